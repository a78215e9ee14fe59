"""The bit plan of kvtc: optimal where every plan can be tried, within budget, nested."""

import itertools

import numpy as np
import pytest

from tierkv_codecs import kvtc_plan
from tierkv_codecs.kvtc_calibrate import nested_plans
from tierkv_codecs.kvtc_plan import Choices, solve, split

TYPES = 4


def choices(components: int, seed: int) -> Choices:
    """Return costs that fall with the component and rise with the fineness of the type."""
    draw = np.random.default_rng(seed)
    energy = np.sort(draw.uniform(0.5, 40, components))[::-1]
    bits = np.sort(draw.uniform(0, 5, (components, TYPES)), axis=1)[:, ::-1].copy()
    bits[:, -1] = 0
    return Choices(energy[:, None] * 4.0**-bits, bits)


def cost(of: Choices, plan: tuple[int, ...]) -> tuple[float, int]:
    rows = np.arange(len(plan))
    return float(of.error[rows, plan].sum()), int(np.ceil(of.bits[rows, plan] - 1e-6).sum())


@pytest.mark.parametrize("seed", range(5))
def test_no_plan_of_single_components_is_better(seed: int) -> None:
    of = choices(6, seed)
    table = solve(of, 20)
    every = [cost(of, plan) for plan in itertools.product(range(TYPES), repeat=6)]
    for budget in range(21):
        least = min(error for error, bits in every if bits <= budget)
        assert table.error[budget] == pytest.approx(least)
        found = cost(of, tuple(table.plan(budget)))
        assert found[0] == pytest.approx(least)
        assert found[1] <= budget


def test_no_cut_into_groups_is_better() -> None:
    of = choices(32, 9)
    table = solve(of, 60)
    pieces = [[(0, 16)], [(at, at + 1) for at in range(16)]]
    best = dict.fromkeys(range(61), np.inf)
    for first, second in itertools.product(range(2), repeat=2):
        cut = pieces[first] + [(16 + a, 16 + b) for a, b in pieces[second]]
        if first == second == 1:
            continue  # 2^64 plans of single components; groups are what is tried here
        singles = [group for group in cut if group[1] - group[0] == 1]
        wide = [group for group in cut if group[1] - group[0] > 1]
        for kinds in itertools.product(range(TYPES), repeat=len(wide)):
            error = sum(of.error[a:b, kind].sum() for (a, b), kind in zip(wide, kinds, strict=True))
            bits = sum(
                int(np.ceil(of.bits[a:b, kind].sum() - 1e-6))
                for (a, b), kind in zip(wide, kinds, strict=True)
            )
            rest = np.array([a for a, _ in singles], int)
            inner = solve(Choices(of.error[rest], of.bits[rest]), 60) if len(rest) else None
            for budget in range(bits, 61):
                more = inner.error[budget - bits] if inner else 0.0
                best[budget] = min(best[budget], error + more)
    for budget in range(61):
        assert table.error[budget] <= best[budget] + 1e-9


def test_sides_share_a_budget_best() -> None:
    one, two = solve(choices(5, 1), 20), solve(choices(5, 2), 20)
    share = split(one, two, 20)
    assert sum(share) == 20
    least = min(one.error[at] + two.error[20 - at] for at in range(21))
    assert one.error[share[0]] + two.error[share[1]] == pytest.approx(least)


def test_plans_nest_and_keep_their_budgets() -> None:
    sides = [tuple(choices(48, seed)) for seed in (3, 4)]
    budgets = [40, 90, 200]
    plans = nested_plans(sides, budgets)  # type: ignore[arg-type]
    for number, budget in enumerate(budgets):
        spent = 0.0
        for (_, bits), shifts in zip(sides, plans, strict=True):
            spent += np.take_along_axis(bits, shifts[number][:, None].astype(int), 1).sum()
        assert 0.8 * budget < spent <= budget
    for shifts in plans:
        assert (shifts[1:] <= shifts[:-1]).all()
        assert set(kvtc_plan.SIZES) == {1, 16, 64, 256, 1024}
