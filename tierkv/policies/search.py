"""Search: what a tier gives up for a given need. Changes nothing; sees what it has chosen as done.

Candidates are sampled placements. The one that loses least per byte stands for its segment, which
gives up blocks from its end on. A block may lose its last placement only when nothing is left
behind it: heads never leave before tails. Where sampling finds nothing more, all that is there
goes, the deepest blocks first.
"""

from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.catalog import NONE, READY, Catalog
from tierkv.lineage import freed, lawful
from tierkv.pairs import PROGRESSIVE
from tierkv.plan import Kind, Move
from tierkv.policies.placed import Placed
from tierkv.policies.stranded import remains
from tierkv.tier import RAM

Numbers = npt.NDArray[np.int64]
ROUNDS = 24
"""Rounds of samples that find nothing, after which everything is looked at."""
SAMPLED = 64
NEAR_END = 3
"""Blocks that are looked at for one that may go."""
TAKEN = 8
"""Of so many sampled segments one is given up at most before others are looked at."""


class Candidate(NamedTuple):
    """A placement, the kind of step that loses least, and its loss per byte."""

    row: int
    kind: Kind
    tier: int
    profile: int
    loss: float


Judge = Callable[[list[int], list[bool], Container[int]], list[Candidate]]
"""Says of placements what to do with each, where anything may be done; of those inside a chain the
last copy may not go. Something is done to others already."""


