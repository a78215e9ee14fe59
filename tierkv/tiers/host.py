"""Host RAM: one memfd arena of pages; a frame is one or more runs of pages.

The arena's descriptor goes to engines, which map it and copy pages to and from it. All of its
memory is reserved at the start, so nobody ever touches a page that is not there; `touch` enters it
into this process's page table later, beside everything else. Locators name runs: (count << 32 |
first page) for one run, a negative number for a list of runs.
"""

import ctypes
import fcntl
import logging
import mmap
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tierkv import frame
from tierkv.errors import invalid, unavailable
from tierkv.tier import DONE, Item, Outcome, Space, Status
from tierkv.tiers.runs import PageRuns, Run

STEP_BYTES = 64 << 20
"""Reserved or touched at once."""
_SAY_S = 5.0
_POPULATE_WRITE = 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HEADROOM = 64 << 20
_NO_MAGIC = bytes(4)
_LOG = logging.getLogger("tierkv.host")
CONTROL_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the arena and of its pages, in bytes."""

    size_bytes: int = 4 << 30
    page_bytes: int = 16 << 10


class HostTier:
    """The arena and its page runs. `touch` may be called until it returns False."""

    name = "host"
    durable = False

    def __init__(self, settings: HostSettings) -> None:
        """Reserve the memory, at some GiB a second.

        Raises: TierKVError (invalid) for a page size that is not 16, 32 or 64 KiB, (unavailable)
            when the machine or its memory limit has less than the arena's size.
        """
        page = settings.page_bytes
        if page not in (16 << 10, 32 << 10, 64 << 10):
            raise invalid(f"[host] page is {page} bytes; use 16KiB, 32KiB or 64KiB")
        self.granule = self.page_bytes = page
        self.nbytes = max(settings.size_bytes // page, 1) * page
        available = available_bytes()
        if self.nbytes + _HEADROOM > available:
            raise unavailable(
                f"[host] size asks for {self.nbytes >> 20} MiB of memory but "
                f"{available >> 20} MiB are available; lower [host] size or give it more memory"
            )
        self.epoch = secrets.randbits(63) | 1
        self.fd = os.memfd_create("tierkv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.nbytes)
        # Whoever gets the descriptor cannot shrink the file under those who have it mapped.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        try:
            reserve(self.fd, self.nbytes)
        except OSError as error:
            os.close(self.fd)
            raise unavailable(
                f"[host] size asks for {self.nbytes >> 20} MiB of memory and the system has no "
                f"more: {error.strerror}; lower [host] size or give it more memory"
            ) from error
        self.view = memoryview(mmap.mmap(self.fd, self.nbytes))
        self._runs = PageRuns()
        self._runs.add(0, self.nbytes // page)
        self._touched = 0
        self._lists: dict[int, list[Run]] = {}
        self._next_list = -1
        self._closed = False

    def touch(self) -> bool:
        """Touch the next step of the arena; returns whether there is more of it."""
        stop = min(self._touched + STEP_BYTES, self.nbytes)
        populate(self.view[self._touched : stop])
        self._touched = stop
        return stop < self.nbytes

    def reserve(self, nbytes: int) -> int | None:
        """Take pages for a frame of `nbytes`."""
        locators = self.reserve_all(nbytes, 1)
        return locators[0] if locators else None

    def reserve_all(self, nbytes: int, frames: int) -> list[int] | None:
        """Take pages for some frames of `nbytes` each; None when not all of them fit."""
        taken = self._runs.take_all(-(-nbytes // self.page_bytes), frames)
        return None if taken is None else [self._locator(runs) for runs in taken]

    def free(self, locator: int, nbytes: int) -> None:
        """Give a frame's pages back and make what lies there no frame any more."""
        del nbytes
        self.free_all([locator])

    def free_all(self, locators: Iterable[int]) -> None:
        """As `free`, for many."""
        view, freed = self.view, []
        for locator in locators:
            start = self.start(locator)
            view[start : start + 4] = _NO_MAGIC
            freed += self.runs(locator)
            if locator < 0:
                del self._lists[locator]
        self._runs.add_all(freed)

    def start(self, locator: int) -> int:
        """Return where a frame starts in the arena, in bytes."""
        first = self._lists[locator][0][0] if locator < 0 else locator & 0xFFFFFFFF
        return first * self.page_bytes

    def truncate(self, locator: int, nbytes: int) -> int:
        """Free the pages behind the first `nbytes` of a frame; returns its new locator."""
        keep = -(-nbytes // self.page_bytes)
        kept: list[Run] = []
        for first, count in self.runs(locator):
            mine = min(keep, count)
            keep -= mine
            if mine:
                kept.append((first, mine))
            if mine < count:
                self._runs.add(first + mine, count - mine)
        self._lists.pop(locator, None)
        return self._locator(kept)

    def runs(self, locator: int) -> list[Run]:
        """Return the page runs of a locator."""
        if locator < 0:
            return self._lists[locator]
        return [(locator & 0xFFFFFFFF, locator >> 32)]

    def runs_of(self, locators: Sequence[int]) -> tuple[bytes, bytes]:
        """Return the count of runs of each frame (uint16) and the runs in bytes (int64 pairs)."""
        if min(locators, default=0) >= 0:
            at = np.array(locators, np.int64)
            pairs = np.stack([at & 0xFFFFFFFF, at >> 32], axis=1) * self.page_bytes
            return np.ones(len(at), np.uint16).tobytes(), pairs.tobytes()
        runs = [self.runs(locator) for locator in locators]
        pairs = np.array([run for some in runs for run in some], np.int64) * self.page_bytes
        return np.array([len(some) for some in runs], np.uint16).tobytes(), pairs.tobytes()

    def pieces(self, locator: int) -> list[memoryview]:
        """Return views of a frame's pages, in order."""
        page, view = self.page_bytes, self.view
        return [view[first * page : (first + count) * page] for first, count in self.runs(locator)]

    def space(self) -> Space:
        """Return the accounting."""
        return Space(self.nbytes, self._runs.free * self.page_bytes, 0)

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        """Copy frames in."""
        return [self._copy(item, inwards=True) for item in items]

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        """Copy frames out; MISSING when another frame lies there."""
        return [self._copy(item, inwards=False) for item in items]

    def probe(self) -> str:
        """Return "": memory that is reserved stays, until it is closed."""
        return "closed" if self._closed else ""

    def close(self) -> None:
        """Drop the mapping; the memory goes when the last reader and engine drop theirs.

        Who asks later finds no frames, in memory that is nobody's and hardly there.
        """
        if not self._closed:
            self._closed = True
            os.close(self.fd)
            self.view = memoryview(mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE))

    def _locator(self, runs: list[Run]) -> int:
        if len(runs) == 1:
            return runs[0][1] << 32 | runs[0][0]
        locator = self._next_list
        self._next_list -= 1
        self._lists[locator] = runs
        return locator

    def _copy(self, item: Item, *, inwards: bool) -> Outcome:
        if self._closed:
            return Outcome(Status.FAILED, "closed")
        here = frame.cut(self.pieces(item.locator), 0, item.nbytes) if self._has(item) else []
        if sum(map(len, here)) < item.nbytes:
            return Outcome(Status.MISSING)
        if not inwards:
            parsed = frame.parse(here[0][: frame.MAX_HEADER_BYTES])
            if isinstance(parsed, frame.Refusal) or (parsed.key, parsed.part) != item.id[:2]:
                return Outcome(Status.MISSING)
        at = 0
        for piece in here:
            done = 0
            for other in frame.cut(item.pieces, at, len(piece)):
                mine = piece[done : done + len(other)]
                if inwards:
                    mine[:] = other
                else:
                    other[:] = mine
                done += len(other)
            at += done
        return DONE

    def _has(self, item: Item) -> bool:
        if item.locator < 0:
            return item.locator in self._lists
        first, count = item.locator & 0xFFFFFFFF, item.locator >> 32
        return count > 0 and (first + count) * self.page_bytes <= self.nbytes


