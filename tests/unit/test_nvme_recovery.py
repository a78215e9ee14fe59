"""What the NVMe tier finds again after a stop, a kill and damage to its indexes."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frames import Sample, make_frame
from tests.nvme_tiers import (
    MIB,
    REGION,
    Open,
    block_at,
    endless_writer,
    fill,
    found,
    get,
    key,
    opening,
    patch_log,
    put,
)
from tierkv.tier import ALIGN, DONE, Status
from tierkv.tiers import region_index
from tierkv.tiers.generations import FILE_NAME
from tierkv.tiers.nvme import NvmeTier
from tierkv.tiers.region_log import FRONT_BYTES, LOCK_NAME, LOG_NAME, TAIL_NAME
from tierkv.tiers.regions import ROWS


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    with opening(tmp_path) as make:
        yield make


def test_r18_content_and_use_survive_stop_and_kill(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    frames = fill(tier)
    first = dict(list(frames.items())[:40])
    for locator in frames.keys() - first.keys():
        tier.free(locator, 100_000)
    tier.close()
    (tmp_path / f"{FILE_NAME}.new").write_bytes(b"left by a kill")
    tier = open_tier()
    assert set(found(tier).values()) == set(frames)
    assert all(get(tier, frame, locator) is DONE for locator, frame in frames.items())
    space = tier.space()
    assert space.capacity - space.free - space.dead == len(frames) * 102_400
    assert tier.reserve(100_000) is None
    on_disk = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert on_disk <= 2 * MIB + 8 * REGION
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [LOG_NAME, LOCK_NAME, TAIL_NAME, FILE_NAME]
    )


def test_the_open_region_is_continued(open_tier: Open) -> None:
    frames = [make_frame(n, nbytes=50_000) for n in range(6)]
    expected: dict[bytes, int] = {}
    for frame in frames:
        tier = open_tier(regions=2)
        assert found(tier) == expected
        (locator,) = put(tier, frame)
        expected[key(frame)] = locator
        tier.close()
    assert {(at - FRONT_BYTES) // REGION for at in expected.values()} == {0}


def test_rows_in_the_tail_are_put_in_their_place(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier(regions=2)
    frames = [make_frame(n, nbytes=5_000) for n in range(ROWS + 3)]
    places = put(tier, *frames)
    tier.close()
    again = open_tier(regions=2)
    assert set(found(again).values()) == set(places)
    again.close()
    assert not any((tmp_path / TAIL_NAME).read_bytes())
    assert set(found(open_tier(regions=2)).values()) == set(places)


def test_the_tail_of_an_earlier_log_is_dropped(
    open_tier: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(regions=2)
    put(tier, make_frame(1))
    tier.close()
    (tmp_path / LOG_NAME).write_bytes(b"")
    tier = open_tier(regions=2)
    write_and_kill(tier, make_frame(2), monkeypatch)
    tier = open_tier(regions=2)
    assert found(tier) == {}
    put(tier, make_frame(3))


def write_and_kill(tier: NvmeTier, frame: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a frame and end between its bytes and its row."""

    def kill(*args: object) -> None:
        raise KeyboardInterrupt

    locator = tier.reserve(frame.nbytes)
    assert locator == FRONT_BYTES
    item = frame.item(locator)
    with monkeypatch.context() as patch:
        patch.setattr(region_index.IndexWriter, "append", kill)
        with pytest.raises(KeyboardInterrupt):
            tier.write([item])
    tier.close()


def test_a_hole_loses_nothing_after_it(open_tier: Open) -> None:
    tier = open_tier()
    frames = [make_frame(n, nbytes=30_000) for n in range(5)]
    places = [tier.reserve(30_000) or 0 for _ in frames]
    tier.free(places[1], 30_000)
    order = [4, 2, 0]
    assert tier.write([frames[n].item(places[n]) for n in order]) == [DONE] * 3
    tier.close()
    again = open_tier()
    assert found(again) == {key(frames[n]): places[n] for n in order}
    assert all(get(again, frames[n], places[n]) is DONE for n in order)
    assert get(again, frames[1], places[1]).status is Status.CORRUPT
    assert (again.reserve(4096) or 0) >= places[4] + 30_000


def test_an_earlier_life_of_a_region_is_not_found(open_tier: Open) -> None:
    tier = open_tier(regions=2)
    old = fill(tier, nbytes=8_000)
    for locator in old:
        tier.free(locator, 8_000)
    tier.release(0)
    new = make_frame(10_000, nbytes=8_000)
    (locator,) = put(tier, new)
    tier.close()
    again = found(open_tier(regions=2))
    assert again.pop(key(new)) == locator == FRONT_BYTES
    assert all(at >= FRONT_BYTES + REGION for at in again.values())


