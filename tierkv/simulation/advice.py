"""Advice: which tiers and profiles pay for a model and hardware, and what more of a tier buys.

Break-even is the raw bytes per second above which loading beats computing; compression moves a tier
across it, since a load is stored bytes over bandwidth plus raw bytes over decode rate, after the
tier's latency once. Bytes held is how much raw KV a tier keeps in a form; seconds per GiB is how
much prefill one GiB of it can save each time all of it is used.
"""

import math
from typing import NamedTuple

from tierkv.policies.configurations import Form
from tierkv.simulation.scenario import GIB, Scenario

POSITIONS = (0, 8192, 32768, 131072)
"""Where a run begins, in tokens: prefill costs more the further back."""
RUN_TOKENS = 2048


class BreakEven(NamedTuple):
    """Raw bytes per second at which loading a run takes as long as computing it."""

    position: int
    raw_bps: float


class Worth(NamedTuple):
    """A form in a tier, for a run of `RUN_TOKENS` at a position.

    `least_tokens` is the shortest run that loads faster than it is computed, None where none does.
    """

    tier: str
    form: str
    load_s: float
    saved_s: float
    least_tokens: int | None
    saved_s_per_gib: float


def break_even(scenario: Scenario) -> list[BreakEven]:
    """Return the rate for runs at POSITIONS."""
    raw = RUN_TOKENS * scenario.model.bytes_per_token
    return [
        BreakEven(position, raw / scenario.recompute.seconds(RUN_TOKENS, position))
        for position in POSITIONS
    ]


def worth(scenario: Scenario, fidelity: str, position: int) -> list[Worth]:
    """Return every form of a class in every tier, tiers as in the scenario, best form first."""
    found = []
    for number, tier in enumerate(scenario.tier):
        rate = scenario.rates[number]
        forms = [
            _worth(scenario, tier.name, form, rate.latency_s, rate.read_bps, position)
            for form in scenario.forms(fidelity)
        ]
        found += sorted(forms, key=lambda one: -one.saved_s)
    return found


def _worth(
    scenario: Scenario, tier: str, form: Form, latency_s: float, read_bps: float, position: int
) -> Worth:
    per_token = scenario.model.bytes_per_token * (1 / (form.ratio * read_bps) + 1 / form.decode_bps)
    load = latency_s + RUN_TOKENS * per_token
    saved = scenario.recompute.seconds(RUN_TOKENS, position) - load
    linear = scenario.recompute.linear + scenario.recompute.quadratic * position - per_token
    held = GIB * form.ratio / scenario.model.bytes_per_token / RUN_TOKENS
    return Worth(
        tier,
        form.name,
        load,
        saved,
        _least_tokens(linear, scenario.recompute.quadratic / 2, latency_s),
        max(saved, 0.0) * held,
    )


def _least_tokens(linear: float, square: float, latency_s: float) -> int | None:
    """Return the least n with linear n + square n^2 > latency."""
    if square == 0:
        return math.ceil(latency_s / linear) if linear > 0 else None
    root = math.sqrt(linear * linear + 4 * square * latency_s)
    return max(1, math.ceil((root - linear) / (2 * square)))
