"""Hazard: how soon a context is used again, by its age and its category, fitted to what happened.

A *spell* begins when a context is used and ends when it is used again or cut short by a branch;
those still open count up to now, so that what is dead is seen to be dead. The hazard of a category
in an age bin is uses over seconds at risk, drawn to the hazard of all categories by `PRIOR` uses.

What a policy needs is more than the hazard now: chat answers are read for half a minute before the
next turn comes. `rate` is the best mean rate over any time ahead,

    rate(a) = max over b > a of P(used in (a, b]) / E[seconds until used or b],

which is what a copy earns per second if it is given up at the best moment.

Sources: categories and ages as in "KVCache cache in the wild" (ATC'25); the ratio is the hit
density of LHD (NSDI'18), maximised over the time ahead (Gittins index of a stopping problem).
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

EDGES_S: tuple[int, ...] = (0, 2, 5, 10, 20, 30, 45, 60, 90, 120, 180, 240, 300, 400, 500, 600)
EDGES_S += (800, 1000, 1300, 1700, 2200, 3000, 4500, 7000, 12000)
PRIOR = 3.0
FIRST_HAZARD = 3e-3
"""Uses a second that is believed before anything happened."""
FADE = 0.7
"""An age at which nothing was seen yet has this share of the hazard before it."""


class Hazard:
    """Spells by category; contexts are numbered by the caller from 0 in order."""

    def __init__(self, categories: int, edges_s: tuple[int, ...] = EDGES_S) -> None:
        self._edges = np.array(edges_s, np.float64)
        self._width = np.append(np.diff(self._edges), 3 * self._edges[-1])
        self._uses = np.zeros((categories, len(edges_s)))
        self._at_risk = np.zeros((categories, len(edges_s)))
        self.start = np.zeros(1024)
        self.category = np.zeros(1024, np.int64)
        self.open = np.zeros(1024, np.bool_)
        self.until = np.full(1024, np.inf)
        """When nobody goes on with a context any more, as far as somebody told."""
        self.count = 0
        self.refit(0.0)

    def begin(self, context: int, category: int, now: float) -> None:
        """A context was used, or is left with what a branch did not use, at `now` seconds."""
        while context >= len(self.start):
            self.start = np.append(self.start, np.zeros_like(self.start))
            self.category = np.append(self.category, np.zeros_like(self.category))
            self.open = np.append(self.open, np.zeros_like(self.open))
            self.until = np.append(self.until, np.full_like(self.until, np.inf))
        self.start[context], self.category[context] = now, category
        self.open[context] = True
        self.count = max(self.count, context + 1)

    def used(self, context: int, now: float) -> None:
        """End the spell of a context with a use."""
        if not self.open[context]:
            return
        age, category = now - self.start[context], self.category[context]
        last = int(np.searchsorted(self._edges, age, side="right")) - 1
        self._uses[category, last] += 1
        self._at_risk[category, :last] += self._width[:last]
        self._at_risk[category, last] += age - self._edges[last]
        self.open[context] = False

    def refit(self, now: float) -> None:
        """Work the rates out anew from all spells, the open ones up to `now`."""
        hazard = self._hazard(self._open_at_risk(now) + self._at_risk)
        stays = np.exp(-hazard * self._width)
        until = (1 - stays) / hazard
        best = np.zeros_like(hazard)
        for first in range(hazard.shape[1]):
            ahead = np.cumprod(stays[:, first:], axis=1)
            reached = np.concatenate([np.ones((len(hazard), 1)), ahead[:, :-1]], axis=1)
            seconds = np.cumsum(reached * until[:, first:], axis=1)
            best[:, first] = np.max((1 - ahead) / seconds, axis=1)
        self.table = best
        self._least = np.minimum.accumulate(best, axis=1)

    def _open_at_risk(self, now: float) -> Floats:
        alive = np.nonzero(self.open[: self.count])[0]
        # Of what was told dead nobody need find out: it says nothing of what was not.
        ages = np.minimum(now, self.until[alive]) - self.start[alive]
        ages, category = np.maximum(ages, 0.0), self.category[alive]
        last = np.searchsorted(self._edges, ages, side="right") - 1
        reach, beyond = np.zeros_like(self._at_risk), np.zeros_like(self._at_risk)
        np.add.at(reach, (category, last), 1.0)
        np.add.at(beyond, (category, last), ages - self._edges[last])
        passed = np.cumsum(reach[:, ::-1], axis=1)[:, ::-1] - reach
        total: Floats = passed * self._width + beyond
        return total

    def _hazard(self, at_risk: Floats) -> Floats:
        everyone = np.empty(len(self._edges))
        before = FIRST_HAZARD
        for age in range(len(everyone)):
            uses, seconds = self._uses[:, age].sum() + 1, at_risk[:, age].sum()
            everyone[age] = before = uses / (seconds + 1 / (before * (FADE if age else 1.0)))
        return (self._uses + PRIOR) / (at_risk + PRIOR / everyone)

    def rate(self, contexts: Numbers, now: float, *, least: bool = False) -> Floats:
        """Return uses per second of contexts (n,) at `now`, as of the last refit.

        `least`: what it was least since their last use.
        """
        age = np.searchsorted(self._edges, now - self.start[contexts], side="right") - 1
        table = self._least if least else self.table
        rates: Floats = table[self.category[contexts], age]
        return np.where(self.until[contexts] > now, rates, 0.0)

    def keep(self, contexts: Numbers, now: float) -> None:
        """Forget all other contexts; those kept get the numbers of their places.

        Spells of the others that are open end here, without a use.
        """
        gone = self.open.copy()
        gone[contexts] = False
        kept = self.open.copy()
        self.open = gone
        self._at_risk += self._open_at_risk(now)
        for name, values in ("start", self.start), ("category", self.category), ("open", kept):
            setattr(self, name, np.append(values[contexts], np.zeros_like(values)[:1024]))
        self.until = np.append(self.until[contexts], np.full(1024, np.inf))
        self.count = len(contexts)

    def at(self, category: int, age_s: float) -> float:
        """Return uses per second of a context of a category and age, as of the last refit."""
        age = int(np.searchsorted(self._edges, age_s, side="right")) - 1
        return float(self.table[category, age])
