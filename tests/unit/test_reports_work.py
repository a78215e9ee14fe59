"""What users reported of time, as work that no load of the machine changes (R23, R25)."""

from collections.abc import Sequence

from tests.disk_rigs import Stuck, shared
from tests.memory_tier import MemoryTier
from tests.stores import Rig, chain
from tests.work import Work, work_of
from tierkv.simulation.server import Server

KNOWN = chain(1, 8)


def work_of_hits(rig: Rig) -> Work:
    def hits() -> None:
        for _ in range(20):
            assert len(rig.read(KNOWN, raw_bytes=1000)) == len(KNOWN)

    hits()
    return work_of(hits)


def work_of_misses(rig: Rig, sessions: Sequence[int]) -> int:
    def ask() -> None:
        for session in sessions:
            reply = rig.store.match(1, rig.match_call(chain(session, 64)))
            assert (reply.match, reply.blocks, reply.pending) == (0, 0, False)

    return work_of(ask).calls


def test_r23_a_hit_in_ram_costs_the_same_while_redis_stands() -> None:
    """Its jobs wait for ever in their lanes, and what was to go there in its queue."""
    executor = Stuck()
    rig = Rig(64, [shared(Server())], executor=executor)
    rig.inline = executor
    executor.drain()
    rig.put(KNOWN, b"known")
    rig.flush(KNOWN)
    idle = work_of_hits(rig)
    executor.age = 60.0
    for session in range(2, 6):
        rig.put(chain(session, 8))
        rig.store.match(2, rig.match_call(chain(session + 100, 8)))
        rig.clock.now += 1.0
        rig.store.tick()
    assert executor.waiting("redis-write") + executor.waiting("redis-seal") > 0
    stands = work_of_hits(rig)
    assert stands.calls <= 1.1 * idle.calls
    assert stands.nbytes <= 1.1 * idle.nbytes


def test_r25_what_nobody_stored_costs_the_same_however_much_is_there() -> None:
    """Neither what is stored nor what waits to be written is looked at."""
    rig = Rig(4096, [MemoryTier()], write_behind_bytes=1 << 30)
    rig.put(chain(0, 8))
    before = work_of_misses(rig, range(1000, 1020))
    for session in range(1, 200):
        rig.put(chain(session, 8))
    assert rig.stat()["write_behind"]["queued_frames"] == 1600
    assert work_of_misses(rig, range(2000, 2020)) <= 1.5 * before
