"""The index of a region: blocks of rows at its end, by which a start finds its frames.

    block 0 is the region's last 4096 bytes, block 1 lies right below it, and so on

A block names the region, its position and the region's sequence, and has a checksum, so a block of
an earlier life, or one that is torn, ends the index. Frames are written first, their rows after,
and only then is a write acknowledged: a kill between the two leaves bytes that no row names, never
a row without bytes. The block that is filling up is kept in the log's tail, and put in its place
when it is full. The first write into a region that is used again puts an empty block 0 over the old
one, before any old frame is overwritten. (docs/FORMAT.md has every byte.)
"""

import mmap
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tierkv import frame
from tierkv.tier import ALIGN, DONE, FOUND, Outcome, Status
from tierkv.tiers.region_log import RegionLog
from tierkv.tiers.regions import ROWS, Life, Regions, Rows

_HEAD = np.dtype(
    [
        ("checksum", "<u8"),
        ("magic", "S4"),
        ("region", "<u4"),
        ("sequence", "<u8"),
        ("position", "<u4"),
        ("count", "<u4"),
        ("zero", "u1", 32),
    ]
)
_OPAQUE = np.dtype(("V", FOUND.itemsize))
"""A FOUND that numpy copies as bytes: five times as fast as field by field."""
_PADDED = np.dtype({"names": ["found"], "formats": [_OPAQUE], "offsets": [0], "itemsize": 96})
_BLOCK = np.dtype([("head", _HEAD), ("rows", _PADDED, ROWS)])
_WORDS = np.dtype(
    {
        "names": ["key", "part", "part_end"],
        "formats": ["<u8", "<u8", "<u2"],
        "offsets": [0, 32, 40],
        "itemsize": FOUND.itemsize,
    }
)
"""A FOUND as words to hash: the first of the key, and the part."""
_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9], "<u8")
_NAME_BYTES = 42
_MAGIC = b"TKVI"
_HEAD_PACK = struct.Struct("<Q4sIQII32x")
_ROW = struct.Struct("<32s10sHBB16sQqqII2x")
_ROW_BYTES = 96
_FIRST_READ = 4 * ALIGN
_NEXT_READ = 128 * ALIGN
_MAX_WALKS = 8
"""Damaged regions that a start walks; more of them are taken as empty, so that it stays short."""

assert _BLOCK.itemsize == ALIGN
assert _HEAD.itemsize == _HEAD_PACK.size
assert FOUND.itemsize + 2 == _ROW.size == _ROW_BYTES

Blocks = npt.NDArray[np.void]


def row_of(header: frame.Header, locator: int, nbytes: int) -> bytes:
    """Return the index row of a frame: a FOUND and two zero bytes."""
    return _ROW.pack(
        header.key, header.part.pack(), header.codec_id, header.fidelity, header.flags,
        header.namespace, header.generation, locator, nbytes, header.position, header.tokens,
    )  # fmt: skip


