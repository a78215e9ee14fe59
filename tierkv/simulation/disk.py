"""Disk: a log of regions that outlives its process, and the tier over it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierkv import frame
from tierkv.simulation.lanes import Pause, Time
from tierkv.simulation.media import REFUSALS, Faults, Medium, Name, parsed
from tierkv.tier import ALIGN, DONE, FOUND, Item, Outcome, Region, Space, Status
from tierkv.tiers.regions import Life, Regions


@dataclass(slots=True)
class Record:
    """A frame on a disk. `faulty`: the medium broke it. `promised`: it was answered as durable."""

    name: Name
    row: npt.NDArray[np.void]
    data: bytes
    sequence: int
    faulty: bool = False
    freed: bool = False
    promised: bool = False


@dataclass(slots=True)
class Disk:
    """A log of regions and the generations beside it."""

    regions: int
    region_bytes: int
    records: dict[int, Record] = field(default_factory=dict)
    sequences: dict[int, int] = field(default_factory=dict)
    generations: dict[bytes, int] = field(default_factory=dict)
    freed: dict[Name, int] = field(default_factory=dict)
    """Step at which a frame was last freed."""
    step: int = 0

    def newest(self) -> dict[Name, int]:
        """Return the locator of the last frame written under each name."""
        found: dict[Name, int] = {}
        for at, record in sorted(
            self.records.items(), key=lambda item: (item[1].sequence, item[0])
        ):
            found[record.name] = at
        return found

    def pass_promise(self, record: Record) -> None:
        """Hand a promise on to the copy that a frame was carried to, if it was."""
        for other in self.records.values():
            if other.name == record.name and not other.freed and other is not record:
                other.promised = True


class ModelTier(Medium):
    """A `RegionTier` over a `Disk`; its space is kept by the same `Regions` as the NVMe tier's."""

    name = "nvme"
    granule = ALIGN

    def __init__(self, disk: Disk, faults: Faults, time: Time, pause: Pause) -> None:
        super().__init__(faults, time, pause)
        self._disk = disk
        self._regions = Regions(disk.regions, disk.region_bytes, 0)
        largest = self._regions.largest
        lives = [Life(number, age, largest, 0) for number, age in disk.sequences.items()]
        self._regions.adopt(lives, None, max(disk.sequences.values(), default=0))

    def reserve(self, nbytes: int) -> int | None:
        """Append to the open region."""
        return self._regions.reserve(nbytes)

    def free(self, locator: int, nbytes: int) -> None:
        """Make bytes dead; they stay on the disk until their region is used again."""
        self._regions.free(locator, nbytes)
        record = self._disk.records.get(locator)
        if record is None:
            return
        self._disk.freed[record.name] = self._disk.step
        if record.promised:
            self._disk.pass_promise(record)
        record.freed, record.promised = True, False

    def truncate(self, locator: int, nbytes: int, kept: int) -> None:
        """Make a frame's end dead."""
        self._regions.truncate(locator, nbytes, kept)

    def space(self) -> Space:
        """Return the accounting."""
        return self._regions.space()

    def regions(self) -> Sequence[Region]:
        """Return the sealed regions."""
        return self._regions.sealed()

    def release(self, number: int) -> None:
        """Make a region free."""
        self._regions.release(number)

    def scan(self) -> npt.NDArray[np.void]:
        """Return the newest frame of each name, those freed before the end included."""
        disk, found = self._disk, self._disk.newest()
        live: Counter[int] = Counter()
        for at in found.values():
            record = disk.records[at]
            record.freed = False
            live[at // disk.region_bytes] += -(-int(record.row["nbytes"][0]) // ALIGN) * ALIGN
        for number, size in live.items():
            self._regions.adopt_live(number, disk.sequences[number], size)
        rows = [disk.records[at].row for at in found.values()]
        return np.concatenate(rows) if rows else np.empty(0, FOUND)

    def generations(self) -> Mapping[bytes, int]:
        """Return what was persisted."""
        return dict(self._disk.generations)

    def raise_generation(self, namespace: bytes, generation: int) -> None:
        """Persist a minimum. Raises: OSError now and then."""
        if self._faults.draw(("raise_failed",)):
            raise OSError("EIO")
        known = self._disk.generations.get(namespace, 0)
        self._disk.generations[namespace] = max(known, generation)
        self._pause()

    def _write(self, item: Item, fault: str) -> Outcome:
        header, disk = parsed(item), self._disk
        if fault in REFUSALS:
            return REFUSALS[fault]
        number = item.locator // disk.region_bytes
        self._begin_life(number)
        data = b"".join(frame.cut(item.pieces, 0, item.nbytes))
        if fault == "write_lost":
            data = bytes(len(data))
        elif fault == "write_torn":
            data = data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
        row = np.zeros(1, FOUND)
        row["key"] = np.frombuffer(header.key, "<u8")
        row["part"] = header.part
        row["namespace"] = np.frombuffer(header.namespace, "u1")
        row["locator"], row["nbytes"] = item.locator, item.nbytes
        for column in "codec_id", "fidelity", "flags", "generation", "position", "tokens":
            row[column] = getattr(header, column)
        disk.records[item.locator] = Record(
            (header.key, header.part), row, data, disk.sequences[number], faulty=bool(fault)
        )
        return DONE

    def _begin_life(self, number: int) -> None:
        """Forget what an earlier life of a region left, at its first write."""
        disk, sequence = self._disk, self._regions.unmarked(number)
        if sequence is None:
            return
        start, stop = number * disk.region_bytes, (number + 1) * disk.region_bytes
        for at in [at for at in disk.records if start <= at < stop]:
            del disk.records[at]
        disk.sequences[number] = sequence
        self._regions.mark(number)

    def _read(self, item: Item, fault: str) -> Outcome:
        record = self._disk.records.get(item.locator)
        if record is None or len(record.data) < item.nbytes:
            return Outcome(Status.MISSING)
        assert record.name == item.id[:2], "read a place that is another frame's"
        return self._deliver(item, record.data, fault)
