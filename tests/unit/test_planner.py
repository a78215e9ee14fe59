"""The planner: what is written, staged and reclaimed, checked by hand and against brute force."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tests.contract.policy_contract import SIZE, Shelf
from tests.frames import key_of
from tierkv import planner
from tierkv.catalog import Catalog
from tierkv.codec import LOSSLESS, RAW
from tierkv.cost import Rates, Recompute, load_seconds
from tierkv.plan import PutPlan, RegionPlan
from tierkv.policies.lru import Lru
from tierkv.tier import Region

FAST = Rates(latency_s=0.0, read_bps=8e9, write_bps=8e9)
DISK = Rates(latency_s=1e-3, read_bps=1e9, write_bps=1e9)
NET = Rates(latency_s=5e-3, read_bps=2e8, write_bps=2e8)


def put(
    known: list[bool], free: int, *, parts: int = 1, size: int = SIZE, shelf: Shelf | None = None
) -> PutPlan:
    shelf = shelf or Shelf(Lru(2))
    assert isinstance(shelf.policy, Lru)
    return planner.plan_put(
        shelf.policy, shelf.catalog, keys_of(known, parts), known, [size] * parts, RAW, free, SIZE
    )


def keys_of(known: list[bool], parts: int) -> bytes:
    return b"".join(key_of(10_000 + block) for block in range(len(known) // parts))


# --- puts ---


def test_only_what_is_not_known_is_written() -> None:
    plan = put([True, False, True, False], 10 * SIZE)
    assert (plan.units, plan.known, plan.refused, plan.moves) == ([1, 3], 2, 0, [])
    assert put([], 0).units == []
    assert put([True] * 3, 0).known == 3


def test_where_room_ends_the_rest_is_refused() -> None:
    plan = put([False] * 5, 3 * SIZE + 1)
    assert (plan.units, plan.refused, plan.declined) == ([0, 1, 2], 2, 0)


@pytest.mark.parametrize(("free", "units"), [(7, 6), (6, 6), (5, 4), (3, 2), (1, 0), (0, 0)])
def test_blocks_are_written_whole(free: int, units: int) -> None:
    plan = put([False] * 8, free * SIZE, parts=2)
    assert plan.units == list(range(units))
    assert plan.refused == 8 - units


def test_a_block_of_which_one_part_is_known_is_completed_or_refused() -> None:
    known = [False, False, True, False, False, False]
    assert put(known, 3 * SIZE, parts=2).units == [0, 1, 3]
    assert put(known, 4 * SIZE, parts=2).units == [0, 1, 3]
    assert put(known, 2 * SIZE, parts=2).units == [0, 1]


def test_parts_have_their_own_sizes() -> None:
    shelf = Shelf(Lru(2))
    plan = planner.plan_put(
        Lru(2),
        shelf.catalog,
        keys_of([False] * 6, 2),
        [False] * 6,
        [SIZE, 3 * SIZE],
        RAW,
        9 * SIZE,
        SIZE,
    )
    assert plan.units == [0, 1, 2, 3]


def test_victims_make_room_for_what_is_missing_only() -> None:
    shelf = Shelf(Lru(2))
    rows = shelf.chain(6)
    shelf.touch(rows[-1])
    plan = put([False] * 4, 2 * SIZE, shelf=shelf)
    assert plan.units == [0, 1, 2, 3]
    assert {move.row for move in plan.moves} == set(rows[4:])


def test_nothing_is_dropped_for_a_put_that_gets_no_room() -> None:
    shelf = Shelf(Lru(2))
    rows = shelf.chain(1)
    shelf.touch(rows[-1])
    plan = put([False, False], SIZE // 2, parts=2, shelf=shelf)
    assert (plan.units, plan.moves, plan.refused) == ([], [], 2)


class Picky(Lru):
    """Lets one block in of all that are offered."""

    def __init__(self) -> None:
        super().__init__(2)
        self.asked: list[bytes] = []

    def offered(self, view: Catalog, tier: int, keys: Sequence[bytes]) -> int:
        self.asked = list(keys)
        return 1


def test_what_the_policy_declines_is_refused_with_all_behind_it() -> None:
    policy = Picky()
    known = [True, True, True, False, False, False]
    plan = put(known, 0, parts=2, shelf=Shelf(policy))
    assert policy.asked == [key_of(10_001), key_of(10_002)]
    assert (plan.units, plan.known, plan.refused, plan.declined) == ([], 3, 3, 2)
    plan = put(known, 9 * SIZE, parts=2, shelf=Shelf(policy))
    assert (plan.units, plan.known, plan.refused, plan.declined) == ([3], 3, 2, 2)


@pytest.mark.parametrize("seed", range(4))
def test_a_put_never_takes_more_than_there_is(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        shelf = Shelf(Lru(2))
        rows = shelf.chain(rng.randint(1, 8), size=SIZE * rng.randint(1, 3))
        shelf.touch(rows[-1])
        shelf.catalog.hold(rows[: rng.randint(0, len(rows))])
        parts = rng.randint(1, 3)
        known = [rng.random() < 0.3 for _ in range(parts * rng.randint(1, 6))]
        free = rng.randint(0, 6) * SIZE
        plan = put(known, free, parts=parts, shelf=shelf)
        gone = [move.row for move in plan.moves]
        room = free + sum(shelf.catalog.allocated[row] for row in gone)
        assert len(plan.units) * SIZE <= room
        assert plan.units == sorted(plan.units)
        wanted = [unit for unit, has in enumerate(known) if not has]
        assert plan.units == wanted[: len(plan.units)]
        assert plan.refused == len(wanted) - len(plan.units)
        if plan.refused:
            refused = wanted[len(plan.units)] // parts
            assert all(unit // parts < refused for unit in plan.units)


# --- profiles ---


def test_the_slowest_tier_decides_the_profile() -> None:
    assert planner.plan_profile([RAW, LOSSLESS], []) is RAW
    assert planner.plan_profile([RAW, LOSSLESS], [FAST]) is RAW
    assert planner.plan_profile([RAW, LOSSLESS], [FAST, NET]) is LOSSLESS
    assert planner.plan_profile([LOSSLESS], [FAST]) is LOSSLESS


# --- stages ---


def cost_of(
    blocks: int, stored: list[int], source: list[int], cost: Recompute, position: int
) -> float:
    """Return the seconds to load so many blocks and to compute the rest of the chain."""
    rates, load = [FAST, DISK, NET], 0.0
    for tier, rate in enumerate(rates):
        mine = [
            size for size, at in zip(stored[:blocks], source[:blocks], strict=True) if at == tier
        ]
        load += load_seconds(sum(mine), 1000 * sum(map(bool, mine)), rate, 1e9)
    rest = (len(stored) - blocks) * 64
    return load + cost.seconds(rest, position + blocks * 64)


@pytest.mark.parametrize("seed", range(6))
def test_a_stage_minimises_load_and_recompute_of_the_rest(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        count = rng.randint(0, 12)
        source = [rng.choice([0, 1, 2]) for _ in range(count)]
        stored = [rng.randrange(1, 1 << 22) if tier else 0 for tier in source]
        cost = Recompute(rng.uniform(0, 2e-4), rng.uniform(0, 1e-8))
        position = rng.randrange(10_000)
        plan = planner.plan_stage(stored, source, [FAST, DISK, NET], 1e9, 1000, 64, position, cost)
        best = min(cost_of(n, stored, source, cost, position) for n in range(count + 1))
        found = cost_of(plan.blocks, stored, source, cost, position)
        assert found == pytest.approx(best, rel=1e-9)


def test_without_a_cost_of_recomputing_everything_is_staged() -> None:
    plan = planner.plan_stage([10, 0, 10], [1, 0, 1], [FAST, DISK], 1e9, 10, 64, 0, Recompute(0, 0))
    assert plan.blocks == 3
    assert plan.recompute_s == 0.0


def test_what_recomputes_faster_is_left_below() -> None:
    cheap = Recompute(1e-9, 0)
    plan = planner.plan_stage([1 << 20] * 4, [1] * 4, [FAST, DISK], 1e9, 10, 64, 0, cheap)
    assert (plan.blocks, plan.load_s) == (0, 0.0)


def test_a_later_position_is_worth_more() -> None:
    cost = Recompute(0, 1e-8)
    lengths = [
        planner.plan_stage(
            [100_000] * 8, [1] * 8, [FAST, DISK], 1e12, 10, 64, position, cost
        ).blocks
        for position in (0, 100, 1000, 10_000, 100_000)
    ]
    assert all(one <= two for one, two in pairwise(lengths))
    assert lengths[-1] == 8


# --- regions ---


def regions(count: int) -> list[Region]:
    return [Region(n, n * 10, n * 10 + 10, 0, n) for n in range(count)]


def reclaim(shelf: Shelf, sealed: list[Region]) -> RegionPlan | None:
    assert isinstance(shelf.policy, Lru)
    return planner.plan_region(shelf.policy, shelf.catalog, 1, sealed)


def region_shelf(count: int) -> tuple[Shelf, list[int]]:
    """Return placements below RAM whose locators are 0, 1, 2, ...: five in each region of ten."""
    shelf = Shelf(Lru(2))
    rows = shelf.add(count, tier=1, size=1)
    for index, row in enumerate(rows):
        shelf.catalog.locator[row] = index // 5 * 10 + index % 5
    return shelf, rows


def test_the_region_that_costs_least_goes() -> None:
    shelf, rows = region_shelf(20)
    for row in rows[10:15] + rows[15:] + rows[:5] + rows[5:10]:
        shelf.policy.touched(shelf.catalog, [row])
    plan = reclaim(shelf, regions(4))
    assert plan is not None
    assert plan.number in (0, 2, 3)
    assert plan.carry == []
    assert len(plan.drops) == 5


def test_what_is_hot_is_carried_and_no_more_than_half_a_region() -> None:
    shelf, rows = region_shelf(10)
    shelf.catalog.locator[rows[5]] = 5
    for row in rows:
        shelf.policy.touched(shelf.catalog, [row])
    for row in rows[:4]:
        for _ in range(2):
            shelf.policy.touched(shelf.catalog, [row])
    plan = reclaim(shelf, regions(1))
    assert plan is not None
    assert set(plan.carry) | set(plan.drops) == set(rows[:6])
    assert not set(plan.carry) & set(plan.drops)
    assert 0 < len(plan.carry) <= 5
    assert rows[3] in plan.carry


@pytest.mark.parametrize("busy", ["held", "writing", "leaving"])
def test_a_region_in_use_is_passed_over(busy: str) -> None:
    shelf, rows = region_shelf(10)
    for row in rows:
        shelf.policy.touched(shelf.catalog, [row])
    if busy == "writing":
        extra = shelf.add(1, tier=1, size=1, ready=False)
        shelf.catalog.locator[extra[0]] = 6
    else:
        shelf.catalog.hold(rows[:1])
        if busy == "leaving":
            shelf.catalog.leave(rows[:1])
    plan = reclaim(shelf, regions(2))
    assert plan is not None
    assert plan.number == 1
    assert reclaim(shelf, regions(1)) is None


def test_an_empty_region_costs_nothing() -> None:
    shelf, rows = region_shelf(5)
    shelf.policy.touched(shelf.catalog, rows)
    plan = reclaim(shelf, regions(2)[::-1])
    assert plan is not None
    assert (plan.number, plan.carry, plan.drops) == (1, [], [])
