"""Choice: which policy a store runs, by its settings.

`auto`: the joint policy where a gate lets it choose between fidelities, else LRU.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tierkv.cost import Rates
from tierkv.errors import invalid
from tierkv.gate import Gate
from tierkv.policies.joint import Joint
from tierkv.policies.lru import Lru
from tierkv.policy import ServicePolicy
from tierkv.tier import Space

POLICIES = ("auto", Lru.name, Joint.name)


def resolve(name: str, gate: Gate | None) -> str:
    """Return the name of the policy that a setting means. Raises: TierKVError (invalid)."""
    if name not in POLICIES:
        raise invalid(f"policy {name[:80]!r} is not known; use one of {', '.join(POLICIES)}")
    if name != "auto":
        return name
    return Lru.name if gate is None else Joint.name


class Room(Protocol):
    """What a policy needs to know of a tier."""

    @property
    def granule(self) -> int:
        """Bytes that allocations are multiples of."""

    def space(self) -> Space:
        """Return its capacity, 0 where it has no bound."""


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """What a policy is made of: its name, and of each tier its rates, bytes and granule.

    `second_sight`: lower tiers take only what was asked for twice.
    """

    policy: str
    rates: list[Rates]
    capacity: list[int]
    granule: list[int]
    second_sight: bool = False


def open_policy(
    setting: str,
    gate: Gate | None,
    rates: Sequence[Rates],
    tiers: Sequence[Room],
    *,
    second_sight: bool = False,
) -> Opening:
    """Return what the policy of a setting is made of, over tiers, nearest first.

    Raises: TierKVError (invalid).
    """
    capacity = [tier.space().capacity for tier in tiers]
    name = resolve(setting, gate)
    if second_sight and name != Joint.name:
        raise invalid(
            f"second_sight is of policy {Joint.name}, not of {name}: set the one or unset the other"
        )
    granule = [tier.granule for tier in tiers]
    return Opening(name, list(rates), capacity, granule, second_sight)


def make_policy(opening: Opening) -> ServicePolicy:
    """Return a policy that was told of nothing."""
    if opening.policy == Joint.name:
        return Joint(
            opening.rates, opening.capacity, opening.granule, second_sight=opening.second_sight
        )
    return Lru(len(opening.rates))
