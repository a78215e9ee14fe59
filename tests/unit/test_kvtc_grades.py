"""Grades of kvtc: costly tokens are told, cost more bits, and come back with smaller errors."""

import numpy as np
import pytest
import torch

from tests.kvtc_rigs import LAYERS, SPEC, artifact, place_at, text_like
from tierkv_codecs.codec import CodecError
from tierkv_codecs.kvtc import codecs_of
from tierkv_codecs.kvtc_anchor_fit import fit_anchors
from tierkv_codecs.kvtc_artifact import ANCHOR, GRADES, USUAL
from tierkv_codecs.kvtc_grades import Coefficients, coefficients_of, empty_groups, packed, unpacked
from tierkv_codecs.kvtc_heed import AHEAD, budgets_of, fit_heed
from tierkv_codecs.kvtc_rows import rows_of
from tierkv_connectors.calibration import cost_of

TOKENS, POSITION = 128, 512
GRADED = artifact(graded=True)


def graded(block: torch.Tensor, level: int = 0) -> Coefficients:
    keys, values = (side.mean for side in GRADED.sides)
    rows = rows_of(block, (SPEC,) * LAYERS, POSITION, (keys, values))
    return coefficients_of(GRADED, rows, level)


def leading(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([30.0, 5.0, 1.0, 0.1])[:, None]
    one, two = (scale * torch.randn(4, tokens, generator=generator) + 7 for _ in range(2))
    return one, two


def test_costs_are_told_from_leading_coefficients() -> None:
    truth = torch.tensor([0.05, 0.0, 1.5, 0.0])
    known = leading(6000, 1)
    exponent = truth @ (known[0] - 7)
    noise = torch.distributions.Gamma(0.5, 0.5).sample((6000,))  # as rough as a gradient is
    heed = fit_heed(known, exponent.exp() * noise)
    fresh = leading(2000, 2)
    score = heed.weights[0] @ fresh[0] + heed.weights[1] @ fresh[1]
    score -= (heed.cuts[0] + heed.cuts[1]) / 2
    expected = truth @ (fresh[0] - 7)
    assert float((score - expected).abs().mean()) < 0.2
    assert sum(heed.shares) == pytest.approx(1.0)
    assert heed.shares[USUAL] > max(heed.shares[0], *heed.shares[2:])


def test_equal_costs_make_every_token_a_usual_one() -> None:
    heed = fit_heed(leading(500, 3), torch.full((500,), 3.0))
    assert heed.shares == (0.0, 1.0, 0.0, 0.0)
    assert not heed.weights.abs().max() > 1e-6


@pytest.mark.parametrize("shares", [(0.0, 1.0, 0.0), (0.25, 0.5, 0.24)])
def test_budgets_add_up_to_what_levels_may_take(shares: tuple[float, ...]) -> None:
    targets = [100.0, 200.0, 400.0, 800.0]
    plans = budgets_of(targets, shares)
    assert plans == sorted(plans)
    assert len(plans) == len(targets) + 1
    for level, target in enumerate(targets):
        mixed = sum(
            share * plans[min(level + ahead, len(targets))]
            for ahead, share in zip(AHEAD, shares, strict=True)
        )
        exact = shares[USUAL] == 1.0 or level == len(targets) - 2
        last = level == len(targets) - 1
        assert mixed == pytest.approx(target, rel=1e-6 if exact else 0.25 if last else 0.1)


@pytest.mark.parametrize("tokens", [0, 1, 5, 128])
def test_grades_are_written_and_read(tokens: int) -> None:
    found = graded(text_like(tokens, 9, POSITION))
    data = packed(found.marks)
    assert len(data) == -(-tokens // 4)
    assert (unpacked(data, tokens) == found.marks).all()
    again, groups = empty_groups(GRADED, found.marks, 0), found.groups(GRADED, 0)
    assert [group.grade for group in again] == [group.grade for group in groups]
    for one, other in zip(groups, again, strict=True):
        assert (one.tokens == other.tokens).all()


def test_the_rig_has_every_grade_and_each_token_is_in_one_group() -> None:
    found = graded(text_like(TOKENS, 9, POSITION))
    assert np.unique(found.marks).tolist() == list(range(GRADES))
    groups = found.groups(GRADED, 0)
    assert [group.grade for group in groups] == list(range(ANCHOR))
    places = np.concatenate([group.tokens for group in groups])
    assert sorted(places.tolist()) == np.flatnonzero(found.marks < ANCHOR).tolist()


def test_a_higher_grade_has_a_smaller_error_at_every_level() -> None:
    block, place = text_like(TOKENS, 9, POSITION), place_at(POSITION)
    for level, codec in enumerate(codecs_of(GRADED)):
        out = torch.empty(codec.bound(block.numel() * 2), dtype=torch.uint8)
        segments = codec.encode(block, out, place)
        back = torch.empty_like(block)
        codec.decode(out[: sum(segments)], segments, back, place)
        lost = (back.float() - block.float()).square().sum((0, 1, 3, 4))
        marks = torch.from_numpy(graded(block, level).marks)
        means = [float(lost[marks == grade].mean()) for grade in range(ANCHOR)]
        plans = [GRADED.plan(level, grade) for grade in range(ANCHOR)]
        for number in range(1, ANCHOR):
            if plans[number] > plans[number - 1]:
                assert means[number] < 0.8 * means[number - 1]


def test_anchors_are_whole_in_the_first_segment() -> None:
    block, place = text_like(TOKENS, 9, POSITION), place_at(POSITION)
    at = torch.from_numpy(graded(block).marks == ANCHOR)
    assert 0 < int(at.sum()) < TOKENS / 4
    codec, errors = codecs_of(GRADED)[-1], []
    out = torch.empty(codec.bound(block.numel() * 2), dtype=torch.uint8)
    segments = codec.encode(block, out, place)
    for count in range(1, len(segments) + 1):
        back, some = torch.empty_like(block), segments[:count]
        codec.decode(out[: sum(some)], some, back, place)
        lost = (back[:, :, at].float() - block[:, :, at].float()).norm()
        errors.append(float(lost / block[:, :, at].float().norm()))
    assert errors[0] < 0.25
    assert errors == pytest.approx([errors[0]] * len(errors), rel=0.02)


def test_anchors_that_are_like_no_others_come_back_too() -> None:
    keys, values = (torch.randn(3, GRADED.anchors.offset.shape[1]) * 1000 for _ in range(2))
    stream = GRADED.anchors.encode((keys, values))
    found = GRADED.anchors.decode(stream, 3)
    again = GRADED.anchors.coefficients((found[0], found[1]))
    exact = GRADED.anchors.coefficients((keys, values))
    assert float((again - exact).abs().max()) < 1.0


def test_anchors_get_the_bits_that_they_may_take() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2, 400, 128, generator=generator) + 2
    unweights = torch.eye(16).expand(2, 8, 16, 16)
    held = torch.arange(400) % 8 == 7
    errors = []
    for bits in (300.0, 600.0, 1200.0):
        anchors, taken = fit_anchors(rows, held, unweights, bits)
        assert taken == pytest.approx(bits, rel=0.05)
        fresh = torch.randn(2, 50, 128, generator=generator) + 2
        stream = anchors.encode((fresh[0], fresh[1]))
        assert 16 * len(stream[1]) / 50 == pytest.approx(bits, rel=0.15)
        errors.append(float((anchors.decode(stream, 50) - fresh).square().mean()))
    assert errors[1] < 0.6 * errors[0]
    assert errors[2] < 0.35 * errors[1]


def test_grades_that_are_cut_off_are_refused() -> None:
    codec, place = codecs_of(GRADED)[0], place_at(POSITION)
    out = torch.empty_like(text_like(9, 1))
    with pytest.raises(CodecError, match="9 grades"):
        codec.decode(torch.zeros(2, dtype=torch.uint8), (2,), out, place)


def test_the_last_plan_is_the_finest_for_all() -> None:
    levels = len(GRADED.header.ratios)
    assert [GRADED.plan(0, grade) for grade in range(ANCHOR)] == [0, 1, 2]
    assert [GRADED.plan(levels - 1, grade) for grade in range(ANCHOR)] == [2, 3, 3]


def test_the_cost_of_a_token_is_that_beside_usual_ones() -> None:
    generator = torch.Generator().manual_seed(1)
    slopes = [torch.randn(6, 400, 2, 16, generator=generator) for _ in range(2)]
    for side in slopes:
        side.mul_(torch.rand(6, 1, 2, 1, generator=generator) + 0.01)  # heads differ
        side[:, 7] *= 30.0
        side[:, 9] *= 0.1
    cost = cost_of(slopes)
    assert float(cost[7]) == pytest.approx(900.0, rel=0.2)
    assert float(cost[9]) == pytest.approx(0.01, rel=0.2)
    assert float(cost.median()) == pytest.approx(1.0, rel=0.05)
