"""LRU, tail first: the longest unused go, and of one chain the tail before the head.

Every touch of a chain stamps its placements from tail to head with rising numbers, so a head is always
younger than what follows it. Each tier has a queue of (row, stamp) in stamp order; an entry is stale when
the row has a newer stamp. Victims are read from the queue's front; stale entries cost one look and are
dropped for good, so a decision is O(1) amortised and exact.
"""

import numpy as np
import numpy.typing as npt

from tierkv.catalog import Rows, State
from tierkv.policy import View

_FIRST = 1024
_STEP = 64
KEEP_FROM = 0.75
_MAX_STEP = 4096


class _Queue:
    """(row, stamp) in the order of stamps, in two growing columns."""

    def __init__(self) -> None:
        self.rows = np.zeros(_FIRST, np.int32)
        self.stamps = np.zeros(_FIRST, np.int64)
        self.start = 0
        self.stop = 0

    def push(self, rows: Rows, stamps: npt.NDArray[np.int64], live: npt.NDArray[np.int64]) -> None:
        if self.stop + len(rows) > len(self.rows):
            self._compact(live, len(rows))
        self.rows[self.stop : self.stop + len(rows)] = rows
        self.stamps[self.stop : self.stop + len(rows)] = stamps
        self.stop += len(rows)

    def _compact(self, live: npt.NDArray[np.int64], more: int) -> None:
        rows = self.rows[self.start : self.stop]
        stamps = self.stamps[self.start : self.stop]
        fresh = live[rows] == stamps
        rows, stamps = rows[fresh], stamps[fresh]
        size = max(_FIRST, (len(rows) + more) * 2)
        self.rows, self.stamps = np.zeros(size, np.int32), np.zeros(size, np.int64)
        self.rows[: len(rows)], self.stamps[: len(rows)] = rows, stamps
        self.start, self.stop = 0, len(rows)


class Lru:
    """Least recently used, tail first."""

    name = "lru"

    def __init__(self, tiers: int) -> None:
        self._stamp = np.zeros(_FIRST, np.int64)
        self._next = 1
        self._queues = [_Queue() for _ in range(tiers)]

    def touched(self, view: View, rows: Rows) -> None:
        """Stamp a chain from tail to head."""
        if not len(rows):
            return
        if len(view.tier) > len(self._stamp):
            grown = np.zeros(len(view.tier), np.int64)
            grown[: len(self._stamp)] = self._stamp
            self._stamp = grown
        rows = rows[::-1]
        stamps = np.arange(self._next, self._next + len(rows), dtype=np.int64)
        self._next += len(rows)
        self._stamp[rows] = stamps
        tiers = view.tier[rows]
        for tier in set(tiers.tolist()):
            mine = tiers == tier
            self._queues[tier].push(rows[mine], stamps[mine], self._stamp)

    def forgot(self, rows: Rows) -> None:
        """Make the rows' queue entries stale."""
        self._stamp[rows] = 0

    def victims(self, view: View, tier: int, need: int) -> Rows:
        """Return the oldest placements; what is held or unfinished is passed over and stays queued."""
        queue = self._queues[tier]
        chosen: list[Rows] = []
        at, found, stale, step = queue.start, 0, True, _STEP
        while at < queue.stop and found < need:
            stop = min(at + step, queue.stop)
            rows = queue.rows[at:stop]
            fresh = self._stamp[rows] == queue.stamps[at:stop]
            usable = fresh & (view.state[rows] == State.READY) & (view.holds[rows] == 0)
            picked = rows[usable & (view.tier[rows] == tier)]
            sizes = np.cumsum(view.allocated[picked])
            enough = int(np.searchsorted(sizes, need - found)) + 1
            chosen.append(picked[:enough])
            found += int(sizes[min(enough, len(sizes)) - 1]) if len(sizes) else 0
            stale = stale and not fresh.any()
            if stale:
                queue.start = stop
            at, step = stop, min(step * 2, _MAX_STEP)
        return np.concatenate(chosen) if chosen else np.empty(0, np.int32)

    def keeps(self, view: View, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return the rows used more lately than KEEP_FROM of the tier's queue."""
        queue = self._queues[tier]
        at = queue.start + int((queue.stop - queue.start) * KEEP_FROM)
        if at >= queue.stop:
            return np.zeros(len(rows), np.bool_)
        return self._stamp[rows] > queue.stamps[at]

    def oldest(self, rows: Rows) -> Rows:
        """Return rows by rising stamp."""
        return rows[np.argsort(self._stamp[rows], kind="stable")]
