"""A durable tier in a dict, whose medium outlives the tier: what a store loses and finds again.

What a store loses and finds again: `MemoryTier(medium)` after another one over the same medium is a
restart. Hooks make it slow, make it fail, or change what comes back.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierkv import frame
from tierkv.tier import ALIGN, DONE, FOUND, Batch, Item, Outcome, Space, Status


@dataclass
class Medium:
    """What stays when the process is gone: frames by locator, and the minimum generations."""

    frames: dict[int, bytes] = field(default_factory=dict)
    generations: dict[bytes, int] = field(default_factory=dict)


def rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class MemoryTier:
    """`DurableTier` over a `Medium`; goes by the name of the first lower tier."""

    name = "nvme"
    durable = True
    granule = ALIGN
    batch = Batch(4, 8 << 20)

    def __init__(self, medium: Medium | None = None, capacity: int = 1 << 30) -> None:
        self.medium = medium or Medium()
        self.capacity = capacity
        self.delay: Callable[[], float] = lambda: 0.0
        self.fault: Callable[[str, Item], Outcome | None] = lambda _op, _item: None
        self.calls: list[tuple[str, int]] = []
        self._sizes: dict[int, int] = {}
        self._numbers = itertools.count(max(self.medium.frames, default=0) + 1)
        self._closed = False
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> int | None:
        if rounded(nbytes) > self.space().free:
            return None
        locator = next(self._numbers)
        self._sizes[locator] = rounded(nbytes)
        return locator

    def free(self, locator: int, nbytes: int) -> None:
        size = self._sizes.pop(locator)
        assert size == rounded(nbytes), f"{nbytes} bytes freed of {size}"
        if not self._closed:
            self.medium.frames.pop(locator, None)

    def space(self) -> Space:
        return Space(self.capacity, self.capacity - sum(self._sizes.values()), 0)

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        return [self._one("write", item) for item in items]

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        return [self._one("read", item) for item in items]

    def probe(self) -> str:
        return "closed" if self._closed else ""

    def close(self) -> None:
        self._closed = True

    def scan(self) -> npt.NDArray[np.void]:
        found = np.zeros(len(self.medium.frames), FOUND)
        for row, (locator, data) in zip(found, self.medium.frames.items(), strict=True):
            header = frame.parse(data[: frame.MAX_HEADER_BYTES])
            assert isinstance(header, frame.Header)
            self._sizes[locator] = rounded(len(data))
            row["key"] = np.frombuffer(header.key, "<u8")
            row["part"] = header.part
            row["namespace"] = np.frombuffer(header.namespace, "u1")
            row["locator"], row["nbytes"] = locator, len(data)
            for name in "codec_id", "fidelity", "flags", "generation", "position", "tokens":
                row[name] = int(getattr(header, name))
        return found

    def sync(self, *, power: bool) -> None:
        self.calls.append(("sync", int(power)))

    def generations(self) -> Mapping[bytes, int]:
        return dict(self.medium.generations)

    def raise_generation(self, namespace: bytes, generation: int) -> None:
        known = self.medium.generations.get(namespace, 0)
        self.medium.generations[namespace] = max(known, generation)

    def _one(self, op: str, item: Item) -> Outcome:
        pause = self.delay()
        if pause:
            time.sleep(pause)
        with self._lock:
            self.calls.append((op, item.locator))
            if self._closed:
                return Outcome(Status.FAILED, "closed")
            return self.fault(op, item) or self._copy(op, item)

    def _copy(self, op: str, item: Item) -> Outcome:
        if op == "write":
            data = b"".join(frame.cut(item.pieces, 0, item.nbytes))
            if self._sizes.get(item.locator) != rounded(item.nbytes) or len(data) != item.nbytes:
                return Outcome(Status.FAILED, "not reserved")
            self.medium.frames[item.locator] = data
            return DONE
        stored = self.medium.frames.get(item.locator, b"")
        header = frame.parse(stored[: frame.MAX_HEADER_BYTES])
        if isinstance(header, frame.Refusal) or (header.key, header.part) != item.id[:2]:
            return Outcome(Status.MISSING)
        at = 0
        for view in frame.cut(item.pieces, 0, len(stored)):
            view[:] = stored[at : at + len(view)]
            at += len(view)
        return DONE
