"""Units: the keys of the catalog's rows, and the way from a unit (key, part) to its first row.

Keys lie row by row in one array. The way to them is an open-addressed table of row numbers with
linear probing, at most half full. A dict would need an object for each key and number, four times
the memory; here a start enters a million units with some forty steps of numpy.

Many units are asked for at once. A chain's rows mostly lie side by side, so what follows the first
of them is compared as one piece of memory; the rest are looked up together.

Slots are the upper bits of a sum of the key's words and the part, each times a secret odd number:
clients choose keys, and must not be able to choose keys that meet.
"""

import secrets
import struct
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierkv.key import KEY_BYTES

NONE = -1
FEW = 16
"""Below it a loop takes less time than numpy."""
_LEAST_BITS = 10
_WORDS = struct.Struct("<4Q")
_64 = (1 << 64) - 1

Words = npt.NDArray[np.uint64]
Parts = npt.NDArray[np.int16]
Places = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]


class Units:
    """Keys by row, and the first row of every unit.

    Args:
        part: the column of part numbers, as long as there are rows.
    """

    def __init__(self, part: "array[int]") -> None:
        self._part = part
        self._keys = bytearray()
        self._first = bytearray()
        """1: the table leads here."""
        self._count = 0
        self._mix = [secrets.randbits(64) | 1 for _ in range(5)]
        self._words_mix = np.array(self._mix[:4], np.uint64)
        self._clear(_LEAST_BITS)

    def __len__(self) -> int:
        """Return the count of rows."""
        return len(self._first)

    def extend(self, keys: bytes) -> None:
        """Append rows."""
        self._keys += keys
        self._first += bytes(len(keys) // KEY_BYTES)

    def name(self, rows: Sequence[int], keys: bytes) -> None:
        """Give rows that lead nowhere other keys."""
        with memoryview(self._keys) as known:
            for at, row in enumerate(rows):
                key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
                known[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key

    def key(self, row: int) -> bytes:
        """Return a row's key."""
        return bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES])

    def keys(self, start: int, stop: int) -> bytes:
        """Return the keys of rows that follow each other, packed."""
        return bytes(self._keys[start * KEY_BYTES : stop * KEY_BYTES])

    def first(self, key: bytes, part: int) -> int:
        """Return the first row of one unit, NONE where the unit is not known."""
        return self._slots[self._place(key, part)]

    def find(self, keys: bytes, part: int) -> Numbers:
        """Return the first row of each unit, NONE where the unit is not known."""
        count = len(keys) // KEY_BYTES
        rows = np.full(count, NONE, np.int32)
        if not self._count:
            return rows
        start, run = self._run(keys, part) if count >= FEW else (NONE, 0)
        rows[:run] = np.arange(start, start + run)
        if count - run >= FEW:
            words = np.frombuffer(keys, np.uint64, offset=run * KEY_BYTES).reshape(-1, 4)
            parts = np.full(len(words), part, np.int16)
            rows[run:] = self._find_many(words, parts, self._homes(words, parts))
        else:
            for number in range(run, count):
                at = number * KEY_BYTES
                rows[number] = self.first(keys[at : at + KEY_BYTES], part)
        return rows

    def lead(self, rows: Numbers) -> Numbers:
        """Make new rows the first of their units, all different; returns what was first before."""
        self._grow(len(rows))
        if len(rows) < FEW:
            return np.array([self._lead_one(row) for row in rows.tolist()], np.int32)
        words, parts = self._named(rows)
        homes = self._homes(words, parts)
        before = self._find_many(words, parts, homes) if self._count else np.full_like(rows, NONE)
        fresh = before == NONE
        self._enter(rows[fresh], homes[fresh])
        np.frombuffer(self._first, np.uint8)[rows[fresh]] = 1
        self._count += int(fresh.sum())
        for row in rows[~fresh].tolist():
            self._lead_one(row)
        return before

    def leads(self, row: int) -> bool:
        """Return whether a row is the first of its unit."""
        return bool(self._first[row])

    def homes(self, rows: Sequence[int]) -> list[int]:
        """Return where the unit of each row has its slot at the earliest; see `follow`."""
        if len(rows) < FEW:
            return [self._home(self.key(row), self._part[row]) for row in rows]
        found: list[int] = self._homes(*self._named(np.asarray(rows, np.int32))).tolist()
        return found

    def follow(self, row: int, after: int, home: int) -> None:
        """Take the first row of a unit away; the next one leads, or the unit is not known."""
        self._first[row] = 0
        slots, at, mask = self._slots, home, len(self._slots) - 1
        while slots[at] != row:
            at = (at + 1) & mask
        if after == NONE:
            self._count -= 1
            self._vacate(at)
        else:
            self._slots[at] = after
            self._first[after] = 1

    def _lead_one(self, row: int) -> int:
        at = self._place(self.key(row), self._part[row])
        before = self._slots[at]
        self._slots[at] = row
        self._first[row] = 1
        if before == NONE:
            self._count += 1
        else:
            self._first[before] = 0
        return before

    def _home(self, key: bytes, part: int) -> int:
        a, b, c, d = _WORDS.unpack(key)
        m = self._mix
        mixed: int = a * m[0] + b * m[1] + c * m[2] + d * m[3] + part * m[4]
        return (mixed & _64) >> self._shift

    def _homes(self, words: Words, parts: Parts) -> Places:
        mixed = words @ self._words_mix + parts.astype(np.uint64) * np.uint64(self._mix[4])
        return (mixed >> np.uint64(self._shift)).view(np.int64)

    def _place(self, key: bytes, part: int) -> int:
        """Return the slot that a unit has, or the free one that it would get."""
        slots, keys, parts, mask = self._slots, self._keys, self._part, len(self._slots) - 1
        at = self._home(key, part)
        row = slots[at]
        while row != NONE and not (keys.startswith(key, row * KEY_BYTES) and parts[row] == part):
            at = (at + 1) & mask
            row = slots[at]
        return at

    def _run(self, keys: bytes, part: int) -> tuple[int, int]:
        """Return the first unit's row, and how many units from there on lie row by row."""
        row = self.first(keys[:KEY_BYTES], part)
        if row == NONE:
            return row, 0
        count = min(len(keys) // KEY_BYTES, len(self) - row)
        words, parts = self._columns()
        asked = np.frombuffer(keys, np.uint64, count * 4).reshape(-1, 4)
        here = (words[row : row + count] == asked).all(axis=1)
        here &= np.frombuffer(self._first, np.bool_)[row : row + count]
        here &= parts[row : row + count] == part
        return row, count if here.all() else int(here.argmin())

    def _find_many(self, words: Words, parts: Parts, at: Places) -> Numbers:
        """As `first` for many: `at` is where each has its slot at the earliest."""
        slots, mask = np.frombuffer(self._slots, np.int32), len(self._slots) - 1
        known, known_parts = self._columns()
        at, rows = at.copy(), slots[at]
        left = np.flatnonzero((rows != NONE) & (known[rows, 0] != words[:, 0]))
        while len(left) >= FEW:
            at[left] = (at[left] + 1) & mask
            rows[left] = found = slots[at[left]]
            left = left[(found != NONE) & (known[found, 0] != words[left, 0])]
        # One word that agrees is nearly always the unit's: what is not is looked up alone.
        sure = (known[rows] == words).all(axis=1) & (known_parts[rows] == parts)
        sure |= rows == NONE
        sure[left] = False
        for number in np.flatnonzero(~sure).tolist():
            rows[number] = self.first(words[number].tobytes(), int(parts[number]))
        return rows

    def _enter(self, rows: Numbers, at: Places) -> None:
        """Give units that are not known a slot each."""
        slots, mask = np.frombuffer(self._slots, np.int32), len(self._slots) - 1
        while len(rows):
            free = slots[at] == NONE
            slots[at[free]] = rows[free]
            lost = slots[at] != rows  # taken before, or by another of these
            rows, at = rows[lost], (at[lost] + 1) & mask

    def _vacate(self, gap: int) -> None:
        """Free a slot, and move up those behind it that it kept from their own."""
        slots, mask = self._slots, len(self._slots) - 1
        slots[gap] = NONE
        at = (gap + 1) & mask
        while (row := slots[at]) != NONE:
            home = self._home(self.key(row), self._part[row])
            if (at - home) & mask >= (at - gap) & mask:
                slots[gap], slots[at] = row, NONE
                gap = at
            at = (at + 1) & mask

    def _grow(self, more: int) -> None:
        """Make the table large enough to stay half empty."""
        bits = (2 * (self._count + more) - 1).bit_length()
        if 1 << bits > len(self._slots):
            self._clear(bits)
            rows = np.flatnonzero(np.frombuffer(self._first, np.bool_)).astype(np.int32)
            self._enter(rows, self._homes(*self._named(rows)))

    def _clear(self, bits: int) -> None:
        self._slots = array("i", [NONE]) * (1 << bits)
        self._shift = 64 - bits

    def _named(self, rows: Numbers) -> tuple[Words, Parts]:
        words, parts = self._columns()
        return words[rows], parts[rows]

    def _columns(self) -> tuple[Words, Parts]:
        words = np.frombuffer(self._keys, np.uint64).reshape(-1, 4)
        return words, np.frombuffer(self._part, np.int16)
