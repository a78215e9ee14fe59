"""Drift: the mean error of the values of a block, which is stored apart.

What a truncated basis leaves out of one text is alike from token to token. In the output of a head
such errors add up, where errors that differ cancel out; so the mean over the block's tokens of
what a level loses of the values is worth bits of its own: about one for each feature of a block.
It is rounded in the weighted form of the features. (For keys it was measured to gain nothing.)
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv_codecs.bits import Floats
from tierkv_codecs.kvtc_artifact import USUAL, Artifact, Side
from tierkv_codecs.kvtc_cells import add_sums, lose, mean_row
from tierkv_codecs.kvtc_grades import Group, features_of, sampled
from tierkv_codecs.kvtc_rans import NONE, SHIFTS
from tierkv_codecs.kvtc_stream import MOST, Level, Tables

COLUMNS = 32
"""A product of so many columns takes less time than one of 17."""


def typical(groups: Sequence[Group[np.int16]]) -> list[Group[np.int16]]:
    """Return the groups up to the usual grade, or all where there is none.

    What tokens of a higher grade lose is less, and to know it takes a matrix twice as large.
    """
    return [group for group in groups if group.grade <= USUAL] or list(groups)


def drift_of(
    artifact: Artifact, values: torch.Tensor, groups: Sequence[Group[np.int16]], levels: int
) -> torch.Tensor:
    """Return the drift of values at each of the first levels, float32 [levels, features], in steps.

    Args:
        artifact: that the block is coded with.
        values: centred rows [token, features].
        groups: of the block, as finest indices; what is in none of them is not looked at.
        levels: how many.
    """
    return losses_of(artifact, values, groups, levels, np.empty(0, np.int64))[1]


def losses_of(
    artifact: Artifact,
    values: torch.Tensor,
    groups: Sequence[Group[np.int16]],
    levels: int,
    tokens: NDArray[np.int64],
) -> tuple[NDArray[np.float64], torch.Tensor]:
    """Return the squared errors of the values of some tokens, in squared steps, and the drift.

    The errors are those at the last of the levels; drift is that of `drift_of`. One product serves
    both: it takes as long as it takes to read its matrix. The tokens are of `typical` groups, which
    alone are looked at.
    """
    if not groups:
        return np.zeros(0), torch.zeros(levels, values.shape[1])
    whole, groups = sum(len(group.tokens) for group in groups), typical(groups)
    some, behind = len(tokens), len(tokens) + levels
    plan = artifact.plan(levels - 1, max(group.grade for group in groups))
    columns = -(-behind // COLUMNS) * COLUMNS
    known = np.zeros((artifact.ready(1, plan).rank, columns), np.float32)
    sampled(artifact, groups, 1, levels - 1, tokens, known)
    _means(artifact, groups, levels, known[:, some:behind])
    remade = features_of(artifact, 1, torch.from_numpy(known), values.device).cpu()
    rows, own = values.cpu().numpy(), np.concatenate([group.tokens for group in groups])
    lose(rows, tokens, mean_row(rows, own), remade.numpy())
    lost = _weighted(artifact, remade)
    errors = lost[:, :some].square().sum(0, dtype=torch.float64)
    return errors.numpy(), lost[:, some:behind].T * (len(own) / whole)


def _means(
    artifact: Artifact, groups: Sequence[Group[np.int16]], levels: int, into: Floats
) -> None:
    """Fill in the mean coefficients of values that a reader of each level has [rank, levels]."""
    sums = np.zeros((levels, len(into)))
    for group in groups:
        for number in range(levels):
            plan = artifact.plan(number, group.grade)
            add_sums(group.sides[1], artifact.cells(1, plan), sums[number])
    into[:] = sums.T / sum(len(group.tokens) for group in groups)


def _weighted(artifact: Artifact, features: torch.Tensor) -> torch.Tensor:
    """Return values [features, columns] in the metric of their basis, in steps."""
    inverse = artifact.inverse
    return torch.bmm(inverse, features.view(*inverse.shape[:2], -1)).flatten(0, 1)


def rounded(weighted: torch.Tensor, step: float) -> NDArray[np.int16]:
    """Return drift in whole steps of its own, int16 [features, 1]."""
    indices: NDArray[np.int16] = (
        (weighted / step).round().clamp(-MOST, MOST).to(torch.int16).numpy()[:, None]
    )
    return indices


def features(indices: NDArray[np.int32], step: float, side: Side) -> torch.Tensor:
    """Return what to add to the mean of the values, float32 [features]."""
    blocks, dim, _ = side.root.shape
    weighted = torch.from_numpy(indices).float().view(blocks, dim, 1) * step
    return torch.bmm(side.root, weighted).flatten()


def level(count: int) -> Level:
    """Return what the entropy stage is told: every feature once, whole."""
    return Level(np.full(count, NONE, np.int8), np.zeros(count, np.int8), np.zeros(count, np.int8))


@functools.lru_cache(64)
def tables(artifact: Artifact, level: int) -> Tables:
    """Return the probabilities of the drift at a level; nothing is refined."""
    first = artifact.drift[level]
    return Tables(
        first.contiguous().numpy().view(np.uint16), np.ones((len(first), SHIFTS, 4), np.uint16)
    )