def test_a_kill_between_frames_and_rows_finds_neither_life(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(regions=2)
    for place in fill(tier):
        tier.free(place, 100_000)
    tier.release(0)
    write_and_kill(tier, make_frame(10_000, nbytes=100_000), monkeypatch)
    again = open_tier(regions=2)
    assert min(found(again).values()) >= FRONT_BYTES + REGION
    put(again, make_frame(2))


def test_the_newest_wins_in_a_region_of_a_lower_number(open_tier: Open) -> None:
    tier = open_tier(regions=3)
    frames = fill(tier, nbytes=500_000)
    old = next(at for at in frames if at > FRONT_BYTES + REGION)
    for place in frames:
        if place < FRONT_BYTES + REGION:
            tier.free(place, 500_000)
    tier.release(0)
    newer = make_frame(frames[old].header.position // 64, nbytes=400_000, version=1)
    assert newer.id == frames[old].id
    put(tier, newer)
    tier.close()
    tier = open_tier(regions=3)
    assert found(tier)[key(newer)] == FRONT_BYTES
    for region in tier.regions():
        if region.start == FRONT_BYTES + REGION:
            tier.free(region.start, region.live)
            tier.release(region.number)
    newest = make_frame(frames[old].header.position // 64, nbytes=700_000, version=2)
    (place,) = put(tier, newest)
    assert place == FRONT_BYTES + REGION
    tier.close()
    assert found(open_tier(regions=3))[key(newest)] == place


def test_the_newest_of_a_name_wins(open_tier: Open) -> None:
    tier = open_tier()
    versions = [make_frame(7, nbytes=300_000, version=n) for n in range(12)]
    places = [put(tier, frame, make_frame(100 + n))[0] for n, frame in enumerate(versions)]
    tier.close()
    tier = open_tier()
    before = tier.space()
    assert before.free + before.dead == before.capacity
    again = found(tier)
    assert again[key(versions[0])] == places[-1]
    assert len(again) == 13
    assert get(tier, versions[-1], places[-1]) is DONE
    space = tier.space()
    assert space.capacity - space.free - space.dead == 303_104 + 12 * 12_288
    assert len(tier.scan()) == 0


@pytest.mark.parametrize("power", [False, True])
def test_blocks_synced_for_power_are_not_written_again(open_tier: Open, power: bool) -> None:
    tier = open_tier()
    one, two = make_frame(1), make_frame(2)
    (place,) = put(tier, one)
    tier.sync(power=power)
    put(tier, two)
    tier.close()
    patch_log(Path(tier._settings.path), block_at(place, int(power)), b"torn" * 1024)
    assert set(found(open_tier())) >= ({key(one)} if power else set())


@pytest.mark.parametrize("lost", ["first", "middle"])
def test_a_damaged_index_is_replaced_by_a_walk(open_tier: Open, tmp_path: Path, lost: str) -> None:
    tier = open_tier()
    frames = [make_frame(n, nbytes=4096 + n * 10) for n in range(3 * ROWS)]
    places = put(tier, *frames)
    tier.close()
    position = 0 if lost == "first" else 1
    patch_log(tmp_path, block_at(places[0], position) + 100, b"junk")
    patch_log(tmp_path, places[50] + 3000, b"junk")
    tier = open_tier()
    again = found(tier)
    assert again.keys() >= {key(frame) for n, frame in enumerate(frames) if n != 50}
    assert all(get(tier, frames[n], places[n]) is DONE for n in range(len(frames)) if n != 50)
    assert key(frames[50]) not in again
    space = tier.space()
    assert space.free + space.dead + (len(frames) - 1) * 8192 - 4096 == space.capacity
    put(tier, make_frame(999))


def test_a_walk_takes_only_whole_frames(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier(regions=2)
    old = fill(tier, nbytes=120_000)
    for locator in old:
        tier.free(locator, 120_000)
    tier.release(0)
    new = [make_frame(1000 + n, nbytes=30_000) for n in range(3)]
    places = put(tier, *new)
    tier.close()
    patch_log(tmp_path, block_at(places[0], 0), b"junk")
    tier = open_tier(regions=2)
    again = found(tier)
    assert {key(frame) for frame in new} <= again.keys()
    assert key(old[FRONT_BYTES]) not in again
    by_key = {key(frame): frame for frame in [*old.values(), *new]}
    assert all(get(tier, by_key[name], at) is DONE for name, at in again.items())


def test_many_damaged_regions_do_not_hold_up_a_start(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier(regions=20)
    fill(tier, nbytes=900_000)
    tier.close()
    for number in range(20):
        patch_log(tmp_path, FRONT_BYTES + (number + 1) * REGION - ALIGN, b"junk")
    assert len(found(open_tier(regions=20))) == region_index._MAX_WALKS


@pytest.mark.parametrize("lines", [1, 30, 200, 700])
def test_kill_loses_nothing_acknowledged(open_tier: Open, tmp_path: Path, lines: int) -> None:
    acknowledged: dict[int, int] = {}
    with subprocess.Popen(endless_writer(tmp_path), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for count, line in enumerate(process.stdout):
            word, *values = line.split()
            numbers = [int(value) for value in values]
            if word == "released":
                start, stop = numbers
                acknowledged = {n: a for n, a in acknowledged.items() if not start <= a < stop}
            else:
                acknowledged |= {numbers[0] + n: at for n, at in enumerate(numbers[1:])}
            if count == lines:
                process.kill()
    tier = open_tier()
    again = found(tier)
    missing = 0
    for number, locator in acknowledged.items():
        frame = make_frame(number, nbytes=5_000 + 1_000 * (number % 4))
        missing += again.get(key(frame)) != locator or get(tier, frame, locator) is not DONE
    assert missing == 0
