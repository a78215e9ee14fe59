"""Claims: several processes fetch their parts of what one of them matched (R13)."""

from tests.stores import ONE, TWO, Rig, chain, packed
from tierkv import calls
from tierkv.part import Part

SCHEDULER, LEFT, RIGHT = 1, 2, 3


def claim(rig: Rig, owner: int, match: int, start: int, blocks: int, *parts: Part) -> int:
    call = calls.ClaimCall(match=match, start=start, blocks=blocks, parts=packed(parts))
    answer = rig.store.claim(owner, call)
    assert len(answer.run_counts) // 2 == (blocks * len(parts) if answer.transfer else 0)
    return answer.transfer


def test_each_rank_claims_its_parts_of_one_match() -> None:
    rig = Rig(16, [])
    assert rig.put(chain(1, 4), parts=TWO) == 8
    reply = rig.match(chain(1, 4), owner=SCHEDULER, parts=TWO)
    left = claim(rig, LEFT, reply.match, 0, 4, TWO[0])
    right = claim(rig, RIGHT, reply.match, 1, 3, TWO[1])
    assert left != right
    rig.store.release(SCHEDULER, calls.ReleaseCall(match=reply.match))
    assert rig.put(chain(2, 16)) == 9, "7 pages are still being read"
    rig.store.release(LEFT, calls.ReleaseCall(transfer=left))
    rig.store.release(RIGHT, calls.ReleaseCall(transfer=right))
    rig.idle()


def test_the_ranks_of_an_engine_that_died_hold_nothing() -> None:
    rig = Rig(16, [])
    rig.put(chain(1, 4))
    reply = rig.match(chain(1, 4), owner=SCHEDULER)
    assert claim(rig, LEFT, reply.match, 0, 4, *ONE)
    rig.store.disown(SCHEDULER)
    assert not claim(rig, RIGHT, reply.match, 0, 4, *ONE)
    rig.store.disown(LEFT)
    rig.idle()


def test_what_is_not_in_the_match_is_a_miss() -> None:
    rig = Rig(16, [])
    rig.put(chain(1, 4), parts=TWO)
    reply = rig.match(chain(1, 4), owner=SCHEDULER, parts=TWO[:1])
    for start, blocks in ((0, 5), (4, 1), (3, 2), (-1, 2), (0, 0), (0, -1)):
        assert not claim(rig, LEFT, reply.match, start, blocks, TWO[0])
    assert not claim(rig, LEFT, reply.match, 0, 1, TWO[1])
    assert not claim(rig, LEFT, reply.match + 1, 0, 1, TWO[0])
    rig.store.release(SCHEDULER, calls.ReleaseCall(match=reply.match))
    rig.idle()


def test_a_cleared_match_cannot_be_claimed() -> None:
    rig = Rig(16)
    rig.put(chain(1, 4))
    reply = rig.match(chain(1, 4), owner=SCHEDULER)
    rig.clear()
    assert not claim(rig, LEFT, reply.match, 0, 4, *ONE)
    rig.store.release(SCHEDULER, calls.ReleaseCall(match=reply.match))
    rig.idle()


def test_a_pending_match_cannot_be_claimed() -> None:
    rig = Rig(16)
    rig.put(chain(1, 4))
    rig.inline.drain()
    rig.put(chain(2, 16))
    reply = rig.match(chain(1, 4), owner=SCHEDULER, drain=False)
    assert reply.pending
    assert not claim(rig, LEFT, reply.match, 0, 1, *ONE)
    rig.store.release(SCHEDULER, calls.ReleaseCall(match=reply.match))
    rig.inline.drain()
    rig.idle()


def test_a_lease_that_ran_out_cannot_be_claimed_but_a_claim_outlives_it() -> None:
    rig = Rig(16, [])
    rig.put(chain(1, 4))
    reply = rig.match(chain(1, 4), owner=SCHEDULER, deadline_s=1.0)
    early = claim(rig, LEFT, reply.match, 0, 2, *ONE)
    rig.clock.now += 1.5
    rig.store.tick()
    assert not claim(rig, LEFT, reply.match, 0, 2, *ONE)
    assert rig.put(chain(2, 16)) == 14
    rig.store.release(LEFT, calls.ReleaseCall(transfer=early))
    rig.idle()
