"""The arena: memory as asked for, pages as promised, and clear words when there is too little."""

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frames import empty_item, make_frame
from tierkv.errors import ErrorKind, TierKVError
from tierkv.tier import DONE, Status
from tierkv.tiers import host as host_module
from tierkv.tiers.host import STEP_BYTES, HostSettings, HostTier, available_bytes

MIB = 1 << 20
PAGE = 16 << 10

RESIDENT = """
import os, sys
from tierkv.tiers.host import HostSettings, HostTier
def memory():
    rows = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Rss"))
    return sum(int(value.split()[0]) << 10 for value in rows.values())
before = memory()
tier = HostTier(HostSettings(size_bytes=int(sys.argv[1])))
assert tier.space().capacity == tier.space().free == int(sys.argv[1])
reserved = os.fstat(tier.fd).st_blocks * 512
while tier.touch():
    pass
print(reserved, memory() - before)
"""


def small(size: int = MIB, page: int = PAGE) -> HostTier:
    return HostTier(HostSettings(size_bytes=size, page_bytes=page))


@pytest.mark.parametrize("mebibytes", [64, 192, 3 << 10, 6 << 10, 10 << 10])
def test_r16_resident_memory_is_what_was_asked_for(mebibytes: int) -> None:
    if available_bytes() < 2 * mebibytes * MIB:
        pytest.skip(f"{mebibytes} MiB are more than half of the memory that is free here")
    command = [sys.executable, "-c", RESIDENT, str(mebibytes * MIB)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    reserved, resident = map(int, done.stdout.split())
    assert reserved == mebibytes * MIB
    assert resident == pytest.approx(mebibytes * MIB, rel=0.05)


@pytest.mark.parametrize("page", [16 << 10, 32 << 10, 64 << 10])
def test_frames_take_whole_pages(page: int) -> None:
    tier = small(page=page)
    assert tier.granule == page
    for nbytes, pages in (1, 1), (page, 1), (page + 1, 2), (3 * page - 1, 3):
        before = tier.space().free
        locator = tier.reserve(nbytes)
        assert locator is not None
        assert before - tier.space().free == pages * page
        assert sum(map(len, tier.pieces(locator))) == pages * page


@pytest.mark.parametrize("page", [0, 1, 4096, 8192, 16_385, 128 << 10, -PAGE])
def test_other_page_sizes_are_refused(page: int) -> None:
    with pytest.raises(TierKVError, match="16KiB, 32KiB or 64KiB") as caught:
        small(page=page)
    assert caught.value.kind is ErrorKind.INVALID


def test_sizes_are_rounded_down_to_pages() -> None:
    assert small(MIB + 5).space().capacity == MIB
    assert small(1).space().capacity == PAGE


def test_r15_too_little_memory_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "available_bytes", lambda: 256 * MIB)
    with pytest.raises(TierKVError, match=r"300 MiB.*256 MiB are available") as caught:
        small(300 * MIB)
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    with pytest.raises(TierKVError, match=r"lower \[host\] size"):
        HostTier(HostSettings(size_bytes=1 << 60))


def test_r15_memory_that_is_gone_after_all_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        if offset:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    gc.collect()  # what earlier tests left may be closed meanwhile
    files = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(TierKVError, match=r"192 MiB.*No space left.*lower \[host\] size") as caught:
        small(3 * STEP_BYTES)
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert set(Path("/proc/self/fd").iterdir()) <= files


def test_a_long_start_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_module, "_SAY_S", -1.0)
    with caplog.at_level(logging.INFO, "tierkv.host"):
        small(2 * STEP_BYTES)
    assert [record.getMessage() for record in caplog.records] == [
        "reserving memory: 0 of 128 MiB",
        "reserving memory: 64 of 128 MiB",
    ]


@pytest.mark.parametrize(
    ("limit", "used", "cached", "expected"),
    [
        (500 * MIB, 200 * MIB, 0, 300 * MIB),
        (500 * MIB, 499 * MIB, 300 * MIB, 301 * MIB),
        (100 * MIB, 200 * MIB, 0, 0),
    ],
)
def test_files_in_the_page_cache_do_not_count_as_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, used: int, cached: int,
    expected: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(host_module, "CONTROL_GROUPS", ((str(tmp_path), "max", "current"),))
    machine = host_module.available_bytes()
    (tmp_path / "max").write_text(f"{limit}\n")
    (tmp_path / "current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 7\n")
    assert host_module.available_bytes() == min(expected, machine)
    (tmp_path / "max").write_text("max\n")
    assert host_module.available_bytes() > min(500 * MIB, machine // 2)


def test_every_arena_has_its_own_epoch() -> None:
    epochs = {small().epoch for _ in range(8)}
    assert len(epochs) == 8
    assert 0 not in epochs


def test_a_freed_frame_is_no_frame_any_more() -> None:
    tier, frame = small(), make_frame(1)
    locator = tier.reserve(frame.nbytes)
    assert locator is not None
    assert tier.write([frame.item(locator)]) == [DONE]
    tier.free(locator, frame.nbytes)
    (outcome,) = tier.read([empty_item(frame.id, locator, frame.nbytes)])
    assert outcome.status is Status.MISSING


def test_a_frame_in_many_runs_reads_back_and_shrinks() -> None:
    tier = small(64 * PAGE)
    singles = [tier.reserve(PAGE) for _ in range(64)]
    for locator in singles[::2]:
        assert locator is not None
        tier.free(locator, PAGE)
    frame = make_frame(2, nbytes=20 * PAGE - 100)
    locator = tier.reserve(frame.nbytes)
    assert locator is not None
    assert len(tier.runs(locator)) == 20
    assert tier.write([frame.item(locator)]) == [DONE]
    item = empty_item(frame.id, locator, frame.nbytes)
    assert tier.read([item]) == [DONE]
    assert bytes(item.pieces[0][: frame.nbytes]) == frame.data
    shorter = tier.truncate(locator, 3 * PAGE + 1)
    assert len(tier.runs(shorter)) == 4
    assert tier.space().free == (32 - 4) * PAGE
    assert b"".join(tier.pieces(shorter)) == frame.data[: 4 * PAGE]
    tier.free(shorter, 3 * PAGE + 1)
    assert tier.space().free == 32 * PAGE


def test_places_that_are_none_are_missing() -> None:
    tier, frame = small(), make_frame(3)
    for locator in 0, -1, 1 << 32, 1 << 50, (1 << 62) | 5, (2 << 32) | 63, (1 << 32) | 64:
        for move in tier.read, tier.write:
            (outcome,) = move([empty_item(frame.id, locator, 5 * PAGE)])
            assert outcome.status is Status.MISSING, locator


def test_another_frame_is_missing() -> None:
    tier, frame, other = small(), make_frame(4), make_frame(5)
    locator = tier.reserve(frame.nbytes)
    assert locator is not None
    assert tier.write([frame.item(locator)]) == [DONE]
    (outcome,) = tier.read([empty_item(other.id, locator, other.nbytes)])
    assert outcome.status is Status.MISSING
