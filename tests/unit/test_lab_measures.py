"""The lab's measures against numbers computed by hand, and intervals that do not depend on luck."""

import math

import numpy as np
import pytest
import torch

from tierkv_codecs.lab import measures
from tierkv_codecs.lab.measures import Interval


def logs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_predictions_by_hand() -> None:
    reference = logs([0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.3, 0.5])
    found = logs([0.25, 0.5, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6])
    one = measures.compare(reference, found, torch.tensor([0, 1, 1]))
    kl = [
        0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5),
        0.0,
        0.3 * math.log(0.3 / 0.2) + 0.5 * math.log(0.5 / 0.6),
    ]
    assert one.kl == pytest.approx(kl, abs=1e-6)
    assert one.agree.tolist() == [0.0, 1.0, 1.0]
    assert one.dnll == pytest.approx([math.log(2), 0.0, math.log(1.5)], abs=1e-6)
    assert one.right.tolist() == [0.0, 1.0, 0.0]


def test_equal_predictions_have_no_loss_at_all() -> None:
    same = torch.log_softmax(torch.randn(50, 1000, generator=torch.Generator().manual_seed(1)), -1)
    one = measures.compare(same, same, same.argmax(-1))
    assert one.kl.max() == one.dnll.max() == 0.0
    assert one.agree.min() == one.right.min() == 1.0


def test_kl_is_never_below_zero() -> None:
    draw = torch.Generator().manual_seed(2)
    exact = torch.randn(200, 5000, generator=draw)
    reference = torch.log_softmax(exact, -1)
    found = torch.log_softmax(exact + 1e-6 * torch.randn(exact.shape, generator=draw), -1)
    assert measures.compare(reference, found, reference.argmax(-1)).kl.min() >= 0.0


def test_relative_error_by_hand() -> None:
    exact, restored = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert measures.relative_error(exact, restored) == (0.25, 25.0)
    assert measures.relative_error(exact, exact) == (0.0, 25.0)


def test_mean_is_over_tokens_and_its_interval_over_sequences() -> None:
    short, long = np.array([1.0]), np.array([0.0, 0.0, 0.0])
    found = measures.mean([short, long])
    assert found.value == 0.25
    assert (found.lo, found.hi) == (0.0, 1.0), "either sequence may be drawn alone"
    assert measures.mean([short, short]) == Interval(1.0, 1.0, 1.0)


def test_p99_is_the_least_value_that_99_percent_do_not_exceed() -> None:
    hundred = np.arange(1.0, 101.0)
    assert measures.p99([hundred]) == Interval(99.0, 99.0, 99.0)
    assert measures.p99([hundred[:50], hundred[50:]]).value == 99.0
    assert measures.p99([hundred[:5]]).value == 5.0
    draw = np.random.default_rng(3)
    values = [draw.exponential(size=n) for n in (40, 128, 90)]
    expected = np.quantile(np.concatenate(values), 0.99, method="inverted_cdf")
    found = measures.p99(values)
    assert found.value == expected
    assert found.lo <= found.value <= found.hi


def test_intervals_narrow_with_more_sequences() -> None:
    draw = np.random.default_rng(4)
    values = [draw.exponential(size=16) * draw.exponential() for _ in range(64)]
    few, many = measures.mean(values[:8]), measures.mean(values)
    assert few.hi - few.lo > 1.5 * (many.hi - many.lo)
    assert many.lo < many.value < many.hi


def test_intervals_are_the_same_every_time() -> None:
    draw = np.random.default_rng(5)
    values = [draw.exponential(size=16) for _ in range(8)]
    assert measures.mean(values) == measures.mean(values)
    assert measures.p99(values) == measures.p99(values)
    assert (measures.draws(8) == measures.draws(8)).all()
    assert (measures.draws(8).sum(1) == 8).all()


def test_ratio_is_paired() -> None:
    draw = np.random.default_rng(6)
    wild = [draw.exponential(size=16) * scale for scale in (0.01, 0.1, 1, 10, 100, 1000)]
    double = [2 * one for one in wild]
    assert measures.ratio(double, wild) == pytest.approx((2.0, 2.0, 2.0))
    free = measures.mean(wild)
    assert free.hi > 2 * free.value, "unpaired, these sequences would say nothing"
    found = measures.ratio(wild, list(reversed(wild)))
    assert found.lo < 1 < found.hi


def test_ratio_with_nothing_below() -> None:
    none, some = [np.zeros(4)] * 4, [np.ones(4)] * 4
    assert measures.ratio(none, none) == Interval(1.0, 1.0, 1.0)
    assert measures.ratio(some, none) == Interval(math.inf, math.inf, math.inf)
    assert measures.ratio(none, some) == Interval(0.0, 0.0, 0.0)
