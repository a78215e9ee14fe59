"""The block-count replay: against models of the papers, on real traces, at the edges."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from tests import cache_models
from tests.traces import SMALL, trace_path
from tierkv.catalog import NONE
from tierkv.errors import TierKVError
from tierkv.simulation.blocks import Shelf, replay
from tierkv.simulation.policies import CONTENDERS, Contender
from tierkv.simulation.policies.belady import next_uses
from tierkv.simulation.traces import Accesses, Trace, load


def accesses_of(prompts: list[list[int]]) -> Accesses:
    flat = [block for prompt in prompts for block in prompt]
    starts = np.cumsum([0, *map(len, prompts)])
    times, tokens = np.arange(len(prompts), dtype=float), np.diff(starts)
    return Accesses(np.array(flat, np.int32), starts, 1 + max(flat), times, tokens, 1)


def forest(seed: int, requests: int = 150) -> list[list[int]]:
    """Return prompts that grow, branch and come back."""
    rng, fresh = random.Random(seed), 0
    prompts: list[list[int]] = []
    for _ in range(requests):
        old = rng.choice(prompts[-12:]) if prompts and rng.random() < 0.8 else []
        old = old[: rng.randint(0, len(old))]
        new = rng.randint(0 if old else 1, 6)
        prompts.append(old + list(range(fresh, fresh + new)))
        fresh += new
    return prompts


MODELS: dict[str, tuple[Callable[[int], cache_models.Cache], bool]] = {
    "lru": (cache_models.LruModel, True),
    "lru-prompt-order": (cache_models.LruModel, False),
    "arc": (cache_models.ArcModel, False),
    "arc-tail-first": (cache_models.ArcModel, True),
    "s3fifo": (cache_models.S3FifoModel, False),
    "s3fifo-tail-first": (cache_models.S3FifoModel, True),
}


def counted(name: str, prompts: list[list[int]], capacity: int) -> tuple[int, int]:
    """Return block hits and usable prefix of a model."""
    if name == "belady":
        flat = [block for prompt in prompts for block in prompt]
        cache: cache_models.Cache = cache_models.BeladyModel(capacity, flat)
        tail_first = False
    else:
        make, tail_first = MODELS[name]
        cache = make(capacity)
    hits = prefix = 0
    for prompt in prompts:
        resident = [block in cache.resident for block in prompt]
        prefix += [*resident, False].index(False)
        hits += sum(cache.access(block) for block in (prompt[::-1] if tail_first else prompt))
    return hits, prefix


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [1, 2, 5, 13, 40, 150])
@pytest.mark.parametrize("name", [*MODELS, "belady"])
def test_counts_are_those_of_a_model(name: str, capacity: int, seed: int) -> None:
    prompts = forest(seed)
    found = replay(accesses_of(prompts), capacity, CONTENDERS[name])
    assert (found.block_hits, found.prefix_hits) == counted(name, prompts, capacity)


@pytest.mark.parametrize("capacity", [1, 3, 10])
def test_gdsf_over_lone_blocks_is_that_of_the_paper(capacity: int) -> None:
    rng = random.Random(capacity)
    prompts = [[int(rng.paretovariate(0.7)) % 60] for _ in range(3000)]
    cache = cache_models.GdsfModel(capacity)
    hits = sum(cache.access(prompt[0]) for prompt in prompts)
    assert replay(accesses_of(prompts), capacity, CONTENDERS["gdsf"]).block_hits == hits


@pytest.mark.parametrize("seed", range(3))
def test_runs_of_missing_blocks_change_no_count(seed: int) -> None:
    """LRU takes several at a time; one at a time counts the same."""
    accesses = accesses_of(forest(seed, 400))
    for name in "lru", "lru-prompt-order":
        for capacity in 1, 4, 30, 100:
            runs = CONTENDERS[name]
            assert runs.in_runs
            singly = Contender(runs.make, runs.tail_first, in_runs=False)
            one, other = replay(accesses, capacity, runs), replay(accesses, capacity, singly)
            assert one._replace(seconds=0) == other._replace(seconds=0)


@pytest.mark.parametrize("name", ["lru", "gdsf"])
def test_what_survives_of_a_prompt_is_its_head(name: str) -> None:
    """R24: a prompt came in two calls, then another one; and any tree of prompts."""
    for prompts, capacity in ([[0, 1], [0, 1, 2, 3], [4, 5, 6, 7]], 6), (forest(5, 400), 60):
        accesses = accesses_of(prompts)
        shelf = Shelf(capacity, accesses.distinct, CONTENDERS[name].make(capacity, accesses))
        for prompt in prompts:
            assert len(prompt) <= capacity
            shelf.meet(np.array(prompt, np.int32), tail_first=True, most=1)
            for each in prompts:
                stored = (shelf.row_of[each] != NONE).tolist()
                assert stored == sorted(stored, reverse=True), "a tail without its head"


def test_what_was_decided_adds_up() -> None:
    accesses = accesses_of(forest(7))
    for name, each in CONTENDERS.items():
        counts = replay(accesses, 20, each)
        assert counts.stored + counts.refused == counts.accesses - counts.block_hits, name
        assert counts.stored - counts.dropped == 20
        assert counts.refused == 0 or name == "belady"


@pytest.fixture(scope="module", params=SMALL)
def small(request: pytest.FixtureRequest) -> Accesses:
    return load(Trace(trace_path(request.param)))


@pytest.mark.parametrize("name", CONTENDERS)
def test_an_endless_cache_hits_the_ideal(small: Accesses, name: str) -> None:
    ideal = len(small.ids) - small.distinct
    for capacity in small.distinct, 1 << 60:
        counts = replay(small, capacity, CONTENDERS[name])
        assert (counts.block_hits, counts.prefix_hits) == (ideal, ideal)


@pytest.mark.parametrize("name", CONTENDERS)
def test_one_block_and_less_than_a_request_run(name: str) -> None:
    accesses = load(Trace(trace_path("taubench")))
    for capacity in 1, 2:
        counts = replay(accesses, capacity, CONTENDERS[name])
        assert 0 < counts.block_hits < counts.accesses


def test_no_block_of_capacity_is_refused() -> None:
    with pytest.raises(TierKVError, match="at least one block"):
        replay(accesses_of([[0]]), 0, CONTENDERS["lru"])


def test_progress_is_told() -> None:
    calls: list[tuple[int, int]] = []
    replay(
        accesses_of([[n] for n in range(600)]), 5, CONTENDERS["lru"], lambda *at: calls.append(at)
    )
    assert calls == [(0, 600), (256, 600), (512, 600)]


def test_next_uses_are_positions_or_the_end() -> None:
    assert next_uses(np.array([3, 1, 3, 3, 2, 1], np.int32)).tolist() == [2, 5, 3, 6, 6, 6]


PINNED = {
    ("miniswe", 28): {
        "lru": (620, 10471),
        "lru-prompt-order": (923, 923),
        "arc": (3772, 2260),
        "arc-tail-first": (1970, 5295),
        "s3fifo": (4372, 1638),
        "s3fifo-tail-first": (2678, 2427),
        "gdsf": (1733, 10252),
        "belady": (10471, 10471),
    },
    ("miniswe", 138): {
        "lru": (18741, 25956),
        "lru-prompt-order": (19194, 19194),
        "arc": (23782, 18097),
        "arc-tail-first": (23351, 25271),
        "s3fifo": (24188, 19428),
        "s3fifo-tail-first": (23966, 22215),
        "gdsf": (16910, 24777),
        "belady": (25956, 25956),
    },
    ("miniswe", 553): {
        "lru": (34657, 35182),
        "lru-prompt-order": (35182, 35182),
        "arc": (35133, 35006),
        "arc-tail-first": (34928, 35106),
        "s3fifo": (35175, 35089),
        "s3fifo-tail-first": (34919, 35182),
        "gdsf": (32897, 34916),
        "belady": (35196, 35196),
    },
    ("sharegpt300", 2944): {
        "lru": (583, 608),
        "lru-prompt-order": (583, 583),
        "arc": (538, 538),
        "arc-tail-first": (538, 563),
        "s3fifo": (538, 538),
        "s3fifo-tail-first": (538, 563),
        "gdsf": (583, 608),
        "belady": (1220, 1220),
    },
    ("taubench", 3): {
        "lru": (339, 518),
        "lru-prompt-order": (339, 339),
        "arc": (418, 322),
        "arc-tail-first": (449, 573),
        "s3fifo": (381, 323),
        "s3fifo-tail-first": (466, 543),
        "gdsf": (291, 487),
        "belady": (659, 659),
    },
    ("taubench", 16): {
        "lru": (1020, 1095),
        "lru-prompt-order": (1039, 1039),
        "arc": (1044, 988),
        "arc-tail-first": (1043, 1092),
        "s3fifo": (934, 925),
        "s3fifo-tail-first": (924, 980),
        "gdsf": (958, 1065),
        "belady": (1115, 1115),
    },
    ("taubench", 32): {
        "lru": (1121, 1121),
        "lru-prompt-order": (1121, 1121),
        "arc": (1111, 1103),
        "arc-tail-first": (1111, 1118),
        "s3fifo": (1074, 1074),
        "s3fifo-tail-first": (1067, 1106),
        "gdsf": (1116, 1124),
        "belady": (1125, 1125),
    },
    ("taubench", 65): {
        "lru": (1125, 1125),
        "lru-prompt-order": (1125, 1125),
        "arc": (1119, 1117),
        "arc-tail-first": (1118, 1122),
        "s3fifo": (1122, 1120),
        "s3fifo-tail-first": (1116, 1123),
        "gdsf": (1125, 1125),
        "belady": (1125, 1125),
    },
}
"""Block hits and usable prefix, in blocks; a change in a number is a decision, written down."""


@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.parametrize(("trace", "capacity"), PINNED)
def test_hit_counts_are_pinned(trace: str, capacity: int, name: str) -> None:
    counts = replay(load(Trace(trace_path(trace))), capacity, CONTENDERS[name])
    assert (counts.block_hits, counts.prefix_hits) == PINNED[trace, capacity][name]