class Search:
    """One search over a tier.

    Args:
        view: the catalog.
        placed: what the placements stand for.
        tier: that needs room.
        need: bytes.
        granule: of the tier's allocations, in bytes.
        salt: of the samples.
    """

    def __init__(
        self, view: Catalog, placed: Placed, tier: int, need: int, granule: int, salt: int
    ) -> None:
        self.moves: list[Move] = []
        self.losses: list[float] = []
        """Per byte, of each candidate that something was done to."""
        self._view = view
        self._placed = placed
        self._tier = tier
        self._need = need
        self._granule = granule
        self._salt = salt
        self._chosen: set[int] = set()
        self._left: dict[int, int] = {}
        """Placements that a block still has, where fewer than the catalog says."""
        self._lost: dict[int, int] = {}
        """By segment: segments behind it that have nothing left any more."""

    def run(self, judge: Judge) -> None:
        """Choose until the need is met or nothing is left."""
        idle = number = 0
        while self._need > 0 and idle < ROUNDS and self._placed.pools[self._tier].rows:
            number += 1
            rows = self._placed.pools[self._tier].sample(SAMPLED, self._salt + number)
            before = len(self.moves)
            open_rows = self._open(rows)
            inside = [self._inside(row) for row in open_rows]
            found = sorted(judge(open_rows, inside, self._chosen), key=lambda one: one.loss)
            taken: set[int] = set()
            for one in found[: 1 + len(found) // TAKEN]:
                segment = self._segment(one.row)
                if segment in taken:  # its other copy was judged beside this one
                    continue
                taken.add(segment)
                self._take(one)
                if self._need <= 0:
                    return
            idle = idle + 1 if len(self.moves) == before else 0
            if len(rows) == len(self._placed.pools[self._tier].rows) and idle:
                break
        if self._need > 0:
            self._take_all()

    def _open(self, rows: list[int]) -> list[int]:
        """Return the placements that may go; half of those inside a chain stand for its end."""
        segments, profile = self._placed.segments, self._view.profile
        seen: dict[tuple[int, bool], int] = {}
        for place, row in enumerate(rows):
            segment, stands = self._segment(row), row
            small = self._tier == RAM and profile[row] in PROGRESSIVE
            if place % 2 and self._inside(row):
                tail = segments.end(int(segments.context[segment]))
                end = self._last(tail, row) if tail not in (NONE, segment) else NONE
                segment, stands = (segment, row) if end == NONE else (tail, end)
            if (segment, small) not in seen and self._free(stands):
                seen[segment, small] = stands
        return list(seen.values())

    def _segment(self, row: int) -> int:
        """Return a placement's segment; an orphan is one of its own."""
        block = self._placed.block(row)
        return -2 - row if block == NONE else self._placed.segment(block)

    def _inside(self, row: int) -> bool:
        """Return whether a segment behind a placement's own has something left."""
        block = self._placed.block(row)
        return block != NONE and self._followed(self._placed.segment(block))

    def _followed(self, segment: int) -> bool:
        """Return whether a segment behind this one has something left."""
        return bool(self._placed.segments.children[segment] > self._lost.get(segment, 0))

    def _last(self, segment: int, like: int) -> int:
        """Return a placement near the end of a segment, in this tier, that may go; else NONE."""
        view, placed, segments = self._view, self._placed, self._placed.segments
        first, blocks = int(segments.first[segment]), int(segments.blocks[segment])
        for block in range(first + blocks - 1, max(first, first + blocks - NEAR_END) - 1, -1):
            head = view.head(placed.keys(block, 1), placed.parts(block)[0])
            row = self._row(head, like)
            if row != NONE and self._free(row):
                return row
        return NONE

    def _row(self, head: int, like: int) -> int:
        """Return a unit's placement in this tier, of a pair the one that is like another."""
        view, found = self._view, NONE
        small = view.profile[like] in PROGRESSIVE
        for row in view.copies(head):
            alike = (view.profile[row] in PROGRESSIVE) == small
            if view.tier[row] == self._tier and (found == NONE or alike):
                found = row
        return found

    def _free(self, row: int) -> bool:
        view = self._view
        return row not in self._chosen and view.state[row] == READY and not view.holds[row]

    def _rows(self, segment: int, like: int) -> Iterator[int]:
        """Go through a segment's placements in this tier, last block first; see `_row`."""
        view, placed, segments = self._view, self._placed, self._placed.segments
        first, blocks = int(segments.first[segment]), int(segments.blocks[segment])
        keys = placed.keys(first, blocks)
        heads = [view.find(keys, part).tolist() for part in placed.parts(first)]
        for at in range(blocks - 1, -1, -1):
            for units in heads:
                row = self._row(units[at], like)
                if row != NONE:
                    yield row

    def _take(self, one: Candidate) -> None:
        """Do to a candidate's segment, from its end on, what is to be done."""
        block = self._placed.block(one.row)
        segment = self._placed.segment(block) if block != NONE else NONE
        rows = iter([one.row]) if block == NONE else self._rows(segment, one.row)
        view, before = self._view, len(self.moves)
        for row in rows:
            if self._need <= 0:
                break
            if not self._free(row):
                continue
            if one.kind is Kind.DROP:
                self._drop(row)
            elif view.profile[row] == view.profile[one.row]:
                self._choose(Move(one.kind, row, one.tier, one.profile))
        if len(self.moves) > before:
            self.losses.append(one.loss)

    def _take_all(self) -> None:
        """Give up what is left, deepest blocks first."""
        placed = self._placed
        depth = {}
        for row in self._placed.pools[self._tier].rows:
            block = placed.block(row)
            depth[row] = (1, -self._view.position[row])
            if block != NONE:
                segment = placed.segment(block)
                start = placed.segments.position[segment] - placed.segments.first[segment]
                depth[row] = (0, -int(start + block))
        for row in sorted(depth, key=depth.__getitem__):
            if self._need <= 0:
                return
            if self._free(row):
                self._drop(row)

    def _drop(self, row: int) -> None:
        block = self._placed.block(row)
        if block == NONE:
            self._choose(Move(Kind.DROP, row, self._tier, 0))
            return
        if not remains(self._view, row, self._chosen) and self._behind(block):
            return
        if self._choose(Move(Kind.DROP, row, self._tier, 0)):
            self._left[block] = self._count(block) - 1
            self._note_end(block)

    def _choose(self, move: Move) -> bool:
        if not lawful(self._view, move):
            return False
        self._chosen.add(move.row)
        self.moves.append(move)
        self._need -= freed(self._view, move, self._granule)
        return True

    def _count(self, block: int) -> int:
        found = self._left.get(block)
        return self._placed.copies(block, 1)[0] if found is None else found

    def _behind(self, block: int) -> bool:
        """Return whether anything behind a block has a placement left."""
        segments = self._placed.segments
        segment = self._placed.segment(block)
        if self._followed(segment):
            return True
        end = int(segments.first[segment] + segments.blocks[segment])
        counts = self._placed.copies(block + 1, end - block - 1)
        return any(
            self._left.get(behind, count) > 0 for behind, count in enumerate(counts, block + 1)
        )

    def _note_end(self, block: int) -> None:
        """When a segment has nothing left, the one ahead has one less behind it."""
        segments = self._placed.segments
        segment = self._placed.segment(block)
        first, blocks = int(segments.first[segment]), int(segments.blocks[segment])
        counts = self._placed.copies(first, blocks)
        if any(self._left.get(one, count) > 0 for one, count in enumerate(counts, first)):
            return
        parent = segments.parent(segment)
        if parent != NONE:
            self._lost[parent] = self._lost.get(parent, 0) + 1
