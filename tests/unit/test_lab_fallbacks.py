"""Which profile takes the blocks that another cannot: what a store would give them to."""

from typing import Any

import pytest

from tests.unit.test_gate import domain, entry
from tests.unit.test_lab_results import ARTIFACT, IDENTITY, tally
from tierkv.gate import Gate
from tierkv_codecs import CODECS
from tierkv_codecs.lab import results
from tierkv_codecs.lab.evaluate import Results, Suite
from tierkv_codecs.lab.fallbacks import candidates, settle
from tierkv_codecs.lab.yardsticks import YARDSTICKS

KVTC, DOMAINS = "kvtc@8x", ("prose", "spanish")
NEAR, SAFE, ECONOMY = 0.0005, 0.005, 0.04


def measured(own: float, with_other: dict[str, float], fixed: dict[str, float]) -> Results:
    """Return what was measured: `own` of kvtc with lossless blocks in Spanish, and with others."""
    profiles = (*fixed, KVTC)
    tallies = {
        (name, place): tally(name, place, kl) for name, kl in fixed.items() for place in DOMAINS
    }
    others = {}
    for place in DOMAINS:
        tallies[KVTC, place] = tally(KVTC, place, own, artifact=ARTIFACT)
        for other, kl in with_other.items():
            found = tally(KVTC, place, kl if place == "spanish" else own, artifact=ARTIFACT)
            found.fallback = other
            others[KVTC, place, other] = found
    for one in [tallies[KVTC, "spanish"], *others.values()]:
        if one.domain == "spanish":
            one.weight.fallbacks["foreign", one.fallback] = 6
    return Results(Suite("own", 4, 256, 10), profiles, DOMAINS, tallies, others)


def of(found: Results, old: Gate | None = None) -> str:
    """Return what kvtc's blocks fall back to."""
    settled = settle(found, IDENTITY, old or Gate())
    names = {settled.tallies[KVTC, place].fallback for place in DOMAINS}
    assert len(names) == 1
    assert not settled.others
    return names.pop()


@pytest.mark.parametrize(
    ("own", "int4", "expected"),
    [
        (SAFE, SAFE, "int4"),
        (NEAR, SAFE, "int8"),
        (ECONOMY, ECONOMY, "int4"),
        (SAFE, ECONOMY, "int8"),
        (0.2, NEAR, "lossless"),  # rejected, whatever takes the rest
    ],
)
def test_it_is_the_smallest_of_at_least_its_class(own: float, int4: float, expected: str) -> None:
    fixed = {"int8": NEAR, "int4": int4}
    assert of(measured(own, fixed, fixed)) == expected


def test_it_costs_the_profile_no_class() -> None:
    mixed = {"int8": SAFE, "int4": 0.011}  # the sum of two losses that each are safe
    assert of(measured(SAFE, mixed, {"int8": NEAR, "int4": SAFE})) == "int8"


def test_none_was_measured() -> None:
    assert of(measured(SAFE, {}, {})) == "lossless"


def test_what_a_gate_already_knows_counts() -> None:
    known: Any = entry(
        domain(), profile="int8", family=IDENTITY.family.hex(), kv_dtype="bf16", artifact=""
    )
    found = measured(SAFE, {"int8": SAFE}, {})
    assert of(found) == "lossless"
    assert of(found, Gate(entries=(known,))) == "int8"
    names = [one.name for one in candidates(CODECS.all(), [], Gate(entries=(known,)))]
    assert names == ["int8"]


def test_only_what_can_be_stored_without_calibration_is_a_fallback() -> None:
    every = (*CODECS.all(), *YARDSTICKS)
    assert {one.name for one in candidates(every, every, Gate())} == {"int8", "int4", "fp8"}


def test_the_share_is_that_of_each_domain() -> None:
    found = settle(measured(SAFE, {"int8": SAFE}, {"int8": NEAR}), IDENTITY, Gate())
    given = results.verdicts(found, results.entries(found, IDENTITY), Gate().thresholds)
    rows = {row.domain: row for row in results.rows(found, given) if row.profile == KVTC}
    assert (rows["prose"].fallback, rows["prose"].fallback_share) == ("", 0.0)
    assert (rows["spanish"].fallback, rows["spanish"].fallback_share) == ("int8", 0.75)
    (one,) = results.fallbacks(found)
    assert (one.fallback, one.reason, one.blocks) == ("int8", "foreign", 6)
