"""Regions: who owns which bytes of a region log. Bookkeeping in memory, nothing touches a disk.

    region:  | frame | frame | ...  -> cursor      free      floor <- | rows | rows | rows |
             start                                                                     stop

A region is free, open (one at most: reservations are appended at its cursor) or sealed. Frames grow
up from its start; its index grows down from its stop, one block of `ROWS` rows at a time. A
reservation takes its row with it, so a row always finds room. `free` makes bytes dead; a region
becomes free as a whole, by `release`, when nothing in it is live. Only what was reserved last and
never given to the disk is taken back by `free`: else refused writes would use up the log.

Law, at every step: free + dead + live = capacity, where live is what was reserved and not freed.
"""

import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from tierkv.tier import ALIGN, Region, Space

ROWS = 42
"""Index rows in one block of 4096 bytes."""


def rounded(nbytes: int) -> int:
    """Return bytes rounded up to the granule, 4096."""
    return (nbytes + ALIGN - 1) // ALIGN * ALIGN


def index_bytes(rows: int) -> int:
    """Return the bytes of the index blocks that hold a count of rows."""
    return -(-rows // ROWS) * ALIGN


class Rows(NamedTuple):
    """Where rows go: their place in a region's index, and the region's life."""

    first: int
    sequence: int


class Life(NamedTuple):
    """A region as found at start: its bytes are taken up to `cursor`, its index up to `row`."""

    number: int
    sequence: int
    cursor: int
    row: int


class _State:
    """One region. `sequence` is 0 while it is free; `marked`: its index on disk is of this life."""

    __slots__ = ("cursor", "live", "marked", "row", "rows", "sequence", "touched")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.sequence = 0
        self.cursor = 0
        self.touched = 0
        """Bytes below this may be on the disk."""
        self.live = 0
        self.rows = 0
        """Rows written, skipped or promised to a reservation."""
        self.row = 0
        """Where the next row goes."""
        self.marked = False


class Regions:
    """The regions of one log. Safe to call from any thread; never blocks for long.

    Args:
        count: regions.
        region_bytes: bytes of each, a multiple of 4096.
        start: file offset of the first one.
    """

    def __init__(self, count: int, region_bytes: int, start: int) -> None:
        self.count = count
        self.region_bytes = region_bytes
        self.start = start
        self.largest = region_bytes - ALIGN
        """The most bytes that one reservation can have."""
        self._lock = threading.Lock()
        self._states = [_State() for _ in range(count)]
        self._unused = deque(range(count))
        self._open: int | None = None
        self._sequence = 0
        self._live = 0

    # --- space ---

    def reserve(self, nbytes: int) -> int | None:
        """Append to the open region, or open the next one; returns a file offset, None when full.

        The open region is sealed only when another one can take its place: without one, it waits
        for smaller frames.
        """
        size = rounded(max(nbytes, 1))
        if size > self.largest:
            return None
        with self._lock:
            number = self._open
            if number is None or not self._fits(self._states[number], size):
                if not self._unused:
                    return None
                number = self._open = self._unused.popleft()
                self._sequence += 1
                self._states[number].sequence = self._sequence
            state = self._states[number]
            locator = self.start_of(number) + state.cursor
            state.cursor += size
            state.rows += 1
            state.live += size
            self._live += size
            return locator

    def free(self, locator: int, nbytes: int) -> None:
        """Make bytes dead or free again; those in no region, or dead already, are ignored."""
        number = self.number_of(locator)
        if number is None:
            return
        with self._lock:
            state = self._states[number]
            size = min(rounded(max(nbytes, 1)), state.live)
            state.live -= size
            self._live -= size
            start = locator - self.start_of(number)
            last = number == self._open and start + size == state.cursor
            if last and size and start >= state.touched:
                state.cursor = start
                state.rows -= 1

    def truncate(self, locator: int, nbytes: int, kept: int) -> None:
        """Make what lies behind the first `kept` bytes of a frame dead."""
        size = rounded(nbytes) - rounded(kept)
        if size > 0:
            self.free(locator + rounded(kept), size)

    def touch(self, number: int, stop: int) -> None:
        """Note that the disk may hold anything up to a file offset of a region."""
        with self._lock:
            state = self._states[number]
            state.touched = max(state.touched, stop - self.start_of(number))

    def space(self) -> Space:
        """Return the accounting; index blocks in use and the rest of sealed regions are dead."""
        with self._lock:
            free = len(self._unused) * self.region_bytes
            if self._open is not None:
                state = self._states[self._open]
                free += self._floor(state.rows) - state.cursor
            capacity = self.count * self.region_bytes
            return Space(capacity, free, capacity - free - self._live)

    def sealed(self) -> list[Region]:
        """Return the sealed regions, oldest first."""
        with self._lock:
            found = [
                Region(number, self.start_of(number), self.start_of(number + 1), s.live, s.sequence)
                for number, s in enumerate(self._states)
                if s.sequence and number != self._open
            ]
        return sorted(found, key=lambda region: region.sequence)

    def release(self, number: int) -> None:
        """Make a sealed region free; one that is free already stays so.

        Raises: ValueError: there is no such region, or it is open or has live bytes.
        """
        if not 0 <= number < self.count:
            raise ValueError(f"there is no region {number}; this tier has {self.count}")
        with self._lock:
            state = self._states[number]
            if number == self._open:
                raise ValueError(f"region {number} is still open")
            if state.live:
                raise ValueError(f"region {number} has {state.live} live bytes: free them first")
            if state.sequence:
                state.clear()
                self._unused.append(number)

    def seal(self, number: int) -> None:
        """Append nothing more to a region; its rest becomes dead."""
        with self._lock:
            if self._open == number:
                self._open = None

    # --- places ---

    def start_of(self, number: int) -> int:
        """Return a region's file offset."""
        return self.start + number * self.region_bytes

    def number_of(self, locator: int) -> int | None:
        """Return the region a file offset lies in."""
        number = (locator - self.start) // self.region_bytes
        return number if 0 <= number < self.count else None

    def holding(self, locator: int, nbytes: int) -> int | None:
        """Return the region in which these bytes lie as a reservation could; None: in none."""
        number = self.number_of(locator)
        if number is None or locator % ALIGN or nbytes <= 0:
            return None
        stop = locator - self.start_of(number) + rounded(nbytes)
        state = self._states[number]
        return number if state.sequence and stop <= state.cursor else None

    # --- index rows (called by whoever writes, one at a time) ---

    def unmarked(self, number: int) -> int | None:
        """Return the region's sequence when its index on disk is still of an earlier life."""
        state = self._states[number]
        return None if state.marked else state.sequence

    def mark(self, number: int) -> None:
        """Note that the index on disk is of this life."""
        self._states[number].marked = True

    def take_rows(self, number: int, count: int) -> Rows | None:
        """Return where the rows of frames just written go; None when a retry used up the room."""
        with self._lock:
            state = self._states[number]
            stop = state.row + count
            if not state.sequence or state.cursor > self._floor(max(stop, state.rows)):
                return None
            state.row, state.rows = stop, max(stop, state.rows)
            return Rows(stop - count, state.sequence)

    def next_block(self, number: int) -> None:
        """Skip the rest of the current index block, if the region has the room to waste."""
        with self._lock:
            state = self._states[number]
            skipped = -state.row % ROWS
            if state.sequence and state.cursor <= self._floor(state.rows + skipped):
                state.row += skipped
                state.rows += skipped

    # --- start ---

    def adopt(self, lives: Iterable[Life], reopen: int | None, last: int) -> None:
        """Take regions found at start as sealed, all their bytes dead until `adopt_live`.

        Args:
            lives: the regions in use.
            reopen: the one of them to append to again.
            last: the highest sequence seen; later ones are higher.
        """
        for number, sequence, cursor, row in lives:
            state = self._states[number]
            state.sequence, state.cursor, state.marked = sequence, cursor, True
            state.touched = cursor
            state.row = state.rows = row
        self._unused = deque(n for n, state in enumerate(self._states) if not state.sequence)
        self._open = reopen
        self._sequence = last

    def adopt_live(self, number: int, sequence: int, live: int) -> bool:
        """Count frames found at start as live; False when their region was released since."""
        with self._lock:
            state = self._states[number]
            if state.sequence != sequence:
                return False
            assert live <= self.largest
            state.live += live
            self._live += live
            return True

    def _fits(self, state: _State, size: int) -> bool:
        return state.cursor + size <= self._floor(state.rows + 1)

    def _floor(self, rows: int) -> int:
        """Where the index begins; a region in use has one block at least."""
        return self.region_bytes - index_bytes(max(rows, 1))