def reserve(fd: int, nbytes: int) -> None:
    """Back a memfd with memory, and say how far it is where that takes long. Raises: OSError."""
    said = time.monotonic()
    for start in range(0, nbytes, STEP_BYTES):
        os.posix_fallocate(fd, start, min(STEP_BYTES, nbytes - start))
        if time.monotonic() - said > _SAY_S:
            said = time.monotonic()
            _LOG.info("reserving memory: %d of %d MiB", start >> 20, nbytes >> 20)


def populate(view: memoryview) -> None:
    """Enter shared memory into this process's page table, so that the first copy does not fault.

    The GIL is free meanwhile. A kernel that cannot (before 5.14) leaves it to the faults.
    """
    if len(view):
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        size = ctypes.c_size_t(len(view))
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, _POPULATE_WRITE)


def available_bytes() -> int:
    """Return the memory this process may still take: the machine's, and its control group's."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    for folder, limit, used in CONTROL_GROUPS:
        try:
            text = Path(folder, limit).read_text().strip()
            taken = int(Path(folder, used).read_text()) - _cached(Path(folder, "memory.stat"))
        except OSError:
            continue
        if text.isdigit():
            free = min(free, max(int(text) - taken, 0))
    return free


def _cached(stat: Path) -> int:
    """Return the bytes of files that a control group counts as used and gives up when asked to."""
    fields = (line.split() for line in stat.read_text().splitlines())
    return next((int(field[1]) for field in fields if field[0] == "inactive_file"), 0)


def aligned(nbytes: int) -> memoryview:
    """Return private memory for tier buffers: page-aligned, zeroed, at least `nbytes` long."""
    return memoryview(mmap.mmap(-1, max(-(-nbytes // 4096) * 4096, 4096)))
