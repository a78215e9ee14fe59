"""What indices of kvtc stand for: the kernels, and what is told of losses before they happen."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.kvtc_rigs import LAYERS, SPEC, artifact, text_like
from tierkv_codecs.kvtc_artifact import ANCHOR, USUAL
from tierkv_codecs.kvtc_cells import (
    CENTRE_UNIT,
    CENTRES,
    Cells,
    add_sums,
    fill_indices,
    restore,
    restore_finest,
)
from tierkv_codecs.kvtc_drift import drift_of, losses_of, typical
from tierkv_codecs.kvtc_grades import coefficients_of, features_of
from tierkv_codecs.kvtc_rans import NONE, OFFSETS, SHIFTS
from tierkv_codecs.kvtc_rows import rows_of
from tierkv_codecs.kvtc_stream import MOST, coarsened

RANK, TOKENS, POSITION = SHIFTS + 1, 61, 512
GRADED = artifact(graded=True)


def drawn() -> NDArray[np.int16]:
    draw = np.random.default_rng(1)
    values = np.rint(draw.standard_normal((RANK, TOKENS)) * np.exp2(np.arange(RANK))[:, None])
    values[:, 0], values[:, 1] = MOST, -MOST
    return values.astype(np.int16)


def cells() -> Cells:
    centres = np.random.default_rng(2).integers(0, 256, (RANK, CENTRES)).astype(np.uint8)
    return Cells(np.arange(RANK, dtype=np.int8), centres)  # the last one is not coded


def defined(coarse: NDArray[np.int32], of: Cells) -> NDArray[np.float64]:
    """What docs/FORMAT.md says of indices, in float64."""
    shifts = np.minimum(of.shifts, SHIFTS - 1).astype(np.int64)[:, None]
    magnitude = np.abs(coarse.astype(np.int64))
    kind = np.clip(magnitude, 1, CENTRES) - 1
    centre = np.take_along_axis(of.centres.astype(float), kind, 1) / CENTRE_UNIT
    value = (magnitude + centre) * np.exp2(shifts) - OFFSETS[shifts] - 0.5
    return np.where((magnitude > 0) & (of.shifts < NONE)[:, None], np.sign(coarse) * value, 0.0)


def test_indices_mean_what_the_format_says() -> None:
    finest, of = drawn(), cells()
    coarse = coarsened(finest, of.shifts)
    columns = np.random.default_rng(3).permutation(TOKENS + 5)[:TOKENS]
    outs = np.full((2, RANK, TOKENS + 5), 7.0, np.float32)
    restore(coarse, columns, of, outs[0])
    restore_finest(finest, np.arange(TOKENS), columns, of, outs[1])
    for out in outs:
        np.testing.assert_allclose(out[:, columns], defined(coarse, of), rtol=1e-6)
        assert (np.delete(out, columns, 1) == 7.0).all(), "other columns are left alone"
    sums = np.ones(RANK)
    add_sums(finest, of, sums)
    np.testing.assert_allclose(sums - 1, defined(coarse, of).sum(1), rtol=1e-9, atol=1e-9)


def test_coefficients_are_rounded_to_even_and_no_larger_than_an_index() -> None:
    values = np.array([[0.5, 1.5, -2.5, 2.4999, 1e9, -np.inf]], np.float32)
    found = np.zeros((1, 6), np.int16)
    fill_indices(values, np.array([5, 4, 3, 2, 1, 0]), found)
    assert found.tolist() == [[-MOST, MOST, 2, -2, 2, 0]]


@pytest.mark.parametrize("levels", [1, 3])
def test_what_a_block_will_lose_is_known_before_it_is_written(levels: int) -> None:
    level, block, side = levels - 1, text_like(96, 9, POSITION), GRADED.sides[1]
    rows = rows_of(block, (SPEC,) * LAYERS, POSITION, tuple(one.mean for one in GRADED.sides))
    found = coefficients_of(GRADED, rows, level)
    groups, exact = found.groups(GRADED, level), rows[1].exact
    coded = int((found.marks < ANCHOR).sum())
    looked_at = np.sort(np.concatenate([group.tokens for group in typical(groups)]))
    assert 50 < len(looked_at) < coded, "finer tokens are there, and left out"
    at = looked_at[[0, 7, 8, 50, -1]]
    errors, drift = losses_of(GRADED, exact, groups, levels, at)
    assert torch.equal(drift, drift_of(GRADED, exact, groups, levels))
    lost = exact.clone()
    for group in groups:  # what a reader has of them, by the definition
        plan = GRADED.plan(level, group.grade)
        values = GRADED.restored(1, plan, GRADED.coarse(1, plan, group.sides[1]))
        lost[torch.from_numpy(group.tokens)] -= features_of(GRADED, 1, values, exact.device).T
    apart = lost.view(len(lost), len(side.root), -1).permute(1, 2, 0)
    weighted = torch.linalg.solve(side.root, apart).flatten(0, 1)
    mean = weighted[:, torch.from_numpy(looked_at)].sum(1) / coded
    expected = weighted[:, torch.from_numpy(at)].square().sum(0).numpy()
    np.testing.assert_allclose(errors, expected, rtol=0.02)
    off = (drift[-1] - mean).square().mean().sqrt()
    assert float(off) < 0.2 * GRADED.header.drift_steps[level]


def test_where_all_tokens_are_fine_they_are_looked_at() -> None:
    block, means = text_like(96, 9, POSITION), tuple(one.mean for one in GRADED.sides)
    rows = rows_of(block, (SPEC,) * LAYERS, POSITION, means)
    groups = coefficients_of(GRADED, rows, 0).groups(GRADED, 0)
    fine = [group for group in groups if group.grade > USUAL]
    assert fine
    errors, drift = losses_of(GRADED, rows[1].exact, fine, 1, fine[0].tokens[:2])
    assert (errors > 0).all()
    assert drift.any()
