"""Putting: what blocks are encoded with when they are put, and which of them are worth it."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tierkv.catalog import NONE
from tierkv.codec import RAW, Profile
from tierkv.policies.placed import Placed
from tierkv.policies.steps import Steps
from tierkv.policy import Picked
from tierkv.tier import RAM

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
Gains = Callable[[Numbers, Numbers, Numbers], Floats]
"""Of segments, their sets of copies and choices: what each choice earns more, a second."""

QUICK = 0.9
"""A second copy is made where a load of it from below saves at least this share of what one of the
first would: where decoding takes long beside computing, what is smaller pays less than its price
promises."""


class Putting:
    """The decisions about one put, in the order in which they are asked for.

    Args:
        steps: which sets of copies there may be.
        placed: what is known of chains.
        gains: what they earn.
    """

    def __init__(self, steps: Steps, placed: Placed, gains: Gains) -> None:
        self._steps = steps
        self._placed = placed
        self._gains = gains
        self._picked = RAW
        self._choices: Sequence[Profile] = ()

    def picks(
        self, keys: bytes, known: Sequence[bool], choices: Sequence[Profile], *, priced: bool
    ) -> Picked:
        """Return the profiles whose best future earns most; none where RAM is not `priced`."""
        self._picked, self._choices = RAW, choices
        blocks = self._placed.find(keys)
        units = np.array(known, np.bool_).reshape(max(len(blocks), 1), -1)
        there = np.logical_and.reduce(units, axis=1)
        segments, weight = self._runs(blocks[~there[: len(blocks)]])
        if not priced or not len(segments):
            return Picked()
        best = -np.inf
        for choice in choices:
            earned = self._earned(segments, weight, self._future(choice))
            if earned > best:
                best, self._picked = earned, choice
        return self._paired(segments, weight)

    def _paired(self, segments: Numbers, weight: Numbers) -> Picked:
        """Return what was picked, or a plain profile with a progressive one beside it.

        Two copies are made where a plain one earns most in RAM, and a progressive one below: where
        the plain one is, it has no use, but it is what goes down, and what remains.
        """
        near, below = list[float](), list[float]()
        for choice in self._choices:
            inside, outside = self._places(choice)
            near.append(self._earned(segments, weight, inside))
            below.append(self._earned(segments, weight, outside))
        plain, small = (self._choices[int(np.argmax(each))] for each in (near, below))
        pays = min(max(near), max(below)) > 0 and small.levels > 0 == plain.levels
        if pays and self._saved(segments, small) >= QUICK * self._saved(segments, plain):
            self._picked = small
            return Picked(plain.number, small.number)
        return Picked(self._picked.number)

    def _saved(self, segments: Numbers, choice: Profile) -> float:
        """Return what a load of segments from the first tier below saves, at best."""
        load = self._steps.known.seconds[self._steps.alone[RAM + 1][choice.number]]
        return float(np.maximum(self._placed.segments.density[segments] - load, 0.0).sum())

    def _earned(self, segments: Numbers, weight: Numbers, options: set[int]) -> float:
        return float((np.maximum(self._best(segments, options), 0.0) * weight).sum())

    def offered(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a chain earn more than they cost, from the first on."""
        segments, weight = self._runs(self._placed.find(b"".join(keys)))
        if not len(segments):
            return len(keys)
        worth = self._best(segments, self._future(self._picked)) > 0
        blocks = len(segments) if worth.all() else int(worth.argmin())
        return int(weight[:blocks].sum())

    def _runs(self, blocks: Ids) -> tuple[Numbers, Numbers]:
        """Return the segments of a chain's blocks, in order, and how many of them each has."""
        rows = self._placed.segments.of(blocks[blocks != NONE])
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        return rows[starts], np.diff(np.append(starts, len(rows)))

    def _places(self, choice: Profile) -> tuple[set[int], set[int]]:
        """Return the sets of one copy that a put of a profile leads to: in RAM, and below."""
        near, far = self._steps.made(choice, [one.number for one in self._choices])
        alone = self._steps.alone
        below = {alone[tier][one] for tier in range(1, len(alone)) for one in far}
        return {alone[RAM][one] for one in near}, below

    def _future(self, choice: Profile) -> set[int]:
        """Return all sets of copies that a put of a profile leads to."""
        inside, below = self._places(choice)
        return inside | below | {one + other for one in inside for other in below}

    def _best(self, segments: Numbers, options: set[int]) -> Floats:
        """Return what segments earn in the best of some sets of copies."""
        if not options:
            return np.zeros(len(segments))
        choices = np.array(sorted(options), np.int64)
        configurations = np.broadcast_to(choices, (len(segments), len(choices)))
        gain = self._gains(segments, np.zeros(len(segments), np.int64), configurations)
        best: Floats = gain.max(axis=1)
        return best
