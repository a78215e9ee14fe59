"""A state machine drives the NVMe tier beside a dict: reserve, write, free, release, stop and kill.

What the tier says is DONE the model holds; after each end the tier must find all of it, with its
bytes, and nothing that was never written. Freed frames may come back: their bytes are sound still.
"""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.frames import Sample, content, empty_item, make_frame
from tierkv.part import Part
from tierkv.tier import ALIGN, DONE, FrameId
from tierkv.tiers.nvme import NvmeSettings, NvmeTier

REGION = 256 << 10
REGIONS = 5
SIZES = st.integers(256, 100_000) | st.just(4096) | st.just(REGION - ALIGN)


class Held(NamedTuple):
    """An acknowledged frame."""

    id: FrameId
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


class NvmeMachine(RuleBasedStateMachine):
    """Frames by locator: `reserved` are not written yet, `live` are acknowledged."""

    @initialize(direct=st.booleans())
    def start(self, direct: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="nvme-machine-"))
        self.direct = direct
        self.count = 0
        self.reserved: dict[int, Sample] = {}
        self.live: dict[int, Held] = {}
        self.ever: dict[FrameId, set[bytes]] = {}
        self.tier = self.open()

    def open(self) -> NvmeTier:
        return NvmeTier(
            NvmeSettings(
                path=str(self.folder), size_bytes=(2 << 20) + REGIONS * REGION,
                region_bytes=REGION, free_floor_bytes=0, direct=self.direct,
            )
        )  # fmt: skip

    @rule(nbytes=SIZES, again=st.booleans(), pick=st.integers(0))
    def reserve(self, nbytes: int, again: bool, pick: int) -> None:
        self.count += 1
        number = pick % self.count if again else self.count
        frame = make_frame(number, nbytes=nbytes, version=self.count)
        locator = self.tier.reserve(nbytes)
        if locator is not None:
            assert locator not in self.reserved.keys() | self.live.keys()
            self.reserved[locator] = frame

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        picks = data.draw(st.lists(st.sampled_from(sorted(self.reserved)), unique=True))
        items = [self.reserved[at].item(at) for at in picks]
        assert self.tier.write(items) == [DONE] * len(items)
        for at in picks:
            frame = self.reserved.pop(at)
            self.ever.setdefault(frame.id, set()).add(frame.data)
            for older in [at for at, other in self.live.items() if other.id == frame.id]:
                self.tier.free(older, self.live.pop(older).nbytes)
            self.live[at] = Held(frame.id, frame.data)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        picks = data.draw(st.lists(st.sampled_from(sorted(self.live))))
        items = [empty_item(self.live[at].id, at, self.live[at].nbytes) for at in picks]
        assert self.tier.read(items) == [DONE] * len(items)
        assert [content(item) for item in items] == [self.live[at].data for at in picks]

    @precondition(lambda self: self.places())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.give_back(data.draw(st.lists(st.sampled_from(sorted(self.places())), unique=True)))

    def places(self) -> set[int]:
        return self.reserved.keys() | self.live.keys()

    def give_back(self, places: Iterable[int]) -> None:
        for at in places:
            sample = self.reserved.pop(at, None)
            self.tier.free(at, sample.nbytes if sample else self.live.pop(at).nbytes)

    @rule(pick=st.integers(0), keep=st.booleans())
    def reclaim(self, pick: int, keep: bool) -> None:
        regions = self.tier.regions()
        if not regions:
            return
        region = regions[pick % len(regions)]
        if not keep:
            self.give_back([at for at in self.places() if region.start <= at < region.stop])
        if not keep or not region.live:
            self.tier.release(region.number)

    @rule()
    def sync(self) -> None:
        self.tier.sync(power=True)

    @rule()
    def restart(self) -> None:
        """A kill is no different: the tier writes nothing when it closes."""
        self.tier.close()
        self.tier = self.open()
        rows = self.tier.scan()
        places = {int(row["locator"]): int(row["nbytes"]) for row in rows}
        back: dict[int, Held] = {}
        for row in rows:
            id_ = FrameId(row["key"].tobytes(), Part(*(int(value) for value in row["part"])))
            item = empty_item(id_, int(row["locator"]), int(row["nbytes"]))
            assert self.tier.read([item]) == [DONE]
            assert content(item) in self.ever[id_]
            back[item.locator] = Held(id_, content(item))
        names = {frame.id for frame in back.values()}
        for at, frame in self.live.items():
            # Of two copies the one in the younger region wins, even if it was written first.
            assert at in back or (frame.id in names and len(self.ever[frame.id]) > 1)
            assert at not in back or back[at] == frame
        assert len(names) == len(back) == len(places)
        self.live, self.reserved = back, {}

    @invariant()
    def accounts(self) -> None:
        if not hasattr(self, "tier"):
            return
        sizes = [frame.nbytes for frame in self.reserved.values()]
        sizes += [frame.nbytes for frame in self.live.values()]
        held = sum(-(-nbytes // ALIGN) * ALIGN for nbytes in sizes)
        space = self.tier.space()
        assert min(space) >= 0
        assert space.free + space.dead + held == space.capacity == REGIONS * REGION

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.folder)


TestNvmeMachine = NvmeMachine.TestCase
TestNvmeMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