class IndexWriter:
    """Writes index blocks; used by one thread at a time.

    While a block fills up it goes to the log's tail, and to its place when it is full, when another
    one is begun, and at `flush`. `settle` puts it there after a kill.
    """

    def __init__(self, log: RegionLog, regions: Regions) -> None:
        self._log = log
        self._regions = regions
        self._block = memoryview(mmap.mmap(-1, ALIGN))
        self._at = (-1, 0, 0)
        """Region, sequence and position of what is in `_block`."""
        self._owed = False
        """Whether the tail has rows that the block's place has not."""

    def start(self, number: int, sequence: int) -> Outcome:
        """Put an empty index over an earlier life's."""
        outcome = self._begin(number, sequence, 0)
        if outcome is DONE:
            self._pack(0)
            outcome = self._write_home()
        if outcome is DONE:
            self._regions.mark(number)
        return outcome

    def append(self, number: int, place: Rows, rows: Sequence[bytes]) -> Outcome:
        """Write the rows of frames that are on the disk."""
        at, stop = place.first, place.first + len(rows)
        while at < stop:
            position, slot = divmod(at, ROWS)
            if self._at != (number, place.sequence, position):
                outcome = self._load(number, place.sequence, position, slot)
                if outcome is not DONE:
                    return outcome
            count = min(ROWS - slot, stop - at)
            data = b"".join(rows[at - place.first :][:count])
            begin = _HEAD.itemsize + slot * _ROW_BYTES
            self._block[begin : begin + len(data)] = data
            self._pack(slot + count)
            self._owed = True
            full = slot + count == ROWS
            outcome = self._write_home() if full else self._log.write_tail(self._block)
            if outcome is not DONE:
                return outcome
            at += count
        return DONE

    def flush(self) -> Outcome:
        """Put the block that is filling up in its place."""
        return self._write_home() if self._owed else DONE

    def _load(self, number: int, sequence: int, position: int, slot: int) -> Outcome:
        """Make a block current: a new one, or one that has `slot` rows already."""
        outcome = self._begin(number, sequence, position)
        if outcome is not DONE or not slot:
            return outcome
        outcome = self._log.read([self._block], _offset(self._regions, number, position))
        block = np.frombuffer(self._block, _BLOCK)
        if outcome is DONE and _sound(block, number, position)[0]:
            return DONE
        self._at = (-1, 0, 0)
        return Outcome(Status.FAILED, f"the index does not read back: {outcome.detail}")

    def _begin(self, number: int, sequence: int, position: int) -> Outcome:
        """Make an empty block current, once the one before is in its place."""
        outcome = self.flush()
        if outcome is DONE:
            self._block[:] = bytes(ALIGN)
            self._at = (number, sequence, position)
        return outcome

    def _pack(self, count: int) -> None:
        number, sequence, position = self._at
        _HEAD_PACK.pack_into(self._block, 0, 0, _MAGIC, number, sequence, position, count)
        struct.pack_into("<Q", self._block, 0, xxhash.xxh3_64_intdigest(self._block[8:]))

    def _write_home(self) -> Outcome:
        number, _, position = self._at
        outcome = self._log.write([self._block], _offset(self._regions, number, position))
        self._owed = self._owed and outcome is not DONE
        return outcome


def settle(log: RegionLog, regions: Regions) -> None:
    """Put the block that a kill left in the tail in its place, if that life of its region goes on.

    Then the tail is emptied: its region and sequence may mean another life one day.
    """
    tail = memoryview(mmap.mmap(-1, ALIGN))
    if log.read_tail(tail) is not DONE:
        return
    head = np.frombuffer(tail, _BLOCK)["head"][0]
    number, position = int(head["region"]), int(head["position"])
    inside = number < regions.count and position < regions.largest // ALIGN
    if inside and _sound(np.frombuffer(tail, _BLOCK), number, position)[0]:
        begun = _read_block(log, regions, number, 0)
        there = _read_block(log, regions, number, position)
        goes_on = begun is not None and begun["sequence"] == head["sequence"]
        same = there is not None and there["sequence"] == head["sequence"]
        rows = int(there["count"]) if there is not None and same else -1
        offset = _offset(regions, number, position)
        if goes_on and rows < head["count"] and log.write([tail], offset) is not DONE:
            return
    log.write_tail(memoryview(bytes(ALIGN)))


def _read_block(log: RegionLog, regions: Regions, number: int, position: int) -> np.void | None:
    """Return the head of a block, None when it is not sound."""
    block = memoryview(mmap.mmap(-1, ALIGN))
    outcome = log.read([block], _offset(regions, number, position))
    blocks = np.frombuffer(block, _BLOCK)
    whole = outcome is DONE and _sound(blocks, number, position)[0]
    return blocks["head"][0] if whole else None


class Recovered(NamedTuple):
    """What a log holds: its regions in use and the newest frame of each (key, part)."""

    lives: list[Life]
    reopen: int | None
    last: int
    rows: npt.NDArray[np.void]


class _Index(NamedTuple):
    """One region's index as read: its blocks in order, and which of them are sound."""

    blocks: Blocks
    sound: npt.NDArray[np.bool_]


