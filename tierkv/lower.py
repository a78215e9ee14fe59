"""Lower: a tier below RAM, as the store sees it."""

from dataclasses import dataclass

from tierkv.clock import Clock
from tierkv.cost import Rates
from tierkv.tier import DurableTier, RegionTier, SharedTier
from tierkv.wrap import Measured, Sealed

FIRST_RATES = {"nvme": Rates(1e-4, 1.0e9, 1.0e9), "redis": Rates(1e-3, 0.5e9, 0.5e9)}
"""What is assumed of a tier until it was used: cautious figures of a small machine."""


@dataclass(slots=True)
class Lower:
    """A tier below RAM with what the store knows of it."""

    number: int
    tier: DurableTier
    io: Measured
    failures: int = 0
    off_until: float = 0.0
    carrying: int = 0
    """Allocated bytes of a region's survivor that is being written to its new place."""
    reading: int = 0
    """Read jobs queued or under way."""
    stuck: float = 0.0
    """Share of the read threads whose job is past its deadline."""

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.name

    @property
    def reads(self) -> str:
        """Lane of reads."""
        return f"{self.name}-read"

    @property
    def writes(self) -> str:
        """Lane of writes; it has one thread."""
        return f"{self.name}-write"

    @property
    def seals(self) -> str:
        """Lane that makes checksums ahead of the writes."""
        return f"{self.name}-seal"

    @property
    def shared(self) -> SharedTier | None:
        """The tier when other sidecars use it too."""
        return self.tier if isinstance(self.tier, SharedTier) else None

    @property
    def regions(self) -> RegionTier | None:
        """The tier when it frees space by the region."""
        return self.tier if isinstance(self.tier, RegionTier) else None


def lower_tier(number: int, tier: DurableTier, clock: Clock) -> Lower:
    """Wrap a tier for the store."""
    return Lower(number, tier, Measured(Sealed(tier), FIRST_RATES[tier.name], clock))
