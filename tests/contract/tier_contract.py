"""The contract every tier keeps, as a suite to inherit.

    class TestHost(TierContract):
        def make_tier(self, tmp: Path) -> Tier: ...

`make_tier` opens an empty tier of 16 to 64 MiB. A durable tier is opened again over the same `tmp`
after `stop` or `kill`.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.frames import Sample, content, empty_item, key_of, make_frame
from tierkv.part import Part
from tierkv.tier import (
    DONE,
    FOUND,
    DurableTier,
    FrameId,
    Item,
    Outcome,
    RegionTier,
    SharedTier,
    Status,
    Tier,
)

SIZES = [256, 257, 4095, 4096, 4097, 65_536, 1_000_000, 2 << 20, 4 << 20]
MIB = 1 << 20


class Ledger:
    """Counts what a test reserved, to check the accounting after every step."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.held: dict[int, int] = {}
        self.reserved = 0
        self.check()

    def reserve(self, nbytes: int) -> int | None:
        locator = self.tier.reserve(nbytes)
        if locator is not None:
            assert locator not in self.held
            self.held[locator] = nbytes
            self.reserved += self.allocated(nbytes)
        self.check()
        return locator

    def free(self, locator: int) -> None:
        nbytes = self.held.pop(locator)
        self.tier.free(locator, nbytes)
        self.reserved -= self.allocated(nbytes)
        self.check()

    def allocated(self, nbytes: int) -> int:
        return -(-nbytes // self.tier.granule) * self.tier.granule

    def check(self) -> None:
        space = self.tier.space()
        assert min(space) >= 0
        assert space.free + space.dead + self.reserved == space.capacity


class TierContract:
    """Inherit, implement `make_tier`; override the hooks that the tier needs."""

    bounded = True
    """Whether `reserve` returns None once capacity is used up."""
    addressed = True
    """Whether a locator is a place: an item is then found by its locator, not by its id alone."""

    # --- what a subclass supplies ---

    def make_tier(self, tmp: Path) -> Tier:
        """Open a tier; over the same `tmp` it finds what an earlier one left, if durable."""
        raise NotImplementedError

    def stop(self, tier: Tier) -> None:
        """End a tier in good order."""
        tier.close()

    def kill(self, tier: Tier) -> None:
        """End a tier as kill -9 would: nothing is written any more. Default: as `stop`."""
        self.stop(tier)

    def damage(self, tmp: Path, seed: int) -> bool:
        """Put junk over a stopped tier's content; returns False where a tier has none to damage."""
        return False

    def reclaim(self, tier: Tier) -> None:
        """Turn dead space into free space as far as the tier needs it."""
        if isinstance(tier, RegionTier):
            for region in tier.regions():
                if region.live == 0:
                    tier.release(region.number)

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.make_tier(tmp_path)
        yield tier
        tier.close()

    def put(self, tier: Tier, frame: Sample) -> int:
        """Reserve and write one frame; returns its locator."""
        locator = tier.reserve(frame.nbytes)
        assert locator is not None
        assert tier.write([frame.item(locator)]) == [DONE]
        return locator

    # --- reading and writing ---

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_reads_back_what_was_written(self, tier: Tier, nbytes: int) -> None:
        frame = make_frame(1, nbytes=nbytes)
        item = empty_item(frame.id, self.put(tier, frame), nbytes)
        assert tier.read([item]) == [DONE]
        assert content(item) == frame.data

    @pytest.mark.parametrize("nbytes", [8192, 100_000, 1_000_000])
    def test_frames_may_be_spread_over_pieces(self, tier: Tier, nbytes: int) -> None:
        frame = make_frame(2, nbytes=nbytes, segments=3)
        locator = tier.reserve(nbytes)
        assert locator is not None
        assert tier.write([frame.item(locator, [4096, 8192, 4096, 65_536])]) == [DONE]
        for cuts in [], [4096] * 40, [65_536, 4096]:
            item = empty_item(frame.id, locator, nbytes, cuts)
            assert tier.read([item]) == [DONE]
            assert content(item) == frame.data

    def test_a_batch_reads_and_writes_each_item(self, tier: Tier) -> None:
        frames = [make_frame(n, nbytes=random.Random(n).randint(256, 50_000)) for n in range(40)]
        locators = [tier.reserve(frame.nbytes) for frame in frames]
        items = [f.item(at) for f, at in zip(frames, locators, strict=True) if at is not None]
        assert len(items) == len(frames)
        assert tier.write(items) == [DONE] * len(items)
        back = [empty_item(item.id, item.locator, item.nbytes) for item in items]
        random.Random(0).shuffle(back)
        assert tier.read(back) == [DONE] * len(back)
        wanted = {frame.id: frame.data for frame in frames}
        assert all(content(item) == wanted[item.id] for item in back)

    def test_an_empty_batch_is_nothing(self, tier: Tier) -> None:
        assert tier.write([]) == []
        assert tier.read([]) == []

    def test_what_was_never_written_is_not_read(self, tier: Tier) -> None:
        locator = tier.reserve(4096)
        assert locator is not None
        unknown = FrameId(key_of(99), Part(3, 0, 1, 0, 1))
        places = [locator, 0, 1, 12_345, 1 << 20, 1 << 50, -1, -4096]
        outcomes = tier.read([empty_item(unknown, place, 4096) for place in places])
        assert len(outcomes) == len(places)
        assert all(outcome.status is not Status.DONE for outcome in outcomes)

    def test_one_bad_item_leaves_the_others(self, tier: Tier) -> None:
        frames = [make_frame(n, nbytes=20_000) for n in range(3)]
        locators = [self.put(tier, frame) for frame in frames]
        items = [empty_item(f.id, at, f.nbytes) for f, at in zip(frames, locators, strict=True)]
        items[1] = empty_item(FrameId(key_of(77), frames[1].id.part), 1 << 50, 20_000)
        outcomes = tier.read(items)
        assert [outcome.status is Status.DONE for outcome in outcomes] == [True, False, True]
        assert content(items[0]) == frames[0].data
        assert content(items[2]) == frames[2].data

    def test_one_bad_write_leaves_the_others(self, tier: Tier) -> None:
        if not self.addressed:
            pytest.skip("no locator is wrong here")
        frames = [make_frame(n, nbytes=20_000) for n in range(3)]
        locators = [tier.reserve(frame.nbytes) or 0 for frame in frames]
        locators[1] = 1 << 50
        items = [f.item(at) for f, at in zip(frames, locators, strict=True)]
        outcomes = tier.write(items)
        assert [outcome.status is Status.DONE for outcome in outcomes] == [True, False, True]
        back = [empty_item(frames[n].id, locators[n], 20_000) for n in (0, 2)]
        assert tier.read(back) == [DONE, DONE]
        assert [content(item) for item in back] == [frames[0].data, frames[2].data]

    def test_reads_go_on_beside_writes(self, tier: Tier) -> None:
        old = [make_frame(n, nbytes=30_000) for n in range(8)]
        places = [self.put(tier, frame) for frame in old]
        new = [make_frame(100 + n, nbytes=30_000) for n in range(40)]
        reserved = [tier.reserve(frame.nbytes) for frame in new]

        def read(number: int) -> bool:
            for turn in range(30):
                pick = (number + turn) % len(old)
                item = empty_item(old[pick].id, places[pick], old[pick].nbytes)
                if tier.read([item]) != [DONE] or content(item) != old[pick].data:
                    return False
            return True

        def write() -> list[Outcome]:
            out: list[Outcome] = []
            for frame, locator in zip(new, reserved, strict=True):
                assert locator is not None
                out += tier.write([frame.item(locator)])
            return out

        with ThreadPoolExecutor(9) as pool:
            writing = pool.submit(write)
            assert all(pool.map(read, range(8)))
            assert writing.result() == [DONE] * len(new)

    # --- space ---

    @pytest.mark.parametrize("nbytes", [4096, 100_000, MIB])
    def test_reserves_until_full(self, tier: Tier, nbytes: int) -> None:
        if not self.bounded:
            pytest.skip("no capacity of its own")
        ledger = Ledger(tier)
        while ledger.reserve(nbytes) is not None:
            pass
        assert ledger.reserved <= tier.space().capacity
        assert ledger.reserved > tier.space().capacity // 3
        assert ledger.reserve(nbytes) is None

    def test_a_frame_larger_than_the_tier_does_not_fit(self, tier: Tier) -> None:
        if not self.bounded:
            pytest.skip("no capacity of its own")
        before = tier.space()
        assert tier.reserve(before.capacity + 1) is None
        assert tier.space() == before

    def test_free_gives_the_space_back(self, tier: Tier) -> None:
        if not self.bounded:
            pytest.skip("no capacity of its own")
        ledger = Ledger(tier)
        for turn in range(3):
            while ledger.reserve(200_000 + turn) is not None:
                pass
            count = len(ledger.held)
            assert count > 0
            for locator in random.Random(turn).sample(sorted(ledger.held), count):
                ledger.free(locator)
            self.reclaim(tier)
            ledger.check()
            assert tier.space().free > 0

    def test_accounting_holds_at_every_step(self, tier: Tier) -> None:
        rng = random.Random(5)
        ledger = Ledger(tier)
        for number in range(200):
            frame = make_frame(number, nbytes=rng.randint(256, 300_000))
            locator = ledger.reserve(frame.nbytes)
            if locator is not None and rng.random() < 0.8:
                assert tier.write([frame.item(locator)]) == [DONE]
                ledger.check()
            while ledger.held and (locator is None or rng.random() < 0.4):
                locator = rng.choice(sorted(ledger.held))
                ledger.free(locator)
            self.reclaim(tier)
            ledger.check()

    # --- life ---

    def test_probe_says_what_is_wrong(self, tier: Tier) -> None:
        assert tier.probe() == ""
        before = tier.space()
        assert tier.probe() == ""
        assert tier.space() == before
        tier.close()
        assert tier.probe() != ""

    def test_calls_after_close_fail_without_raising(self, tier: Tier) -> None:
        frame = make_frame(1)
        locator = self.put(tier, frame)
        tier.close()
        tier.close()
        items: list[Item] = [frame.item(locator)] * 2
        assert [o.status for o in tier.write(items)] == [Status.FAILED] * 2
        assert [o.status for o in tier.read(items)] == [Status.FAILED] * 2
        tier.free(locator, frame.nbytes)
        tier.space()

    # --- durability ---

    def test_an_empty_tier_finds_nothing(self, tier: Tier) -> None:
        if not isinstance(tier, DurableTier):
            pytest.skip("not durable")
        found = tier.scan()
        assert found.dtype == FOUND
        assert len(found) == 0

    @pytest.mark.parametrize("end", ["stop", "kill"])
    def test_what_was_acknowledged_is_found_again(self, tmp_path: Path, end: str) -> None:
        tier = self.make_tier(tmp_path)
        if not isinstance(tier, DurableTier) or isinstance(tier, SharedTier):
            tier.close()
            pytest.skip("keeps nothing that a scan finds")
        rng = random.Random(end)
        frames = {}
        for number in range(60):
            frame = make_frame(
                number, nbytes=rng.randint(256, 200_000), generation=number, codec_id=number + 1,
                part=Part(0, 0, number + 1, 0, 2),
            )  # fmt: skip
            frames[self.put(tier, frame)] = frame
        tier.sync(power=end == "stop")
        getattr(self, end)(tier)
        again = self.make_tier(tmp_path)
        assert isinstance(again, DurableTier)
        before = again.space()
        found = again.scan()
        after = again.space()
        assert {int(row["locator"]) for row in found} == set(frames)
        reserved = sum(-(-f.nbytes // tier.granule) * tier.granule for f in frames.values())
        assert after.free + after.dead + reserved == after.capacity == before.capacity
        for row in found:
            frame = frames[int(row["locator"])]
            self.check_row(row, frame)
            item = empty_item(frame.id, int(row["locator"]), frame.nbytes)
            assert again.read([item]) == [DONE]
            assert content(item) == frame.data
        again.close()

    @staticmethod
    def check_row(row: np.void, frame: Sample) -> None:
        header = frame.header
        assert row["key"].tobytes() == header.key
        assert Part(*(int(value) for value in row["part"])) == header.part
        assert row["namespace"].tobytes() == header.namespace
        assert int(row["nbytes"]) == frame.nbytes
        for name in "codec_id", "fidelity", "flags", "generation", "position", "tokens":
            assert int(row[name]) == int(getattr(header, name))

    def test_generations_persist_and_only_rise(self, tmp_path: Path) -> None:
        tier = self.make_tier(tmp_path)
        if not isinstance(tier, DurableTier):
            tier.close()
            pytest.skip("not durable")
        one, two = b"1" * 16, b"2" * 16
        assert dict(tier.generations()) == {}
        tier.raise_generation(one, 3)
        tier.raise_generation(two, 1)
        tier.raise_generation(one, 7)
        tier.raise_generation(one, 5)
        assert dict(tier.generations()) == {one: 7, two: 1}
        self.kill(tier)
        again = self.make_tier(tmp_path)
        assert isinstance(again, DurableTier)
        assert dict(again.generations()) == {one: 7, two: 1}
        again.close()

    @pytest.mark.parametrize("seed", range(6))
    def test_junk_is_never_found_as_a_frame(self, tmp_path: Path, seed: int) -> None:
        tier = self.make_tier(tmp_path)
        frames = {f.id: f for f in (make_frame(n, nbytes=50_000) for n in range(30))}
        for frame in frames.values():
            self.put(tier, frame)
        self.stop(tier)
        if not isinstance(tier, DurableTier) or not self.damage(tmp_path, seed):
            pytest.skip("nothing to damage")
        again = self.make_tier(tmp_path)
        assert isinstance(again, DurableTier)
        for row in again.scan():
            id_ = FrameId(row["key"].tobytes(), Part(*(int(value) for value in row["part"])))
            assert id_ in frames
            item = empty_item(id_, int(row["locator"]), int(row["nbytes"]))
            again.read([item])
        assert again.reserve(4096) is not None
        again.close()