def recover(log: RegionLog, regions: Regions) -> Recovered:
    """Read every region's index; walk the few regions whose index is damaged."""
    buffer = memoryview(mmap.mmap(-1, regions.region_bytes))
    pile = _Pile()
    lives: list[Life] = []
    last, walks, newest = 0, 0, None
    for number in range(regions.count):
        index = _read_index(log, regions, number, buffer)
        if index is None:
            continue
        sequences = index.blocks["head"]["sequence"]
        sequence = int(sequences[index.sound].max(initial=0))
        good = index.sound & (sequences == sequence)
        stop = int(np.flatnonzero(good).max(initial=-1)) + 1
        last = max(last, sequence)
        rows = _rows(index.blocks[good], regions, number)
        cursor = _cursor(rows, regions, number)
        if not good[:stop].all() or not stop:
            walks += 1
            rows = rows if good[0] else rows[:0]  # without block 0 they may be of an earlier life
            rows = _walk(log, regions, number, buffer, rows) if walks <= _MAX_WALKS else rows
            cursor = regions.largest
        elif sequence == last:
            newest = number
        if len(rows):
            lives.append(Life(number, max(sequence, 1), cursor, stop * ROWS))
            pile.add(rows)
    lives.sort(key=lambda life: life.sequence)
    whole = lives and (lives[-1].number, lives[-1].sequence) == (newest, last)
    return Recovered(lives, newest if whole else None, last, _newest(pile.rows(), lives, regions))


