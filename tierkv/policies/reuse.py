"""Reuse: what is asked for, and how often it will be asked for again.

A segment is used again because its context goes on, whose hazard is fitted by category and age, or
because another context branches off it, of which a decayed rate is kept by segment. The category
of a context is its turn and length; what a branch left behind has categories of its own.
"""

import numpy as np
import numpy.typing as npt

from tierkv.policies.hazard import Hazard
from tierkv.policies.segments import SEGMENT_BLOCKS, Ids, Segments, Walk

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

FOREIGN_S = 300.0
"""Memory of how often other contexts branch off a segment."""
SIGHTS = 2
"""Uses that a lower tier waits for, where it takes nothing at first sight."""
PARTIAL = 0.05
"""Of the rate of its context: a block that is not full is another one when its chain goes on."""
REFIT_FIRST, REFIT_SHARE = 100, 20
TURNS, LENGTHS = 6, (600, 2048, 32768, 65536)
LEFT = TURNS * (len(LENGTHS) + 1)
"""Categories of what a branch left behind: a short rest of a context, a long one."""
CATEGORIES = LEFT + 2


class Reuse:
    """Segments of all chains that were asked for, and the rate of their next uses."""

    def __init__(self, segment_blocks: int = SEGMENT_BLOCKS) -> None:
        self.segments = Segments(segment_blocks)
        self.hazard = Hazard(CATEGORIES)
        self._turn: list[int] = []
        self._length: list[int] = []
        self._forgotten = 0
        """Contexts that have no number any more."""
        self._refit_at = REFIT_FIRST

    def use(
        self,
        now: float,
        walk: Walk,
        ids: Ids,
        tokens: int,
        full: int,
        nbytes: Floats,
        density: Floats,
    ) -> Numbers:
        """A request has used a chain; returns its segments, head first. `refit` comes next.

        Args: see `EvicPress.used_chain`.
        """
        context = len(self._turn)
        self._learn(now, walk, context, tokens, full)
        rows = walk.rows
        self.segments.uses[rows] += 1
        if walk.blocks < len(ids):
            grown = self.segments.grow(ids, walk.blocks, full, nbytes, density)
            rows = np.concatenate([rows, grown])
        self.segments.use(context, rows)
        return rows

    def continues(self, ids: Ids, known: int) -> bool:
        """Return whether a chain, of which so many blocks are known, goes on where a context ends.

        No branch of it can lie there: then its next block would be known, or another's.
        """
        if not known:
            return False
        row = self.segments.at(int(ids[known - 1]))
        last = self.segments.first[row] + self.segments.blocks[row] - 1
        context = self.segments.context[row]
        return bool(last == ids[known - 1] and self._length[context] == known)

    def go_on(self, walk: Walk, ids: Ids, nbytes: Floats, density: Floats) -> None:
        """A context goes on, without a use, behind its whole chain, which the walk has met.

        Args: see `EvicPress.used_chain`; every block is full.
        """
        segments, last, at = self.segments, int(walk.rows[-1]), walk.blocks
        context = int(segments.context[last])
        at += segments.lengthen(last, ids[at:], float(nbytes[at]), float(density[at]))
        if at < len(ids):
            segments.use(context, segments.grow(ids, at, len(ids), nbytes, density))
        self._length[context] = len(ids)

    def end(self, context: int, at: float) -> None:
        """Nobody will go on with a context from `at` seconds on, which a later use may change."""
        self.hazard.until[context] = at

    def keep(self, rows: Numbers, now: float) -> Numbers:
        """Forget all other segments; returns the old numbers of blocks by their new ones.

        Args: see `Segments.keep`; the last use is among them.
        """
        blocks, contexts = self.segments.keep(rows)
        self.hazard.keep(contexts, now)
        self._forgotten += len(self._turn) - len(contexts)
        self._turn = [self._turn[one] for one in contexts.tolist()]
        self._length = [self._length[one] for one in contexts.tolist()]
        return blocks

    @property
    def newest(self) -> int:
        """The context of the last use."""
        return len(self._turn) - 1

    def refit(self, now: float) -> None:
        """Fit the hazard anew when enough was used since the last time."""
        newest = self._forgotten + len(self._turn) - 1
        if newest >= self._refit_at:
            self.hazard.refit(now)
            self._refit_at += max(REFIT_FIRST, newest // REFIT_SHARE)

    def _learn(self, now: float, walk: Walk, context: int, tokens: int, full: int) -> None:
        segments, hazard, turn = self.segments, self.hazard, 0
        if len(walk.rows):
            before = int(segments.context[walk.rows[-1]])
            apart = bool(2 * walk.blocks < self._length[before] or hazard.until[before] <= now)
            foreign = walk.rows[(segments.context[walk.rows] != before) | apart]
            faded = np.exp((segments.foreign_at[foreign] - now) / FOREIGN_S)
            segments.foreign[foreign] = segments.foreign[foreign] * faded + 1
            segments.foreign_at[foreign] = now
            # What all chains share says nothing of the context that met it last.
            if walk.blocks > 1:
                turn = self._turn[before] + 1
                hazard.used(before, now)
                if walk.blocks < self._length[before]:
                    hazard.begin(before, LEFT + int(not apart), now)
        self._turn.append(turn)
        self._length.append(full)
        length = int(np.searchsorted(LENGTHS, tokens, side="right"))
        hazard.begin(context, min(turn, TURNS - 1) * (len(LENGTHS) + 1) + length, now)

    def rate(self, rows: Numbers, now: float, *, least: bool = False) -> Floats:
        """Return expected uses per second of segments (n,); see `Hazard.rate` for `least`."""
        segments = self.segments
        own = self.hazard.rate(segments.context[rows], now, least=least)
        own = np.where(segments.partial[rows], own * PARTIAL, own)
        faded = np.exp((segments.foreign_at[rows] - now) / FOREIGN_S)
        return own + segments.foreign[rows] * faded / FOREIGN_S

    def rate_of_unknown(self, age_s: float) -> float:
        """Return expected uses per second of what nobody has asked for in so many seconds."""
        return float(self.hazard.at(0, age_s))
