"""What the tests of the NVMe tier share: small tiers over one directory, frames in and out."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.frames import Sample, content, empty_item, make_frame
from tierkv.tier import ALIGN, DONE, Outcome
from tierkv.tiers.nvme import NvmeSettings, NvmeTier
from tierkv.tiers.region_log import FRONT_BYTES, LOG_NAME

MIB = 1 << 20
REGION = MIB
Open = Callable[..., NvmeTier]


@contextmanager
def opening(folder: Path) -> Iterator[Open]:
    """Yield a function that opens a tier of 8 regions of 1 MiB; all are closed at the end."""
    opened: list[NvmeTier] = []

    def make(regions: int = 8, now: Callable[[], float] = lambda: 0.0, **fields: Any) -> NvmeTier:
        values: dict[str, Any] = {
            "path": str(folder), "size_bytes": 2 * MIB + regions * REGION,
            "region_bytes": REGION, "free_floor_bytes": 0,
        }  # fmt: skip
        opened.append(NvmeTier(NvmeSettings(**(values | fields)), now=now))
        return opened[-1]

    try:
        yield make
    finally:
        for tier in opened:
            tier.close()


def put(tier: NvmeTier, *frames: Sample) -> list[int]:
    """Write frames in one batch; returns their locators."""
    locators = [tier.reserve(frame.nbytes) for frame in frames]
    items = [frame.item(at) for frame, at in zip(frames, locators, strict=True) if at is not None]
    assert tier.write(items) == [DONE] * len(frames)
    return [item.locator for item in items]


def get(tier: NvmeTier, frame: Sample, locator: int) -> Outcome:
    """Read a frame; DONE only with its own bytes."""
    item = empty_item(frame.id, locator, frame.nbytes)
    (outcome,) = tier.read([item])
    assert outcome is not DONE or content(item) == frame.data
    return outcome


def found(tier: NvmeTier) -> dict[bytes, int]:
    return {row["key"].tobytes(): int(row["locator"]) for row in tier.scan()}


def key(frame: Sample) -> bytes:
    return frame.id.key


def fill(tier: NvmeTier, first: int = 0, nbytes: int = 100_000) -> dict[int, Sample]:
    """Write frames until the tier is full; returns them by locator."""
    out: dict[int, Sample] = {}
    while (locator := tier.reserve(nbytes)) is not None:
        out[locator] = make_frame(first + len(out), nbytes=nbytes)
        assert tier.write([out[locator].item(locator)]) == [DONE]
    return out


def patch_log(tmp_path: Path, offset: int, data: bytes) -> None:
    with (tmp_path / LOG_NAME).open("r+b") as file:
        file.seek(offset)
        file.write(data)


def block_at(locator: int, position: int) -> int:
    """Return where an index block of the region lies that holds a locator."""
    region = (locator - FRONT_BYTES) // REGION
    return FRONT_BYTES + (region + 1) * REGION - (position + 1) * ALIGN


_WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.frames import make_frame
from tierkv.tier import DONE
from tierkv.tiers.nvme import NvmeSettings, NvmeTier
tier = NvmeTier(NvmeSettings(path=sys.argv[1], size_bytes=10 << 20, region_bytes=1 << 20,
                             free_floor_bytes=0))
number = 0
while True:
    batch = [make_frame(number + n, nbytes=5_000 + 1_000 * n) for n in range(4)]
    places = [tier.reserve(frame.nbytes) for frame in batch]
    if None in places:
        for region in tier.regions():
            tier.free(region.start, region.live)
            tier.release(region.number)
            print("released", region.start, region.stop, flush=True)
            break
        continue
    if tier.write([f.item(at) for f, at in zip(batch, places)]) == [DONE] * 4:
        print("done", number, *places, flush=True)
    number += 4
"""


def endless_writer(folder: Path) -> list[str]:
    """Return the command of a process that writes until it is killed, saying what is DONE."""
    root = str(Path(__file__).resolve().parents[1])
    return [sys.executable, "-c", _WRITER, str(folder), root]
