"""Drift: the mean error of the values of a block, which is stored apart.

What a truncated basis leaves out of one text is alike from token to token. In the output of a head
such errors add up, where errors that differ cancel out; so the mean over the block's tokens of
what a level loses of the values is worth bits of its own: about one for each feature of a block.
It is rounded in the weighted form of the features. (For keys it was measured to gain nothing.)
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv_codecs.kvtc_artifact import Artifact, Side
from tierkv_codecs.kvtc_cells import add_sums
from tierkv_codecs.kvtc_grades import Group, features_of, sampled
from tierkv_codecs.kvtc_stream import MOST, NONE, SHIFTS, Level, Tables


def drift_of(
    artifact: Artifact, values: torch.Tensor, groups: Sequence[Group[np.int16]], levels: int
) -> torch.Tensor:
    """Return the drift of values at each of the first levels, float32 [levels, features], in steps.

    Args:
        artifact: that the block is coded with.
        values: centred rows [token, features].
        groups: of the block, as finest indices.
        levels: how many.
    """
    (means,) = _remade(artifact, [_means(artifact, groups, levels)], values.device)
    return _drift(artifact, values, means)


def losses_of(
    artifact: Artifact,
    values: torch.Tensor,
    groups: Sequence[Group[np.int16]],
    levels: int,
    tokens: NDArray[np.int64],
) -> tuple[NDArray[np.float64], torch.Tensor]:
    """Return the squared errors of the values of some tokens, in squared steps, and the drift.

    The errors are those at the last of the levels; drift is that of `drift_of`. One product serves
    both: it takes as long as it takes to read its matrix.
    """
    if not len(tokens):
        return np.zeros(0), torch.zeros(levels, values.shape[1])
    some = sampled(artifact, groups, 1, levels - 1, tokens)
    columns = [some, _means(artifact, groups, levels)]
    found, means = _remade(artifact, columns, values.device)
    lost = _weighted(artifact, values[torch.from_numpy(tokens)].T - found)
    return lost.double().square().sum(0).numpy(), _drift(artifact, values, means)


def _means(artifact: Artifact, groups: Sequence[Group[np.int16]], levels: int) -> torch.Tensor:
    """Return the mean coefficients of values that a reader of each level has [rank, levels]."""
    finest = max((group.grade for group in groups), default=0)
    sums = np.zeros((levels, artifact.ready(1, artifact.plan(levels - 1, finest)).rank))
    for group in groups:
        for number in range(levels):
            plan = artifact.plan(number, group.grade)
            add_sums(group.sides[1], artifact.cells(1, plan), sums[number])
    tokens = sum(len(group.tokens) for group in groups)
    return torch.from_numpy(sums.T / max(tokens, 1)).float()


def _remade(
    artifact: Artifact, columns: Sequence[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return what columns of values' coefficients are, each float32 [features, columns]."""
    whole = torch.zeros(max(map(len, columns)), sum(of.shape[1] for of in columns))
    start = 0
    for of in columns:
        whole[: len(of), start : start + of.shape[1]] = of
        start += of.shape[1]
    found = features_of(artifact, 1, whole, device)
    return torch.split(found, [of.shape[1] for of in columns], 1)


def _drift(artifact: Artifact, values: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    if not len(values):
        return torch.zeros(means.shape[1], values.shape[1])
    return _weighted(artifact, values.mean(0)[:, None] - means).T


def _weighted(artifact: Artifact, features: torch.Tensor) -> torch.Tensor:
    """Return values [features, columns] in the metric of their basis, in steps."""
    inverse = artifact.inverse
    return torch.bmm(inverse, features.cpu().view(*inverse.shape[:2], -1)).flatten(0, 1)


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


def tables(first: torch.Tensor) -> Tables:
    """Return tables of probabilities int16 [features, FIRST_SYMBOLS]; nothing is refined."""
    return Tables(
        first.contiguous().numpy().view(np.uint16), np.ones((len(first), SHIFTS, 4), np.uint16)
    )
