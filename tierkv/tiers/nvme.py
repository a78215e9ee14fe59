"""NvmeTier: frames in one preallocated file, appended region by region past the page cache.

    tierkv.log            superblock, then regions (`regions`, `region_index`, `region_log`)
    tierkv.tail           the index block that is filling up
    tierkv.lock           the pid of the process that has the log (the lock itself is on the log);
                          written again to see whether the volume still takes writes
    tierkv.generations    the minimum generations (`generations`)

What `write` returned DONE survives kill -9: the frame and its index row are then with the kernel
or the disk. `sync(power=True)` adds the disk's own cache. Payload checksums are a wrapper's matter;
the tier compares a frame's name with the one asked for, and checks headers and index blocks.

Size: the cap covers the log and its side files; none of them grows. A larger cap at the next start
adds regions, a smaller one cuts off the regions behind it and what they hold. A log keeps the
region size it was made with until it is emptied. A log that is not ours, or whose generations are
lost (cleared content could come back), starts empty.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tierkv import frame
from tierkv.errors import invalid, unavailable
from tierkv.tier import ALIGN, DONE, FOUND, Batch, Item, Outcome, Region, Space, Status
from tierkv.tiers.budget import WriteBudget
from tierkv.tiers.generations import Generations
from tierkv.tiers.region_index import IndexWriter, recover, row_of, settle
from tierkv.tiers.region_log import FRONT_BYTES, MAX_REGION_BYTES, MIN_REGION_BYTES, RegionLog
from tierkv.tiers.regions import Regions, rounded

SIDE_BYTES = 1 << 20
"""Set aside in the cap for the tail, the lock file and the generations."""
LEAST_REGIONS = 2
LARGE_REGION_BYTES = 256 << 20
REGIONS = 32
_STEP = 64 << 20

_CLOSED = Outcome(Status.FAILED, "the tier is closed")
_NOT_HERE = Outcome(Status.MISSING, "no such place in the log")

Transfer = Callable[[Sequence[memoryview], int], Outcome]


class NvmeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the log lies and what it may use."""

    path: str
    """A directory of its own on a local disk; made if it is not there."""
    size_bytes: int
    """Cap on everything the tier writes, reserved at start."""
    region_bytes: int = 0
    """Space is freed by the region; no frame is larger. A multiple of 4096, 0: see `region`."""
    free_floor_bytes: int = 1 << 30
    """Bytes of the volume that the tier leaves to others."""
    write_budget_bytes_per_day: int = 0
    """Wear limit with a burst of one hour; 0: none."""
    direct: bool = True
    """Bypass the page cache (O_DIRECT) where the file system allows it."""

    def __post_init__(self) -> None:
        if not self.path:
            raise invalid("path is empty: name a directory on a local disk")
        fits = MIN_REGION_BYTES <= self.region <= MAX_REGION_BYTES
        if not fits or self.region % ALIGN:
            raise invalid(
                f"region_bytes is {self.region_bytes}: give a multiple of {ALIGN}"
                f" from {MIN_REGION_BYTES} to {MAX_REGION_BYTES}, or 0"
            )
        if self.size_bytes < _least_size(self.region):
            raise invalid(
                f"size_bytes is {self.size_bytes}: {LEAST_REGIONS} regions of {self.region}"
                f" need {_least_size(self.region)}; raise it, or lower region_bytes"
            )
        if min(self.free_floor_bytes, self.write_budget_bytes_per_day) < 0:
            raise invalid("free_floor_bytes and write_budget_bytes_per_day are 0 or more")

    @property
    def region(self) -> int:
        """Bytes of a region: what was asked for, else by the size.

        A batch that runs into the end of a region costs a second write, and large frames leave the
        rest of theirs unused; so regions are large, as long as there are many.
        """
        if self.region_bytes:
            return self.region_bytes
        return min(max(self.size_bytes // REGIONS // _STEP * _STEP, _STEP), LARGE_REGION_BYTES)


class NvmeTier:
    """A `RegionTier` on a local disk.

    `direct` and `preallocated` say what the file system granted. An item that was not DONE keeps
    its reservation; the caller may write it again or free it. A region whose write failed takes no
    more reservations (a full volume excepted: that may pass).

    Args:
        settings: what it may use.
        now: a monotonic clock in seconds, for the write budget.

    Raises: TierKVError: the path is in use by another process, cannot be used or is too small.
    """

    name = "nvme"
    durable = True
    granule = ALIGN
    batch = Batch(4, 8 << 20)
    """More threads than keep a disk busy: some verify what they have read meanwhile."""

    def __init__(self, settings: NvmeSettings, now: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._now = now
        self._budget = WriteBudget(settings.write_budget_bytes_per_day, now())
        self._writing = threading.Lock()
        self._log = RegionLog(Path(settings.path), direct=settings.direct)
        with ExitStack() as undo:
            undo.callback(self._log.close)
            self._start(Path(settings.path))
            undo.pop_all()

    def _start(self, folder: Path) -> None:
        settings, log = self._settings, self._log
        try:
            self._generations = Generations(folder)
            if not log.region_bytes or not self._generations.sound:
                log.format(settings.region)
                self._generations.clear()
        except OSError as error:
            raise unavailable(f"cannot use {folder}: {error}; check its owner and room") from error
        count = (settings.size_bytes - FRONT_BYTES - SIDE_BYTES) // log.region_bytes
        if count < LEAST_REGIONS:
            raise invalid(
                f"{log.path} has regions of {log.region_bytes} bytes, so size_bytes must be"
                f" at least {_least_size(log.region_bytes)}; raise it, or remove the file"
            )
        log.resize(count, settings.free_floor_bytes)
        self.direct, self.preallocated = log.direct, log.preallocated
        self._regions = Regions(count, log.region_bytes, FRONT_BYTES)
        self._index = IndexWriter(log, self._regions)
        self._unsynced: set[int] = set()
        """Regions whose last index block must not be rewritten once it is safe."""
        settle(log, self._regions)
        found = recover(log, self._regions)
        self._regions.adopt(found.lives, found.reopen, found.last)
        self._found = found.rows
        self._sequences = {life.number: life.sequence for life in found.lives}

    # --- space ---

    def reserve(self, nbytes: int) -> int | None:
        return self._regions.reserve(nbytes)

    def free(self, locator: int, nbytes: int) -> None:
        self._regions.free(locator, nbytes)

    def truncate(self, locator: int, nbytes: int, kept: int) -> None:
        self._regions.truncate(locator, nbytes, kept)

    def space(self) -> Space:
        return self._regions.space()

    def regions(self) -> Sequence[Region]:
        """Return the sealed regions, oldest first; one without live bytes waits for `release`."""
        return self._regions.sealed()

    def release(self, number: int) -> None:
        self._regions.release(number)

    # --- I/O ---

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        with self._writing:
            if not self._log.enter():
                return [_CLOSED] * len(items)
            try:
                return self._write(items)
            finally:
                self._log.leave()

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        if not self._log.enter():
            return [_CLOSED] * len(items)
        try:
            outcomes = [_NOT_HERE] * len(items)
            holding = self._regions.holding
            known = [n for n, item in enumerate(items) if _is_held(holding, item)]
            for run in _runs(items, known):
                failures = self._transfer(self._log.read, items, run)
                for number in run:
                    outcomes[number] = failures.get(number) or _compare(items[number])
            return outcomes
        finally:
            self._log.leave()

    def probe(self) -> str:
        """Read one block, write the pid again where it stands; hangs when the disk does."""
        if not self._log.enter():
            return _CLOSED.detail
        try:
            return self._log.probe()
        finally:
            self._log.leave()

    def close(self) -> None:
        self._log.close()

    # --- durability ---

    def scan(self) -> npt.NDArray[np.void]:
        """Return what was found at start and reserve it; the second call returns nothing."""
        found, self._found = self._found, np.empty(0, FOUND)
        if not len(found):
            return found
        places = (found["locator"] - FRONT_BYTES) // self._log.region_bytes
        sizes = -(-found["nbytes"] // ALIGN) * ALIGN
        live = np.bincount(places, sizes, self._regions.count)
        here = np.ones(self._regions.count, np.bool_)
        for number, sequence in self._sequences.items():
            here[number] = self._regions.adopt_live(number, sequence, int(live[number]))
        return found if here.all() else found[here[places]]

    def sync(self, *, power: bool) -> None:
        """Raises: OSError: with `power`, the disk refused, or the tier is closed."""
        if not power:
            return
        with self._writing:
            if not self._log.enter():
                raise OSError(errno.EBADF, _CLOSED.detail)
            try:
                outcome = self._index.flush()
                if outcome is not DONE:
                    raise OSError(errno.EIO, outcome.detail)
                self._log.sync()
            finally:
                self._log.leave()
            while self._unsynced:
                self._regions.next_block(self._unsynced.pop())

    def generations(self) -> Mapping[bytes, int]:
        return self._generations.all()

    def raise_generation(self, namespace: bytes, generation: int) -> None:
        if not self._log.enter():
            raise OSError(errno.EBADF, _CLOSED.detail)
        try:
            self._generations.raise_to(namespace, generation)
        finally:
            self._log.leave()

    def _write(self, items: Sequence[Item]) -> list[Outcome]:
        fault = self._log.fault()
        if fault:
            return [Outcome(Status.FAILED, fault)] * len(items)
        outcomes: list[Outcome] = []
        rows: dict[int, bytes] = {}
        for number, item in enumerate(items):
            admitted = self._admit(item)
            if isinstance(admitted, bytes):
                rows[number] = admitted
            outcomes.append(DONE if isinstance(admitted, bytes) else admitted)
        # The rows of a region follow its frames at once: to come back to a region's index after
        # another one was begun costs a read.
        for region, runs in groupby(_runs(items, list(rows)), self._region_of(items)):
            written: list[int] = []
            for run in runs:
                failures = self._write_run(items, run, region)
                for number in run:
                    outcomes[number] = failures.get(number, DONE)
                written += [number for number in run if number not in failures]
            if written:
                outcome = self._write_rows(region, [rows[number] for number in written])
                for number in written:
                    outcomes[number] = outcome
        return outcomes

    def _region_of(self, items: Sequence[Item]) -> Callable[[list[int]], int]:
        """Return what tells a run's region."""

        def region_of(run: list[int]) -> int:
            number = self._regions.number_of(items[run[0]].locator)
            assert number is not None
            return number

        return region_of

    def _admit(self, item: Item) -> bytes | Outcome:
        """Return the index row of an item that may be written, or why it may not."""
        if not _is_held(self._regions.holding, item):
            return Outcome(Status.FAILED, "not reserved, or its memory is shorter than the frame")
        header = frame.parse(item.pieces[0][: frame.MAX_HEADER_BYTES])
        if isinstance(header, frame.Refusal):
            return Outcome(Status.FAILED, f"not a frame: {header.value}")
        if (header.key, header.part) != item.id[:2] or item.nbytes > header.frame_bytes:
            return Outcome(Status.FAILED, "the header names another frame")
        if not self._log.has_room(item.nbytes, self._settings.free_floor_bytes):
            return Outcome(Status.FULL, "the volume is at its free-space floor")
        if not self._budget.take(rounded(item.nbytes), self._now()):
            return Outcome(Status.THROTTLED, "the write budget is spent for now")
        return row_of(header, item.locator, item.nbytes)

    def _write_run(
        self, items: Sequence[Item], run: list[int], region: int
    ) -> Mapping[int, Outcome]:
        """Write neighbours in one go; returns those that failed and why."""
        sequence = self._regions.unmarked(region)
        if sequence is not None:
            outcome = self._index.start(region, sequence)
            if outcome is not DONE:
                self._seal_failed(region, outcome)
                return dict.fromkeys(run, outcome)
        last = items[run[-1]]
        self._regions.touch(region, last.locator + rounded(last.nbytes))
        failures = self._transfer(self._log.write, items, run)
        for outcome in failures.values():
            self._seal_failed(region, outcome)
        return failures

    def _write_rows(self, region: int, rows: list[bytes]) -> Outcome:
        place = self._regions.take_rows(region, len(rows))
        if place is None:
            return Outcome(Status.FAILED, "the region's index is full: reserve anew")
        outcome = self._index.append(region, place, rows)
        self._budget.charge(ALIGN)
        self._unsynced.add(region)
        if outcome is not DONE:
            self._seal_failed(region, outcome)
        return outcome

    def _seal_failed(self, region: int, outcome: Outcome) -> None:
        if outcome.status is not Status.FULL:
            self._regions.seal(region)

    @staticmethod
    def _transfer(call: Transfer, items: Sequence[Item], run: list[int]) -> dict[int, Outcome]:
        """Move a run of neighbours; after an error one by one, to find the item it belongs to."""
        pieces = [piece for number in run for piece in _views(items[number])]
        outcome = call(pieces, items[run[0]].locator)
        if outcome is DONE:
            return {}
        if len(run) == 1:
            return {run[0]: outcome}
        failures: dict[int, Outcome] = {}
        for number in run:
            failures |= NvmeTier._transfer(call, items, [number])
        return failures


def _least_size(region_bytes: int) -> int:
    return FRONT_BYTES + SIDE_BYTES + LEAST_REGIONS * region_bytes


def _views(item: Item) -> Sequence[memoryview]:
    if sum(map(len, item.pieces)) == rounded(item.nbytes):
        return item.pieces
    return frame.cut(item.pieces, 0, rounded(item.nbytes))


def _is_held(holding: Callable[[int, int], int | None], item: Item) -> bool:
    """Return whether an item lies in reserved space and its memory is long enough."""
    if holding(item.locator, item.nbytes) is None:
        return False
    return sum(map(len, item.pieces)) >= rounded(item.nbytes)


def _runs(items: Sequence[Item], numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield item numbers in runs that lie one behind the other in the log."""
    run: list[int] = []
    stop = -1
    for number in numbers:
        item = items[number]
        if run and item.locator != stop:
            yield run
            run = []
        run.append(number)
        stop = item.locator + rounded(item.nbytes)
    if run:
        yield run


def _compare(item: Item) -> Outcome:
    """Return DONE when the header that came back names the frame asked for."""
    header = frame.parse(item.pieces[0][: frame.MAX_HEADER_BYTES])
    if header is frame.Refusal.UNKNOWN:
        return Outcome(Status.UNKNOWN, "a frame of a later release")
    if isinstance(header, frame.Refusal) or (header.key, header.part) != item.id[:2]:
        return Outcome(Status.CORRUPT, "another frame lies there, or none")
    return DONE
