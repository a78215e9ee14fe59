"""The vLLM worker on a device where everything is late: nothing is seen before its copy ended.

The engine's own writing is queued too, and runs as soon as it may ("quick") or as late ("slow"): a
copy in front of what it must go behind has other bytes; so has one behind what must wait for it.
"""

import dataclasses
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.late_cuda import INDEX, LateCuda, installed
from tests.vllm_double import Asked, EngineDouble, prompts
from tests.vllm_memory import kept_of
from tierkv.cache import TierKV
from tierkv.calls import AbortCall, Call, CommitCall, ReleaseCall
from tierkv.channel import EmbeddedChannel
from tierkv.reservation import Written
from tierkv.settings import Settings
from tierkv.tiers.host import HostSettings
from tierkv_connectors.device import cuda as cuda_module
from tierkv_connectors.device.cuda import CudaDevice
from tierkv_connectors.pages import UnitCopier
from tierkv_connectors.vllm import worker as worker_module
from tierkv_connectors.vllm.plan import StepPlan

torch = pytest.importorskip("torch")
ENGINE, STORE = 4, 16
ENDS = (CommitCall, AbortCall, ReleaseCall)
"""After these the arena's bytes are others'."""


class Watched:
    """A channel that asserts that nothing the caller has begun is under way when bytes go back."""

    def __init__(self, channel: EmbeddedChannel, late: LateCuda) -> None:
        self.channel, self.late, self.early = channel, late, 0

    def look(self, call: Call) -> None:
        self.early += isinstance(call, ENDS) and self.late.unfinished(copies=True)

    def call(self, call: Call, timeout_s: float | None = None) -> Any | None:
        self.look(call)
        return self.channel.call(call, timeout_s)

    def post(self, call: Call) -> None:
        self.look(call)
        self.channel.post(call)

    def borrow(self) -> memoryview | None:
        return self.channel.borrow()

    def give_back(self) -> None:
        self.channel.give_back()

    def close(self) -> None:
        self.channel.close()


class LateEngine(EngineDouble):
    """An engine whose forward is queued on a GPU's stream."""

    def __init__(self, store: TierKV, late: LateCuda, *, quick: bool, **options: Any) -> None:
        self.late, self.quick = late, quick
        self.device = CudaDevice(torch.device("cuda", INDEX))
        self.watched = Watched(EmbeddedChannel(store, store.host.view, 2), late)
        scheduler = EmbeddedChannel(store, store.host.view, 1)
        kept = kept_of(ENGINE, STORE, **options)
        super().__init__(kept, scheduler, self.watched, blocks=128, device=self.device)

    def fill(self, request: Asked, start: int, stop: int) -> None:
        then = dataclasses.replace(
            request,
            all_token_ids=list(request.all_token_ids),
            block_ids=[list(ids) for ids in request.block_ids],
        )
        self.late.engine.queue(lambda: super(LateEngine, self).fill(then, start, stop))
        if self.quick:
            self.late.engine.synchronize()

    def check(self, request: Asked) -> None:
        self.late.engine.synchronize()
        super().check(request)

    def pin(self, store: TierKV) -> None:
        self.device.pins._piece_bytes = 1 << 20
        self.device.pin(store.host.view)
        thread = self.device.pins._thread
        assert thread is not None
        thread.join()


@pytest.fixture
def store() -> Iterator[TierKV]:
    store = TierKV.open(Settings(host=HostSettings(size_bytes=32 << 20)))
    yield store
    store.close(0.0)


