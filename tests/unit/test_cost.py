"""The cost model: seconds from bytes, rates and positions, checked against figures by hand."""

import pytest

from tierkv.codec import LOSSLESS, RAW
from tierkv.cost import Rates, Recompute, load_seconds, pick_profile

DISK = Rates(latency_s=1e-4, read_bps=1e9, write_bps=1e9)


def test_a_load_is_latency_and_transfer_and_decode() -> None:
    assert load_seconds(10**9, 2 * 10**9, DISK, 4e9) == pytest.approx(1e-4 + 1.0 + 0.5)
    assert load_seconds(10**9, 2 * 10**9, DISK, float("inf")) == pytest.approx(1e-4 + 1.0)


def test_nothing_costs_nothing() -> None:
    assert load_seconds(0, 0, DISK, 1e9) == 0.0
    assert Recompute(0, 0).seconds(1000, 5) == 0.0


def test_recompute_grows_with_position() -> None:
    cost = Recompute(linear=1e-4, quadratic=1e-8)
    assert cost.seconds(100, 0) == pytest.approx(1e-2 + 1e-8 * 5000)
    assert cost.seconds(100, 1000) == pytest.approx(1e-2 + 1e-8 * (100_000 + 5000))


@pytest.mark.parametrize("cut", [1, 64, 500, 999])
def test_recompute_of_two_halves_is_that_of_the_whole(cut: int) -> None:
    cost = Recompute(linear=3e-5, quadratic=7e-9)
    halves = cost.seconds(cut, 40) + cost.seconds(1000 - cut, 40 + cut)
    assert halves == pytest.approx(cost.seconds(1000, 40))


@pytest.mark.parametrize(
    ("linear", "quadratic", "known"), [(0, 0, False), (1e-5, 0, True), (0, 1e-9, True)]
)
def test_zeros_are_unknown(linear: float, quadratic: float, known: bool) -> None:
    assert Recompute(linear, quadratic).known is known


def test_lossless_pays_only_on_slow_tiers() -> None:
    """Below decode_bps * (ratio - 1) / ratio: 2.5e9 * 0.45 / 1.45 = 0.776e9."""
    limit = LOSSLESS.decode_bps * (LOSSLESS.ratio - 1) / LOSSLESS.ratio
    assert pick_profile([RAW, LOSSLESS], limit * 0.99) is LOSSLESS
    assert pick_profile([RAW, LOSSLESS], limit * 1.01) is RAW
    assert pick_profile([RAW], 1e3) is RAW


def test_ties_go_to_the_first() -> None:
    assert pick_profile([RAW, RAW], 1e9) is RAW
