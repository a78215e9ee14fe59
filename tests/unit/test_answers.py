"""Every call that is answered later is answered once, whatever becomes of its job or the store."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.disk_rigs import Answer, Wall, evict_ram
from tests.memory_tier import MemoryTier
from tests.stores import ONE, Rig, chain, packed
from tierkv import calls
from tierkv.errors import TierKVError
from tierkv.executor import Threads
from tierkv.health import lane
from tierkv.tier import Item, Outcome

KEYS = chain(1, 2)


class Hanging(MemoryTier):
    """A medium that answers nothing until it is let go, once it hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()

    def pause(self) -> None:
        if not self.go.is_set():
            self.entered.set()
            assert self.go.wait(60)

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        self.pause()
        return super().write(items)

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        self.pause()
        return super().read(items)

    def probe(self) -> str:
        self.pause()
        return super().probe()

    def raise_generation(self, namespace: bytes, generation: int) -> None:
        self.pause()
        super().raise_generation(namespace, generation)


class Once(Answer):
    """An answer that must not come twice."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __call__(self, reply: object) -> None:
        self.count += 1
        super().__call__(reply)


@pytest.fixture
def rig() -> Iterator[Rig]:
    tier = Hanging()
    lanes = {
        "control": 2,
        "touch": 1,
        "nvme-read": 1,
        "nvme-seal": 1,
        "nvme-write": 1,
        "host-probe": 1,
    }
    made = Rig(16, [tier], executor=Threads({**lanes, lane(tier): 1}), clock=Wall())
    yield made
    tier.go.set()
    made.store.close(0.0)


def hang(rig: Rig) -> Hanging:
    tier = rig.lower[0]
    assert isinstance(tier, Hanging)
    tier.go.clear()
    return tier


def flush_call(deadline_s: float = 60.0) -> calls.FlushCall:
    return calls.FlushCall(
        namespace="one", keys=b"".join(KEYS), parts=packed(ONE), deadline_s=deadline_s
    )


def ask_flush(rig: Rig, done: Once) -> None:
    hang(rig)
    rig.put(KEYS)
    rig.store.flush(flush_call(), done)


def ask_clear(rig: Rig, done: Once) -> None:
    rig.put(KEYS)
    hang(rig)
    rig.store.clear(calls.ClearCall(namespace="one"), done)


def ask_wait(rig: Rig, done: Once) -> None:
    rig.put(KEYS)
    stored = Once()
    rig.store.flush(flush_call(), stored)
    assert stored.wait().durable == b"\1\1"
    evict_ram(rig)
    hang(rig)
    reply = rig.store.match(1, rig.match_call(KEYS, deadline_s=60.0))
    assert reply.pending
    rig.store.wait(1, calls.WaitCall(match=reply.match), done)


def ask_stat(rig: Rig, done: Once) -> None:
    hang(rig)
    rig.store.stat(calls.StatCall(probe=True), done)


ASK = {"flush": ask_flush, "clear": ask_clear, "wait": ask_wait, "stat": ask_stat}


CHECK: dict[str, Callable[[Any], bool]] = {
    "flush": lambda reply: reply.durable == b"\0\0",
    "clear": lambda reply: set(reply.failed) == {"nvme"},
    "wait": lambda reply: (reply.match, reply.blocks) == (0, 0),
    "stat": lambda reply: [one["name"] for one in reply["tiers"]] == ["host", "nvme"],
}


@pytest.mark.parametrize("what", ASK)
def test_a_store_that_closes_answers_what_hangs(rig: Rig, what: str) -> None:
    done, tier = Once(), rig.lower[0]
    ASK[what](rig, done)
    assert isinstance(tier, Hanging)
    assert tier.entered.wait(30)
    rig.store.close(0.0)
    assert CHECK[what](done.wait())
    tier.go.set()
    executor = rig.store._store.executor
    assert isinstance(executor, Threads)
    for late in executor._lanes.values():
        for thread in late.threads:
            thread.join(30)
    assert done.count == 1, "the job that hung has ended too"


def test_a_store_that_closes_answers_what_was_queued(rig: Rig) -> None:
    tier = hang(rig)
    answers = [Once() for _ in range(5)]
    for done in answers:  # more than the lane has threads
        rig.store.clear(calls.ClearCall(namespace="one"), done)
    assert tier.entered.wait(30)
    rig.store.close(0.0)
    assert all(CHECK["clear"](done.wait()) for done in answers)


def test_within_its_grace_a_store_answers_as_ever(rig: Rig) -> None:
    tier, done = hang(rig), Once()
    rig.put(KEYS)
    rig.store.flush(flush_call(), done)
    assert tier.entered.wait(30)
    threading.Timer(0.2, tier.go.set).start()
    rig.store.close(30.0)
    assert done.wait().durable == b"\1\1"
    assert done.count == 1


def test_a_closed_store_answers_at_once(rig: Rig) -> None:
    rig.put(KEYS)
    rig.store.close(0.0)
    asks: list[Callable[[Once], None]] = [
        lambda done: rig.store.flush(flush_call(), done),
        lambda done: rig.store.clear(calls.ClearCall(namespace="one"), done),
        lambda done: rig.store.wait(1, calls.WaitCall(match=7), done),
        lambda done: rig.store.stat(calls.StatCall(probe=True), done),
    ]
    for ask in asks:
        done = Once()
        ask(done)
        assert done.count == 1


def test_what_is_refused_is_owed_no_answer(rig: Rig) -> None:
    done = Once()
    with pytest.raises(TierKVError, match="deadline"):
        rig.store.flush(flush_call(-1.0), done)
    rig.store.close(0.0)
    assert done.count == 0
