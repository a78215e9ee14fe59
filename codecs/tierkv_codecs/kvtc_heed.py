"""Heed: learning which tokens' errors will cost much, and sharing the bits of a level accordingly.

What an error in a token costs is known in calibration from gradients, but not while encoding, when
nobody has asked for the token yet. It is predicted from the token's leading coefficients: log cost
is linear in them, fitted by the gamma deviance, cost / predicted + log predicted, because bits that
follow the prediction give an expected loss of just that form.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tierkv_codecs.kvtc_artifact import GRADES, USUAL

RIDGE = 0.003
"""Weight of the squared weights of standardised coefficients beside a token's deviance."""
TURNS = 100
AHEAD = (0, 1, 2)
"""So many plans each grade below that of anchors is ahead of grade 0: half, as many, twice the
usual bits."""
MOST_FINER = 1.5
"""The last plan takes up to so many times the bits that doubling would give it."""
CUTS = (-1.0, 1.0, 5.0)
"""Where grades begin: log costs beside that of the median token."""


class Heed(NamedTuple):
    """What grades are made from: see `Artifact`; `shares` of tokens have each grade.

    weights: float32 [2, h], for coefficients in their own units.
    """

    weights: torch.Tensor
    cuts: tuple[float, ...]
    shares: tuple[float, ...]


def fit_heed(leading: tuple[torch.Tensor, torch.Tensor], costs: torch.Tensor) -> Heed:
    """Learn to tell costs.

    Args:
        leading: both sides' first coefficients, float32 [h, tokens].
        costs: float32 [tokens].
    """
    h = len(leading[0])
    known = torch.cat(leading).T.double()
    mean, deviation = known.mean(0), known.std(0).clamp_min(1e-12)
    known, cost = (known - mean) / deviation, costs.double()
    found = torch.zeros(2 * h + 1, dtype=torch.double, requires_grad=True)
    found.data[-1] = cost.mean().log()
    search = torch.optim.LBFGS([found], max_iter=TURNS, line_search_fn="strong_wolfe")

    def deviance() -> torch.Tensor:
        search.zero_grad()
        predicted = known @ found[:-1] + found[-1]
        loss = (cost * (-predicted).exp() + predicted).mean()
        loss = loss + RIDGE / 2 * found[:-1].square().sum()
        loss.backward()
        return loss

    search.step(deviance)
    solved = found.detach()
    weights = solved[:-1] / deviation
    score = known @ solved[:-1] + weights @ mean
    cuts = score.median() + torch.tensor(CUTS, dtype=torch.double)
    grades = torch.bucketize(score, cuts)
    shares = torch.bincount(grades, minlength=GRADES).double() / len(grades)
    return Heed(weights.float().view(2, h), tuple(cuts.tolist()), tuple(shares.tolist()))


def budgets_of(targets: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return the bits per token of each plan, from the coarsest, with which levels take `targets`.

    Nearly so where each target is twice the one before. The last level takes less, for it has no
    finer plans; the last plan is so fine that the level before it takes what it may.

    Args:
        targets: bits per token of each level, from the coarsest.
        shares: of tokens that have each grade below that of anchors, whose bits are not in targets.
    """
    last = len(targets)
    doubled = [targets[0] / 2, *targets]
    doubled += [targets[-1] * 2.0**beyond for beyond in range(1, AHEAD[-1])]
    found = [0.0]
    for level, target in enumerate(targets):
        mixed = sum(share * doubled[level + AHEAD[grade]] for grade, share in enumerate(shares))
        found.append(target * target / mixed)
    if last == 1:
        found[1] = targets[0] / (sum(shares) - shares[0] / 2)
    found[0] = found[1] / 2
    finest = sum(share for grade, share in enumerate(shares) if AHEAD[grade] > USUAL)
    if last > 1 and finest:
        coarser = shares[0] * found[last - 2] + shares[USUAL] * found[last - 1]
        wanted = (targets[last - 2] - coarser) / finest
        found[last] = min(max(wanted, found[last]), MOST_FINER * found[last])
    return found
