"""Blocks that a client holds itself: used, counted as its own, neither leased nor brought up."""

import pytest

from tests.stores import ONE, TWO, Rig, chain
from tests.unit.test_windows import WINDOWS
from tierkv import calls
from tierkv.errors import TierKVError

BLOCKS = 6


def found(rig: Rig) -> tuple[dict[str, int], int]:
    """Return what was found by tier, and missed."""
    stat = rig.stat()
    return {name: n for name, n in stat["hits_by_tier_blocks"].items() if n}, stat["miss_blocks"]


def below() -> tuple[Rig, list[bytes]]:
    """Return a store that has a chain in its lower tier alone."""
    rig, keys = Rig(8), chain(1, BLOCKS)
    rig.put(keys)
    assert rig.flush(keys) == b"\1" * BLOCKS
    rig.put(chain(2, 8))
    return rig, keys


@pytest.mark.parametrize("parts", [ONE, TWO], ids=["one part", "two parts"])
def test_a_hit_goes_on_behind_what_is_held(parts: tuple[object, ...]) -> None:
    rig, keys = Rig(16, []), chain(1, BLOCKS)
    rig.put(keys[:5], parts=parts)
    reply = rig.match(keys, parts=parts, held=2)
    assert (reply.blocks, reply.sources) == (5, {"host": 3})
    call = rig.match_call(keys[2:5], parts=parts)
    transfer = rig.claim(reply.match, 2, call, owner=7)
    assert transfer is not None
    assert transfer.units == 3 * len(parts)
    transfer.close()
    assert rig.claim(reply.match, 1, rig.match_call(keys[1:5], parts=parts), owner=7) is None
    with pytest.raises(TierKVError, match="claimed part by part, not fetched"):
        rig.store.get(1, calls.GetCall(match=reply.match, blocks=5))
    rig.store.release(1, calls.ReleaseCall(match=reply.match))
    assert found(rig) == ({"hbm": 2, "host": 3}, 1)
    assert rig.match(keys, parts=parts, held=2, fetch=True).got is None
    rig.store.end_leases(1)
    rig.idle()


def test_a_hit_goes_on_behind_what_is_held_and_gone_here() -> None:
    rig, keys = below()
    reply = rig.match(keys, held=4)
    assert reply.blocks == BLOCKS
    assert found(rig) == ({"hbm": 4, "nvme": 2}, 0)
    assert rig.stat()["counters"]["promoted"] == 2
    transfer = rig.claim(reply.match, 4, rig.match_call(keys[4:]), owner=7)
    assert transfer is not None
    seen = [transfer.header(unit) for unit in range(transfer.units)]
    assert [header.key for header in seen if header is not None] == keys[4:]
    transfer.close()
    rig.match(keys, owner=2)
    assert rig.stat()["counters"]["promoted"] == BLOCKS
    assert found(rig) == ({"hbm": 4, "nvme": 6, "host": 2}, 0)
    for owner in 1, 2:
        rig.store.end_leases(owner)
    rig.idle()


def test_nothing_is_brought_up_for_who_holds_it_all() -> None:
    rig, keys = below()
    reply = rig.match(keys, drain=False, held=BLOCKS)
    assert (reply.match, reply.blocks, reply.pending) == (0, 0, False)
    rig.idle()
    assert found(rig) == ({"hbm": BLOCKS}, 0)
    assert rig.match(chain(9, 2), held=2).match == 0, "nor for what nobody has stored"
    assert found(rig) == ({"hbm": BLOCKS + 2}, 0)


def test_a_long_chain_is_looked_at_alike() -> None:
    rig, keys = Rig(600, []), chain(1, 400)
    rig.put(keys[:300])
    reply = rig.match(keys, held=290)
    assert (reply.blocks, reply.sources) == (300, {"host": 10})
    rig.store.release(1, calls.ReleaseCall(match=reply.match))
    assert rig.match(keys, held=300).match == 0
    assert found(rig) == ({"hbm": 590, "host": 10}, 200)
    rig.idle()


@pytest.mark.parametrize("policy", ["lru", "evicpress"])
def test_what_is_held_is_used(policy: str) -> None:
    """Two chains were stored; one is asked for by an engine that has all of it, one by nobody."""
    rig = Rig(16, [], policy=policy)
    asked, idle = chain(1, BLOCKS), chain(2, BLOCKS)
    rig.put(asked)
    rig.put(idle)
    for _ in range(4):
        rig.clock.now += 10.0
        rig.match(asked, linear=1e-3, held=BLOCKS)
    rig.clock.now += 10.0
    rig.put(chain(3, 8))
    assert rig.match(asked, owner=1).blocks == BLOCKS
    assert rig.match(idle, owner=2).blocks < BLOCKS


def test_what_computing_takes_is_that_behind_what_is_held() -> None:
    rig, keys = Rig(16, []), chain(1, BLOCKS)
    rig.put(keys)
    whole = rig.match(keys, quadratic=1e-6)
    rest = rig.match(keys, quadratic=1e-6, held=4)
    assert whole.recompute_s == pytest.approx(1e-6 * 384**2 / 2)
    assert rest.recompute_s == pytest.approx(1e-6 * (384**2 - 256**2) / 2)
    assert rest.load_s < whole.load_s


def test_who_holds_what_it_did_not_ask_for_is_refused() -> None:
    rig, keys = Rig(16, []), chain(1, 2)
    for wrong in ({"held": 3}, {"held": -1}, {"held": 1, "parts": TWO, "windows": WINDOWS}):
        with pytest.raises(TierKVError, match="holds some of the blocks it asks for"):
            rig.match(keys, **wrong)
    rig.idle()
