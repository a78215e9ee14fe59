"""Choice: which policy a store runs, by its settings.

`auto`: the joint policy where a gate lets it choose between fidelities, else LRU.
"""

from collections.abc import Sequence
from typing import Protocol

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


def policy_for(
    setting: str, gate: Gate | None, rates: Sequence[Rates], tiers: Sequence[Room]
) -> ServicePolicy:
    """Return the policy that a setting means, told of nothing, over tiers, nearest first.

    Raises: TierKVError (invalid).
    """
    if resolve(setting, gate) == Joint.name:
        capacity = [tier.space().capacity for tier in tiers]
        return Joint(rates, capacity, [tier.granule for tier in tiers])
    return Lru(len(rates))
