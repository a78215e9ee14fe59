"""LRU over tiers with one profile, tail first: what a joint policy must beat.

A block that was used is in the first tier; what a tier has no room for goes to the next, and is
gone behind the last. Such tiers are one stack cut at their capacities, so a block's tier follows
from how many bytes were used since: one log of uses and a mark in it for each tier.
"""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
_STRIDE = 512


class Stack:
    """Blocks by last use. Sizes are stored bytes.

    Attributes:
        written: bytes that entered each tier.
    """

    def __init__(self, capacity: list[int], distinct: int) -> None:
        self._stamp = np.full(distinct, -1, np.int64)
        self._nbytes = np.zeros(distinct)
        self._log = np.zeros(1 << 16, np.int32)
        self._next = 0
        self._room = np.cumsum(np.array(capacity, np.float64))
        self._mark = [0] * len(capacity)
        self._inside = [0.0] * len(capacity)
        self.written = np.zeros(len(capacity))

    def tiers(self, ids: Ids) -> Numbers:
        """Return each block's tier, the count of tiers for what has none."""
        stamps = self._stamp[ids]
        found = np.full(len(ids), len(self._mark), np.int64)
        for tier in range(len(self._mark) - 1, -1, -1):
            found[stamps >= max(self._mark[tier], 0)] = tier
        found[stamps < 0] = len(self._mark)
        return found

    def use(self, ids: Ids, nbytes: npt.NDArray[np.float64]) -> None:
        """Bring a chain to the top, head last, and let the tiers give up what is too much."""
        before = self.tiers(ids)
        count = len(ids)
        self._nbytes[ids] = nbytes
        while self._next + count > len(self._log):
            self._log = np.append(self._log, np.zeros_like(self._log))
        stamps = np.arange(self._next + count - 1, self._next - 1, -1)
        self._log[stamps] = ids
        self._stamp[ids] = stamps
        self._next += count
        self.written[0] += nbytes[before > 0].sum()
        for tier, room in enumerate(self._room):
            self._inside[tier] += float(nbytes[before > tier].sum())
            self._give_up(tier, float(room))

    def _give_up(self, tier: int, room: float) -> None:
        while self._inside[tier] > room:
            start = self._mark[tier]
            stop = min(start + _STRIDE, self._next)
            ids = self._log[start:stop]
            fresh = self._stamp[ids] == np.arange(start, stop)
            left = np.cumsum(np.where(fresh, self._nbytes[ids], 0.0))
            gone = int(np.searchsorted(left, self._inside[tier] - room)) + 1
            gone = min(gone, stop - start)
            self._mark[tier] = start + gone
            self._inside[tier] -= float(left[gone - 1])
            if tier + 1 < len(self._mark):
                self.written[tier + 1] += float(left[gone - 1])
