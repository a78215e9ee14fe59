"""The NVMe tier where it is unlike others: regions, its cap, its volume, two processes."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frames import make_frame
from tests.nvme_tiers import (
    MIB,
    REGION,
    Open,
    endless_writer,
    fill,
    found,
    get,
    key,
    opening,
    put,
)
from tierkv.errors import ErrorKind, TierKVError
from tierkv.tier import ALIGN, DONE, Status
from tierkv.tiers import region_log
from tierkv.tiers.budget import WriteBudget
from tierkv.tiers.nvme import NvmeSettings
from tierkv.tiers.region_log import FRONT_BYTES, LOG_NAME


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    with opening(tmp_path) as make:
        yield make


# --- regions ---


def test_a_region_is_freed_as_a_whole(open_tier: Open) -> None:
    tier = open_tier(regions=3)
    frames = fill(tier, nbytes=200_000)
    regions = tier.regions()
    assert [region.number for region in regions] == [0, 1]
    assert regions[0].sequence < regions[1].sequence
    inside = [at for at in frames if regions[0].start <= at < regions[0].stop]
    assert regions[0].live == sum(-(-frames[at].nbytes // ALIGN) * ALIGN for at in inside)
    with pytest.raises(ValueError, match="live bytes"):
        tier.release(0)
    with pytest.raises(ValueError, match="still open"):
        tier.release(2)
    with pytest.raises(ValueError, match="no region 3"):
        tier.release(3)
    for at in inside:
        tier.free(at, 200_000)
    assert tier.regions()[0].live == 0
    assert tier.reserve(200_000) is None
    tier.release(0)
    tier.release(0)
    assert tier.reserve(200_000) == inside[0]
    assert get(tier, frames[inside[1]], inside[1]).status is Status.MISSING


def test_small_frames_use_what_a_large_one_could_not(open_tier: Open) -> None:
    tier = open_tier(regions=2)
    assert tier.reserve(REGION - ALIGN) is not None
    assert tier.reserve(REGION // 2) is not None
    assert tier.reserve(REGION) is None
    assert tier.reserve(REGION // 2) is None
    assert tier.reserve(REGION // 4) is not None


@pytest.mark.parametrize("region_bytes", [44 * ALIGN, REGION])
@pytest.mark.parametrize("syncs", [0, 1, 7, 300])
def test_the_index_always_has_room(open_tier: Open, region_bytes: int, syncs: int) -> None:
    tier = open_tier(regions=2, region_bytes=region_bytes)
    places = []
    while (locator := tier.reserve(ALIGN)) is not None:
        places.append(locator)
    frames = [make_frame(number, nbytes=ALIGN) for number in range(len(places))]
    for number, (frame, locator) in enumerate(zip(frames, places, strict=True)):
        assert tier.write([frame.item(locator)]) == [DONE]
        if syncs and number % syncs == 0:
            tier.sync(power=True)
    space = tier.space()
    assert len(places) * ALIGN + space.free + space.dead == space.capacity
    tier.close()
    tier = open_tier(regions=2, region_bytes=region_bytes)
    assert found(tier) == {key(f): at for f, at in zip(frames, places, strict=True)}
    assert all(get(tier, f, at) is DONE for f, at in zip(frames, places, strict=True))


# --- the cap and the volume ---


def test_size_may_change_at_a_restart(open_tier: Open) -> None:
    frames = fill(tier := open_tier(regions=4))
    tier.close()
    tier = open_tier(regions=6, region_bytes=2 * REGION)
    assert tier.space().capacity == 6 * REGION
    assert set(found(tier).values()) == set(frames)
    assert fill(tier, first=500)
    tier.close()
    tier = open_tier(regions=2)
    kept = found(tier)
    assert set(kept.values()) == {at for at in frames if at < FRONT_BYTES + 2 * REGION}
    assert tier.space().capacity == 2 * REGION
    assert tier._log.path.stat().st_size == FRONT_BYTES + 2 * REGION


@pytest.mark.parametrize(
    "wrong",
    [{"size_bytes": 3 * MIB}, {"region_bytes": 1000}, {"path": ""}, {"free_floor_bytes": -1},
     {"region_bytes": 1 << 40}, {"write_budget_bytes_per_day": -5}],
)  # fmt: skip
def test_wrong_settings_are_refused(open_tier: Open, wrong: dict[str, Any]) -> None:
    with pytest.raises(TierKVError) as caught:
        open_tier(**wrong)
    assert caught.value.kind is ErrorKind.INVALID


def test_r19_a_volume_too_small_is_a_clear_error(open_tier: Open, tmp_path: Path) -> None:
    with pytest.raises(TierKVError, match=r"needs \d+ bytes more .* has \d+ bytes available"):
        open_tier(size_bytes=1 << 50)
    with pytest.raises(TierKVError, match=f"floor of {1 << 60}"):
        open_tier(free_floor_bytes=1 << 60)
    assert sum(path.stat().st_blocks for path in tmp_path.iterdir()) * 512 < MIB
    open_tier()


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "volume"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a small volume")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_r19_reads_go_on_when_others_fill_the_volume(
    open_tier: Open, small_volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_log, "_allocate", no_allocation)
    tier = open_tier(path=str(small_volume))
    assert not tier.preallocated
    frame = make_frame(1, nbytes=200_000)
    (place,) = put(tier, frame)
    fill_volume(small_volume)
    late = make_frame(2, nbytes=200_000)
    locator = tier.reserve(200_000)
    assert locator is not None
    assert tier.write([late.item(locator)])[0].status is Status.FULL
    assert get(tier, frame, place) is DONE
    (small_volume / "other").unlink()
    assert tier.write([late.item(locator)]) == [DONE]
    assert get(tier, late, locator) is DONE
    tier.close()
    assert len(found(open_tier(path=str(small_volume)))) == 2


def fill_volume(folder: Path) -> None:
    with (folder / "other").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def no_allocation(fd: int, size: int) -> bool:
    os.ftruncate(fd, size)
    return False


def test_r19_writes_stop_at_the_floor(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_log, "_allocate", no_allocation)
    tier = open_tier(free_floor_bytes=1000)
    monkeypatch.setattr(region_log.RegionLog, "_available", lambda self: 10_999)
    frame = make_frame(1, nbytes=10_000)
    locator = tier.reserve(10_000)
    assert locator is not None
    assert tier.write([frame.item(locator)])[0].status is Status.FULL
    monkeypatch.setattr(region_log.RegionLog, "_available", lambda self: 20_000)
    assert tier.write([frame.item(locator)]) == [DONE]


def test_the_write_budget_throttles(open_tier: Open) -> None:
    clock = [0.0]
    tier = open_tier(now=lambda: clock[0], write_budget_bytes_per_day=24 * 100_000)
    frames = [make_frame(n, nbytes=50_000) for n in range(3)]
    places = [tier.reserve(50_000) or 0 for _ in frames]
    items = [frame.item(at) for frame, at in zip(frames, places, strict=True)]
    assert [o.status.value for o in tier.write(items)] == ["done", "throttled", "throttled"]
    clock[0] += 3600
    assert tier.write(items[1:2]) == [DONE]


def test_what_was_refused_uses_up_no_space(open_tier: Open) -> None:
    """Reservations that never reached the disk are taken back, the last first; others are dead."""
    clock = [0.0]
    tier = open_tier(now=lambda: clock[0], write_budget_bytes_per_day=24 * 100_000)
    kept = make_frame(0, nbytes=50_000)
    (at,) = put(tier, kept)
    before = tier.space()
    for turn in range(200):  # many times the log
        frames = [make_frame(turn * 4 + n, nbytes=200_000) for n in range(4)]
        places = [tier.reserve(200_000) or 0 for _ in frames]
        items = [frame.item(place) for frame, place in zip(frames, places, strict=True)]
        assert {outcome.status for outcome in tier.write(items)} == {Status.THROTTLED}
        for place in reversed(places):
            tier.free(place, 200_000)
    assert tier.space() == before
    assert get(tier, kept, at) is DONE
    tier.free(at, 50_000)
    assert tier.space().free == before.free, "what was written is dead, not free"
    clock[0] += 3600
    (place,) = put(tier, make_frame(1, nbytes=50_000))
    assert place > at
    tier.close()
    assert found(open_tier()) == {key(kept): at, key(make_frame(1)): place}


def test_a_budget_earns_evenly_and_no_more_than_an_hour() -> None:
    budget = WriteBudget(86_400 * 10, 0.0)
    assert budget.take(36_000, 0.0)
    assert not budget.take(11, 1.0)
    assert budget.take(10, 1.0)
    assert budget.take(36_000, 1e6)
    assert not budget.take(10, 1e6)
    assert not budget.take(100_000, 1e6 + 3599)
    assert budget.take(100_000, 1e6 + 3600)
    assert not budget.take(1, 1e6 + 3600 + 6000)
    budget.charge(50)
    assert budget.take(1, 1e6 + 3600 + 6500)
    assert WriteBudget(0, 0.0).take(1 << 60, 0.0)


# --- two processes ---


def test_r20_a_second_process_is_told_who_has_the_log(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    command = endless_writer(tmp_path)
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert f"{tmp_path / LOG_NAME} is in use by process {os.getpid()}" in second.stderr
    with pytest.raises(TierKVError) as caught:
        open_tier()
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    put(tier, make_frame(1))
    tier.close()
    assert len(found(open_tier())) == 1


@pytest.mark.parametrize(
    ("size", "region"), [(1 << 30, 64 << 20), (4 << 30, 128 << 20), (1 << 40, 256 << 20)]
)
def test_regions_are_large_where_there_are_many(size: int, region: int) -> None:
    assert NvmeSettings(path="here", size_bytes=size).region == region


def test_a_region_that_was_asked_for_is_taken() -> None:
    settings = NvmeSettings(path="here", size_bytes=1 << 40, region_bytes=1 << 20)
    assert settings.region == 1 << 20
