"""The Catalog: every placement and every hold, in memory. The only mutable heart of tierkv.

A placement is one copy of a *unit* (key, part) in one tier. Placements are rows in typed columns,
not objects; a dict per part leads from a key to the first of its placements, `sibling` to the next.
Keys and row numbers are all that the interpreter sees, and none of it is tracked by the garbage
collector.

Columns are `array.array`: one row is read in tens of nanoseconds, and `column` gives numpy a view
where a decision looks at all of them.

State changes only through TRANSITIONS. Allocated bytes are summed by (tier, state) with every
change, so that free + dead + writing + ready + leaving = capacity can be asserted at any time. No
I/O, no clock, no lock: the owner calls from one thread at a time.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.part import Part
from tierkv.tier import Space


class State(IntEnum):
    """Where a placement stands."""

    ABSENT = 0
    WRITING = 1
    READY = 2
    LEAVING = 3


ABSENT, WRITING, READY, LEAVING = map(int, State)

TRANSITIONS = {
    "begin": (ABSENT, WRITING),
    "commit": (WRITING, READY),
    "abort": (WRITING, ABSENT),
    "truncate": (READY, READY),
    "leave": (READY, LEAVING),
    "gone": (LEAVING, ABSENT),
}
"""Holds lie on ready placements only.

