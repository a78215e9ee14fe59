"""Host RAM keeps the contract of every tier."""

from pathlib import Path

from tests.contract.tier_contract import MIB, TierContract
from tierkv.tier import DurableTier, Tier
from tierkv.tiers.host import HostSettings, HostTier


class TestHost(TierContract):
    page_bytes = 16 << 10

    def make_tier(self, tmp: Path) -> Tier:
        return HostTier(HostSettings(size_bytes=40 * MIB, page_bytes=self.page_bytes))

    def test_it_keeps_nothing(self, tier: Tier) -> None:
        assert not tier.durable
        assert not isinstance(tier, DurableTier)


class TestHostOfLargePages(TestHost):
    page_bytes = 64 << 10
