"""What users of other stores suffered, as conditions on the real store (R8, R14, R17, R24)."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.memory_tier import MemoryTier
from tests.stores import BLOCK, ONE, PAGE, TWO, Direct, Rig, chain, fill, payload_of
from tierkv import calls
from tierkv.executor import Threads
from tierkv.part import Part
from tierkv.reservation import Reservation

LANES = {
    "control": 2, "touch": 1, "host-probe": 1, "nvme-read": MemoryTier.batch.threads,
    "nvme-seal": 1, "nvme-write": 1, "nvme-probe": 1,
}  # fmt: skip


def marked(session: int, block: int) -> bytes:
    """Return a block that says whose it is in every eight bytes."""
    return b"%03d.%03d " % (session, block) * (BLOCK // 8)


class Session:
    """One client thread: stores a session's chain, comes back, compares."""

    def __init__(self, rig: Rig, owner: int, seed: int) -> None:
        self.rig, self.owner, self.rng = rig, owner, random.Random(seed)
        self.hits = 0

    def store(self, session: int, keys: list[bytes]) -> None:
        call = self.rig.put_call(keys)
        reply = self.rig.store.put(self.owner, call)
        if reply.reservation:
            held = Reservation(Direct(self.rig.store, self.owner), reply, self.rig.host.view)
            for index, unit in enumerate(held.units):
                fill(held.payload(index), marked(session, unit))
            held.commit([BLOCK] * len(held.units))

    def load(self, session: int, keys: list[bytes]) -> None:
        call = self.rig.match_call(keys, deadline_s=5.0)
        reply = self.rig.store.match(self.owner, call)
        if reply.pending:
            answered = threading.Event()
            wait = calls.WaitCall(match=reply.match)
            self.rig.store.wait(self.owner, wait, lambda _: answered.set())
            answered.wait(30)
            reply = self.rig.store.settle(self.owner, calls.SettleCall(match=reply.match))
        transfer = self.rig.transfer(reply, call, owner=self.owner) if reply.match else None
        if transfer is None:
            return
        with transfer:
            for unit in range(transfer.units):
                assert payload_of(transfer, unit) == marked(session, unit)
                self.hits += 1

    def run(self, turns: int) -> int:
        for _ in range(turns):
            session = self.rng.randrange(16)
            keys = chain(session, 8)
            self.load(session, keys[: self.rng.randint(1, 8)])
            self.store(session, keys)
        return self.hits


def test_r08_no_session_ever_reads_another_ones_blocks() -> None:
    """RAM of 4 blocks, 16 sessions of 8 blocks, 8 threads, a slow tier below."""
    tier = MemoryTier()
    delays = random.Random(8)
    tier.delay = lambda: delays.uniform(0.005, 0.05) / 20
    rig = Rig(4, [tier], executor=Threads(LANES), clock=None)
    rig.store._store.clock = time.monotonic
    sessions = [Session(rig, owner, owner) for owner in range(8)]
    with ThreadPoolExecutor(8) as pool:
        hits = sum(pool.map(lambda session: session.run(40), sessions))
    assert hits > 0
    rig.store.close(2.0)
    rig.idle()


def test_r08_a_read_that_comes_late_harms_nobody() -> None:
    """The pages that a read fills stay reserved until it is back, whatever became of its match."""
    rig = Rig(4)
    rig.put(chain(1, 4), b"old")
    rig.inline.drain()
    rig.put(chain(2, 4), b"fill")
    call = rig.match_call(chain(1, 4))
    reply = rig.store.match(1, call)
    assert reply.pending
    rig.store.release(1, calls.ReleaseCall(match=reply.match))
    assert rig.put(chain(3, 4), b"new") == 0
    rig.inline.drain()
    assert rig.put(chain(3, 4), b"new") == 4
    assert len(rig.read(chain(3, 4))) == 4
    rig.idle()


def test_r14_what_was_looked_up_and_never_fetched_is_let_go() -> None:
    rig = Rig(8, [])
    for session in range(8):
        assert rig.put(chain(session, 1)) == 1
    replies = [rig.match(chain(session, 1), owner=session) for session in range(8)]
    assert all(reply.blocks == 1 for reply in replies)
    assert rig.put(chain(9, 1)) == 0
    rig.clock.now += 10.1
    rig.store.tick()
    assert rig.stat()["counters"]["lease_expired"] == 8
    rig.idle()
    assert rig.put(chain(9, 1)) == 1


