"""The catalog: only its transitions happen, sums are those of the rows, units lead to them."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.frames import WHOLE, key_of
from tierkv.catalog import (
    ABSENT,
    COLUMNS,
    LEAVING,
    NONE,
    READY,
    TRANSITIONS,
    WRITING,
    Catalog,
    State,
    Unit,
)
from tierkv.part import Part
from tierkv.tier import Space

TIERS = ("host", "nvme", "redis")
OTHER = Part(1, 0, 2, 0, 2)


def unit(number: int, *, part: int = 0, nbytes: int = 100, allocated: int = 4096) -> Unit:
    return Unit(key_of(number), part, 1, 4, 0, nbytes, allocated, number, 0, 0, number * 64)


def catalog() -> Catalog:
    made = Catalog(TIERS)
    assert [made.part_number(part) for part in (WHOLE, OTHER, WHOLE)] == [0, 1, 0]
    return made


def in_state(state: int) -> tuple[Catalog, int]:
    """Return a catalog with one placement in a state; an absent one was there once."""
    made = catalog()
    (row,) = made.begin(0, [unit(1)])
    if state == ABSENT:
        made.abort([row])
    if state in (READY, LEAVING):
        made.commit([row])
    if state == LEAVING:
        made.leave([row])
    assert made.state[row] == state
    return made, row


ACTS: dict[str, Callable[[Catalog, int], object]] = {
    "commit": lambda made, row: made.commit([row]),
    "abort": lambda made, row: made.abort([row]),
    "leave": lambda made, row: made.leave([row]),
    "gone": lambda made, row: made.gone([row]),
    "hold": lambda made, row: made.hold([row]),
    "unhold": lambda made, row: made.unhold([row]),
    "truncate": lambda made, row: made.resize(row, 50, 4096, 7),
}
ALLOWED = {
    ("commit", WRITING), ("abort", WRITING), ("leave", READY), ("gone", LEAVING), ("hold", READY),
    ("truncate", WRITING), ("truncate", READY),
}  # fmt: skip


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("act", ACTS)
def test_only_the_transitions_of_the_table_happen(act: str, state: State) -> None:
    made, row = in_state(state)
    before = [list(sums) for sums in made.bytes]
    if (act, state) in ALLOWED:
        ACTS[act](made, row)
        if act in TRANSITIONS:
            assert state in (TRANSITIONS[act][0], WRITING)
        return
    with pytest.raises(AssertionError):
        ACTS[act](made, row)
    assert made.state[row] == state
    assert made.bytes == before


@pytest.mark.parametrize("act", ["leave", "gone", "truncate"])
def test_what_is_held_stays(act: str) -> None:
    made, row = in_state(READY)
    made.hold([row])
    made.hold([row])
    if act == "truncate":
        with pytest.raises(AssertionError):
            made.resize(row, 50, 4096, 7)
    else:
        made.leave([row])
        with pytest.raises(AssertionError, match="held"):
            made.gone([row])
        assert made.unhold([row]) == []
        assert made.unhold([row]) == [row]
        with pytest.raises(AssertionError, match="twice"):
            made.unhold([row])
        made.gone([row])
        assert made.head(key_of(1), 0) == NONE


def test_a_hold_that_ends_on_a_ready_placement_frees_nothing() -> None:
    made, row = in_state(READY)
    made.hold([row])
    assert made.unhold([row]) == []
    assert made.state[row] == READY


def test_units_lead_to_their_placements_in_every_tier() -> None:
    made = catalog()
    rows = [made.begin(tier, [unit(1)])[0] for tier in range(3)]
    other = made.begin(0, [unit(1, part=1)])[0]
    head = made.head(key_of(1), 0)
    assert sorted(made.copies(head)) == rows
    assert [made.in_tier(head, tier) for tier in range(3)] == rows
    assert made.find(key_of(1) + key_of(2), 1).tolist() == [other, NONE]
    assert list(made.copies(NONE)) == []
    assert made.in_tier(NONE, 0) == NONE
    assert (made.part_of(other), made.part_at(1)) == (OTHER, OTHER)


def test_units_alike_begin_and_go_as_one_by_one() -> None:
    one, all_ = catalog(), catalog()
    for made in one, all_:
        old = made.begin(0, [unit(number) for number in range(40)])
        made.commit(old)
        below = made.begin(1, [unit(number, allocated=100) for number in range(0, 60, 2)])
        made.commit(below[:5])
        made.leave(old[10:30])
        made.gone(old[29:9:-1])
    numbers = range(40, 100)
    rows = one.begin(0, [unit(number, part=1, nbytes=number) for number in numbers])
    columns = unit(0)._asdict() | {name: np.array(numbers) for name in ("nbytes", "locator")}
    columns |= {"position": np.array(numbers) * 64}
    for name in "key", "part":
        del columns[name]
    keys = b"".join(key_of(number) for number in numbers)
    assert all_.begin_alike(0, 1, keys, columns) == rows
    for made in one, all_:
        made.commit(rows[::2])
        made.abort(rows[1::2])
        made.leave(rows[:40:2])
        check_sums(made)
    assert rows[:20] == list(range(10, 30))
    for name in COLUMNS:
        assert getattr(one, name) == getattr(all_, name), name
    assert (one.bytes, one.count) == (all_.bytes, all_.count)
    everything = b"".join(key_of(number) for number in range(100))
    for part in 0, 1:
        assert one.find(everything, part).tolist() == all_.find(everything, part).tolist()
    with pytest.raises(AssertionError, match="commit of a placement"):
        all_.commit(rows[:3])


def test_both_copies_of_a_unit_may_go_at_once() -> None:
    made = catalog()
    rows = [*made.begin(0, [unit(1), unit(2)]), *made.begin(1, [unit(1), unit(2)])]
    made.abort(rows)
    assert made.find(key_of(1) + key_of(2), 0).tolist() == [NONE, NONE]
    assert made.begin(0, [unit(1)]) == [rows[-1]]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_placements_of_a_unit_may_go_in_any_order(order: tuple[int, ...]) -> None:
    made = catalog()
    rows = [made.begin(tier, [unit(1), unit(2)])[0] for tier in range(3)]
    left = set(rows)
    for tier in order:
        made.abort([rows[tier]])
        left.discard(rows[tier])
        assert set(made.copies(made.head(key_of(1), 0))) == left
    assert len(list(made.copies(made.head(key_of(2), 0)))) == 3


def test_rows_come_back_as_others() -> None:
    made, row = in_state(READY)
    serial = made.serial[row]
    made.leave([row])
    made.gone([row])
    assert made.state[row] == ABSENT
    again = made.begin(1, [unit(9)])[0]
    assert again == row
    assert made.serial[row] == serial + 1
    assert (made.holds[row], made.tier[row], made.key(row)) == (0, 1, key_of(9))
    assert made.find(key_of(1) + key_of(9), 0).tolist() == [NONE, row]


def test_select_finds_rows_by_tier_and_state() -> None:
    made = catalog()
    assert made.select(0, READY).tolist() == []
    rows = made.begin(0, [unit(number) for number in range(6)])
    below = made.begin(1, [unit(number) for number in range(2)])
    made.commit(rows[:4])
    made.leave(rows[:1])
    assert made.select(0, READY).tolist() == rows[1:4]
    assert made.select(0, WRITING, LEAVING).tolist() == [rows[0], *rows[4:]]
    assert made.select(1, WRITING).tolist() == below
    assert made.select(2, WRITING).tolist() == []


def test_rows_are_found_by_where_they_lie() -> None:
    made = catalog()
    assert made.within(1, 0, 10) == []
    rows = made.begin(1, [unit(number) for number in range(8)])  # locators are the numbers
    made.begin(0, [unit(number) for number in range(8)])
    made.commit(rows[:5])
    made.leave(rows[:4])
    made.gone(rows[3:4])
    assert made.within(1, 2, 6) == [rows[2], rows[4], rows[5]]
    assert made.within(1, 7, 100) == rows[7:]
    assert made.within(2, 0, 100) == made.within(1, 3, 4) == []


def test_adopted_placements_are_ready() -> None:
    made = catalog()
    made.begin(0, [unit(0)])
    numbers = np.arange(2, 5)
    fields = [name for name in Unit._fields if name not in ("key", "part")]
    columns = dict.fromkeys(fields, numbers)
    rows = made.adopt(1, 1, key_of(0) + key_of(3) + key_of(4), columns).tolist()
    assert [made.state[row] for row in rows] == [READY] * 3
    assert [made.tier[row] for row in rows] == [1] * 3
    assert made.find(key_of(3) + key_of(0), 1).tolist() == [rows[1], rows[0]]
    assert [made.generation[row] for row in rows] == [2, 3, 4]
    assert made.bytes[1][READY] == 9
    assert made.count[1][READY] == 3
    more = made.begin(2, [unit(3, part=1)])
    assert list(made.copies(made.head(key_of(3), 1))) == [*more, rows[1]]
    check_sums(made)


def test_the_capacity_invariant_names_what_is_wrong() -> None:
    made = catalog()
    made.begin(0, [unit(1), unit(2)])
    made.check(0, Space(capacity=10_000, free=1808, dead=0))
    made.check(1, Space(5, 2, 3))
    with pytest.raises(AssertionError, match="host: free 1807"):
        made.check(0, Space(10_000, 1807, 0))


def check_sums(made: Catalog) -> None:
    for tier in range(len(TIERS)):
        for state in WRITING, READY, LEAVING:
            rows = made.select(tier, state).tolist()
            rows = [row for row in rows if made.state[row] != ABSENT]
            assert made.count[tier][state] == len(rows)
            assert made.bytes[tier][state] == sum(made.allocated[row] for row in rows)
        assert (made.count[tier][ABSENT], made.bytes[tier][ABSENT]) == (0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_those_of_the_rows_after_any_steps(seed: int) -> None:
    rng = random.Random(seed)
    made = catalog()
    rows: dict[tuple[int, int, int], int] = {}
    for _ in range(600):
        name = (rng.randrange(3), rng.randrange(40), rng.randrange(2))
        row = rows.get(name)
        if row is None:
            tier, number, part = name
            size = rng.randrange(1, 9) * 4096
            rows[name] = made.begin(tier, [unit(number, part=part, allocated=size)])[0]
        elif made.state[row] == WRITING:
            step = rng.choice(["commit", "abort", "truncate"])
            ACTS[step](made, row)
            if step == "abort":
                del rows[name]
        elif made.state[row] == READY:
            step = rng.choice(["leave", "hold", "unhold" if made.holds[row] else "leave"])
            ACTS[step](made, row)
        elif made.holds[row]:
            made.unhold([row])
        else:
            made.gone([row])
            del rows[name]
        check_sums(made)
    for (tier, number, part), row in rows.items():
        assert made.in_tier(made.head(key_of(number), part), tier) == row
    assert len(made) <= 240, "rows are used again"


def test_a_position_or_size_too_large_is_never_stored_as_another() -> None:
    made = catalog()
    with pytest.raises(OverflowError):
        made.begin(0, [unit(1)._replace(position=1 << 31)])
