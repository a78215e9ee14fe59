"""The joint policy over equal blocks: the counts add up, and it stands beside LRU."""

import numpy as np
import pytest

from tests.traces import SMALL, trace_path
from tierkv.errors import TierKVError
from tierkv.simulation.joint_blocks import count_blocks
from tierkv.simulation.traces import Accesses, Trace, load


@pytest.fixture(scope="module", params=SMALL)
def small(request: pytest.FixtureRequest) -> Accesses:
    return load(Trace(trace_path(request.param)))


def test_an_endless_cache_hits_the_ideal(small: Accesses) -> None:
    ideal = len(small.ids) - small.distinct
    for capacity in small.distinct, 1 << 40:
        assert count_blocks(small, capacity, "evicpress").prefix_hits == ideal


@pytest.mark.parametrize("capacity", [1, 5, 200])
def test_counts_add_up(small: Accesses, capacity: int) -> None:
    counts = count_blocks(small, capacity, "evicpress")
    assert 0 <= counts.stored - counts.dropped <= capacity
    assert counts.block_hits + counts.stored + counts.refused == counts.accesses
    assert counts.prefix_hits == counts.block_hits <= len(small.ids) - small.distinct


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1, 0.2])
def test_it_is_nowhere_half_a_point_behind_lru(small: Accesses, share: float) -> None:
    capacity = round(small.distinct * share)
    ours, lru = (count_blocks(small, capacity, name) for name in ("evicpress", "lru"))
    assert ours.prefix_hits >= lru.prefix_hits - 0.005 * lru.accesses


def one_block(requests: int) -> Accesses:
    """Return a trace that asks for one block, with a prompt of none in between."""
    starts = np.array([0, *range(1, requests + 1), requests])
    times, tokens = np.arange(requests + 1.0), np.ones(requests + 1, np.int64)
    return Accesses(np.zeros(requests, np.int32), starts, 1, times, tokens, 1)


def test_prompts_without_a_block_are_passed_over() -> None:
    assert count_blocks(one_block(3), 1, "evicpress").prefix_hits == 2


def test_what_cannot_be_replayed_is_said() -> None:
    with pytest.raises(TierKVError, match=r"lru, .*belady, evicpress"):
        count_blocks(one_block(1), 1, "fifo")
    with pytest.raises(TierKVError, match="at least one block"):
        count_blocks(one_block(1), 0, "evicpress")
