"""What anchors are coded with, learned from the rows that the highest grade has in calibration."""

import numpy as np
import torch

from tierkv_codecs.kvtc_anchors import Anchors
from tierkv_codecs.kvtc_measure import first_table, measure, refine_table
from tierkv_codecs.kvtc_rans import SHIFTS

FIRST_RANGE = 3.0
"""A component starts at the shift where its standard deviation is at most so many steps."""
TURNS = 5
"""The step is looked for so many times, each time closer."""


def fit_anchors(
    rows: torch.Tensor, held: torch.Tensor, unweights: torch.Tensor, bits: float
) -> tuple[Anchors, float]:
    """Return how to code anchors with so many bits each, and the bits that held-out ones take.

    Args:
        rows: float32 [2, anchors, p] of both sides, centred on the means of all tokens.
        held: bool [anchors], not to be learned from.
        unweights: float32 [2, layers x heads, d, d], inverse square roots of their metrics.
        bits: of each anchor.
    """
    train = rows[:, ~held] if bool((~held).any()) else rows
    offset = train.mean(1)
    root = _components(train - offset[:, None], unweights)
    plain = Anchors(offset, root, *(torch.empty(0) for _ in range(4)))
    found = plain.coefficients((rows[0], rows[1]))
    shown = held if bool(held.any()) else torch.ones_like(held)
    step = float(found.square().mean().sqrt()) / 2 ** (SHIFTS // 2) + 1e-6
    for turn in range(TURNS):
        of = measure(_part(found, ~shown, step), _part(found, shown, step))
        taken = of.bits[:, :SHIFTS].sum(0)
        if turn:
            octaves = (taken[0] - bits) / max(taken[0] - taken[1], 1.0)
        else:
            octaves = np.interp(-bits, -taken, np.arange(SHIFTS))
        step *= 2.0 ** float(np.clip(octaves, -2, SHIFTS))
    of = measure(_part(found, ~shown, step), _part(found, shown, step))
    deviation = found.square().mean(1).sqrt().numpy() / step
    start = np.ceil(np.log2(np.maximum(deviation / FIRST_RANGE, 1.0)))
    start = np.minimum(start, SHIFTS - 1).astype(np.int8)
    anchors = Anchors(
        offset=offset,
        root=root * step,
        start=torch.from_numpy(start),
        centres=torch.from_numpy(np.ascontiguousarray(of.centres[:, 0])),
        first=torch.from_numpy(first_table(of.counts, start).astype(np.int16)),
        refine=torch.from_numpy(refine_table(of.counts).astype(np.int16).reshape(len(start), -1)),
    )
    return anchors, float(of.bits[:, 0].sum())


def _components(train: torch.Tensor, unweights: torch.Tensor) -> torch.Tensor:
    """Return float32 [2, layers x heads, d, d], principal components of each head in its metric."""
    sides, blocks, dim, _ = unweights.shape
    apart = train.reshape(sides, -1, blocks, dim).permute(0, 2, 3, 1)
    weighted = torch.linalg.solve(unweights, apart)
    covariance = weighted @ weighted.transpose(2, 3) / max(train.shape[1], 1)
    vectors: torch.Tensor = torch.linalg.eigh(covariance).eigenvectors
    return unweights @ vectors


def _part(found: torch.Tensor, which: torch.Tensor, step: float) -> np.ndarray:
    rows: np.ndarray = (found[:, which] / step).numpy()
    return np.ascontiguousarray(rows)
