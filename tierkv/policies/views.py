"""Views: two views of what is used again compete; the one that would have served best decides.

Where there is one way to keep a segment, all that is to be decided is what goes first. The fitted
rate says it best where uses follow habits that can be learnt, plain recency where what was used
last is all there is to know, and no view is right everywhere. So at each use both are asked what
they would hold, had they decided all along: out of a sample of what is there and of what went
lately, what they value most, as much as there is room for. What the chain finds of that they would
have served.

For recency that is exact, since what LRU holds follows from the order of uses alone. A rate may
rise again with age, when what it valued least has long gone, so a segment is held as long as the
*least* rate since its last use says. What is still too good in that is seen while the rate decides:
what was served then, of what it said it would serve, is believed of it.

Sources: regret over experts as in LeCaR (HotStorage'18), with shadow caches of samples as in
Waldspurger and others (ATC'17) in place of lists of ghosts.
"""

import numpy as np
import numpy.typing as npt

from tierkv.policies.reuse import Reuse
from tierkv.policies.segments import NONE

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

RECENCY, RATE = 0, 1
SAMPLED = 128
"""So many of what is there are looked at, and so many of what went."""
REACH = 2
"""What went lately: so many times what there is room for. The order of drops within one use is not
that of uses, so once would miss some of what recency holds."""
MEMORY_USES = 128
MEMORY_TURNS = 2
"""A view is judged by so many uses, or by as many as ask for so many times what there is room for:
it must have had the time to fill the room."""
MARGIN = 0.02
"""A view that serves less than this more does not take over: what is there was kept by another."""


class Gone:
    """Segments that were given up, in order, as far back as `reach` bytes."""

    def __init__(self, reach: float) -> None:
        self._reach = reach
        self._rows = np.zeros(1024, np.int64)
        self._upto = np.zeros(1025)
        """Bytes that went before each."""
        self._count = 0
        self._forgotten = 0
        self._latest = np.full(1024, NONE, np.int64)
        """By segment: its last place, those forgotten counted."""

    def add(self, rows: Numbers, nbytes: Floats) -> None:
        """Segments went, in this order."""
        if not len(rows):
            return
        while self._count + len(rows) > len(self._rows):
            self._make_room()
        first, self._count = self._count, self._count + len(rows)
        self._rows[first : self._count] = rows
        self._upto[first + 1 : self._count + 1] = self._upto[first] + np.cumsum(nbytes)
        while int(rows.max()) >= len(self._latest):
            self._latest = np.append(self._latest, np.full_like(self._latest, NONE))
        self._latest[rows] = np.arange(first, self._count) + self._forgotten

    @property
    def lately(self) -> tuple[int, int]:
        """Return the places of what went within reach: the first, and that behind the last."""
        least = self._upto[self._count] - self._reach
        return int(np.searchsorted(self._upto[: self._count], least)), self._count

    def at(self, places: Numbers) -> Numbers:
        """Return the segments at places, but for those that went once more later."""
        rows = self._rows[places]
        last: Numbers = rows[self._latest[rows] == places + self._forgotten]
        return last

    def _make_room(self) -> None:
        first, count = self.lately
        if first > len(self._rows) // 2:
            kept = count - first
            self._rows[:kept] = self._rows[first:count]
            self._upto[: kept + 1] = self._upto[first : count + 1] - self._upto[first]
            self._forgotten += first
            self._count = kept
        else:
            self._rows = np.append(self._rows, np.zeros_like(self._rows))
            self._upto = np.append(self._upto, np.zeros(len(self._upto) - 1))


class Views:
    """Who decides over one tier with one way to keep a segment.

    Args:
        reuse: what was asked for.
        capacity: bytes.
    """

    def __init__(self, reuse: Reuse, capacity: float) -> None:
        self._reuse = reuse
        self._segments = reuse.segments
        self._capacity = capacity
        self._gone = Gone(REACH * capacity)
        self.deciding = RECENCY
        self._would = np.zeros(2)
        """Bytes that each would have served lately."""
        self._served = np.full(2, capacity)
        self._said = np.full(2, capacity)
        """Bytes that each served while it decided, and would have served: the same at first."""

    def gave_up(self, rows: Numbers) -> None:
        """Segments went, or were not taken in; of a chain the end before its head."""
        self._gone.add(rows, self._segments.nbytes[rows])

    def judge(
        self,
        now: float,
        used: Numbers,
        loaded: int,
        asked: float,
        pool: Numbers,
        random: np.random.Generator,
    ) -> None:
        """Judge the views by a use that nothing has learnt from yet.

        Args:
            now: seconds.
            used: segments of the chain, as far as it was ever asked for, head first.
            loaded: so many of them were there.
            asked: bytes of the whole chain.
            pool: all segments that are there, and maybe some that are not.
            random: of the samples.
        """
        found = self._found(now, used, pool, random) if len(used) else np.zeros(2)
        mine = self.deciding
        memory = max(MEMORY_USES, MEMORY_TURNS * self._capacity / asked)
        fade = 1 - 1 / memory
        self._would = self._would * fade + found
        self._said[mine] = self._said[mine] * fade + found[mine]
        real = float(self._segments.nbytes[used[:loaded]].sum())
        self._served[mine] = self._served[mine] * fade + real
        kept = (self._served + self._capacity) / (self._said + self._capacity)
        score = self._would * np.minimum(kept, 1.0)
        best = int(score.argmax())
        if score[best] > score[mine] * (1 + MARGIN):
            self.deciding = best

    def _found(
        self, now: float, used: Numbers, pool: Numbers, random: np.random.Generator
    ) -> Floats:
        """Return the bytes that a chain finds of what each view would hold."""
        segments = self._segments
        there, share = _drawn(0, len(pool), random)
        there = pool[there]
        there = there[segments.configuration[there] != 0]
        went, other = _drawn(*self._gone.lately, random)
        went = self._gone.at(went)
        went = went[segments.configuration[went] == 0]
        every = np.concatenate([used, there, went])
        weight = segments.nbytes[every]
        weight[: len(used)] = 0.0
        weight[len(used) : len(used) + len(there)] *= share
        weight[len(used) + len(there) :] *= other
        # Of one context its head stays longest.
        lately = np.lexsort((segments.position[every], -segments.context[every]))
        rate = self._reuse.rate(every[lately], now, least=True)
        worth = rate * segments.density[every[lately]]
        orders = lately, lately[np.argsort(-worth, kind="stable")]
        nbytes = segments.nbytes[used]
        return np.array([_head(self._held(one, weight, len(used)), nbytes) for one in orders])

    def _held(self, order: Numbers, weight: Floats, used: int) -> npt.NDArray[np.bool_]:
        """Return which of the first `used` are held, when things are held in an order."""
        upto = np.cumsum(weight[order])
        if upto[-1] <= self._capacity:
            return np.ones(used, np.bool_)
        fits = np.flatnonzero((upto <= self._capacity) & (weight[order] > 0))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        held: npt.NDArray[np.bool_] = place[:used] <= (fits[-1] if len(fits) else NONE)
        return held


def _drawn(first: int, end: int, random: np.random.Generator) -> tuple[Numbers, float]:
    """Return places of a sample, and of how many each of them is one."""
    if end - first <= SAMPLED:
        return np.arange(first, end), 1.0
    return random.integers(first, end, SAMPLED), (end - first) / SAMPLED


def _head(held: npt.NDArray[np.bool_], nbytes: Floats) -> float:
    """Return the bytes ahead of the first that is not held."""
    return float(nbytes[: len(held) if held.all() else int(held.argmin())].sum())
