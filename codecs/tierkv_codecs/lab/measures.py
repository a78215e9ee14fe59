"""Measures: distances between what a model says on exact KV and on restored KV, and how sure.

Next-token distributions are compared with KL divergence in nats (its mean resolves effects a
hundred times smaller than a change of loss does), the most likely tokens with each other, and
tensors by the norm of their difference. Intervals come from a bootstrap over sequences, because
tokens of one sequence are not independent: sequences are drawn with replacement, seeded.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

DRAWS = 2000
LEVEL = 0.95
P99 = 0.99
_SEED = 20251130

Doubles = NDArray[np.float64]


class Predictions(NamedTuple):
    """How a continuation's predictions differ, each a vector [token].

    `kl` in nats; `agree` 1.0 where the most likely token is the same; `dnll` what the right token
    lost, in nats; `right` 1.0 where the most likely token is the right one.
    """

    kl: Doubles
    agree: Doubles
    dnll: Doubles
    right: Doubles


class Interval(NamedTuple):
    """A number with the ends of its 95% interval."""

    value: float
    lo: float
    hi: float


def compare(reference: torch.Tensor, found: torch.Tensor, targets: torch.Tensor) -> Predictions:
    """Compare the predictions of one sequence.

    Args:
        reference: log probabilities [token, vocabulary] on exact KV, float32.
        found: of the same tokens on restored KV.
        targets: the tokens that truly follow, [token].
    """
    # KL is never below 0; rounding is, by a few 1e-8.
    kl = (reference.exp() * (reference - found)).sum(-1).clamp_(min=0.0)
    best = found.argmax(-1)
    lost = (reference - found).gather(1, targets[:, None])[:, 0]
    columns = (kl, best == reference.argmax(-1), lost, best == targets)
    return Predictions(*(column.double().numpy() for column in columns))


def relative_error(exact: torch.Tensor, restored: torch.Tensor) -> tuple[float, float]:
    """Return the squared norms of the difference and of the exact tensor, to be added up."""
    wide, other = exact.double(), restored.double()
    return float((other - wide).square().sum()), float(wide.square().sum())


def draws(sequences: int, count: int = DRAWS) -> NDArray[np.float64]:
    """Return how often each sequence is drawn, [draw, sequence]; the same at every call."""
    share = np.full(sequences, 1 / sequences)
    return np.random.default_rng(_SEED).multinomial(sequences, share, size=count).astype(np.float64)


def mean(values: Sequence[Doubles]) -> Interval:
    """Return the mean over all tokens of sequences, with its interval."""
    sums, counts = _sums(values)
    drawn = draws(len(values))
    return _interval(sums.sum() / counts.sum(), (drawn @ sums) / (drawn @ counts))


def p99(values: Sequence[Doubles]) -> Interval:
    """Return the 99th percentile of all tokens, the least value that 99% do not exceed."""
    tokens = np.concatenate(values)
    order = np.argsort(tokens, kind="stable")
    owner = np.repeat(np.arange(len(values)), [len(one) for one in values])[order]
    tokens = tokens[order]
    drawn = draws(len(values))
    weights = np.concatenate([np.ones((1, len(values))), drawn])[:, owner].cumsum(1)
    # The first draw is the sample itself. A weight of 1e-9 forgives the sum's rounding.
    at = (weights >= P99 * weights[:, -1:] - 1e-9).argmax(1)
    found = tokens[at]
    return _interval(found[0], found[1:])


def ratio(above: Sequence[Doubles], below: Sequence[Doubles]) -> Interval:
    """Return mean(above) / mean(below), paired: the same sequences are drawn for both.

    Infinite where what stands below is 0 and what stands above is not; 1 where both are.
    """
    (top, top_count), (bottom, bottom_count) = _sums(above), _sums(below)
    drawn = draws(len(above))
    one = np.ones((1, len(above)))
    weights = np.concatenate([one, drawn])
    upper = (weights @ top) / (weights @ top_count)
    lower = (weights @ bottom) / (weights @ bottom_count)
    found = np.where(upper == 0, np.where(lower == 0, 1.0, 0.0), np.inf)
    np.divide(upper, lower, out=found, where=lower > 0)
    return _interval(found[0], found[1:])


def _sums(values: Sequence[Doubles]) -> tuple[Doubles, Doubles]:
    sums = np.array([one.sum() for one in values])
    return sums, np.array([float(len(one)) for one in values])


def _interval(value: float, drawn: Doubles) -> Interval:
    # Neighbours are not averaged: an infinite ratio would make the mean of two undefined.
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    lo, hi = np.quantile(drawn, ends, method="inverted_cdf")
    return Interval(float(value), float(lo), float(hi))
