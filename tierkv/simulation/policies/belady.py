"""Belady's MIN over equal blocks: what is needed last goes first, and may be refused at the door.

It knows the trace: the policy counts the accesses it is told of, in prompt order, and looks up when
each block comes next. Nothing online can have more block hits, which makes it the bound of a plot.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierkv.catalog import READY, Catalog, Rows

Positions = npt.NDArray[np.int64]
_COMPACT_FROM = 4096
_ROW_BITS = 32


def next_uses(ids: npt.NDArray[np.int32]) -> Positions:
    """Return for each access the number of the next one to the same block, or their count."""
    order = np.argsort(ids, kind="stable")
    again = ids[order[1:]] == ids[order[:-1]]
    found = np.full(len(ids), len(ids), np.int64)
    found[order[:-1][again]] = order[1:][again]
    return found


class Belady:
    """MIN over one tier of equal blocks of one byte.

    Args:
        capacity: blocks.
        future: of each access in prompt order, when its block comes next (`next_uses`).
    """

    name = "belady"

    def __init__(self, capacity: int, future: Positions) -> None:
        self._capacity = capacity
        self._future = future
        self._never = len(future)
        self._position = 0
        self._coming = self._never
        self._next: dict[int, int] = {}
        """When each row's block comes next."""
        self._heap: list[int] = []
        """(accesses - next) * 2^32 + row: the block that is needed last stands first."""

    def touched(self, view: Catalog, rows: Rows) -> None:
        """Look up when these come next; the blocks are met in the order given."""
        del view
        known = [row in self._next for row in rows]
        end = self._position + sum(known)
        future = iter(self._future[self._position : end].tolist())
        self._position = end
        for row, hit in zip(rows, known, strict=True):
            at = next(future) if hit else self._coming
            self._next[row] = at
            heapq.heappush(self._heap, (self._never - at) << _ROW_BITS | row)
        if len(self._heap) > _COMPACT_FROM and len(self._heap) > 4 * len(self._next):
            self._heap = sorted({item for item in self._heap if self._fresh(item)})

    def forgot(self, rows: Rows) -> None:
        """Make the rows' entries stale."""
        for row in rows:
            self._next.pop(row, None)

    def offered(self, view: Catalog, tier: int, keys: Sequence[bytes]) -> int:
        """Refuse what comes next later than all that would have to go, or never."""
        for number, _ in enumerate(keys):
            self._coming = int(self._future[self._position])
            self._position += 1
            full = sum(view.bytes[tier]) + number >= self._capacity
            if self._coming == self._never or (full and self._coming >= self._last()):
                return number
        return len(keys)

    def victims(self, view: Catalog, tier: int, need: int) -> list[int]:
        """Return what is needed last."""
        heap, seen, chosen = self._heap, list[int](), list[int]()
        while heap and need > 0:
            item = heapq.heappop(heap)
            row = item & ((1 << _ROW_BITS) - 1)
            if not self._fresh(item) or (seen and seen[-1] == item):
                continue
            seen.append(item)
            if view.tier[row] == tier and view.state[row] == READY and not view.holds[row]:
                chosen.append(row)
                need -= view.allocated[row]
        for item in seen:
            heapq.heappush(heap, item)
        return chosen

    def _last(self) -> int:
        """Return when the block comes that is needed last of all."""
        heap = self._heap
        while heap and not self._fresh(heap[0]):
            heapq.heappop(heap)
        return self._never - (heap[0] >> _ROW_BITS) if heap else 0

    def _fresh(self, item: int) -> bool:
        row = item & ((1 << _ROW_BITS) - 1)
        return self._next.get(row) == self._never - (item >> _ROW_BITS)
