"""The Catalog: every placement and every hold, in memory. The only mutable heart of tierkv.

A placement is one copy of a *unit* (key, part) in one tier. Placements are rows in typed columns,
not objects; `units` leads from a unit to the first of its placements, `sibling` to the next. None
of it is tracked by the garbage collector.

Columns are `array.array`: one row is read in tens of nanoseconds, and `column` gives numpy a view
where a decision looks at all of them.

State changes only through TRANSITIONS. Allocated bytes are summed by (tier, state) with every
change, so that free + dead + writing + ready + leaving = capacity can be asserted at any time. No
I/O, no clock, no lock: the owner calls from one thread at a time.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv import units
from tierkv.allowance import Allowance, Allowances
from tierkv.key import KEY_BYTES
from tierkv.part import Part
from tierkv.tier import RAM, Space


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

NONE = units.NONE

MANY = 256
"""From here on numpy takes less time than a loop over rows."""

ENDS = ("end1", "end2", "end3")
"""By segments: bytes of the frame cut short behind so many; 0 where that is not known."""

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
    "serial": "I",
    "allowance": "h",
    "fixed": "b",  # what who encodes could not: 1: by a calibration, 2: at all
    **dict.fromkeys(ENDS, "i"),
}
Rows = Sequence[int]
Column = int | npt.NDArray[Any]
"""A value for many rows, or one for each."""


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
    allowance: int = 0
    end1: int = 0
    end2: int = 0
    end3: int = 0


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
    serial: "array[int]"
    allowance: "array[int]"
    fixed: "array[int]"
    end1: "array[int]"
    end2: "array[int]"
    end3: "array[int]"

    def __init__(self, tiers: Sequence[str], cuts: Collection[int] = (RAM,)) -> None:
        """`cuts`: numbers of the tiers in which a frame can be cut short where it lies."""
        self.tiers, self.cuts = tuple(tiers), frozenset(cuts)
        self.encodes: frozenset[bytes] = frozenset()
        self.bytes = [[0] * len(State) for _ in tiers]
        self.count = [[0] * len(State) for _ in tiers]
        self._parts: dict[Part, int] = {}
        self.parts: list[Part] = []
        self._recycled: list[int] = []
        self.allowances = Allowances()
        for name, typecode in COLUMNS.items():
            setattr(self, name, array(typecode))
        self._units = units.Units(self.part)

    def __len__(self) -> int:
        """Return the count of rows, those that are free included."""
        return len(self._units)

    def part_number(self, part: Part) -> int:
        """Return the number that columns hold for a part."""
        number = self._parts.get(part)
        if number is None:
            number = self._parts[part] = len(self.parts)
            self.parts.append(part)
        return number

    def part_at(self, number: int) -> Part:
        """Return the part of a number."""
        return self.parts[number]

    def part_of(self, row: int) -> Part:
        """Return a row's part."""
        return self.parts[self.part[row]]

    def allowed(self, row: int) -> Allowance:
        """Return the lossy profiles, by number, that a row's block may take."""
        return self.allowances[self.allowance[row]]

    def key(self, row: int) -> bytes:
        """Return a row's key."""
        return self._units.key(row)

    def head(self, key: bytes, part: int) -> int:
        """Return the first placement of one unit, NONE where the unit is not known."""
        return self._units.first(key, part)

    def find(self, keys: bytes, part: int) -> npt.NDArray[np.int32]:
        """Return the first placement of each unit of n x 32 bytes of keys; see `head`."""
        return self._units.find(keys, part)

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

    def begin(self, tier: int, new: Sequence[Unit]) -> list[int]:
        """Make placements in `writing`; no unit has one in `tier` yet or stands twice in a call."""
        rows = self._take_rows(b"".join([unit.key for unit in new]))
        for row, unit in zip(rows, new, strict=True):
            self.part[row], self.profile[row] = unit.part, unit.profile
            self.fidelity[row], self.flags[row] = unit.fidelity, unit.flags
            self.nbytes[row], self.allocated[row] = unit.nbytes, unit.allocated
            self.locator[row], self.namespace[row] = unit.locator, unit.namespace
            self.generation[row], self.position[row] = unit.generation, unit.position
            self.allowance[row], self.fixed[row] = unit.allowance, 0
            self.end1[row], self.end2[row], self.end3[row] = unit.end1, unit.end2, unit.end3
            self.tier[row], self.serial[row] = tier, (self.serial[row] + 1) & 0xFFFFFFFF
        before = self._units.lead(np.array(rows, np.int32))
        for row, sibling in zip(rows, before.tolist(), strict=True):
            self.sibling[row] = sibling
        self._change("begin", rows)
        return rows

    def begin_alike(
        self, tier: int, part: int, keys: bytes, columns: Mapping[str, Column]
    ) -> list[int]:
        """As `begin`, for many units of one part.

        Args:
            tier: where.
            part: of all the units.
            keys: of the units, n x 32 bytes.
            columns: the other fields of `Unit` that have no default: for all, or for each.
        """
        rows = self._take_rows(keys)
        at = np.array(rows, np.int32)
        unknown = dict.fromkeys(("allowance", "fixed", *ENDS), 0)
        for name, values in {"part": part, "tier": tier, **unknown, **columns}.items():
            self.column(name)[at] = values
        self.column("serial")[at] += np.uint32(1)
        self.column("sibling")[at] = self._units.lead(at)
        self._change("begin", rows)
        return rows

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

    def restate(self, row: int, **columns: int) -> None:
        """Note what a frame has turned out to be, or has become: columns by name."""
        for name, value in columns.items():
            getattr(self, name)[row] = value

    def let_encode(self, artifacts: Collection[bytes]) -> None:
        """From now on an exact copy can be encoded again on its way down, by these calibrations."""
        self.encodes = frozenset(artifacts)

    def leave(self, rows: Rows) -> None:
        """Make ready placements invisible; their space stays until `gone`."""
        self._change("leave", rows)

    def gone(self, rows: Rows) -> None:
        """End leaving placements that nobody holds."""
        assert not any(map(self.holds.__getitem__, rows)), "a held placement cannot be gone"
        self._change("gone", rows)
        self._forget(rows)

    def hold(self, rows: Rows) -> None:
        """Keep the bytes of ready placements, all different, in place."""
        if len(rows) >= MANY:
            at = np.asarray(rows, np.int32)
            assert (self.column("state")[at] == READY).all(), "holds lie on ready placements only"
            self.column("holds")[at] += 1
            return
        state, holds = self.state, self.holds
        for row in rows:
            assert state[row] == READY, "holds lie on ready placements only"
            holds[row] += 1

    def unhold(self, rows: Rows) -> list[int]:
        """End one hold of each row, all different; returns those that leave with their last one."""
        if len(rows) >= MANY:
            at, column = np.asarray(rows, np.int32), self.column("holds")
            left = column[at] - 1
            assert (left >= 0).all(), "a hold ended twice"
            column[at] = left
            if not any(counts[LEAVING] for counts in self.count):
                return []
            gone: list[int] = at[(left == 0) & (self.column("state")[at] == LEAVING)].tolist()
            return gone
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
        if not len(self):
            return np.empty(0, np.int32)
        mine = (self.column("tier") == tier) & np.isin(self.column("state"), states)
        return np.flatnonzero(mine).astype(np.int32)

    def within(self, tier: int, start: int, stop: int) -> list[int]:
        """Return the rows of a tier, in any state, that lie at start <= locator < stop.

        Linear in placements: two passes of numpy over their locators.
        """
        beyond = (self.column("locator") - start).view(np.uint64)
        near = np.flatnonzero(beyond < np.uint64(stop - start))
        mine = (self.column("tier")[near] == tier) & (self.column("state")[near] != ABSENT)
        rows: list[int] = near[mine].tolist()
        return rows

    def check(self, tier: int, space: Space, carrying: int = 0) -> None:
        """Assert the capacity invariant of a tier, with what a placement takes twice meanwhile."""
        placed = sum(self.bytes[tier][WRITING:]) + carrying
        assert space.free + space.dead + placed == space.capacity, (
            f"{self.tiers[tier]}: free {space.free} + dead {space.dead} + placed {placed} "
            f"is not capacity {space.capacity}"
        )

    def adopt(
        self, tier: int, part: int, keys: bytes, columns: dict[str, npt.NDArray[Any]]
    ) -> npt.NDArray[np.int32]:
        """Make ready placements of units that a tier found at start, in bulk; see `begin`.

        Args:
            tier: where; the catalog has no placements of it yet.
            part: of all the units.
            keys: of the units, distinct, n x 32 bytes.
            columns: the other fields of `Unit`.
        """
        begin = len(self)
        self._units.extend(keys)
        rows = np.arange(begin, len(self), dtype=np.int32)
        blank = np.zeros(len(rows), np.int8)
        given = {"part": blank.astype("h") + part, "tier": blank + tier, "state": blank + READY}
        given |= {"serial": blank + 1, **columns}
        for name, typecode in COLUMNS.items():
            values = given.get(name, blank)
            getattr(self, name).frombytes(values.astype(typecode).tobytes())
        self.column("sibling")[rows] = self._units.lead(rows)
        self.bytes[tier][READY] += int(columns["allocated"].sum())
        self.count[tier][READY] += len(rows)
        return rows

    def _change(self, name: str, rows: Rows) -> None:
        old, new = TRANSITIONS[name]
        state, tiers, allocated = self.state, self.tier, self.allocated
        for row in rows:
            assert state[row] == old, f"{name} of a placement that is {State(state[row]).name}"
            state[row] = new
            sums, counts, size = self.bytes[tiers[row]], self.count[tiers[row]], allocated[row]
            if old != ABSENT:  # nobody counts those that are absent
                sums[old] -= size
                counts[old] -= 1
            if new != ABSENT:
                sums[new] += size
                counts[new] += 1

    def _forget(self, rows: Rows) -> None:
        """Unlink absent rows from their units and recycle them, rising where they will be used."""
        units, sibling = self._units, self.sibling
        for row, home in zip(rows, units.homes(rows), strict=True):
            if units.leads(row):
                units.follow(row, sibling[row], home)
                continue
            at = self.head(self.key(row), self.part[row])
            while sibling[at] != row:
                at = sibling[at]
            sibling[at] = sibling[row]
        self._recycled += sorted(rows)

    def _take_rows(self, keys: bytes) -> list[int]:
        """Return free rows for keys, which they get."""
        count = len(keys) // KEY_BYTES
        reused = min(count, len(self._recycled))
        rows = self._recycled[len(self._recycled) - reused :]
        del self._recycled[len(self._recycled) - reused :]
        new = count - reused
        rows += range(len(self), len(self) + new)
        if new:
            self._units.extend(bytes(KEY_BYTES * new))
            for name, typecode in COLUMNS.items():
                getattr(self, name).extend(array(typecode, bytes(array(typecode).itemsize * new)))
        self._units.name(rows, keys)
        return rows
