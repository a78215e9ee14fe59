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

from tierkv_codecs.kvtc_artifact import Artifact, Ready, Side
from tierkv_codecs.kvtc_grades import Group, coarser, restored, split
from tierkv_codecs.kvtc_stream import MOST, NONE, SHIFTS, Level, Tables


def drift(rows: torch.Tensor, means: torch.Tensor, side: Side, ready: Ready) -> torch.Tensor:
    """Return the weighted mean error at each level, float32 [levels, features], in steps.

    Args:
        rows: [token, features] of the values, centred.
        means: float32 [rank, levels], over tokens, of the coefficients that a reader will have.
        side: of the values.
        ready: at the finest of the levels.
    """
    if not len(rows):
        return torch.zeros(means.shape[1], rows.shape[1])
    found = split(means, len(ready.wide)).to(rows.device)
    lost = rows.mean(0) - (found.T @ ready.synthesis.to(rows.device)).float()
    blocks, dim, _ = side.root.shape
    apart = lost.cpu().view(-1, blocks, dim).permute(1, 2, 0)
    weighted: torch.Tensor = torch.linalg.solve(side.root, apart)
    return weighted.permute(2, 0, 1).flatten(1)


def drift_of(
    artifact: Artifact, rows: torch.Tensor, groups: Sequence[Group[np.int16]], levels: int
) -> torch.Tensor:
    """Return the drift of values at each of the first levels, from their finest indices."""
    finest = max((group.grade for group in groups), default=0)
    ready = artifact.ready(1, artifact.plan(levels - 1, finest))
    means = torch.zeros(ready.rank, levels)
    for number in range(levels):
        found = restored(artifact, coarser(artifact, groups, number), 1, number)
        means[: len(found), number] = found.sum(1) / max(len(rows), 1)
    return drift(rows, means, artifact.sides[1], ready)


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