One that is held may leave, and is gone when the last hold ends.
"""

NONE = -1

COLUMNS = {
    "part": "h",
    "tier": "b",
    "state": "b",
    "profile": "b",
    "fidelity": "b",
    "flags": "B",
    "holds": "i",
    "nbytes": "i",
    "allocated": "q",
    "locator": "q",
    "namespace": "i",
    "generation": "q",
    "position": "i",
    "sibling": "i",
    "first": "b",
    "serial": "I",
}

Rows = Sequence[int]


class Unit(NamedTuple):
    """What a new placement says of its frame.

    Sizes in bytes, `namespace` and `profile` by number.
    """

    key: bytes
    part: int
    profile: int
    fidelity: int
    flags: int
    nbytes: int
    allocated: int
    locator: int
    namespace: int
    generation: int
    position: int


class Catalog:
    """Placements of units over tiers, which are numbered in the order given."""

    part: "array[int]"
    tier: "array[int]"
    state: "array[int]"
    profile: "array[int]"
    fidelity: "array[int]"
    flags: "array[int]"
    holds: "array[int]"
    nbytes: "array[int]"
    allocated: "array[int]"
    locator: "array[int]"
    namespace: "array[int]"
    generation: "array[int]"
    position: "array[int]"
    sibling: "array[int]"
    first: "array[int]"
    """1: the unit's dict entry leads here."""
    serial: "array[int]"

    def __init__(self, tiers: Sequence[str]) -> None:
        self.tiers = tuple(tiers)
        self.bytes = [[0] * len(State) for _ in tiers]
        self.count = [[0] * len(State) for _ in tiers]
        self.keys: list[bytes] = []
        self._parts: dict[Part, int] = {}
        self._part_list: list[Part] = []
        self._heads: list[dict[bytes, int]] = []
        self._recycled: list[int] = []
        for name, typecode in COLUMNS.items():
            setattr(self, name, array(typecode))

    def part_number(self, part: Part) -> int:
        """Return the number that columns hold for a part."""
        number = self._parts.get(part)
        if number is None:
            number = self._parts[part] = len(self._part_list)
            self._part_list.append(part)
            self._heads.append({})
        return number

    def part_at(self, number: int) -> Part:
        """Return the part of a number."""
        return self._part_list[number]

    def part_of(self, row: int) -> Part:
        """Return a row's part."""
        return self._part_list[self.part[row]]

    def find(self, keys: Iterable[bytes], part: int) -> list[int]:
        """Return the first placement of each unit, NONE where the unit is not known."""
        lookup, known, parts, first = self._heads[part].get, self.keys, self.part, self.first
        rows: list[int] = []
        row, count = NONE, len(known)
        for key in keys:
            # A chain's rows mostly lie side by side; then the next one needs no look into a dict
            # of a million, which costs as much as everything else here.
            row += 1
            if not (row < count and known[row] == key and first[row] and parts[row] == part):
                row = lookup(key, NONE)
            rows.append(row)
        return rows

    def copies(self, head: int) -> Iterator[int]:
        """Go through the placements of a unit."""
        sibling = self.sibling
        while head != NONE:
            yield head
            head = sibling[head]

    def in_tier(self, head: int, tier: int) -> int:
        """Return a unit's placement in a tier in any state, NONE where there is none."""
        tiers, sibling = self.tier, self.sibling
        while head != NONE and tiers[head] != tier:
            head = sibling[head]
        return head

    def begin(self, tier: int, units: Sequence[Unit]) -> list[int]:
        """Make placements in `writing`; no unit has one in `tier` yet or stands twice in a call."""
        rows = self._take_rows(len(units))
        size = 0
        for row, unit in zip(rows, units, strict=True):
            self.keys[row] = unit.key
            self.part[row], self.profile[row] = unit.part, unit.profile
            self.fidelity[row], self.flags[row] = unit.fidelity, unit.flags
            self.nbytes[row], self.allocated[row] = unit.nbytes, unit.allocated
            self.locator[row], self.namespace[row] = unit.locator, unit.namespace
            self.generation[row], self.position[row] = unit.generation, unit.position
            size += unit.allocated
            heads = self._heads[unit.part]
            before = self.sibling[row] = heads.get(unit.key, NONE)
            heads[unit.key] = row
            self.first[row] = 1
            if before != NONE:
                self.first[before] = 0
        self._enter(tier, rows, size)
        return rows

    def _enter(self, tier: int, rows: Rows, size: int) -> None:
        for row in rows:
            self.tier[row] = tier
            self.serial[row] = (self.serial[row] + 1) & 0xFFFFFFFF
        self.count[tier][ABSENT] += len(rows)
        self.bytes[tier][ABSENT] += size
        self._change("begin", rows)

    def commit(self, rows: Rows) -> None:
        """Make written placements visible."""
        self._change("commit", rows)

    def abort(self, rows: Rows) -> None:
        """Take placements back that were not written."""
        self._change("abort", rows)
        self._forget(rows)

    def resize(self, row: int, nbytes: int, allocated: int, locator: int) -> None:
        """Note where a frame lies now and how long it is; a ready one must not be held."""
        state = self.state[row]
        assert state == WRITING or (state == READY and not self.holds[row])
        self.bytes[self.tier[row]][state] += allocated - self.allocated[row]
        self.nbytes[row], self.allocated[row], self.locator[row] = nbytes, allocated, locator

    def leave(self, rows: Rows) -> None:
        """Make ready placements invisible; their space stays until `gone`."""
        self._change("leave", rows)

    def gone(self, rows: Rows) -> None:
        """End leaving placements that nobody holds."""
        assert not any(self.holds[row] for row in rows), "a held placement cannot be gone"
        self._change("gone", rows)
        self._forget(rows)

    def hold(self, rows: Rows) -> None:
        """Keep ready placements' bytes in place."""
        state, holds = self.state, self.holds
        for row in rows:
            assert state[row] == READY, "holds lie on ready placements only"
            holds[row] += 1

    def unhold(self, rows: Rows) -> list[int]:
        """End one hold of each row; returns those that are leaving and nobody holds any more."""
        state, holds = self.state, self.holds
        free = []
        for row in rows:
            assert holds[row] > 0, "a hold ended twice"
            holds[row] -= 1
            if state[row] == LEAVING and not holds[row]:
                free.append(row)
        return free

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a numpy view of a column; it must be gone before the next placement is made."""
        values = getattr(self, name)
        return np.frombuffer(values, values.typecode)

    def select(self, tier: int, *states: int) -> npt.NDArray[np.int32]:
        """Return the rows of a tier in any of the states. Linear in placements."""
        if not self.keys:
            return np.empty(0, np.int32)
        mine = (self.column("tier") == tier) & np.isin(self.column("state"), states)
        return np.flatnonzero(mine).astype(np.int32)

    def check(self, tier: int, space: Space, carrying: int = 0) -> None:
        """Assert the capacity invariant of a tier, with what a placement takes twice meanwhile."""
        placed = sum(self.bytes[tier][WRITING:]) + carrying
        assert space.free + space.dead + placed == space.capacity, (
            f"{self.tiers[tier]}: free {space.free} + dead {space.dead} + placed {placed} "
            f"is not capacity {space.capacity}"
        )

    def adopt(
        self, tier: int, part: int, keys: list[bytes], columns: dict[str, npt.NDArray[Any]]
    ) -> list[int]:
        """Make ready placements of units that a tier found at start, in bulk; see `begin`.

        Args:
            tier: where; the catalog has no placements of it yet.
            part: of all the units.
            keys: of the units, distinct.
            columns: the other fields of `Unit`.
        """
        rows = list(range(len(self.keys), len(self.keys) + len(keys)))
        self.keys += keys
        heads, blank = self._heads[part], np.zeros(len(keys), np.int8)
        siblings = np.full(len(keys), NONE, np.int32)
        if heads:
            siblings = np.fromiter((heads.get(key, NONE) for key in keys), np.int32, len(keys))
        given = {"part": blank.astype("h") + part, "tier": blank + tier, "state": blank + READY}
        given |= {"serial": blank + 1, "first": blank + 1, "sibling": siblings, **columns}
        for name, typecode in COLUMNS.items():
            values = given.get(name, blank)
            getattr(self, name).frombytes(values.astype(typecode).tobytes())
        heads.update(zip(keys, rows, strict=True))
        for before in siblings[siblings != NONE].tolist():
            self.first[before] = 0
        self.bytes[tier][READY] += int(columns["allocated"].sum())
        self.count[tier][READY] += len(rows)
        return rows

    def _change(self, name: str, rows: Rows) -> None:
        old, new = TRANSITIONS[name]
        state, tiers, allocated = self.state, self.tier, self.allocated
        for row in rows:
            assert state[row] == old, f"{name} of a placement that is {State(state[row]).name}"
            state[row] = new
            tier, size = tiers[row], allocated[row]
            sums, counts = self.bytes[tier], self.count[tier]
            sums[old] -= size
            sums[new] += size
            counts[old] -= 1
            counts[new] += 1

    def _forget(self, rows: Rows) -> None:
        """Unlink absent rows from their units and recycle them."""
        for row in rows:
            key, heads = self.keys[row], self._heads[self.part[row]]
            after, at = self.sibling[row], heads[key]
            if at == row and after == NONE:
                del heads[key]
            elif at == row:
                heads[key] = after
                self.first[after] = 1
            else:
                while self.sibling[at] != row:
                    at = self.sibling[at]
                self.sibling[at] = after
            self.keys[row] = b""
            self.first[row] = 0
            tier = self.tier[row]
            self.bytes[tier][ABSENT] -= self.allocated[row]
            self.count[tier][ABSENT] -= 1
        self._recycled.extend(rows)

    def _take_rows(self, count: int) -> list[int]:
        reused = min(count, len(self._recycled))
        rows = self._recycled[len(self._recycled) - reused :]
        del self._recycled[len(self._recycled) - reused :]
        new = count - reused
        rows += range(len(self.keys), len(self.keys) + new)
        self.keys += [b""] * new
        for name, typecode in COLUMNS.items():
            if new:
                getattr(self, name).extend(array(typecode, bytes(array(typecode).itemsize * new)))
        return rows
