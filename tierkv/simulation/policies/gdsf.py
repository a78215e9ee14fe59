"""GDSF, greedy dual size frequency (Cherkasova 1998): worth = clock + uses * seconds saved / size.

The clock is the worth of what left last, so that old uses fade. `saved` says how many seconds a hit
of a placement saves where it lies; one second each is the published block count. A head is worth at
least what any of its tails is, since they are no use without it: chains leave tail first.
"""

import heapq
from collections.abc import Callable, Sequence

from tierkv.catalog import READY, Catalog, Rows

Saved = Callable[[Catalog, int], float]
_COMPACT_FROM = 4096


class _Entry:
    __slots__ = ("stamp", "tier", "uses", "worth")

    def __init__(self, tier: int) -> None:
        self.tier, self.uses, self.worth, self.stamp = tier, 0, 0.0, 0


class Gdsf:
    """Greedy dual size frequency.

    Args:
        tiers: how many.
        saved: seconds that a hit of a row saves.
    """

    name = "gdsf"

    def __init__(self, tiers: int, saved: Saved) -> None:
        self._saved = saved
        self._clock = [0.0] * tiers
        self._entries: dict[int, _Entry] = {}
        self._heaps: list[list[tuple[float, int, int]]] = [[] for _ in range(tiers)]
        """(worth, stamp, row); stale when the row has another stamp."""
        self._next = 0

    def touched(self, view: Catalog, rows: Rows) -> None:
        """Count a use and set the worth, from tail to head."""
        behind = [0.0] * len(self._clock)
        for row in reversed(rows):
            tier = view.tier[row]
            entry = self._entries.get(row)
            if entry is None:
                entry = self._entries[row] = _Entry(tier)
            entry.uses += 1
            own = self._clock[tier] + entry.uses * self._saved(view, row) / view.allocated[row]
            entry.worth = behind[tier] = max(entry.worth, own, behind[tier])
            entry.stamp = self._next
            self._next += 1
            heapq.heappush(self._heaps[tier], (entry.worth, entry.stamp, row))
        for tier, heap in enumerate(self._heaps):
            if len(heap) > _COMPACT_FROM and len(heap) > 4 * len(self._entries):
                self._heaps[tier] = sorted(item for item in heap if self._fresh(item))

    def forgot(self, rows: Rows) -> None:
        """Move the clock to the worth of what is gone."""
        for row in rows:
            entry = self._entries.pop(row, None)
            if entry is not None:
                self._clock[entry.tier] = max(self._clock[entry.tier], entry.worth)

    def offered(self, view: Catalog, tier: int, keys: Sequence[bytes]) -> int:
        """Take all."""
        del view, tier
        return len(keys)

    def victims(self, view: Catalog, tier: int, need: int) -> list[int]:
        """Return what is worth least."""
        heap, seen, chosen = self._heaps[tier], list[tuple[float, int, int]](), list[int]()
        while heap and need > 0:
            item = heapq.heappop(heap)
            row = item[2]
            if not self._fresh(item):
                continue
            seen.append(item)
            if view.state[row] == READY and not view.holds[row]:
                chosen.append(row)
                need -= view.allocated[row]
        for item in seen:
            heapq.heappush(heap, item)
        return chosen

    def _fresh(self, item: tuple[float, int, int]) -> bool:
        entry = self._entries.get(item[2])
        return entry is not None and entry.stamp == item[1]
