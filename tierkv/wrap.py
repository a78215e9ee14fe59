"""Tiers around tiers: one concern each, the same interface.

`Sealed` makes payload checksums when bytes leave RAM and verifies them when they come back.
`Measured` keeps live bandwidth, latency and counters.
"""

import threading
from collections import Counter
from collections.abc import Sequence

from tierkv import frame
from tierkv.clock import Clock
from tierkv.cost import Rates
from tierkv.tier import DONE, Item, Outcome, Status, Tier

_SMOOTH = 0.2
_LATENCY_BYTES = 256 << 10


class Sealed:
    """Checksums on the way out, verification on the way in."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        """Seal each frame's header in place, then store it."""
        outcomes = [seal_in_place(item) for item in items]
        sound = [item for item, outcome in zip(items, outcomes, strict=True) if outcome is DONE]
        stored = iter(self.inner.write(sound))
        return [next(stored) if outcome is DONE else outcome for outcome in outcomes]

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        """Load frames and refuse every one that is not sound, sealed and the one asked for."""
        outcomes = self.inner.read(items)
        return [
            check(item) if outcome.status is Status.DONE else outcome
            for item, outcome in zip(items, outcomes, strict=True)
        ]


def seal_in_place(item: Item) -> Outcome:
    """Fill the checksums of the frame in an item's pieces; CORRUPT when its header does not hold.

    Only checksum fields change, so a reader who compares the frame's content meanwhile is not
    disturbed.
    """
    head = item.pieces[0]
    header = frame.parse(head[: frame.MAX_HEADER_BYTES])
    if isinstance(header, frame.Refusal) or (header.key, header.part) != item.id[:2]:
        return Outcome(Status.CORRUPT, "the frame in RAM is not the one to store")
    if not header.checksums:
        head[: header.header_bytes] = frame.pack(frame.seal(header, item.pieces))
    return DONE


def check(item: Item) -> Outcome:
    """Return whether an item's pieces hold the frame it names, with the payload it promises."""
    header = frame.parse(item.pieces[0][: frame.MAX_HEADER_BYTES])
    if header is frame.Refusal.UNKNOWN:
        return Outcome(Status.UNKNOWN, "a frame of an unknown version or class")
    if isinstance(header, frame.Refusal):
        return Outcome(Status.CORRUPT, "header checksum")
    if (header.key, header.part) != item.id[:2] or header.frame_bytes != item.nbytes:
        return Outcome(Status.CORRUPT, "another frame")
    if not frame.verify(header, item.pieces):
        return Outcome(Status.CORRUPT, "payload checksum")
    return DONE


class Measured:
    """Counts and rates of a tier's I/O; what it measures replaces the first guesses it is given."""

    def __init__(self, inner: Sealed, guess: Rates, clock: Clock) -> None:
        self.inner = inner
        self._clock = clock
        self.rates = guess
        self.read_bytes = 0
        self.written_bytes = 0
        self.outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        """Store, and learn the write rate."""
        start = self._clock()
        outcomes = self.inner.write(items)
        size = self._note("write", items, outcomes)
        with self._lock:
            self.written_bytes += size
            if size >= _LATENCY_BYTES:
                rate = size / max(self._clock() - start, 1e-9)
                self.rates = self.rates._replace(write_bps=_blend(self.rates.write_bps, rate))
        return outcomes

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        """Load, and learn the read rate (large batches) or the latency (small ones)."""
        start = self._clock()
        outcomes = self.inner.read(items)
        size = self._note("read", items, outcomes)
        seconds = max(self._clock() - start, 1e-9)
        with self._lock:
            self.read_bytes += size
            if size >= _LATENCY_BYTES:
                rate = size / max(seconds - self.rates.latency_s, seconds / 2)
                self.rates = self.rates._replace(read_bps=_blend(self.rates.read_bps, rate))
            elif size:
                self.rates = self.rates._replace(latency_s=_blend(self.rates.latency_s, seconds))
        return outcomes

    def _note(self, op: str, items: Sequence[Item], outcomes: Sequence[Outcome]) -> int:
        with self._lock:
            self.outcomes.update(f"{op}_{outcome.status.value}" for outcome in outcomes)
        return sum(
            item.nbytes
            for item, outcome in zip(items, outcomes, strict=True)
            if outcome.status is Status.DONE
        )


def _blend(old: float, new: float) -> float:
    return old + (new - old) * _SMOOTH
