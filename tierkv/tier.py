"""Tier: a place that stores frames by (key, part).

Knows nothing of codecs, policies or other tiers.

A tier has two sides. Its *space* (reserve, free, space) is bookkeeping in memory: called under the
store's lock, never blocks. Its *I/O* (write, read and, where there is one, sync, find, drop) blocks
and is called by executor threads only, any number of reads at once, one write call at a time.

The store keeps the catalog; a tier needs no index of its own. It hands out a locator when space is
reserved and gets it back with each read and free.

Buffers: the caller passes each frame as pieces of memory in order, header first. Every piece but
the last has a length that is a multiple of 4096, the last one is at least as long as the frame's
rest rounded up to 4096, and each starts at an address that is a multiple of 4096. So a tier may use
O_DIRECT straight from and to the pieces.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tierkv.frame import Watch
from tierkv.part import Part

ALIGN = 4096
RAM = 0
"""The number of host RAM among a store's tiers; those below it follow, fastest first."""

FOUND = np.dtype(
    [
        ("key", "<u8", 4),
        ("part", "<u2", 5),
        ("codec_id", "<u2"),
        ("fidelity", "u1"),
        ("flags", "u1"),
        ("namespace", "u1", 16),
        ("generation", "<u8"),
        ("locator", "<i8"),
        ("nbytes", "<i8"),
        ("position", "<u4"),
        ("tokens", "<u4"),
    ]
)
"""One frame a tier found at start; `nbytes` is the frame's bytes, header included."""


class Status(enum.Enum):
    """How one item of a batch ended. All are results; none raises."""

    DONE = "done"
    MISSING = "missing"
    """Nothing is there (any more)."""
    THROTTLED = "throttled"
    """Refused to keep a limit (write budget, breaker open): later may work."""
    FULL = "full"
    """No space: a capacity, a free-space floor or the medium itself."""
    CORRUPT = "corrupt"
    """Bytes came back that are not the frame asked for: drop the copy."""
    UNKNOWN = "unknown"
    """A frame of a version or codec this release does not know: keep the copy."""
    FAILED = "failed"
    """An I/O error or a deadline: `detail` says which."""


class Outcome(NamedTuple):
    """The end of one item; `detail` is for people."""

    status: Status
    detail: str = ""


DONE = Outcome(Status.DONE)


class FrameId(NamedTuple):
    """What a tier stores frames under; `key` is 32 bytes.

    The namespace's generation belongs to the name where others write too, so that a clear makes way
    at once for new frames of the same keys.
    """

    key: bytes
    part: Part
    generation: int = 0


class Item(NamedTuple):
    """One frame to write or to read.

    Its name, its place and the memory it comes from or goes to.
    """

    id: FrameId
    locator: int
    nbytes: int
    pieces: Sequence[memoryview]
    watch: Watch | None = None
    """Of a read: a tier that receives a frame in order tells it how far it has come."""


class Batch(NamedTuple):
    """What one call to `read` is given: at most so many frames, none more from so many bytes on.

    `threads`: how many such calls are made at once.
    """

    frames: int
    nbytes: int
    threads: int = 6


class Space(NamedTuple):
    """Allocated bytes of a tier. `dead` is space that only a reclaim can free again."""

    capacity: int
    free: int
    dead: int


class Tier(Protocol):
    """What every tier does. `durable` content survives kill -9 of the process.

    `granule`: allocated sizes are multiples of it.
    """

    name: str
    durable: bool
    granule: int

    def reserve(self, nbytes: int) -> int | None:
        """Set space aside for a frame; returns its locator, or None when it does not fit now."""

    def free(self, locator: int, nbytes: int) -> None:
        """Give back a reservation or a frame of `nbytes` (as reserved). Never fails."""

    def space(self) -> Space:
        """Return the accounting; free + dead + what is reserved = capacity, always."""

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        """Store frames at their reserved locators; an item is found by `read` only when DONE."""

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        """Fill each item's pieces with exactly its frame's bytes."""

    def probe(self) -> str:
        """Try the medium within a second, without side effects; returns "" or what is wrong."""

    def close(self) -> None:
        """Stop using the medium; later calls return FAILED. Idempotent."""


@runtime_checkable
class DurableTier(Tier, Protocol):
    """A tier whose content outlives the process. `batch`: what its reads are cut into."""

    batch: Batch

    def scan(self) -> npt.NDArray[np.void]:
        """Return what was found at start as an array of FOUND; reserves that space."""

    def sync(self, *, power: bool) -> None:
        """Make finished writes findable after kill -9; with `power`, after a power loss too."""

    def generations(self) -> Mapping[bytes, int]:
        """Return the minimum generation of every namespace (16 bytes) that was ever cleared."""

    def raise_generation(self, namespace: bytes, generation: int) -> None:
        """Persist a higher minimum; durable when this returns. Raises: OSError."""


@runtime_checkable
class SharedTier(DurableTier, Protocol):
    """A durable tier that other sidecars read and write too. Its `scan` finds nothing."""

    def find(self, ids: Sequence[FrameId]) -> list[int]:
        """Return the stored frame bytes of each id, -1 where absent or unreachable."""

    def drop(self, ids: Sequence[FrameId]) -> list[Outcome]:
        """Remove frames; one that is gone already is DONE."""


class Region(NamedTuple):
    """A run of locators that is freed as a whole."""

    number: int
    start: int
    stop: int
    live: int
    sequence: int
    """Age: a region opened later has a higher one."""


@runtime_checkable
class RegionTier(DurableTier, Protocol):
    """A tier that frees space by the region: `free` only makes bytes dead."""

    def truncate(self, locator: int, nbytes: int, kept: int) -> None:
        """Make what lies behind the first `kept` of a frame's `nbytes` dead. Never fails.

        The medium is left as it is: a start finds the whole frame again.
        """

    def regions(self) -> Sequence[Region]:
        """Return the sealed regions, oldest first; the open one and empty ones are not listed."""

    def release(self, number: int) -> None:
        """Make a sealed region without live bytes free.

        Raises: ValueError when it has live bytes.
        """
