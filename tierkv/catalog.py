"""The Catalog: every placement and every hold, in memory. The only mutable heart of tierkv.

A placement is one copy of a *unit* (key, part) in one tier. Placements are rows in numpy columns, not
objects; a dict per part leads from a key to the first of its placements, `sibling` to the next. Keys and
row numbers are all that the interpreter sees, and none of it is tracked by the garbage collector.

State changes only through TRANSITIONS. Allocated bytes are summed by (tier, state) with every change,
so that free + dead + writing + ready + leaving = capacity can be asserted at any time.
No I/O, no clock, no lock: the owner calls from one thread at a time.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum

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


TRANSITIONS = {
    "begin": (State.ABSENT, State.WRITING),
    "commit": (State.WRITING, State.READY),
    "abort": (State.WRITING, State.ABSENT),
    "truncate": (State.READY, State.READY),
    "leave": (State.READY, State.LEAVING),
    "gone": (State.LEAVING, State.ABSENT),
}
"""Holds lie on ready placements only; one that is held may leave, and is gone when the last hold ends."""

NONE = -1

COLUMNS = {
    "part": "i4",
    "tier": "i1",
    "state": "i1",
    "profile": "i1",
    "fidelity": "i1",
    "flags": "u1",
    "holds": "i4",
    "nbytes": "i4",
    "allocated": "i8",
    "locator": "i8",
    "namespace": "i4",
    "generation": "i8",
    "position": "i4",
    "sibling": "i4",
    "serial": "u4",
}
Rows = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Sizes = npt.NDArray[np.int64]
Column = npt.NDArray[np.int64]
_FIRST_ROWS = 1024


class Catalog:
    """Placements of units over tiers, which are numbered in the order given."""

    part: Rows
    tier: Column
    state: Column
    profile: Column
    fidelity: Column
    flags: Column
    holds: Column
    nbytes: Column
    allocated: Column
    locator: Column
    namespace: Column
    generation: Column
    position: Column
    sibling: Rows
    serial: Column

    def __init__(self, tiers: Sequence[str]) -> None:
        self.tiers = tuple(tiers)
        self.bytes = np.zeros((len(tiers), len(State)), np.int64)
        self.count = np.zeros((len(tiers), len(State)), np.int64)
        self.keys: list[bytes] = []
        self._parts: dict[Part, int] = {}
        self._part_list: list[Part] = []
        self._heads: list[dict[bytes, int]] = []
        self._recycled: list[int] = []
        for name, dtype in COLUMNS.items():
            setattr(self, name, np.zeros(_FIRST_ROWS, dtype))
        self._end()

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

    def find(self, keys: Sequence[bytes], part: int) -> Rows:
        """Return the first placement of each unit, NONE where the unit is not known."""
        head = self._heads[part].get
        return np.array([head(key, NONE) for key in keys], np.int32)

    def siblings(self, heads: Rows) -> list[Rows]:
        """Return the placements of units, first ones first; NONE where a unit has no more."""
        out = []
        while heads.max(initial=NONE) != NONE:
            out.append(heads)
            heads = self.sibling[heads]
        return out

    def in_tier(self, heads: Rows, tier: int) -> Rows:
        """Return each unit's placement in a tier in any state, NONE where there is none."""
        out = np.where(self.tier[heads] == tier, heads, np.int32(NONE))
        rows = self.sibling[heads]
        while rows.max(initial=NONE) != NONE:
            np.copyto(out, rows, where=self.tier[rows] == tier)
            rows = self.sibling[rows]
        return out

    def begin(
        self, tier: int, keys: Sequence[bytes], part: int, **columns: npt.ArrayLike
    ) -> Rows:
        """Make placements in `writing`.

        Args:
            tier: where; no unit has a placement there yet, and none stands twice in a call.
            keys: of the units.
            part: their part number.
            columns: profile, fidelity, flags, nbytes, allocated, locator, namespace, generation and
                position: a value for all or one for each.
        """
        fresh = self._take_rows(keys)
        for name, values in columns.items():
            getattr(self, name)[fresh] = values
        self.part[fresh] = part
        self.tier[fresh] = tier
        self.holds[fresh] = 0
        self.serial[fresh] += 1
        heads = self._heads[part]
        rows = fresh.tolist()
        self.sibling[fresh] = [heads.get(key, NONE) for key in keys]
        heads.update(zip(keys, rows, strict=True))
        self.count[tier, State.ABSENT] += len(rows)
        self.bytes[tier, State.ABSENT] += int(self.allocated[fresh].sum())
        self._change("begin", fresh)
        return fresh

    def commit(self, rows: Rows) -> None:
        """Make written placements visible."""
        self._change("commit", rows)

    def abort(self, rows: Rows) -> None:
        """Take placements back that were not written."""
        self._change("abort", rows)
        self._forget(rows)

    def resize(self, row: int, nbytes: int, allocated: int, locator: int) -> None:
        """Note that a placement's frame became shorter; a ready one must not be held."""
        state = int(self.state[row])
        assert state == State.WRITING or (state == State.READY and not self.holds[row])
        self.bytes[self.tier[row], state] += allocated - int(self.allocated[row])
        self.nbytes[row], self.allocated[row], self.locator[row] = nbytes, allocated, locator

    def leave(self, rows: Rows) -> None:
        """Make ready placements invisible; their space stays until `gone`."""
        self._change("leave", rows)

    def gone(self, rows: Rows) -> None:
        """End leaving placements that nobody holds."""
        assert not self.holds[rows].any(), "a held placement cannot be gone"
        self._change("gone", rows)
        self._forget(rows)

    def hold(self, rows: Rows) -> None:
        """Keep ready placements' bytes in place; rows stand once in a call."""
        assert (self.state[rows] == State.READY).all(), "holds lie on ready placements only"
        self.holds[rows] += 1

    def unhold(self, rows: Rows) -> Rows:
        """End one hold of each row; returns those that are leaving and nobody holds any more."""
        self.holds[rows] -= 1
        assert (self.holds[rows] >= 0).all(), "a hold ended twice"
        return rows[(self.holds[rows] == 0) & (self.state[rows] == State.LEAVING)]

    def select(self, tier: int, *states: State) -> Rows:
        """Return the rows of a tier in any of the states. Linear in placements."""
        used = len(self.keys)
        mine = (self.tier[:used] == tier) & np.isin(self.state[:used], states)
        return np.flatnonzero(mine).astype(np.int32)

    def check(self, tier: int, space: Space) -> None:
        """Assert the capacity invariant of one tier."""
        placed = int(self.bytes[tier, State.WRITING :].sum())
        assert space.free + space.dead + placed == space.capacity, (
            f"{self.tiers[tier]}: free {space.free} + dead {space.dead} + placed {placed} "
            f"is not capacity {space.capacity}"
        )

    def by_tier(self, rows: Rows) -> Iterator[tuple[int, Rows]]:
        """Split rows by their tier."""
        tiers = self.tier[rows]
        if len(rows) and (tiers == tiers[0]).all():
            yield int(tiers[0]), rows
            return
        for tier in np.unique(tiers).tolist():
            yield tier, rows[tiers == tier]

    def _change(self, name: str, rows: Rows) -> None:
        old, new = TRANSITIONS[name]
        assert (self.state[rows] == old).all(), f"{name} of a placement that is not {old.name}"
        self.state[rows] = new
        for tier, mine in self.by_tier(rows):
            size = int(self.allocated[mine].sum())
            self.bytes[tier, old] -= size
            self.bytes[tier, new] += size
            self.count[tier, old] -= len(mine)
            self.count[tier, new] += len(mine)

    def _forget(self, rows: Rows) -> None:
        """Unlink absent rows from their units and recycle them."""
        for row in rows.tolist():
            key, heads = self.keys[row], self._heads[self.part[row]]
            after = int(self.sibling[row])
            at = heads[key]
            if at == row and after == NONE:
                del heads[key]
            elif at == row:
                heads[key] = after
            else:
                while self.sibling[at] != row:
                    at = int(self.sibling[at])
                self.sibling[at] = after
            self.keys[row] = b""
        for tier, mine in self.by_tier(rows):
            self.bytes[tier, State.ABSENT] -= int(self.allocated[mine].sum())
            self.count[tier, State.ABSENT] -= len(mine)
        self._recycled.extend(rows.tolist())

    def _take_rows(self, keys: Sequence[bytes]) -> Rows:
        reused = min(len(keys), len(self._recycled))
        fresh = self._recycled[len(self._recycled) - reused :]
        del self._recycled[len(self._recycled) - reused :]
        for row, key in zip(fresh, keys, strict=False):
            self.keys[row] = key
        fresh += range(len(self.keys), len(self.keys) + len(keys) - reused)
        self.keys += keys[reused:]
        if len(self.keys) >= len(self.part):
            self._grow(len(self.keys) + 1)
        return np.array(fresh, np.int32)

    def _grow(self, rows: int) -> None:
        size = max(rows, len(self.part) * 3 // 2)
        for name in COLUMNS:
            old = getattr(self, name)
            column = np.zeros(size, old.dtype)
            column[: len(old)] = old
            setattr(self, name, column)
        self._end()

    def _end(self) -> None:
        """Make the last row, which NONE leads to, one that no question is answered by."""
        self.state[NONE], self.tier[NONE], self.sibling[NONE] = State.ABSENT, NONE, NONE
