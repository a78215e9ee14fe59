"""Telling: a decision of the joint policy in numbers. Pure."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.codec import BY_NUMBER
from tierkv.explain import Choice, Terms
from tierkv.plan import Kind
from tierkv.policies.steps import Steps
from tierkv.policies.worth import gains, losses

MOST_CHOICES = 12


class Facts(NamedTuple):
    """What a decision about one placement rests on.

    `current` is the set of copies of its block, `allowed` the forms that may be made, as bits;
    `rate` is uses per second, `density` seconds of prefill for a raw byte; `raw_bytes` 0: unknown.
    """

    key: bytes
    tiers: tuple[str, ...]
    tier: int
    nbytes: int
    current: int
    allowed: int
    rate: float
    density: float
    pinned: bool
    raw_bytes: float
    behind: int
    price: npt.NDArray[np.float64]


def tell(steps: Steps, facts: Facts) -> Terms:
    """Return the terms of a placement: what it earns, and what each step would leave and lose."""
    known, raw = steps.known, facts.raw_bytes
    current = np.array([facts.current])
    ways = known.relief(facts.tier, current)
    barred = steps.barred(facts.tier, np.array([facts.allowed]), current, ways, set(Kind))
    rate, density, nothing = np.array([facts.rate]), np.array([facts.density]), np.array([0])
    loss, freed = losses(known, facts.price, facts.tier, rate, density, current, ways)
    earns = gains(known, facts.price, rate, density, nothing, ways)
    now = gains(known, facts.price, rate, density, nothing, current[:, None])
    choices = []
    for at in np.flatnonzero(~barred[0] & (freed[0] > 0)).tolist():
        kind, where, profile = steps.read(facts.tier, facts.current, int(ways[0, at]))
        made = f" as {BY_NUMBER[profile].name} in {facts.tiers[where]}" if profile else ""
        choices.append(
            Choice(
                does=f"{kind.name.lower()}{made}",
                leaves=steps.say(facts.tiers, int(ways[0, at])),
                earns=float(earns[0, at]) * raw,
                loss_per_byte=float(loss[0, at]),
            )
        )
    numbers = {
        "uses_per_s": facts.rate,
        "raw_bytes": raw,
        "recompute_s": facts.density * raw,
        "load_s": float(known.seconds[facts.current]) * raw if facts.current else 0.0,
        "earns": float(now[0, 0]) * raw,
        "behind_blocks": float(facts.behind),
        "pinned": float(facts.pinned),
    }
    for name, price in zip(facts.tiers, facts.price.tolist(), strict=True):
        numbers[f"price_{name}_per_byte"] = price
    because = f"there was {steps.say(facts.tiers, facts.current)}"
    if not raw:
        because += "; nobody has asked for its chain since the start"
    choices.sort(key=lambda one: one.loss_per_byte)
    return Terms(because, numbers, tuple(choices[:MOST_CHOICES]))
