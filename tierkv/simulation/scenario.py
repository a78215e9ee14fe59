"""Scenario: the model, the tiers and the gate that a replay runs over, as a readable TOML file.

`h100-8b` and `small` come with tierkv (`tierkv/simulation/scenarios/`) and are the reference for
what a file may say: nothing else is accepted, and everything but decode and encode rates, `kl`,
`fidelity` and `progressive` must be there.
"""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tierkv.cost import Rates, Recompute
from tierkv.errors import invalid, unavailable
from tierkv.fidelity import CLASSES
from tierkv.policies.configurations import Form

GIB = 1 << 30
Positive = Annotated[float, msgspec.Meta(gt=0)]
AtLeastZero = Annotated[float, msgspec.Meta(ge=0)]
ClassName = Literal["exact", "near_lossless", "safe", "economy"]
MAX_FORMS = 8
MAX_CONFIGURATIONS = 1 << 20


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV bytes of a token, and seconds of prefill by tokens and by tokens times position."""

    bytes_per_token: Annotated[int, msgspec.Meta(ge=1)]
    prefill_s_per_token: Positive
    prefill_s_per_token_squared: AtLeastZero


class TierSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A modelled tier; bandwidth in 10^9 bytes per second."""

    name: str
    gib: Positive
    gb_per_s: Positive
    latency_us: AtLeastZero


class ProfileSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A profile and the class that its measured loss passes; rates in 10^9 raw bytes a second."""

    name: str
    ratio: Annotated[float, msgspec.Meta(ge=1)]
    decode_gb_per_s: Positive | None = None
    encode_gb_per_s: Positive | None = None
    kl: AtLeastZero = 0.0
    fidelity: ClassName = "exact"
    progressive: bool = False


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a replay needs but the trace; tiers fastest first."""

    model: Model
    tier: Annotated[list[TierSpec], msgspec.Meta(min_length=1, max_length=4)]
    profile: Annotated[list[ProfileSpec], msgspec.Meta(min_length=1, max_length=MAX_FORMS)]

    @property
    def rates(self) -> list[Rates]:
        """Return what each tier reads and writes at."""
        return [
            Rates(tier.latency_us / 1e6, tier.gb_per_s * 1e9, tier.gb_per_s * 1e9)
            for tier in self.tier
        ]

    @property
    def capacity(self) -> list[int]:
        """Return the bytes of each tier."""
        return [int(tier.gib * GIB) for tier in self.tier]

    @property
    def recompute(self) -> Recompute:
        """Return the seconds of prefill."""
        return Recompute(self.model.prefill_s_per_token, self.model.prefill_s_per_token_squared)

    def allowed(self, fidelity: str) -> list[ProfileSpec]:
        """Return the profiles that readers of a class accept."""
        least = CLASSES[fidelity]
        return [spec for spec in self.profile if CLASSES[spec.fidelity] >= least]

    def forms(self, fidelity: str) -> list[Form]:
        """Return them as a policy sees them."""
        return [
            Form(
                name=spec.name,
                ratio=spec.ratio,
                decode_bps=(spec.decode_gb_per_s or float("inf")) * 1e9,
                kl=spec.kl,
                progressive=spec.progressive,
            )
            for spec in self.allowed(fidelity)
        ]


def built_in() -> list[str]:
    """Return the names of the scenarios that come with tierkv."""
    folder = resources.files("tierkv.simulation") / "scenarios"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir())


def read_scenario(name: str) -> Scenario:
    """Read a built-in scenario by name or one's own by path.

    Raises: TierKVError (invalid, unavailable) naming what is wrong and where.
    """
    if name in built_in():
        file = resources.files("tierkv.simulation") / "scenarios" / f"{name}.toml"
        text = file.read_text("utf-8")
    else:
        try:
            text = Path(name).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            known = ", ".join(built_in())
            raise unavailable(
                f"scenario {name!r} is neither a file that can be read nor one of {known}"
            ) from None
    try:
        scenario = msgspec.convert(tomllib.loads(text), Scenario)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise invalid(
            f"scenario {name}: {error}; the built-in {built_in()[0]} shows what a file may say"
        ) from None
    _check(name, scenario)
    return scenario


def _check(name: str, scenario: Scenario) -> None:
    for what in (scenario.tier, scenario.profile):
        names = [one.name for one in what]
        if len(set(names)) < len(names):
            raise invalid(f"scenario {name}: two tiers or two profiles have one name")
    if all(spec.fidelity != "exact" for spec in scenario.profile):
        raise invalid(f"scenario {name}: give it an exact profile, such as raw with ratio 1")
    for spec in scenario.profile:
        if (spec.fidelity == "exact") != (spec.kl == 0):
            raise invalid(
                f"scenario {name}: profile {spec.name} is exact just when its kl is 0;"
                " set its fidelity or its kl"
            )
    plain = sum(not spec.progressive for spec in scenario.profile)
    count = ((plain + 1) * (len(scenario.profile) - plain + 1)) ** len(scenario.tier)
    if count > MAX_CONFIGURATIONS:
        raise invalid(
            f"scenario {name}: its tiers and profiles make {count} sets of copies, more than"
            f" {MAX_CONFIGURATIONS}; leave out a profile"
        )
