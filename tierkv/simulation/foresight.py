"""Foresight: what a first pass over a trace tells of the requests that are still to come.

Traces need not name conversations, so they are read off the chains: a request *goes on* with the
request that used the last of its known blocks last, unless the two share no more than one block.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.policies.reuse import Reuse
from tierkv.policies.segments import NONE, Ids

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
SHARED = 1
"""Blocks that every chain may begin with: they say nothing of where it comes from."""
SOON_S = 0.1
"""A use that comes sooner is as one that comes then: times of traces are rounded."""


def goes_on_with(prompts: list[Ids]) -> Numbers:
    """Return for each prompt the number of the one that it goes on with, else NONE.

    Args:
        prompts: blocks numbered in the order of first appearance, head first.
    """
    earlier = np.full(len(prompts), NONE, np.int64)
    user = np.zeros(max(int(ids.max(initial=0)) for ids in prompts) + 1, np.int64)
    newest = NONE
    for number, ids in enumerate(prompts):
        known = int(np.count_nonzero(ids <= newest))
        if known > SHARED:
            earlier[number] = user[ids[known - 1]]
        user[ids] = number
        newest = max(newest, int(ids.max(initial=NONE)))
    return earlier


def sessions(goes_on: Numbers) -> Numbers:
    """Return for each prompt the first one of its conversation, given what each goes on with."""
    first = np.arange(len(goes_on))
    for number, earlier in enumerate(goes_on.tolist()):
        if earlier != NONE:
            first[number] = first[earlier]
    return first


def sensitivities(goes_on: Numbers, variation: float, seed: int) -> Floats:
    """Draw for each prompt what its session multiplies losses by.

    Lognormal, of mean 1 and this coefficient of variation: a gate's loss is the mean of contexts.
    """
    deviation = np.sqrt(np.log1p(variation**2))
    drawn = np.random.default_rng(seed).normal(-(deviation**2) / 2, deviation, len(goes_on))
    return np.exp(drawn)[sessions(goes_on)]


def closing(goes_on: Numbers) -> npt.NDArray[np.bool_]:
    """Return for each prompt whether none goes on with it, given what each goes on with."""
    closed = np.ones(len(goes_on), np.bool_)
    closed[goes_on[goes_on != NONE]] = False
    return closed


class Clients(NamedTuple):
    """What clients say with their requests, and what losses do to them.

    Attributes:
        closed: by request, whether it says that none goes on with it; None where nobody says so.
        sensitivity: by request, what its session multiplies the loss of a copy by; None for 1.
        most_kl: loss so multiplied that no copy may pass, in nats.
    """

    closed: npt.NDArray[np.bool_] | None = None
    sensitivity: Floats | None = None
    most_kl: float = np.inf

    def closes(self, number: int) -> bool:
        """Return whether a request says that none goes on with it."""
        return self.closed is not None and bool(self.closed[number])

    def sensitivity_of(self, number: int) -> float:
        """Return what a request's session multiplies losses by."""
        return 1.0 if self.sensitivity is None else float(self.sensitivity[number])


def clients_of(
    prompts: list[Ids], *, closed: bool, variation: float, most_kl: float, seed: int
) -> Clients:
    """Return clients that say truthfully what they close, where `closed`, and differ by session.

    Args: see `sensitivities`, `Clients`.
    """
    goes_on = goes_on_with(prompts)
    return Clients(
        closing(goes_on) if closed else None,
        sensitivities(goes_on, variation, seed) if variation else None,
        most_kl,
    )


def next_uses(prompts: list[Ids], times_s: Floats) -> list[Floats]:
    """Return for each block of each prompt when it is asked for next, infinity for never."""
    ids = np.concatenate(prompts)
    ends = np.cumsum([len(one) for one in prompts])
    request = np.repeat(np.arange(len(prompts)), np.diff(ends, prepend=0))
    order = np.argsort(ids, kind="stable")
    again = np.append(ids[order[1:]] == ids[order[:-1]], False)
    following = np.full(len(ids), np.inf)
    following[order[again]] = times_s[request[order[1:]][again[:-1]]]
    return np.split(following, ends[:-1])


class Clairvoyant(Reuse):
    """Knows when each block is asked for next: what is left to a policy is where to keep what.

    A segment's rate is that of one use at that time, which is what its rent until then buys; over
    its blocks, their mean.
    """

    def __init__(self, prompts: list[Ids], times_s: Floats) -> None:
        super().__init__()
        self._prompts = prompts
        self._following = next_uses(prompts, times_s)
        self._next = np.zeros(max(int(ids.max(initial=0)) for ids in prompts) + 1)
        self._known = 0
        """Prompts whose next uses are in `_next`."""

    def refit(self, now: float) -> None:
        """Do nothing: there is nothing to fit."""

    def rate(self, rows: Numbers, now: float, *, least: bool = False) -> Floats:
        """See `Reuse`: what is known is not less when it is far."""
        del least
        for number in range(self._known, self.newest + 1):
            self._next[self._prompts[number]] = self._following[number]
        self._known = self.newest + 1
        segments = self.segments
        first, blocks = segments.first[rows], segments.blocks[rows]
        ends = np.cumsum(blocks)
        inside = np.arange(ends[-1]) - np.repeat(ends - blocks - first, blocks)
        rates = 1 / np.maximum(self._next[inside] - now, SOON_S)
        return np.add.reduceat(rates, ends - blocks) / blocks
