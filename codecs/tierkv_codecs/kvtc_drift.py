"""Drift: the mean error of the values of a block, which is stored apart.

What a truncated basis leaves out of one text is alike from token to token. In the output of a head
such errors add up, where errors that differ cancel out; so the mean over the block's tokens of
what a level loses of the values is worth bits of its own: about one for each feature of a block.
It is rounded in the weighted form of the features. (For keys it was measured to gain nothing.)
"""

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv_codecs.kvtc_artifact import Ready, Side
from tierkv_codecs.kvtc_stream import MOST, NONE, SHIFTS, Level, Tables


def split(values: torch.Tensor, wide: int) -> torch.Tensor:
    """Return bf16 values, then what bf16 has lost of the first `wide` ones, then those again.

    The rows [rank + 2 wide, tokens] belong to those of `Ready.synthesis`.
    """
    narrow = values.bfloat16()
    first = narrow[:wide]
    return torch.cat([narrow, (values[:wide] - first.float()).bfloat16(), first])


def drift(rows: torch.Tensor, restored: torch.Tensor, side: Side, ready: Ready) -> torch.Tensor:
    """Return the weighted mean error, float32 [features], in steps.

    Args:
        rows: [token, features] of the values, centred.
        restored: float32 [rank, token], the coefficients that a reader will have.
        side: of the values.
        ready: at the level of `restored`.
    """
    if not len(rows):
        return torch.zeros(rows.shape[1])
    mean = split(restored.mean(1, keepdim=True), len(ready.wide)).to(rows.device)
    lost = rows.mean(0) - (mean.T @ ready.synthesis.to(rows.device)).float()[0]
    blocks, dim, _ = side.root.shape
    apart = lost.cpu().view(blocks, dim, 1)
    weighted: torch.Tensor = torch.linalg.solve(side.root, apart)
    return weighted.flatten()


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