def test_r28_ram_full_of_held_blocks_is_named() -> None:
    rig = Rig(8, [])
    rig.put(chain(1, 8))
    assert rig.stat()["tiers"][0]["state"] == "ok"
    held = [rig.match(chain(1, 8)) for _ in range(3)]
    stat = rig.stat()
    assert stat["holds"]["held_bytes"] == 8 * PAGE, "however many hold it"
    assert stat["tiers"][0]["state"] == "degraded"
    assert "no room for others" in stat["tiers"][0]["problem"]
    for match in held:
        rig.store.release(1, calls.ReleaseCall(match=match.match))
    assert rig.stat()["tiers"][0]["state"] == "ok"
    assert rig.stat()["holds"]["held_bytes"] == 0


def test_r14_a_dead_callers_leases_end_at_once() -> None:
    rig = Rig(8, [])
    rig.put(chain(1, 8))
    rig.match(chain(1, 8), owner=5)
    held = rig.match(chain(1, 4), owner=5)
    assert rig.transfer(held, rig.match_call(chain(1, 4)), owner=5) is not None
    rig.offer(chain(2, 3), owner=5)
    rig.store.disown(5)
    rig.idle()
    assert rig.put(chain(3, 8)) == 8


@pytest.mark.parametrize("again", ["match", "transfer", "put"])
def test_r14_ending_twice_is_harmless(again: str) -> None:
    rig = Rig(8, [])
    rig.put(chain(1, 4))
    first, second = rig.match(chain(1, 4)), rig.match(chain(1, 4))
    if again == "transfer":
        answer = rig.store.get(1, calls.GetCall(match=first.match, blocks=4))
        release = calls.ReleaseCall(transfer=answer.transfer)
    else:
        release = calls.ReleaseCall(match=first.match)
    held = rig.offer(chain(2, 2))
    assert held is not None
    number = held.number
    for _ in range(3):
        rig.store.release(1, release)
        if again == "put":
            rig.store.abort(1, calls.AbortCall(reservation=number))
    assert rig.put(chain(3, 8), owner=2) <= 4, "the second match still holds its blocks"
    rig.store.release(1, calls.ReleaseCall(match=second.match))
    held.abort()
    rig.idle()


def test_r14_a_lease_is_not_prolonged_by_asking_again() -> None:
    rig = Rig(8, [])
    rig.put(chain(1, 4))
    reply = rig.match(chain(1, 4))
    for _ in range(4):
        rig.clock.now += 3.0
        rig.store.settle(1, calls.SettleCall(match=reply.match))
        rig.store.tick()
    rig.idle()


def test_r17_loads_never_wait_for_ram_that_waiting_loads_hold() -> None:
    """RAM of 10 blocks, 4 loads of 8 blocks at once: all end, one whole and the others cut."""
    rig = Rig(10)
    for session in range(4):
        assert rig.put(chain(session, 8), b"old") == 8
        rig.inline.drain()
    rig.put(chain(9, 10), b"fill")
    rig.inline.drain()
    replies = [rig.store.match(n, rig.match_call(chain(n, 8))) for n in range(4)]
    rig.inline.drain()
    finals = [
        rig.store.settle(n, calls.SettleCall(match=reply.match)) if reply.match else reply
        for n, reply in enumerate(replies)
    ]
    assert not any(reply.pending for reply in finals)
    assert sorted(reply.blocks for reply in finals) == [0, 0, 2, 8]
    for owner in range(4):
        rig.store.disown(owner)
    for session in range(4):
        assert len(rig.read(chain(session, 8))) == 8, "one after another all can be loaded"
    rig.idle()


def test_r17_a_stage_keeps_what_ram_has_of_its_own_chain() -> None:
    """Room for the missing head is not taken from the tail that is there already."""
    rig = Rig(6)
    keys = chain(1, 5)
    rig.put(keys, b"old")
    rig.inline.drain()
    catalog = rig.store._store.catalog
    head = catalog.in_tier(catalog.head(keys[0], 0), 0)
    rig.store._store.drop([head])
    rig.put(chain(2, 2), b"other")
    rig.inline.drain()
    assert len(rig.read(keys)) == 5
    rig.idle()


def ram_blocks(rig: Rig, keys: list[bytes]) -> list[bool]:
    """Return which blocks RAM holds."""
    catalog = rig.store._store.catalog
    return [catalog.in_tier(head, 0) != -1 for head in catalog.find(b"".join(keys), 0).tolist()]


def is_prefix(held: list[bool]) -> bool:
    return sorted(held, reverse=True) == held


