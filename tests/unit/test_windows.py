"""Hits with windows: what is needed of a chain whose parts look back only so far."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from tests.disk_rigs import shared
from tests.memory_tier import Medium, MemoryTier
from tests.stores import ONE, TWO, Rig, chain
from tierkv import calls, windows
from tierkv.cost import Rates
from tierkv.errors import TierKVError
from tierkv.part import Part
from tierkv.planner import plan_window_stage
from tierkv.simulation.server import Server
from tierkv.tier import Outcome, Status

FULL, SLIDING = TWO
WINDOW = 2
WINDOWS = windows.pack((0, WINDOW))


def may_end(there: Sequence[Sequence[bool]], sizes: Sequence[int], end: int) -> bool:
    """Say so in the words of the rule."""
    return all(
        there[block][part]
        for part, size in enumerate(sizes)
        for block in range(max(end - size, 0) if size else 0, end)
    )


def test_an_end_has_all_that_its_windows_ask_for() -> None:
    random = Random(3)
    for _ in range(500):
        blocks, parts = random.randrange(8), random.randrange(1, 4)
        sizes = tuple(random.choice([0, 1, 2, 3, 9]) for _ in range(parts))
        grid = [[random.random() < 0.7 for _ in range(parts)] for _ in range(blocks)]
        there = np.array(grid, np.bool_).reshape(blocks, parts)
        wanted = [may_end(grid, sizes, end) for end in range(blocks + 1)]
        assert windows.ends(there, sizes).tolist() == wanted
        assert windows.longest(there, sizes) == max(n for n, fits in enumerate(wanted) if fits)
        flat = [random.randrange(9) for _ in range(blocks * parts)]
        values = np.array(flat, np.int64).reshape(blocks, parts)
        found = windows.sums(values, sizes)
        for end in range(blocks + 1):
            needed = windows.needed((blocks, parts), end, sizes)
            assert found[end] == values[needed].sum()
            assert (there | ~needed).all() == wanted[end], "exactly the needed ones decide"


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(1, 1), (2, 1), (129, 1), (130, 2), (512, 4), (513, 4), (514, 5)]
)
def test_a_window_looks_back_one_token_less_than_it_is_wide(tokens: int, blocks: int) -> None:
    assert windows.window_blocks(tokens, 128) == blocks


def test_how_far_the_parts_without_a_window_reach() -> None:
    there = np.array([[1, 0], [1, 0], [0, 1]], np.bool_)
    assert windows.reach(there, (0, 1)) == 2
    assert windows.reach(there[:2], (0, 1)) == 2
    assert windows.reach(there, (1, 1)) == 0


def test_windows_are_packed() -> None:
    assert windows.unpack(windows.pack((0, 4)), 2) == (0, 4)
    assert windows.unpack(windows.pack((0, 0)), 2) == windows.unpack(b"", 2) == ()
    with pytest.raises(TierKVError, match="4 bytes for each of 2"):
        windows.unpack(bytes(4), 2)


def put(rig: Rig, keys: Sequence[bytes], part: Part, start: int, stop: int) -> None:
    """Store blocks of one part, as a connector does for each group of its own."""
    assert rig.put(keys[start:stop], parts=(part,), position=64 * start) == stop - start


def ask(rig: Rig, keys: Sequence[bytes], owner: int = 1) -> calls.MatchReply:
    return rig.match(keys, owner=owner, parts=TWO, windows=WINDOWS)


def claims(
    rig: Rig, reply: calls.MatchReply, keys: Sequence[bytes], *wanted: tuple[Part, int]
) -> bool:
    """Whether a worker gets all of these parts of a match, each from a block on to the end."""
    for part, start in wanted:
        call = rig.match_call(keys[start : reply.blocks], parts=(part,))
        transfer = rig.claim(reply.match, start, call, owner=2)
        if transfer is None or len(transfer.headers()) != reply.blocks - start:
            return False
        transfer.close()
    return True


def release(rig: Rig, reply: calls.MatchReply) -> None:
    rig.store.release(1, calls.ReleaseCall(match=reply.match))
    rig.idle()


def test_only_the_last_window_is_needed_and_held() -> None:
    rig, keys = Rig(16, []), chain(1, 6)
    put(rig, keys, FULL, 0, 6)
    put(rig, keys, SLIDING, 4, 6)
    reply = ask(rig, keys)
    assert (reply.blocks, reply.reach, reply.sources) == (6, 6, {"host": 6})
    assert claims(rig, reply, keys, (FULL, 0), (FULL, 3), (SLIDING, 4), (SLIDING, 5))
    assert not claims(rig, reply, keys, (SLIDING, 3))
    release(rig, reply)


def test_a_hit_ends_where_a_window_is_whole() -> None:
    rig, keys = Rig(16, []), chain(1, 6)
    put(rig, keys, FULL, 0, 6)
    put(rig, keys, SLIDING, 0, 3)
    put(rig, keys, SLIDING, 5, 6)
    reply = ask(rig, keys)
    assert (reply.blocks, reply.reach) == (3, 6)
    assert claims(rig, reply, keys, (FULL, 0), (SLIDING, 1))
    release(rig, reply)
    shorter = ask(rig, keys[:1])
    assert shorter.blocks == 1, "a window that begins before the chain does is whole"
    release(rig, shorter)
    assert ask(rig, chain(2, 4)).blocks == 0
    rig.idle()


def test_windows_that_are_not_needed_grow_old() -> None:
    """Room for 10 frames: what makes way is the window of an end that nobody asks for any more."""
    rig, keys = Rig(10, []), chain(1, 4)
    put(rig, keys, FULL, 0, 4)
    put(rig, keys, SLIDING, 0, 4)
    release(rig, ask(rig, keys))
    rig.put(chain(2, 4))
    reply = ask(rig, keys)
    assert reply.blocks == 4
    release(rig, reply)
    assert ask(rig, keys[:2]).blocks == 0


def test_a_match_with_windows_is_not_fetched() -> None:
    rig, keys = Rig(16, []), chain(1, 4)
    put(rig, keys, FULL, 0, 4)
    put(rig, keys, SLIDING, 2, 4)
    reply = rig.match(keys, parts=TWO, windows=WINDOWS, fetch=True)
    assert (reply.blocks, reply.got) == (4, None)
    with pytest.raises(TierKVError, match="claimed part by part"):
        rig.store.get(1, calls.GetCall(match=reply.match, blocks=4))
    release(rig, reply)


def restarted(medium: Medium, pages: int = 16) -> Rig:
    return Rig(pages, [MemoryTier(medium)])


def below(rig: Rig) -> MemoryTier:
    (tier,) = rig.lower
    assert isinstance(tier, MemoryTier)
    return tier


def stored(full: tuple[int, int], *sliding: tuple[int, int]) -> tuple[Medium, list[bytes]]:
    """Return a medium that holds ranges of a chain of six blocks."""
    medium, keys = Medium(), chain(1, 6)
    rig = restarted(medium, 32)
    put(rig, keys, FULL, *full)
    for start, stop in sliding:
        put(rig, keys, SLIDING, start, stop)
    rig.inline.drain()
    rig.store.close(0.0)
    return medium, keys


def test_what_an_end_needs_comes_from_below() -> None:
    medium, keys = stored((0, 6), (0, 2), (3, 5))
    rig = restarted(medium)
    reply = ask(rig, keys)
    assert (reply.blocks, reply.reach, reply.sources) == (5, 6, {"host": 0, "nvme": 5})
    assert sum(op == "read" for op, _ in below(rig).calls) == 7, "nothing else is brought up"
    assert claims(rig, reply, keys, (FULL, 0), (SLIDING, 3))
    release(rig, reply)
    again = ask(rig, keys)
    assert (again.blocks, again.sources) == (5, {"host": 5})
    release(rig, again)


def test_a_window_that_cannot_be_read_leaves_the_hit_that_ram_has() -> None:
    medium, keys = stored((0, 6), (0, 6))
    rig = restarted(medium)
    release(rig, ask(rig, keys[:3]))
    lost = Outcome(Status.MISSING)
    below(rig).fault = lambda op, item: lost if (op, item.id.key) == ("read", keys[5]) else None
    reply = ask(rig, keys)
    assert reply.blocks == 3
    assert claims(rig, reply, keys, (FULL, 0), (SLIDING, 1))
    release(rig, reply)


def test_what_does_not_fit_is_not_brought_up() -> None:
    medium, keys = stored((0, 6), (4, 6))
    rig = restarted(medium, 6)
    assert ask(rig, keys).blocks == 0
    rig.idle()


def test_the_end_is_where_loading_pays_most() -> None:
    sizes, blocks = (0, 2), 8
    stored_bytes = np.full((blocks, 2), 1000)
    source = np.ones((blocks, 2), np.int64)
    source[5:, 0] = 2
    rates = [Rates(0, 1e9, 1e9), Rates(0, 1e6, 1e6), Rates(1.0, 1e3, 1e3)]
    ends = np.array([3, 5, 8])

    def chosen(linear: float) -> int:
        call = Rig(2, []).match_call(chain(1, 1), parts=TWO, linear=linear)
        plan = plan_window_stage(
            stored_bytes, source, ends, 0, sizes, rates, float("inf"), call
        )  # fmt: skip
        return plan.blocks

    assert chosen(0.0) == 8, "unknown: all"
    assert chosen(1e-3) == 5, "the last three come from a slow tier"
    assert chosen(1.0) == 8
    assert chosen(1e-7) == 0


def test_a_shared_tier_is_asked_for_windows_too() -> None:
    """One sidecar stores, another one that shares only a server with it finds the same end."""
    server, keys = Server(), chain(1, 6)
    first = Rig(32, [shared(server)])
    put(first, keys, FULL, 0, 6)
    put(first, keys, SLIDING, 0, 2)
    put(first, keys, SLIDING, 3, 5)
    first.inline.drain()
    second = Rig(32, [shared(server)])
    reply = ask(second, keys)
    assert (reply.blocks, reply.reach, reply.sources) == (5, 6, {"host": 0, "redis": 5})
    assert claims(second, reply, keys, (FULL, 0), (SLIDING, 3))
    release(second, reply)
    put(first, keys, SLIDING, 5, 6)
    first.inline.drain()
    assert ask(second, keys).blocks == 5, "what was absent is not asked for again at once"
    second.clock.now += 60.0
    assert ask(second, keys).blocks == 6


def test_other_parts_of_an_absent_block_are_asked_for() -> None:
    """Ranks of another parallel size store other parts: one's absence says nothing of theirs."""
    server, keys = Server(), chain(1, 3)
    first = Rig(32, [shared(server)])
    assert first.put(keys, parts=TWO) == 6
    first.inline.drain()
    second = Rig(32, [shared(server)])
    assert second.match(keys, parts=ONE).blocks == 0
    assert second.match(keys, parts=TWO).blocks == 3
