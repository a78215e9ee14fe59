"""Tiers around tiers: one concern each, the same interface.

`Sealed` makes payload checksums when bytes leave RAM and verifies them when they come back.
`Measured` keeps live bandwidth, latency and counters.
"""

import math
import threading
from collections import Counter
from collections.abc import Sequence

from tierkv import frame
from tierkv.clock import Clock
from tierkv.cost import LATENCY_BYTES, RATE_BYTES, Rates, load_seconds
from tierkv.tier import DONE, Item, Outcome, Status, Tier

_SPAN_S = 0.25


class Sealed:
    """Checksums on the way out, verification on the way in."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    def seal(self, items: Sequence[Item]) -> None:
        """Make checksums ahead of `write`, while an earlier batch is on its way to the medium."""
        for item in items:
            seal_in_place(item)

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        """Seal each frame's header in place where that was not done ahead, then store it."""
        outcomes = [
            DONE if frame.is_sealed(item.pieces[0]) else seal_in_place(item) for item in items
        ]
        sound = [item for item, outcome in zip(items, outcomes, strict=True) if outcome is DONE]
        stored = iter(self.inner.write(sound))
        return [next(stored) if outcome is DONE else outcome for outcome in outcomes]

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        """Load frames and refuse every one that is not sound, sealed and the one asked for."""
        items = [item._replace(watch=frame.Watch(item.pieces)) for item in items]
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
    # One copy, for the write thread of another tier may be sealing the same frame.
    header = frame.parse(bytes(head[: frame.MAX_HEADER_BYTES]))
    if isinstance(header, frame.Refusal) or (header.key, header.part) != item.id[:2]:
        return Outcome(Status.CORRUPT, "the frame in RAM is not the one to store")
    if not header.checksums:
        head[: header.header_bytes] = frame.pack(frame.seal(header, item.pieces))
    return DONE


def check(item: Item) -> Outcome:
    """Return whether an item's pieces hold the frame it names, with the payload it promises.

    Where it asked for a prefix of the frame, the header is made that of the prefix.
    """
    head = item.pieces[0]
    found = frame.parse(head[: frame.MAX_HEADER_BYTES])
    if found is frame.Refusal.UNKNOWN:
        return Outcome(Status.UNKNOWN, "a frame of an unknown version or class")
    if isinstance(found, frame.Refusal):
        return Outcome(Status.CORRUPT, "header checksum")
    header = frame.shortened(found, item.nbytes)
    if (found.key, found.part) != item.id[:2] or header is None:
        return Outcome(Status.CORRUPT, "another frame")
    verified = None if item.watch is None else item.watch.verified(header)
    if not (frame.verify(header, item.pieces) if verified is None else verified):
        return Outcome(Status.CORRUPT, "payload checksum")
    if header.payload_bytes < found.payload_bytes:
        head[: header.header_bytes] = frame.pack(header)
    return DONE


class _Window:
    """Bytes per second over spans in which a tier was busy, whatever the count of threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._active = 0
        self._since = 0.0
        self._bytes = 0

    def enter(self) -> None:
        if not self._active:
            self._since, self._bytes = self._clock(), 0
        self._active += 1

    def leave(self, nbytes: int) -> float:
        """Note the end of a batch; returns the rate of a finished span, 0 while there is none."""
        self._active -= 1
        self._bytes += nbytes
        seconds = self._clock() - self._since
        if self._bytes < RATE_BYTES or (self._active and seconds < _SPAN_S):
            return 0.0
        rate = self._bytes / max(seconds, 1e-9)
        self._since, self._bytes = self._clock(), 0
        return rate


class Measured:
    """Counts and rates of a tier's I/O; what it measures replaces the first guesses it is given."""

    def __init__(self, inner: Sealed, guess: Rates, clock: Clock) -> None:
        self.inner = inner
        self.rates = guess
        self.read_bytes = 0
        self.written_bytes = 0
        self.outcomes: Counter[str] = Counter()
        self.expected_s = 0.0
        """Of reads that were whole: what the rates of that moment promised, in seconds."""
        self.taken_s = 0.0
        """Of the same reads."""
        self.error_s = 0.0
        """Sum of the differences of each, whatever their sign."""
        self._clock = clock
        self._reads = _Window(clock)
        self._writes = _Window(clock)
        self._lock = threading.Lock()

    def seal(self, items: Sequence[Item]) -> None:
        """Make checksums ahead of `write`."""
        self.inner.seal(items)

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        """Store, and learn the write rate."""
        with self._lock:
            self._writes.enter()
        outcomes = self.inner.write(items)
        with self._lock:
            size = self._note("write", items, outcomes)
            self.written_bytes += size
            rate = self._writes.leave(size)
            if rate:
                self.rates = self.rates.with_write(rate)
        return outcomes

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        """Load, and learn the read rate from large spans and the latency from small batches."""
        with self._lock:
            self._reads.enter()
        start = self._clock()
        outcomes = self.inner.read(items)
        with self._lock:
            size = self._note("read", items, outcomes)
            self.read_bytes += size
            seconds = self._clock() - start
            if size == sum(item.nbytes for item in items) > 0:
                self._compare(size, seconds)
            rate = self._reads.leave(size)
            if rate:
                self.rates = self.rates.with_read(rate)
            if 0 < size < LATENCY_BYTES:
                self.rates = self.rates.with_latency(seconds)
        return outcomes

    def _compare(self, nbytes: int, seconds: float) -> None:
        """Note how a read differs from what a plan would have expected of it."""
        expected = load_seconds(nbytes, 0, self.rates, math.inf)
        self.expected_s += expected
        self.taken_s += seconds
        self.error_s += abs(seconds - expected)

    def _note(self, op: str, items: Sequence[Item], outcomes: Sequence[Outcome]) -> int:
        self.outcomes.update(f"{op}_{outcome.status.value}" for outcome in outcomes)
        return sum(
            item.nbytes
            for item, outcome in zip(items, outcomes, strict=True)
            if outcome.status is Status.DONE
        )
