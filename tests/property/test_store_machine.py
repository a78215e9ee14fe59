"""The state machine over tiers in memory and on disk."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.store_machine import StoreMachine
from tierkv.catalog import MANY
from tierkv.tier import DurableTier
from tierkv.tiers.nvme import NvmeSettings, NvmeTier
from tierkv.units import FEW


class NvmeMachine(StoreMachine):
    """Over the real NVMe tier, small enough to reclaim regions."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    def open_tier(self) -> DurableTier:
        settings = NvmeSettings(
            path=str(Path(self.folder.name, "nvme")), size_bytes=14 << 20,
            region_bytes=1 << 20, free_floor_bytes=0, direct=False,
        )  # fmt: skip
        return NvmeTier(settings)

    def keeps_all(self) -> bool:
        return not self.rig.store._store.totals["regions_reclaimed"]

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


@pytest.mark.parametrize(("many", "few"), [(1, 1), (MANY, FEW)], ids=["far", "near"])
def test_a_store_over_a_dict(monkeypatch: pytest.MonkeyPatch, many: int, few: int) -> None:
    monkeypatch.setattr("tierkv.store.MANY", many)
    monkeypatch.setattr("tierkv.catalog.MANY", many)
    monkeypatch.setattr("tierkv.units.FEW", few)
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=120, stateful_step_count=40)
    )


def test_a_store_over_nvme() -> None:
    run_state_machine_as_test(
        NvmeMachine, settings=settings(max_examples=30, stateful_step_count=40)
    )
