"""Media: what a simulated process cannot take with it when it is killed, and how it fails.

`ModelTier` (a disk) and `ModelShared` (a server) keep the contract of every tier, with the faults
that real media have. Each fault is counted by name. What a medium broke by itself is marked, so
that the world does not blame the store for it.
"""

import random
from collections import Counter
from collections.abc import Sequence

from tierkv import frame
from tierkv.part import Part
from tierkv.simulation.lanes import Pause, Time
from tierkv.tier import DONE, Batch, Item, Outcome, Status

READ_FAULTS = ("read_failed", "read_short", "read_corrupt", "read_late", "read_missing")
WRITE_FAULTS = ("write_failed", "write_full", "write_throttled", "write_lost", "write_torn")
LATE_S = 7.0
SECONDS_PER_BYTE = 1e-9
LATENCY_S = 2e-4

REFUSALS = {
    "write_failed": Outcome(Status.FAILED, "EIO"),
    "write_full": Outcome(Status.FULL, "ENOSPC"),
    "write_throttled": Outcome(Status.THROTTLED, "budget"),
    "read_failed": Outcome(Status.FAILED, "EIO"),
    "read_missing": Outcome(Status.MISSING),
}
Name = tuple[bytes, Part]


class Faults:
    """Draws what goes wrong; `rate` is the share of operations that a fault strikes."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self.rng = rng
        self.rate = rate
        self.injected: Counter[str] = Counter()

    def draw(self, kinds: Sequence[str]) -> str:
        """Return the fault of this operation, "" for none."""
        if self.rng.random() >= self.rate:
            return ""
        kind = self.rng.choice(kinds)
        self.injected[kind] += 1
        return kind


def parsed(item: Item) -> frame.Header:
    """Return the header of an item; it must be the frame the item names, sealed and sound."""
    header = frame.parse(item.pieces[0][: frame.MAX_HEADER_BYTES])
    assert not isinstance(header, frame.Refusal), f"wrote no frame: {header}"
    assert (header.key, header.part) == item.id[:2], "wrote a frame under another name"
    assert header.generation == item.id.generation, "wrote a frame of another generation"
    assert frame.verify(header, item.pieces), "wrote a frame whose bytes had changed"
    return header


def fill(item: Item, data: bytes) -> None:
    """Copy a frame's bytes into an item's pieces."""
    at = 0
    for piece in frame.cut(item.pieces, 0, len(data)):
        piece[:] = data[at : at + len(piece)]
        at += len(piece)


class Medium:
    """What the models share: time that passes, faults, and others that run meanwhile."""

    durable = True
    name = ""
    batch = Batch(4, 8 << 20)

    def __init__(self, faults: Faults, time: Time, pause: Pause) -> None:
        self._faults = faults
        self._time = time
        self._pause = pause

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        """Store frames, or not."""
        self._pause()
        outcomes = [self._write(item, self._faults.draw(WRITE_FAULTS)) for item in items]
        self._spend(items)
        return outcomes

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        """Load frames, or something else."""
        outcomes = [self._read(item, self._faults.draw(READ_FAULTS)) for item in items]
        self._spend(items)
        return outcomes

    def probe(self) -> str:
        """Find nothing wrong."""
        return ""

    def sync(self, *, power: bool) -> None:
        """Keep what was written. Raises: OSError now and then."""
        del power
        if self._faults.draw(("sync_failed",)):
            raise OSError("EIO")

    def close(self) -> None:
        """Do nothing: the medium stays."""

    def _spend(self, items: Sequence[Item]) -> None:
        size = sum(item.nbytes for item in items)
        self._time.advance(LATENCY_S + size * SECONDS_PER_BYTE)
        self._pause()

    def _deliver(self, item: Item, data: bytes, fault: str) -> Outcome:
        """Fill an item as a medium with this fault does."""
        if fault in REFUSALS:
            return REFUSALS[fault]
        if fault == "read_short":
            data = data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
        elif fault == "read_corrupt":
            at = self._faults.rng.randrange(len(data))
            data = (
                data[:at]
                + bytes([data[at] ^ (1 << self._faults.rng.randrange(8))])
                + data[at + 1 :]
            )
        elif fault == "read_late":
            self._time.advance(self._faults.rng.random() * LATE_S)
        fill(item, data[: item.nbytes])
        return DONE

    def _write(self, item: Item, fault: str) -> Outcome:
        raise NotImplementedError

    def _read(self, item: Item, fault: str) -> Outcome:
        raise NotImplementedError