class _Pile:
    """Rows of all regions in one array, copied once: memory that is new costs more than a copy."""

    def __init__(self) -> None:
        self._room = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used = 0

    def add(self, rows: npt.NDArray[np.void]) -> None:
        stop = self._used + rows.nbytes
        if stop > len(self._room):
            self._room.resize(2 * stop)
        self._room[self._used : stop] = rows.view(np.uint8).data
        self._used = stop

    def rows(self) -> npt.NDArray[np.void]:
        return np.frombuffer(self._room, FOUND, self._used // FOUND.itemsize)


def _read_index(log: RegionLog, regions: Regions, number: int, buffer: memoryview) -> _Index | None:
    """Read a region's blocks from position 0 down; None where it was never used."""
    size = regions.region_bytes
    have, step = 0, _FIRST_READ
    sound: list[npt.NDArray[np.bool_]] = []
    while have < size:
        step = min(step, size - have)
        view = buffer[size - have - step : size - have]
        if log.read([view], regions.start_of(number + 1) - have - step) is not DONE:
            view[:] = bytes(step)
        if not have and view[-ALIGN:] == bytes(ALIGN):
            return None
        sound.append(_sound(np.frombuffer(view, _BLOCK)[::-1], number, have // ALIGN))
        have += step
        step = _NEXT_READ
        if not sound[-1][-2:].any():
            break
    return _Index(np.frombuffer(buffer[size - have :], _BLOCK)[::-1], np.concatenate(sound))


def _sound(blocks: Blocks, number: int, position: int) -> npt.NDArray[np.bool_]:
    """Return which blocks are whole and lie where they say."""
    head = blocks["head"]
    here = np.arange(position, position + len(blocks))
    sound: npt.NDArray[np.bool_] = (
        (head["magic"] == _MAGIC)
        & (head["region"] == number)
        & (head["position"] == here)
        & (head["count"] <= ROWS)
    )
    digest, checksums = xxhash.xxh3_64_intdigest, head["checksum"].tolist()
    for at in np.flatnonzero(sound).tolist():
        sound[at] = digest(blocks[at : at + 1].view(np.uint8)[8:].data) == checksums[at]
    return sound


def _rows(blocks: Blocks, regions: Regions, number: int) -> npt.NDArray[np.void]:
    """Return the FOUND rows of sound blocks, in the order of their writing."""
    taken = np.arange(ROWS) < blocks["head"]["count"][:, None]
    found = blocks["rows"]["found"][taken].view(FOUND)
    start, stop = regions.start_of(number), regions.start_of(number + 1) - ALIGN
    at, nbytes = found["locator"], found["nbytes"]
    inside = (at >= start) & (at % ALIGN == 0) & (nbytes > 0) & (nbytes <= stop - at)
    found = found if inside.all() else found[inside]
    if (np.diff(found["locator"]) <= 0).any():  # not in order: a place may have been written twice
        _, backwards = np.unique(found["locator"][::-1], return_index=True)
        found = found[np.sort(len(found) - 1 - backwards)]
    return found if int(found["nbytes"].sum()) <= regions.largest else found[:0]


def _cursor(found: npt.NDArray[np.void], regions: Regions, number: int) -> int:
    """Return where the region's frames end, in bytes from its start."""
    if not len(found):
        return 0
    stop = int((found["locator"] + found["nbytes"]).max()) - regions.start_of(number)
    return -(-stop // ALIGN) * ALIGN


def _walk(
    log: RegionLog,
    regions: Regions,
    number: int,
    buffer: memoryview,
    known: npt.NDArray[np.void],
) -> npt.NDArray[np.void]:
    """Return the rows known and those of whole frames between them.

    Without an index only a frame's payload checksum tells it from one that was partly overwritten.
    """
    start = regions.start_of(number)
    if log.read([buffer], start) is not DONE:
        return known
    covered = np.zeros(regions.region_bytes // ALIGN, np.bool_)
    for row in known:
        first = (int(row["locator"]) - start) // ALIGN
        covered[first : first - (-int(row["nbytes"]) // ALIGN)] = True
    magic = np.frombuffer(buffer, "S4")[:: ALIGN // 4]
    rows = []
    for at in np.flatnonzero(magic == frame.MAGIC):
        view = buffer[at * ALIGN :]
        header = frame.parse(view[: frame.MAX_HEADER_BYTES])
        if covered[at] or isinstance(header, frame.Refusal) or not frame.verify(header, [view]):
            continue
        stop = at - (-header.frame_bytes // ALIGN)
        if not covered[at:stop].any():
            covered[at:stop] = True
            rows.append(row_of(header, start + int(at) * ALIGN, header.frame_bytes))
    walked = np.frombuffer(b"".join(row[: FOUND.itemsize] for row in rows), FOUND)
    return np.concatenate([known, walked])


def _newest(
    rows: npt.NDArray[np.void], lives: Sequence[Life], regions: Regions
) -> npt.NDArray[np.void]:
    """Return the rows without those of whose name there is one in a younger region, or later."""
    words = rows.view(_WORDS)
    name = words["key"] ^ (words["part"] * _MIX[0]) ^ (words["part_end"] * _MIX[1])
    # The lower bits make way for the row's number: a plain sort takes a third of an argsort's time.
    bits = np.uint64(len(rows).bit_length())
    numbers = np.arange(len(rows), dtype=np.uint64)
    name = np.sort(name >> bits << bits | numbers)
    same = np.flatnonzero(name[1:] >> bits == name[:-1] >> bits)
    if not len(same):
        return rows
    alike = np.concatenate([name[same], name[same + 1]]) & ((np.uint64(1) << bits) - np.uint64(1))
    suspects = np.unique(alike).astype(np.int64)
    ages = np.zeros(regions.count, "<u8")
    for life in lives:
        ages[life.number] = life.sequence
    places = (rows["locator"][suspects] - regions.start) // regions.region_bytes
    suspects = suspects[np.argsort(ages[places], kind="stable")]
    names = rows[suspects].view("u1").reshape(len(suspects), -1)[:, :_NAME_BYTES]
    newest = {key.tobytes(): at for at, key in zip(suspects.tolist(), names, strict=True)}
    keep = np.ones(len(rows), np.bool_)
    keep[suspects] = False
    keep[list(newest.values())] = True
    return rows.view(_OPAQUE)[keep].view(FOUND)


def _offset(regions: Regions, number: int, position: int) -> int:
    return regions.start_of(number + 1) - (position + 1) * ALIGN
