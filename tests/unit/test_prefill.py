"""The cost of prefill is found again in what an engine took, and is never negative."""

import itertools

import pytest

from tierkv_connectors.prefill import LEAST_TOKENS, PrefillCost


def seen(linear: float, quadratic: float, runs: list[tuple[int, int]]) -> PrefillCost:
    cost = PrefillCost()
    for position, tokens in runs:
        pairs = position * tokens + tokens * tokens / 2
        cost.observe(position, tokens, linear * tokens + quadratic * pairs)
    return cost


@pytest.mark.parametrize(("linear", "quadratic"), [(5e-3, 1e-6), (1e-4, 0.0), (0.0, 1e-7)])
def test_exact_costs_are_found_again(linear: float, quadratic: float) -> None:
    cost = seen(linear, quadratic, [(0, 500), (0, 3000), (2000, 600)])
    assert cost.linear == pytest.approx(linear, abs=1e-12)
    assert cost.quadratic == pytest.approx(quadratic, abs=1e-12)
    assert cost.seconds(1000, 400) == pytest.approx(linear * 400 + quadratic * 480_000)


def test_unknown_is_zero_and_short_runs_say_nothing() -> None:
    cost = PrefillCost()
    assert (cost.linear, cost.quadratic, cost.seconds(0, 1000)) == (0.0, 0.0, 0.0)
    cost.observe(2816, LEAST_TOKENS - 1, 1.0)
    cost.observe(0, 1000, 0.0)
    assert cost.seconds(0, 1000) == 0.0


def test_one_run_predicts_itself() -> None:
    cost = seen(5e-3, 0.0, [(0, 3000)])
    assert cost.seconds(0, 3000) == pytest.approx(15.0)


def test_noise_never_makes_a_coefficient_negative() -> None:
    for slow, fast in itertools.permutations([1.0, 7.0, 0.2], 2):
        cost = PrefillCost()
        cost.observe(0, 500, slow)
        cost.observe(0, 4000, fast)
        cost.observe(3000, 500, slow)
        assert cost.linear >= 0
        assert cost.quadratic >= 0
        assert cost.seconds(0, 2000) > 0


def test_old_runs_are_forgotten() -> None:
    cost = seen(5e-3, 0.0, [(0, 1000)] * 3)
    for _ in range(64):
        cost.observe(0, 1000, 1.0)
    assert cost.seconds(0, 1000) == pytest.approx(1.0)
