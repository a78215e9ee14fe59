"""Stores over the real NVMe tier, with hands on its media: for tests of what users reported."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.memory_tier import MemoryTier
from tests.stores import BLOCK, Clock, Rig, pattern
from tierkv.catalog import READY
from tierkv.executor import Inline
from tierkv.simulation.lanes import Time
from tierkv.simulation.media import Faults
from tierkv.simulation.server import ModelShared, Server
from tierkv.tier import RAM, DurableTier, Item, Outcome
from tierkv.tiers.nvme import NvmeSettings, NvmeTier

MIB = 1 << 20
Open = Callable[..., Rig]


class Hooked(NvmeTier):
    """The real tier; tells a test when it is in the middle of I/O, outside of the store's lock."""

    between: Callable[[str], None] = staticmethod(lambda _op: None)

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = super().write(items)
        self.between("write")
        return outcomes

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = super().read(items)
        self.between("read")
        return outcomes


def shared(server: Server) -> ModelShared:
    return ModelShared(server, Faults(random.Random(0), 0.0), Time(), lambda: None)


@contextlib.contextmanager
def opening(tmp_path: Path) -> Iterator[Open]:
    """Open a store over a directory; opening the directory again is a restart after kill -9."""
    tiers: dict[str, NvmeTier] = {}

    def make(
        folder: str = "nvme", *others: DurableTier, pages: int = 32, size: int = 20 * MIB,
        **fields: Any,
    ) -> Rig:  # fmt: skip
        if folder in tiers:
            tiers[folder].close()
        settings = NvmeSettings(
            path=str(tmp_path / folder), size_bytes=size, region_bytes=MIB, free_floor_bytes=0
        )
        tiers[folder] = Hooked(settings)
        return Rig(pages, [tiers[folder], *others], **fields)

    yield make
    for tier in tiers.values():
        tier.close()


def evict_ram(rig: Rig) -> None:
    """Make RAM forget everything that nobody holds."""
    store = rig.store._store
    with store.lock:
        rows = store.catalog.select(RAM, READY).tolist()
        store.drop([row for row in rows if not store.catalog.holds[row]])


def texts(keys: Sequence[bytes], text: bytes) -> list[bytes]:
    return [pattern(text + key + b"\0", BLOCK) for key in keys]


def place(rig: Rig, key: bytes) -> int:
    """Return where in the log a block lies."""
    catalog = rig.store._store.catalog
    row = catalog.in_tier(catalog.head(key, 0), 1)
    return int(catalog.locator[row])


def counters(rig: Rig) -> dict[str, int]:
    found: dict[str, int] = rig.stat()["counters"]
    return found


class Stuck(Inline):
    """Jobs that wait for `drain`, as if the threads of their lane had hung for `age`."""

    age = 0.0
    share = 1.0

    def stuck(self, lane: str, longer_s: float) -> float:
        hangs = self.age > longer_s and any(name == lane for name, _ in self.jobs)
        return self.share if hangs else 0.0


def stuck_rig(pages: int = 16) -> tuple[Rig, Stuck]:
    executor = Stuck()
    rig = Rig(pages, [MemoryTier()], executor=executor)
    rig.inline = executor
    executor.drain()
    return rig, executor


class Wall(Clock):
    """The real time, for stores with threads."""

    def __call__(self) -> float:
        return time.monotonic()


class Answer:
    """Takes one reply in any thread and gives it to the one who waits."""

    def __init__(self) -> None:
        self._there = threading.Event()
        self._reply: Any = None

    def __call__(self, reply: object) -> None:
        self._reply = reply
        self._there.set()

    def wait(self) -> Any:
        assert self._there.wait(30), "no answer"
        return self._reply
