"""The NVMe tier keeps the contract of every tier, past the page cache and through it."""

import random
from pathlib import Path

from tests.contract.tier_contract import MIB, TierContract
from tierkv.tier import RegionTier, Tier
from tierkv.tiers.nvme import NvmeSettings, NvmeTier
from tierkv.tiers.region_log import LOG_NAME


class TestNvme(TierContract):
    direct = True

    def make_tier(self, tmp: Path) -> Tier:
        return NvmeTier(
            NvmeSettings(
                path=str(tmp / "nvme"), size_bytes=42 * MIB, region_bytes=5 * MIB,
                free_floor_bytes=0, direct=self.direct,
            )
        )  # fmt: skip

    def damage(self, tmp: Path, seed: int) -> bool:
        rng = random.Random(seed)
        path = tmp / "nvme" / LOG_NAME
        size = path.stat().st_size
        with path.open("r+b") as file:
            for _ in range(200):
                file.seek(rng.randrange(MIB, size))
                file.write(rng.randbytes(rng.choice([1, 100, 5000])))
        return True

    def test_it_is_a_region_tier(self, tier: Tier) -> None:
        assert isinstance(tier, RegionTier)


class TestNvmeBuffered(TestNvme):
    direct = False

    def test_it_is_buffered(self, tier: Tier) -> None:
        assert isinstance(tier, NvmeTier)
        assert not tier.direct
