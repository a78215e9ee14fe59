"""Grades of kvtc: costly tokens are told, cost more bits, and come back with smaller errors."""

import numpy as np
import pytest
import torch

from tests.kvtc_rigs import LAYERS, SPEC, artifact, place_at, text_like
from tierkv_codecs.codec import CodecError
from tierkv_codecs.kvtc import codecs_of
from tierkv_codecs.kvtc_artifact import GRADES, USUAL
from tierkv_codecs.kvtc_grades import Group, groups_of, packed, unpacked
from tierkv_codecs.kvtc_heed import AHEAD, budgets_of, fit_heed
from tierkv_codecs.kvtc_rows import rows_of
from tierkv_connectors.calibration import cost_of

TOKENS, POSITION = 128, 512
GRADED = artifact(graded=True)


def groups(block: torch.Tensor, level: int = 0) -> list[Group[np.int16]]:
    keys, values = (side.mean for side in GRADED.sides)
    rows = rows_of(block, (SPEC,) * LAYERS, POSITION, (keys, values))
    return groups_of(GRADED, rows, level)


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


@pytest.mark.parametrize("shares", [(0.0, 1.0, 0.0, 0.0), (0.25, 0.5, 0.22, 0.03)])
def test_budgets_add_up_to_what_levels_may_take(shares: tuple[float, ...]) -> None:
    targets = [100.0, 200.0, 400.0, 800.0]
    plans = budgets_of(targets, shares)
    assert plans == sorted(plans)
    assert len(plans) == len(targets) + 1
    for level, target in enumerate(targets):
        mixed = sum(
            share * plans[min(level + AHEAD[grade], len(targets))]
            for grade, share in enumerate(shares)
        )
        exact = shares[USUAL] == 1.0 or level == len(targets) - 2
        last = level == len(targets) - 1
        assert mixed == pytest.approx(target, rel=1e-6 if exact else 0.2 if last else 0.1)


@pytest.mark.parametrize("tokens", [0, 1, 5, 128])
def test_grades_are_written_and_read(tokens: int) -> None:
    found = groups(text_like(tokens, 9, POSITION))
    data = packed(found)
    assert len(data) == -(-tokens // 4)
    again = unpacked(GRADED, data, tokens, 0)
    assert [group.grade for group in again] == [group.grade for group in found]
    for one, other in zip(found, again, strict=True):
        assert (one.tokens == other.tokens).all()


def test_the_rig_has_every_grade_and_each_token_is_in_one_group() -> None:
    found = groups(text_like(TOKENS, 9, POSITION))
    assert [group.grade for group in found] == list(range(GRADES))
    places = torch.cat([torch.from_numpy(group.tokens) for group in found])
    assert sorted(places.tolist()) == list(range(TOKENS))


def test_a_higher_grade_has_a_smaller_error_at_every_level() -> None:
    block, place = text_like(TOKENS, 9, POSITION), place_at(POSITION)
    for level, codec in enumerate(codecs_of(GRADED)):
        out = torch.empty(codec.bound(block.numel() * 2), dtype=torch.uint8)
        segments = codec.encode(block, out, place)
        back = torch.empty_like(block)
        codec.decode(out[: sum(segments)], segments, back, place)
        lost = (back.float() - block.float()).square().sum((0, 1, 3, 4))
        means = [
            float(lost[torch.from_numpy(group.tokens)].mean()) for group in groups(block, level)
        ]
        plans = [GRADED.plan(level, grade) for grade in range(GRADES)]
        for number in range(1, GRADES):
            if plans[number] > plans[number - 1]:
                assert means[number] < 0.8 * means[number - 1]


def test_grades_that_are_cut_off_are_refused() -> None:
    codec, place = codecs_of(GRADED)[0], place_at(POSITION)
    out = torch.empty_like(text_like(9, 1))
    with pytest.raises(CodecError, match="9 grades"):
        codec.decode(torch.zeros(2, dtype=torch.uint8), (2,), out, place)


def test_the_last_plan_is_the_finest_for_all() -> None:
    levels = len(GRADED.header.ratios)
    assert [GRADED.plan(0, grade) for grade in range(GRADES)] == [0, 1, 2, 3]
    assert [GRADED.plan(levels - 1, grade) for grade in range(GRADES)] == [2, 3, 3, 3]


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
