"""Stranded: placements that nobody could reach any more if others went. Pure.

A reader of a chain needs a part of every block up to where it stops. So where a block loses its
last placement of a part, those of the same part behind it are of no use, in whatever tier, and go
with it: heads never leave before tails. Of parts with a sliding window only the last blocks are
needed: nothing of them hangs on what lies before.
"""

from collections.abc import Container, Iterator, Sequence

import numpy as np

from tierkv.catalog import READY, WRITING, Catalog
from tierkv.policies.placed import Placed
from tierkv.policies.segments import NONE, Segments


def stranded(view: Catalog, placed: Placed, rows: Sequence[int]) -> list[int]:
    """Return the ready placements that are out of reach once `rows` are gone, without those.

    Linear in the segments that are known, when any is lost.
    """
    going, segments = set(rows), placed.segments
    lost: dict[tuple[int, int], int] = {}
    for row in rows:
        block, part = placed.block(row), view.part[row]
        if block == NONE or part in placed.windowed or remains(view, row, going):
            continue
        place = part, placed.segment(block)
        lost[place] = min(block, lost.get(place, block))
    found: set[int] = set()
    children = _Children(segments) if lost else None
    for (part, segment), block in lost.items():
        assert children is not None
        found.update(_ready(view, placed, part, block + 1, _end(segments, segment)))
        for other in children.below(segment):
            first = int(segments.first[other])
            found.update(_ready(view, placed, part, first, _end(segments, other)))
    return sorted(found - going)


def remains(view: Catalog, row: int, going: Container[int]) -> bool:
    """Return whether the unit of a row has another that stays, or is being written."""
    return any(
        copy != row and copy not in going and view.state[copy] in (WRITING, READY)
        for copy in view.copies(view.head(view.key(row), view.part[row]))
    )


def _ready(view: Catalog, placed: Placed, part: int, first: int, end: int) -> Iterator[int]:
    for head in view.find(placed.keys(first, end - first), part).tolist():
        yield from (row for row in view.copies(head) if view.state[row] == READY)


def _end(segments: Segments, segment: int) -> int:
    return int(segments.first[segment] + segments.blocks[segment])


class _Children:
    """Who lies behind whom, of the segments that have a placement."""

    def __init__(self, segments: Segments) -> None:
        placed = np.flatnonzero(segments.configuration[: segments.count])
        parents = segments.parents(placed)
        order = np.argsort(parents, kind="stable")
        self._rows, self._parents = placed[order], parents[order]

    def below(self, segment: int) -> Iterator[int]:
        """Go through all segments behind one."""
        waiting = [segment]
        while waiting:
            parent = waiting.pop()
            start, end = np.searchsorted(self._parents, [parent, parent + 1]).tolist()
            rows: list[int] = self._rows[start:end].tolist()
            waiting += rows
            yield from rows