@pytest.fixture(params=["pinned", "refused"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    monkeypatch.setattr(cuda_module, "BOUNCE_BYTES", 300)
    return installed(monkeypatch, allowed=1 << 40 if request.param == "pinned" else 0)


@pytest.fixture(params=["quick", "slow"])
def engine(request: pytest.FixtureRequest, store: TierKV, late: LateCuda) -> Iterator[LateEngine]:
    engine = LateEngine(store, late, quick=request.param == "quick")
    engine.pin(store)
    yield engine
    engine.settle()
    engine.close()
    engine.device.unpin()
    assert not late.registered
    assert not engine.edge.failures
    assert not engine.watched.early, "the arena's bytes went back while they were copied"


def test_what_was_computed_is_loaded(engine: LateEngine) -> None:
    tokens = next(prompts(1, 100))
    assert engine.run(tokens).external == 0
    engine.settle()
    assert engine.run(tokens).external == 96
    assert engine.worker.counters["saved_blocks"] == 6


def test_r07_nothing_is_seen_before_its_copy_ended(engine: LateEngine) -> None:
    """Blocks go to other requests at once, and are asked for again at once."""
    many = [tokens for tokens, _ in zip(prompts(2, 90), range(40), strict=False)]
    for tokens in [*many, *many]:
        engine.run(tokens)
    engine.settle()
    assert sum(engine.run(tokens).external for tokens in many) > 0


def test_a_step_goes_behind_the_copies_of_what_it_overwrites(
    engine: LateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the launch of a gather and its end the blocks are given to another request."""
    taken, fenced = threading.Event(), threading.Event()
    encode = UnitCopier.encode

    def later(self: UnitCopier, *args: Any) -> Written:
        taken.set()
        assert fenced.wait(30)
        return encode(self, *args)

    monkeypatch.setattr(UnitCopier, "encode", later)
    first, other = (tokens for tokens, _ in zip(prompts(3, 16), range(2), strict=False))
    engine.run(first)
    assert taken.wait(30)
    engine.run(other)  # in the very blocks
    fenced.set()
    engine.settle()
    assert engine.run([*first, 1]).external == 16


def test_a_block_given_away_before_its_copy_began_is_not_saved(engine: LateEngine) -> None:
    go = threading.Event()
    engine.threads.submit("save", lambda: void(go.wait(30)))
    first, other = (tokens for tokens, _ in zip(prompts(4, 40), range(2), strict=False))
    engine.run(first)
    engine.run(other)
    go.set()
    engine.settle()
    assert engine.worker.counters["saves_cut_short"] == 1
    assert engine.run(first).external == 0


def test_a_save_goes_behind_the_step_that_computed_it(engine: LateEngine) -> None:
    """Nobody but the save waits for that step."""
    tokens = next(prompts(12, 100))
    request = engine.ask(tokens)
    engine.admit(request)
    engine.compute(request, 0)
    engine.settle()
    engine.end(request, reuse=False)
    assert engine.run(tokens).external == 96


def test_a_load_goes_behind_what_last_used_its_blocks(engine: LateEngine) -> None:
    """Their former owner's writes are still queued when they are filled."""
    first, other = (tokens for tokens, _ in zip(prompts(5, 100), range(2), strict=False))
    engine.run(first)
    engine.settle()
    request = engine.ask(other, store=False)
    engine.admit(request)
    engine.compute(request, 0)
    engine.end(request)
    assert engine.run(first).external == 96


def test_a_load_is_reported_only_after_its_last_copy(
    engine: LateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = next(prompts(6, 100))
    engine.run(tokens)
    engine.settle()
    ended, reading, go = engine.worker.ended, threading.Event(), threading.Event()
    read = UnitCopier.read

    def slowly(self: UnitCopier, *args: Any) -> bool:
        reading.set()
        assert go.wait(30)
        return read(self, *args)

    monkeypatch.setattr(UnitCopier, "read", slowly)
    request = engine.ask(tokens)
    engine.admit(request)
    assert reading.wait(30)
    assert not ended()
    go.set()
    computed = engine.wait(request, request.external)
    assert computed == 96
    engine.compute(request, computed)
    engine.check(request)
    engine.end(request)


@pytest.mark.parametrize("broken", ["read", "deadline"])
def test_a_load_that_ends_half_way_is_waited_for(
    engine: LateEngine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Its request is computed in the same blocks at once: a late copy would be seen there."""
    tokens = next(prompts(7, 100))
    engine.run(tokens)
    engine.settle()
    read, count = UnitCopier.read, 0

    def twice(self: UnitCopier, *args: Any) -> bool:
        nonlocal count
        count += 1
        if count > 2 and broken == "read":
            raise ZeroDivisionError
        if count == 2 and broken == "deadline":
            late_clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6)
            monkeypatch.setattr(worker_module, "time", late_clock)
        return read(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(UnitCopier, "read", twice)
        request = engine.ask(tokens)
        engine.admit(request)
        while engine.threads.waiting("load"):
            time.sleep(0.001)
    monkeypatch.setattr(worker_module, "time", time)
    computed = engine.wait(request, request.external)
    assert computed == (0 if broken == "read" else 32)
    engine.compute(request, computed)
    engine.check(request)
    engine.end(request)
    assert engine.worker.counters["loads_failed"] == 1
    assert engine.edge.failures.pop("load", 0) == (broken == "read")


def test_an_aborted_request_s_load_is_waited_for(engine: LateEngine) -> None:
    tokens, other = (tokens for tokens, _ in zip(prompts(8, 100), range(2), strict=False))
    engine.run(tokens)
    engine.settle()
    request = engine.ask(tokens)
    engine.admit(request)
    engine.scheduler.ended(request)  # vLLM keeps its blocks until the load is reported
    engine.wait(request, request.external)
    engine.release(request)
    engine.run(other)


def test_a_save_that_fails_leaves_nothing_under_way(
    engine: LateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = next(prompts(9, 100))

    def broken(self: UnitCopier, *args: Any) -> int:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(UnitCopier, "encode", broken)
        engine.run(tokens)
        engine.settle()
    assert engine.edge.failures.pop("save") > 0
    assert engine.run(tokens).external == 0
    engine.settle()
    assert engine.run(tokens).external == 96


def test_a_step_that_could_not_be_planned_goes_behind_every_copy(engine: LateEngine) -> None:
    tokens = next(prompts(10, 100))
    engine.run(tokens)
    engine.worker.fence(StepPlan(overwritten=None))
    engine.settle()
    request = engine.run(tokens)
    assert request.external in range(0, 97, STORE)


def test_a_mark_that_cannot_be_taken_ends_loads_and_saves(
    engine: LateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = next(prompts(11, 100))
    engine.run(tokens)
    engine.settle()

    def broken() -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    with monkeypatch.context() as patched:
        patched.setattr(engine.device, "mark", broken)
        request = engine.run(tokens)
    assert request.external == 96
    assert engine.edge.failures.pop("load") == 1
    engine.edge.failures.pop("save", 0)


def void(_: object) -> None:
    pass
