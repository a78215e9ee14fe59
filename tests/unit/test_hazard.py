"""Hazard: rates that are known are found, and what is dead is seen to be dead."""

import numpy as np
import pytest

from tierkv.policies.hazard import Hazard

LIVE, DEAD, LATE = 0, 1, 2


def played(seed: int = 0) -> tuple[Hazard, float]:
    """Play contexts of three kinds: used at 0.01 a second, never, and after 60 to 90 s of rest."""
    rng = np.random.default_rng(seed)
    uses = []
    hazard = Hazard(3)
    for context in range(3000):
        start = context * 1.0
        kind = context % 3
        hazard.begin(context, kind, start)
        if kind == LIVE:
            uses.append((start + rng.exponential(100.0), context))
        elif kind == LATE:
            uses.append((start + rng.uniform(60, 90), context))
    for at, context in sorted(uses):
        hazard.used(context, at)
    now = 3600.0
    hazard.refit(now)
    return hazard, now


def test_a_constant_rate_is_found_at_any_age() -> None:
    hazard, now = played()
    contexts = np.array([3000, 3001])
    for context, age in zip(contexts.tolist(), (1.0, 110.0), strict=True):
        hazard.begin(context, LIVE, now - age)
    assert hazard.rate(contexts, now) == pytest.approx([0.01, 0.01], rel=0.25)


def test_what_never_comes_back_has_no_rate() -> None:
    hazard, now = played()
    for context, age in ((3000, 1.0), (3001, 1000.0)):
        hazard.begin(context, DEAD, now - age)
    young, old = hazard.rate(np.array([3000, 3001]), now)
    assert young < 0.01 / 5
    assert old < 0.01 / 1000


def test_a_use_to_come_is_worth_waiting_for() -> None:
    """At age 0 the hazard is nought, yet within 90 s a use is certain."""
    hazard, now = played()
    for context, age in ((3000, 0.0), (3001, 50.0), (3002, 200.0)):
        hazard.begin(context, LATE, now - age)
    fresh, soon, past = hazard.rate(np.array([3000, 3001, 3002]), now)
    assert 1 / 100 < fresh < 1 / 60
    assert soon > 2 * fresh
    assert past < fresh / 3


def test_the_least_rate_since_the_use_does_not_rise() -> None:
    """What was worth little at once was given up then, however soon its use is now."""
    hazard, now = played()
    for context, age in ((3000, 0.0), (3001, 50.0)):
        hazard.begin(context, LATE, now - age)
    contexts = np.array([3000, 3001])
    fresh, soon = hazard.rate(contexts, now)
    assert soon > 2 * fresh
    assert hazard.rate(contexts, now, least=True) == pytest.approx([fresh, fresh])


def test_spells_still_open_count() -> None:
    """Without them a category that is used at once or never would look alive for ever."""
    hazard = Hazard(1)
    for context in range(200):
        hazard.begin(context, 0, 0.0)
        if context % 2:
            hazard.used(context, 1.0)
    hazard.refit(5000.0)
    assert hazard.rate(np.array([0]), 5000.0)[0] < 1e-4


def test_a_spell_ends_once() -> None:
    hazard = Hazard(1)
    hazard.begin(0, 0, 0.0)
    hazard.used(0, 10.0)
    before = hazard.table.copy()
    hazard.used(0, 20.0)
    hazard.refit(20.0)
    once = hazard.table.copy()
    assert not np.array_equal(before, once)
    hazard.used(0, 30.0)
    hazard.refit(20.0)
    assert np.array_equal(once, hazard.table)


def test_what_was_told_dead_says_nothing_of_the_others() -> None:
    """Half of all are told dead at once, the others come after 100 s on average."""
    hazard, rng = Hazard(1), np.random.default_rng(0)
    for context in range(2000):
        hazard.begin(context, 0, float(context))
        if context % 2:
            hazard.until[context] = context
        else:
            hazard.used(context, context + rng.exponential(100.0))
    hazard.refit(4000.0)
    hazard.begin(2000, 0, 4000.0)
    hazard.begin(2001, 0, 4000.0)
    hazard.until[2001] = 4000.0
    open_one, told = hazard.rate(np.array([2000, 2001]), 4000.0)
    assert 0.009 < open_one < 0.015
    assert told == 0.0
