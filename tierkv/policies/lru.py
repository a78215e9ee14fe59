"""LRU, tail first: the longest unused go, and of one chain the tail before the head.

Every touch of a chain stamps its placements from tail to head with rising numbers, so a head is
always younger than what follows it. Each tier has a queue of (row, stamp) in stamp order; an entry
is stale when the row has a newer stamp. Victims are read from the queue's front and stale entries
there are dropped for good, so a decision is exact and O(1) amortised.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from tierkv.catalog import READY, Catalog, Rows
from tierkv.codec import Profile
from tierkv.cost import Rates
from tierkv.explain import Dropped, Terms
from tierkv.plan import Move, drops
from tierkv.policy import Picked
from tierkv.use import Use

KEEP_FROM = 0.75
"""A reclaimed region's survivors were used more lately than this share of the tier's queue."""
_COMPACT_FROM = 4096
_BULK_FROM = 96


class _Queue:
    """(row, stamp) in the order of stamps; `start` entries at the front are stale."""

    def __init__(self) -> None:
        self.rows = array("i")
        self.stamps = array("q")
        self.start = 0
        self.limit = _COMPACT_FROM

    def skip(self, stamp: "array[int]") -> None:
        """Pass over the stale entries at the front for good."""
        at, rows, stamps = self.start, self.rows, self.stamps
        while at < len(rows) and stamp[rows[at]] != stamps[at]:
            at += 1
        self.start = at

    def compact(self, stamp: "array[int]") -> None:
        """Drop stale entries when the queue has doubled since the last time."""
        if len(self.rows) < self.limit:
            return
        rows, stamps = np.frombuffer(self.rows, np.int32), np.frombuffer(self.stamps, np.int64)
        fresh = np.frombuffer(stamp, np.int64)[rows] == stamps
        self.rows = array("i", rows[fresh].tobytes())
        self.stamps = array("q", stamps[fresh].tobytes())
        self.start, self.limit = 0, max(_COMPACT_FROM, 2 * len(self.rows))


class Lru:
    """Least recently used, tail first."""

    name = "lru"

    def __init__(self, tiers: int) -> None:
        self._stamp = array("q")
        self._next = 1
        self._queues = [_Queue() for _ in range(tiers)]
        self.last_drop: Dropped | None = None

    def touched(self, view: Catalog, rows: Rows) -> None:
        """Stamp a chain from tail to head."""
        stamp, tiers, queues, now = self._stamp, view.tier, self._queues, self._next
        if len(tiers) > len(stamp):
            stamp.frombytes(bytes(8 * (len(tiers) - len(stamp))))
        if len(rows) >= _BULK_FROM:
            self._touched_many(view, rows)
            return
        for row in reversed(rows):
            queue = queues[tiers[row]]
            stamp[row] = now
            queue.rows.append(row)
            queue.stamps.append(now)
            now += 1
        self._next = now
        for queue in queues:
            queue.compact(stamp)

    def _touched_many(self, view: Catalog, rows: Rows) -> None:
        """As `touched`, with fewer steps for each row and more for each call."""
        tailwards = np.asarray(rows, np.int32)[::-1]
        stamps = np.arange(self._next, self._next + len(rows), dtype=np.int64)
        np.frombuffer(self._stamp, np.int64)[tailwards] = stamps
        tiers = view.column("tier")[tailwards]
        for number, queue in enumerate(self._queues):
            mine = tiers == number
            queue.rows.frombytes(tailwards[mine].tobytes())
            queue.stamps.frombytes(stamps[mine].tobytes())
            queue.compact(self._stamp)
        self._next += len(rows)

    def used(self, view: Catalog, use: Use) -> None:
        """Learn nothing from what was asked for in vain, nor from hints."""

    def measured(self, view: Catalog, rates: Sequence[Rates]) -> None:
        """Time plays no part."""

    def found(self, view: Catalog, rows: Rows) -> None:
        """Take heads for younger than tails."""
        self.touched(view, rows)

    def picks(self, keys: bytes, known: Sequence[bool], choices: Sequence[Profile]) -> Picked:
        """Leave it to the planner."""
        del keys, known, choices
        return Picked()

    def admits(self, view: Catalog, tier: int, rows: Rows) -> list[bool]:
        """Take all: what is written down is dropped from RAM at no loss."""
        del view, tier
        return [True] * len(rows)

    def forgot(self, rows: Rows) -> None:
        """Make the rows' queue entries stale."""
        for row in rows:
            if row < len(self._stamp):
                self._stamp[row] = 0

    def offered(self, view: Catalog, tier: int, keys: Sequence[bytes]) -> int:
        """Take all: what is new is younger than all that is there."""
        del view, tier
        return len(keys)

    def victims(self, view: Catalog, tier: int, need: int) -> list[int]:
        """Return the oldest placements.

        What is held or unfinished is passed over and stays queued.
        """
        queue, stamp = self._queues[tier], self._stamp
        state, holds, tiers, allocated = view.state, view.holds, view.tier, view.allocated
        chosen: list[int] = []
        at = queue.start
        while at < len(queue.rows) and need > 0:
            row = queue.rows[at]
            if stamp[row] != queue.stamps[at] or tiers[row] != tier:
                queue.start += at == queue.start
            elif state[row] == READY and not holds[row]:
                chosen.append(row)
                need -= allocated[row]
            at += 1
        return chosen

    def reclaim(self, view: Catalog, tier: int, need: int, *, at_once: bool) -> list[Move]:
        """Drop the oldest, and only when room is wanted: until then it may be asked for."""
        if not at_once:
            return []
        rows = self.victims(view, tier, need)
        if rows:
            row, name = rows[-1], view.tiers[tier]
            self.last_drop = Dropped(
                view.key(row), name, view.allocated[row], self.terms(view, row)
            )
        return drops(view, rows)

    def terms(self, view: Catalog, row: int) -> Terms:
        """Say how many uses ago it was touched, and how many of the tier's others were later."""
        stamp = self._stamp[row] if row < len(self._stamp) else 0
        since = float(self._next - stamp)
        because = "lru gives up what was used longest ago, the tail of a chain before its head"
        numbers = {
            "touches_since": since,
            "placements_of_tier": float(view.count[view.tier[row]][READY]),
        }
        return Terms(because, numbers)

    def keeps(self, view: Catalog, tier: int, rows: Rows) -> list[bool]:
        """Return the rows used more lately than KEEP_FROM of the tier's queue."""
        del view
        queue = self._queues[tier]
        # Else a log that never asked for victims would count what it has lost as its oldest, and
        # find all that is left hot.
        queue.skip(self._stamp)
        at = queue.start + int((len(queue.rows) - queue.start) * KEEP_FROM)
        since = queue.stamps[at] if at < len(queue.rows) else self._next
        return [self._stamp[row] > since for row in rows]

    def stranded(self, view: Catalog, rows: Rows) -> list[int]:
        """Know no chains: what lies behind has older stamps, and goes by them."""
        del view, rows
        return []

    def oldest(self, rows: Rows) -> list[int]:
        """Return rows by rising stamp."""
        return sorted(rows, key=self._stamp.__getitem__)
