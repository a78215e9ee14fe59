"""Configurations: sizes and times by hand, and no step that makes a copy of what is not there."""

import itertools

import numpy as np
import pytest

from tierkv.cost import Rates
from tierkv.policies.configurations import ABSENT, Configurations, Form

RAW = Form("raw", 1.0, float("inf"))
LOSSLESS = Form("lossless", 1.45, 20e9)
INT8 = Form("int8", 1.88, 200e9, kl=4e-5)
INT4 = Form("int4", 3.2, 200e9, kl=0.01)
KVTC = [Form(f"kvtc{ratio}", ratio, 40e9, 1e-3 * ratio, progressive=True) for ratio in (9, 18, 36)]
RATES = [Rates(20e-6, 50e9, 50e9), Rates(100e-6, 6.5e9, 6.5e9)]


@pytest.fixture(scope="module")
def known() -> Configurations:
    return Configurations([RAW, LOSSLESS, INT8, INT4, *KVTC], RATES)


def reached(known: Configurations) -> set[int]:
    """Return every configuration that stores and reclaims lead to."""
    seen, todo = {0}, [0]
    while todo:
        numbers = np.array([todo.pop()])
        steps = [known.stores(numbers, at_hand=hand) for hand in (False, True)]
        steps += [known.relief(tier, numbers) for tier in range(known.tiers)]
        for step in itertools.chain.from_iterable(one.ravel().tolist() for one in steps):
            if step != ABSENT and step not in seen:
                seen.add(step)
                todo.append(step)
    return seen


def copies(known: Configurations, number: int) -> list[tuple[int, Form]]:
    """Return the copies of a configuration with their tiers."""
    return [
        (slot // 2, known.families[slot % 2][digit - 1])
        for slot, digit in enumerate(known.digits(number))
        if digit
    ]


def test_times_and_sizes_of_copies(known: Configurations) -> None:
    one, other = known.named(0, "int8"), known.named(1, "kvtc9")
    both = one + other
    assert known.seconds[one] == pytest.approx(1 / (1.88 * 50e9) + 1 / 200e9)
    assert known.seconds[other] == pytest.approx(1 / (9 * 6.5e9) + 1 / 40e9)
    assert known.seconds[both] == known.seconds[one]
    assert known.stored[both].tolist() == pytest.approx([1 / 1.88, 1 / 9])
    assert known.forms[known.source[both, 1]].name == "int8"
    assert known.source[both, 0] == 0
    assert known.seconds[0] == np.inf
    assert known.number(known.digits(both)) == both


def test_what_is_at_hand_decides_what_can_be_made(known: Configurations) -> None:
    int8 = np.array([known.named(0, "int8")])
    lossy = {
        form.name
        for step in known.stores(int8, at_hand=False)[0].tolist()
        if step != ABSENT
        for _, form in copies(known, step)
    }
    assert lossy == {"int8"}
    exact = {
        form.name
        for step in known.stores(int8, at_hand=True)[0].tolist()
        if step != ABSENT
        for _, form in copies(known, step)
    }
    assert exact == {form.name for form in known.forms}


def test_no_lossy_copy_of_a_lossy_one_but_by_truncation(known: Configurations) -> None:
    for number in reached(known):
        before = copies(known, number)
        exact = any(form.exact for _, form in before)
        numbers = np.array([number])
        for tier in range(known.tiers):
            for step in known.relief(tier, numbers)[0].tolist():
                if step == ABSENT:
                    continue
                for copy in set(copies(known, step)) - set(before):
                    form = copy[1]
                    same = any(form == other for _, other in before)
                    finer = any(
                        form.progressive and other.progressive and other.ratio <= form.ratio
                        for _, other in before
                    )
                    assert same or finer or (exact and not form.progressive)


def test_relief_frees_bytes_of_its_tier(known: Configurations) -> None:
    for number in reached(known):
        for tier in range(known.tiers):
            steps = known.relief(tier, np.array([number]))[0]
            steps = steps[steps != ABSENT]
            assert np.all(known.stored[steps, tier] < known.stored[number, tier])
            assert bool(len(steps)) == (known.stored[number, tier] > 0)


def test_a_store_keeps_what_is_there_or_makes_it_finer(known: Configurations) -> None:
    for number in reached(known):
        for hand in (False, True):
            steps = known.stores(np.array([number]), at_hand=hand)[0]
            assert steps[0] == number
            before = np.array(known.digits(number))
            for step in steps[steps != ABSENT].tolist():
                after = np.array(known.digits(step))
                assert np.all((before == 0) | ((after > 0) & (after <= before)))


def test_a_plain_copy_stands_beside_a_progressive_one_where_it_can(known: Configurations) -> None:
    for step in known.stores(np.array([0]), at_hand=True)[0].tolist():
        if step > 0:
            assert known.progressive[step]
    only = Configurations([RAW, INT8], RATES)
    assert len([step for step in only.stores(np.array([0]), at_hand=True)[0] if step > 0]) == 4


def test_an_exact_copy_becomes_progressive_on_its_way_down_where_somebody_encodes(
    known: Configurations,
) -> None:
    does = Configurations([RAW, LOSSLESS, INT8, INT4, *KVTC], RATES, encodes_down=True)
    for name, found in (("raw", 3), ("lossless", 3), ("int8", 0), ("kvtc9", 0)):
        start = np.array([does.named(0, name)])
        old, new = (set(one.relief(0, start)[0].tolist()) - {ABSENT} for one in (known, does))
        assert old < new if found else old == new
        assert {does.named(1, one.name) for one in KVTC} & (new - old) == new - old
        assert len(new - old) == found
    both = does.named(0, "raw") + does.named(1, "kvtc18")
    steps = does.relief(0, np.array([both]))[0].tolist()
    assert does.named(1, "kvtc9") in steps
    assert does.named(1, "kvtc36") not in steps, "what is there is finer"
