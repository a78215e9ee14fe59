"""What opening and closing a store takes and gives back: files, memory, threads."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.cache import TierKV
from tierkv.errors import TierKVError
from tierkv.settings import Settings
from tierkv.tiers.host import HostSettings, HostTier
from tierkv.tiers.nvme import NvmeSettings

MIB = 1 << 20


@pytest.fixture
def _no_collection() -> Iterator[None]:
    """Let nothing go that waits for the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def arenas() -> int:
    """Return the bytes of this process that lie in arenas."""
    found = Path("/proc/self/smaps").read_text().splitlines()
    at = [number for number, line in enumerate(found) if "memfd:tierkv-arena" in line]
    return sum(int(found[number + 1].split()[1]) << 10 for number in at)


def files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.usefixtures("_no_collection")
def test_a_closed_store_keeps_neither_memory_nor_files(tmp_path: Path) -> None:
    before = files(), arenas()
    nvme = NvmeSettings(path=str(tmp_path), size_bytes=256 * MIB, free_floor_bytes=0)
    store = TierKV.open(Settings(host=HostSettings(size_bytes=8 * MIB), nvme=nvme))
    assert arenas() == before[1] + 8 * MIB
    store.close(0.0)
    assert (files(), arenas()) == before


def test_a_reader_keeps_the_memory_that_it_reads_until_it_is_done() -> None:
    tier = HostTier(HostSettings(size_bytes=MIB))
    before = arenas()
    locator = tier.reserve(100)
    assert locator is not None
    (piece,) = tier.pieces(locator)
    piece[:5] = b"hello"
    tier.close()
    assert bytes(piece[:5]) == b"hello"
    assert arenas() == before
    assert bytes(tier.view[:5]) == bytes(5), "who comes later finds nothing"
    tier.free(locator, 100)
    del piece
    assert arenas() == before - MIB


@pytest.mark.usefixtures("_no_collection")
def test_a_start_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    nvme = NvmeSettings(path=str(tmp_path), size_bytes=256 * MIB, free_floor_bytes=0)
    before = files()
    with pytest.raises(TierKVError, match=r"lower \[host\] size"):
        TierKV.open(Settings(host=HostSettings(size_bytes=1 << 60), nvme=nvme))
    assert files() == before
    TierKV.open(Settings(host=HostSettings(size_bytes=MIB), nvme=nvme)).close(0.0)