def test_r24_a_prompt_in_two_calls_loses_its_tail_first() -> None:
    rig = Rig(6, [])
    keys = chain(1, 4)
    assert rig.put(keys[:2]) == 2
    assert rig.put(keys, start=2) == 2
    assert rig.put(chain(2, 4)) == 4
    held = ram_blocks(rig, keys)
    assert held == [True, True, False, False]
    assert rig.match(keys).blocks == 2


def test_r24_a_look_up_keeps_the_whole_prefix_young() -> None:
    rig = Rig(6, [])
    rig.put(chain(1, 3))
    rig.put(chain(2, 3))
    rig.store.release(1, calls.ReleaseCall(match=rig.match(chain(1, 3)).match))
    rig.put(chain(3, 2))
    assert ram_blocks(rig, chain(1, 3)) == [True] * 3
    assert ram_blocks(rig, chain(2, 3)) == [True, False, False]


def test_r24_heads_that_the_engine_holds_stay_before_tails_that_we_serve() -> None:
    """Head hits on the GPU: matches of the whole chain touch it all, whoever serves what."""
    rig = Rig(6, [])
    keys = chain(1, 4)
    rig.put(keys)
    for _ in range(3):
        reply = rig.match(keys)
        answer = rig.store.get(1, calls.GetCall(match=reply.match, blocks=4))
        rig.store.release(1, calls.ReleaseCall(transfer=answer.transfer))
    rig.put(chain(2, 4))
    assert ram_blocks(rig, keys) == [True, True, False, False]


def test_r24_what_a_stage_brought_up_loses_its_tail_first() -> None:
    rig = Rig(6)
    keys = chain(1, 5)
    rig.put(keys)
    rig.inline.drain()
    rig.put(chain(2, 6))
    rig.inline.drain()
    assert len(rig.read(keys)) == 5
    rig.put(chain(3, 3))
    assert ram_blocks(rig, keys) == [True] * 3 + [False] * 2


def test_r24_a_tail_on_its_way_keeps_its_head() -> None:
    """The second half of a prompt is being written while another session needs room."""
    rig = Rig(6, [])
    keys = chain(1, 4)
    rig.put(keys[:2])
    held = rig.offer(keys, start=2)
    assert held is not None
    rig.put(chain(2, 4), owner=2)
    for index in 0, 1:
        fill(held.payload(index), marked(1, index))
    held.commit([BLOCK] * 2)
    assert is_prefix(ram_blocks(rig, keys))


@pytest.mark.parametrize("seed", range(5))
def test_r24_what_survives_is_always_a_prefix(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(20, [])
    lengths = dict.fromkeys(range(6), 0)
    for _ in range(120):
        session = rng.randrange(6)
        keys = chain(session, 10)
        if rng.random() < 0.6:
            stop = min(lengths[session] + rng.randint(1, 3), 8)
            rig.put(keys[:stop], start=rng.choice([0, lengths[session]]), owner=session)
            lengths[session] = stop
        else:
            reply = rig.match(keys[: rng.randint(1, 8)], owner=session)
            rig.store.release(session, calls.ReleaseCall(match=reply.match))
        for other in lengths:
            assert is_prefix(ram_blocks(rig, chain(other, 10))), (session, other)
        rig.sound()


def test_r24_parts_of_a_block_count_as_one() -> None:
    rig = Rig(8, [])
    keys = chain(1, 3)
    assert rig.put(keys, parts=TWO, raw=PAGE // 2) == 6
    assert rig.put(chain(2, 2), parts=TWO, raw=PAGE // 2) == 4
    assert rig.match(keys, parts=TWO).blocks == 2


@pytest.mark.parametrize("parts", [ONE, TWO])
def test_r24_what_a_start_finds_loses_its_tail_first(parts: tuple[Part, ...]) -> None:
    tier = MemoryTier()
    rig = Rig(64, [tier])
    for session in 1, 2:
        rig.put(chain(session, 6), parts=parts, raw=1000)
    rig.inline.drain()
    tier.close()
    again = Rig(64, [MemoryTier(tier.medium)])
    store = again.store._store
    order = store.policy.oldest(store.catalog.select(1, 2).tolist())
    assert len(order) == 12 * len(parts)
    for session in 1, 2:
        keys = chain(session, 6)
        found = [store.catalog.key(row) for row in order]
        places = [keys.index(key) for key in found if key in keys]
        assert places == sorted(places, reverse=True)
