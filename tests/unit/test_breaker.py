"""The breaker, with the time passed in."""

import random

from tierkv.tiers.breaker import Breaker


def make(failures: int = 3, draw: float = 1.0) -> Breaker:
    return Breaker(failures=failures, first_s=0.5, most_s=4.0, draw=lambda: draw)


def opened(breaker: Breaker, now: float = 0.0) -> Breaker:
    for _ in range(3):
        assert breaker.allows(now)
        breaker.failed(now)
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = make()
    for _ in range(5):
        breaker.failed(0.0)
        breaker.failed(0.0)
        assert breaker.allows(0.0)
        breaker.succeeded()
    assert not opened(breaker).allows(0.0)


def test_one_call_tries_when_the_delay_is_over() -> None:
    breaker = opened(make())
    assert not breaker.allows(0.49)
    assert breaker.allows(0.5)
    assert not breaker.allows(0.5)
    assert breaker.is_open
    breaker.succeeded()
    assert breaker.allows(0.5)
    assert breaker.allows(0.5)
    assert not breaker.is_open


def test_the_delay_doubles_up_to_its_limit_and_starts_over() -> None:
    breaker = opened(make())
    now = 0.0
    for delay in [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]:
        assert not breaker.allows(now + delay - 0.01)
        now += delay
        assert breaker.allows(now)
        breaker.failed(now)
    now += 4.0
    assert breaker.allows(now)
    breaker.succeeded()
    opened(breaker, now)
    assert breaker.allows(now + 0.5)


def test_delays_are_jittered_but_never_shorter_than_half() -> None:
    ends = []
    for seed in range(50):
        breaker = opened(
            Breaker(failures=3, first_s=1.0, most_s=4.0, draw=random.Random(seed).random)
        )
        ends.append(next(ms for ms in range(2000) if breaker.allows(ms / 1000)))
    assert min(ends) >= 500
    assert max(ends) <= 1000
    assert len(set(ends)) > 25


def test_calls_that_began_before_it_opened_do_not_lengthen_the_delay() -> None:
    breaker = opened(make())
    for _ in range(10):
        breaker.failed(0.1)
    assert breaker.allows(0.5)


def test_a_trial_that_never_reports_is_followed_by_another() -> None:
    breaker = opened(make())
    assert breaker.allows(0.5)
    assert not breaker.allows(4.4)
    assert breaker.allows(4.5)
