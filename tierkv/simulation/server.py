"""Server: a store that several simulated sidecars share, and the tier over it."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierkv import frame
from tierkv.simulation.lanes import Pause, Time
from tierkv.simulation.media import REFUSALS, Faults, Medium, Name, parsed
from tierkv.tier import DONE, FOUND, FrameId, Item, Outcome, Space, Status

SPOILING = ("read_short", "read_corrupt", "read_missing")
"""After these the reader gives the frame up."""


@dataclass(slots=True)
class Server:
    """A store that several sidecars share, and that forgets as it likes."""

    frames: dict[FrameId, bytes] = field(default_factory=dict)
    generations: dict[bytes, int] = field(default_factory=dict)
    reachable: bool = True
    lost: set[Name] = field(default_factory=set)
    """What it ever forgot or never stored, whoever was told otherwise."""

    def lose(self, name: FrameId) -> None:
        """Forget a frame."""
        self.frames.pop(name, None)
        self.lost.add(name[:2])

    def evict(self, rng: random.Random) -> None:
        """Lose a quarter of the frames."""
        for name in rng.sample(sorted(self.frames), len(self.frames) // 4):
            self.lose(name)


class ModelShared(Medium):
    """A `SharedTier` of one sidecar over the server."""

    name = "redis"
    granule = 1
    LIMIT = 1 << 30

    def __init__(self, server: Server, faults: Faults, time: Time, pause: Pause) -> None:
        super().__init__(faults, time, pause)
        self._server = server
        self._known: dict[bytes, int] = {}
        self._reserved = self._locator = 0

    def reserve(self, nbytes: int) -> int | None:
        """Count bytes."""
        self._reserved += nbytes
        self._locator += 1
        return self._locator

    def free(self, locator: int, nbytes: int) -> None:
        """Count bytes."""
        del locator
        self._reserved -= nbytes
        assert self._reserved >= 0, "freed more than was reserved"

    def space(self) -> Space:
        """Return what this sidecar counts."""
        return Space(self.LIMIT, self.LIMIT - self._reserved, 0)

    def scan(self) -> npt.NDArray[np.void]:
        """Find nothing: what is there belongs to all."""
        return np.empty(0, FOUND)

    def find(self, ids: Sequence[FrameId]) -> list[int]:
        """Return the bytes of frames that are there and not cleared."""
        self._pause()
        if not self._server.reachable:
            return [-1] * len(ids)
        self._agree()
        found = [self._frame(name) for name in ids]
        self._spend(())
        return [-1 if data is None else len(data) for data in found]

    def drop(self, ids: Sequence[FrameId]) -> list[Outcome]:
        """Remove frames."""
        if not self._server.reachable:
            return [Outcome(Status.FAILED, "gone")] * len(ids)
        for name in ids:
            self._server.lose(name)
        return [DONE] * len(ids)

    def generations(self) -> Mapping[bytes, int]:
        """Return the minima, of the server where it can be reached."""
        self._agree()
        return dict(self._known)

    def raise_generation(self, namespace: bytes, generation: int) -> None:
        """Raise a minimum for all. Raises: OSError: only this sidecar knows it yet."""
        self._known[namespace] = max(self._known.get(namespace, 0), generation)
        if not self._server.reachable:
            raise OSError("the server is gone")
        self._agree()
        self._pause()

    def _agree(self) -> None:
        """Exchange minima with the server."""
        if self._server.reachable:
            for known, other in (
                (self._known, self._server.generations),
                (self._server.generations, self._known),
            ):
                for namespace, generation in other.items():
                    known[namespace] = max(known.get(namespace, 0), generation)

    def _frame(self, name: FrameId) -> bytes | None:
        data = self._server.frames.get(name)
        if data is None:
            return None
        header = frame.parse(data[: frame.MAX_HEADER_BYTES])
        if isinstance(header, frame.Refusal):
            return data
        return data if header.generation >= self._known.get(header.namespace, 0) else None

    def _write(self, item: Item, fault: str) -> Outcome:
        header = parsed(item)
        if not self._server.reachable:
            return Outcome(Status.FAILED, "gone")
        if fault in REFUSALS:
            return REFUSALS[fault]
        self._agree()
        data = b"".join(frame.cut(item.pieces, 0, item.nbytes))
        there = frame.parse(self._server.frames.get(item.id, b"")[: frame.MAX_HEADER_BYTES])
        if isinstance(there, frame.Header) and there.fidelity > header.fidelity:
            return Outcome(Status.THROTTLED, "a copy of a higher class is there")
        if fault == "write_torn":
            data = data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
        if fault:
            self._server.lost.add(item.id[:2])
        if fault != "write_lost":
            self._server.frames[item.id] = data
        return DONE

    def _read(self, item: Item, fault: str) -> Outcome:
        if not self._server.reachable:
            return Outcome(Status.FAILED, "gone")
        self._agree()
        data = self._frame(item.id)
        if data is None or len(data) != item.nbytes:
            return Outcome(Status.MISSING)
        if fault in SPOILING:
            self._server.lost.add(item.id[:2])
        return self._deliver(item, data, fault)
