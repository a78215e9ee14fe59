"""What users reported, at the level of the store, over the real NVMe tier where it is about one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stores import Rig, chain
from tierkv.tiers.nvme import NvmeSettings, NvmeTier

MIB = 1 << 20
Open = Callable[..., Rig]


@pytest.fixture
def open_rig(tmp_path: Path) -> Iterator[Open]:
    """Open a store over a directory; opening it again is a restart after kill -9."""
    tiers: list[NvmeTier] = []

    def make(folder: str = "nvme", *, pages: int = 32, size: int = 20 * MIB, **fields: Any) -> Rig:
        for tier in tiers:
            tier.close()
        tier = NvmeTier(
            NvmeSettings(
                path=str(tmp_path / folder), size_bytes=size, region_bytes=MIB, free_floor_bytes=0
            )
        )
        tiers.append(tier)
        return Rig(pages, [tier], **fields)

    yield make
    for tier in tiers:
        tier.close()


def evict_ram(rig: Rig) -> None:
    """Make RAM forget everything that nobody holds."""
    store = rig.store._store
    with store.lock:
        store.drop(store.catalog.select(0, 2).tolist())


def test_r06_disk_works_again_after_a_clear(open_rig: Open) -> None:
    rig = open_rig()
    rig.put(chain(1, 3), b"old")
    assert rig.flush(chain(1, 3)) == b"\1\1\1"
    rig.clear()
    assert rig.read(chain(1, 3)) == []
    rig.put(chain(1, 3), b"new")
    assert rig.flush(chain(1, 3)) == b"\1\1\1"
    evict_ram(rig)
    assert len(rig.read(chain(1, 3))) == 3
    assert rig.stat()["counters"].get("corrupt", 0) == 0
