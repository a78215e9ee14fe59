"""The NVMe tier on a medium that fails, hangs, or is changed by others."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frames import aligned, content, empty_item, make_frame
from tests.nvme_tiers import (
    MIB,
    REGION,
    Open,
    fill,
    found,
    get,
    key,
    opening,
    patch_log,
    put,
)
from tierkv.errors import ErrorKind, TierKVError
from tierkv.tier import DONE, FrameId, Item, Outcome, Status
from tierkv.tiers import region_log
from tierkv.tiers.generations import FILE_NAME
from tierkv.tiers.region_log import FRONT_BYTES, LOG_NAME, TAIL_NAME


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    with opening(tmp_path) as make:
        yield make


def replace(path: Path) -> Path:
    path.unlink()
    return path


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "half": lambda path: os.truncate(path, FRONT_BYTES + REGION // 2 + 77),
    "unreadable": lambda path: path.chmod(0),
    "directory": lambda path: replace(path).mkdir(),
    "replaced": lambda path: replace(path).write_bytes(b"x" * MIB),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("direct", [True, False])
def test_r11_the_file_is_damaged_under_us(
    open_tier: Open, tmp_path: Path, damage: str, direct: bool
) -> None:
    tier = open_tier(direct=direct)
    frames = fill(tier)
    locator = min(frames)
    last = max(frames)
    for place in (locator, last):
        tier.free(place, 100_000)
    DAMAGES[damage](tmp_path / LOG_NAME)
    items = [empty_item(frame.id, at, frame.nbytes) for at, frame in frames.items()]
    for item, outcome in zip(items, tier.read(items), strict=True):
        assert outcome.status in {Status.DONE, Status.MISSING, Status.FAILED, Status.CORRUPT}
        assert outcome is not DONE or content(item) == frames[item.locator].data
    if damage in {"empty", "half"}:
        assert get(tier, frames[last], last).status is Status.MISSING
    (outcome,) = tier.write([frames[locator].item(locator)])
    assert (outcome.status is Status.FAILED) == (damage != "unreadable")
    assert (tier.probe() != "") == (damage != "unreadable" or os.geteuid() != 0)
    tier.close()
    if damage == "directory" or (damage == "unreadable" and os.geteuid()):
        with pytest.raises(TierKVError, match=r"cannot open .*tierkv\.log"):
            open_tier(direct=direct)
        return
    again = open_tier(direct=direct)
    for name, at in found(again).items():
        assert name == key(frames[at])
        assert get(again, frames[at], at) is DONE
    put(again, make_frame(1))


def test_r11_without_its_tail_a_write_is_not_done(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    (place,) = put(tier, one := make_frame(1))
    tier.sync(power=True)
    (tmp_path / TAIL_NAME).unlink()
    locator = tier.reserve(10_000)
    assert locator is not None
    assert tier.write([make_frame(2).item(locator)])[0].status is Status.FAILED
    assert get(tier, one, place) is DONE
    assert "tail" in tier.probe()
    tier.close()
    assert found(open_tier()) == {key(one): place}


def test_r11_lost_generations_empty_the_log(open_tier: Open, tmp_path: Path) -> None:
    for spoil in Path.unlink, lambda path: path.write_bytes(b"junk"):
        tier = open_tier()
        tier.raise_generation(b"n" * 16, 3)
        put(tier, make_frame(1))
        tier.close()
        spoil(tmp_path / FILE_NAME)
        tier = open_tier()
        assert found(tier) == {}
        assert tier.generations() == {}
        tier.close()


def test_a_log_of_a_newer_release_is_refused(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(region_log, "VERSION", 2)
        open_tier().close()
    with pytest.raises(TierKVError, match="has format 2, this release reads 1") as caught:
        open_tier()
    assert caught.value.kind is ErrorKind.INCOMPATIBLE


@pytest.mark.parametrize("at", [0, 20, 70, 150, 5000])
def test_r21_a_flipped_bit_in_the_header_is_corrupt(
    open_tier: Open, tmp_path: Path, at: int
) -> None:
    tier = open_tier()
    frame = make_frame(1)
    (place,) = put(tier, frame)
    patch_log(tmp_path, place + at, bytes([frame.data[at] ^ 1]))
    item = empty_item(frame.id, place, frame.nbytes)
    expected = Status.CORRUPT if at < frame.header.header_bytes else Status.DONE
    assert tier.read([item])[0].status is expected


def test_r21_another_frame_in_its_place_is_corrupt(open_tier: Open) -> None:
    tier = open_tier()
    one, two = make_frame(1), make_frame(2)
    here, there = put(tier, one, two)
    assert get(tier, one, there).status is Status.CORRUPT
    assert get(tier, two, here).status is Status.CORRUPT
    other = Item(FrameId(key(one), make_frame(1).id.part._replace(group=9)), here, 10_000, [])
    wrong = other._replace(pieces=[aligned(10_000)])
    assert [o.status for o in tier.read([other, wrong])] == [Status.MISSING, Status.CORRUPT]


def test_r21_a_read_that_hangs_hangs_alone(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    one, two = make_frame(1), make_frame(2)
    here, there = put(tier, one, two)
    started, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def hang(fd: int, pieces: list[memoryview], offset: int) -> int:
        if offset == here:
            started.set()
            assert go_on.wait(20)
        return preadv(fd, pieces, offset)

    monkeypatch.setattr(os, "preadv", hang)
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(get(tier, one, here)))
    thread.start()
    assert started.wait(20)
    assert get(tier, two, there) is DONE
    put(tier, make_frame(3))
    tier.sync(power=True)
    assert tier.probe() == ""
    tier.close()
    assert get(tier, two, there).status is Status.FAILED
    go_on.set()
    thread.join()
    assert outcomes == [DONE]
    open_tier()


def test_a_failed_write_seals_its_region(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier()
    frames = [make_frame(n, nbytes=20_000) for n in range(4)]
    places = [tier.reserve(20_000) or 0 for _ in frames]
    items = [frame.item(at) for frame, at in zip(frames, places, strict=True)]
    pwritev = os.pwritev

    def broken(fd: int, pieces: list[memoryview], offset: int) -> int:
        stop = offset + sum(map(len, pieces))
        if offset <= places[1] < stop:
            raise OSError(errno.EIO, "broken")
        return pwritev(fd, pieces, offset)

    monkeypatch.setattr(os, "pwritev", broken)
    outcomes = tier.write(items)
    monkeypatch.undo()
    assert [o.status is Status.DONE for o in outcomes] == [True, False, True, True]
    assert outcomes[1].status is Status.FAILED
    assert "EIO" in outcomes[1].detail
    assert (tier.reserve(20_000) or 0) >= FRONT_BYTES + REGION
    tier.close()
    tier = open_tier()
    assert found(tier) == {key(frames[n]): places[n] for n in (0, 2, 3)}
    assert all(get(tier, frames[n], places[n]) is DONE for n in (0, 2, 3))


def test_a_failed_index_write_is_not_acknowledged(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    put(tier, make_frame(0))
    frame = make_frame(1, nbytes=20_000)
    locator = tier.reserve(20_000)
    assert locator is not None
    pwritev = os.pwritev

    def broken(fd: int, pieces: list[memoryview], offset: int) -> int:
        if offset == 0:  # the tail
            raise OSError(errno.EIO, "broken")
        return pwritev(fd, pieces, offset)

    monkeypatch.setattr(os, "pwritev", broken)
    assert tier.write([frame.item(locator)])[0].status is Status.FAILED
    monkeypatch.undo()
    assert tier.write([frame.item(locator)]) == [DONE]
    tier.close()
    assert found(open_tier())[key(frame)] == locator


def test_partial_transfers_go_on_where_they_stopped(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    preadv, pwritev = os.preadv, os.pwritev

    def some(pieces: list[memoryview]) -> list[memoryview]:
        return [pieces[0][:4096]] if len(pieces) % 2 else pieces[:3]

    monkeypatch.setattr(os, "preadv", lambda fd, p, at: preadv(fd, some(p), at))
    monkeypatch.setattr(os, "pwritev", lambda fd, p, at: pwritev(fd, some(p), at))
    frame = make_frame(1, nbytes=150_000)
    locator = tier.reserve(150_000)
    assert locator is not None
    assert tier.write([frame.item(locator, [8192, 4096, 16_384, 12_288])]) == [DONE]
    assert get(tier, frame, locator) is DONE


def test_a_batch_may_have_more_pieces_than_one_call_takes(open_tier: Open) -> None:
    tier = open_tier(regions=4, region_bytes=8 * MIB, size_bytes=40 * MIB)
    frame = make_frame(1, nbytes=5 * MIB - 5)
    locator = tier.reserve(frame.nbytes)
    assert locator is not None
    cuts = [4096] * 1200
    assert tier.write([frame.item(locator, cuts)]) == [DONE]
    item = empty_item(frame.id, locator, frame.nbytes, cuts)
    assert tier.read([item]) == [DONE]
    assert content(item) == frame.data


def test_without_direct_io_the_page_cache_serves(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    tier = open_tier()
    assert not tier.direct
    assert "refuses O_DIRECT" in caplog.text, "slower than thought, and nobody said so"
    frame = make_frame(1)
    assert get(tier, frame, put(tier, frame)[0]) is DONE


def test_a_lot_of_rows_is_found_in_order(open_tier: Open) -> None:
    tier = open_tier(regions=4)
    frames = [make_frame(n, nbytes=256) for n in range(600)]
    places = [place for n in range(0, 600, 60) for place in put(tier, *frames[n : n + 60])]
    tier.close()
    rows = open_tier(regions=4).scan()
    assert rows["locator"].tolist() == places
    assert np.array_equal(rows["key"].tobytes(), b"".join(key(frame) for frame in frames))
