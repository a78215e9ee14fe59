"""Kernels of `kvtc`'s entropy stage (`kvtc_stream` says what they code).

A symbol costs about as much as one wrongly guessed branch, so a component's tokens go in passes:
what each token is to be coded with is found for all of them at once, without branches, where the
compiler takes many in one instruction; then the LANES states, which wait for nothing but
themselves, take one symbol each in turn. A symbol whose range is the whole one changes no state,
so tokens with nothing to code are coded like all others.

A range is one number: where it begins in the lower 16 bits, its size above. States and places are
unsigned numbers of 64 bits throughout: one signed number among them would make floats of all.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv_codecs.bits import inlined, kernel, least, most, shifted_right

SHIFTS = 10
"""Shifts are 0 to SHIFTS - 1."""
NONE = SHIFTS
"""The shift of a component that is not coded."""
OFFSETS = np.array([0, 0, 2, 2, 10, 10, 42, 42, 170, 170], np.int32)
ESCAPE = 12
"""The largest first index that is a symbol of its own; it stands for everything beyond, too."""
FIRST_SYMBOLS = 2 * ESCAPE + 1
PROBABILITY_BITS = 12
TOTAL = 1 << PROBABILITY_BITS
LANES = 4
LOW = 1 << 16
"""States lie in [LOW, LOW << 16)."""
GUESSES = 128
"""Parts of the range whose first symbol is known: a search begins there."""
NOTHING = TOTAL << 16
"""The range of a symbol that is none."""

_INVERSE_BITS = 44
_INVERSES = np.concatenate(
    [np.zeros(1, np.uint64), (1 << _INVERSE_BITS) // np.arange(1, TOTAL + 1, dtype=np.uint64) + 1]
).astype(np.uint64)
"""x // size is x * inverse >> 44, exactly and within 64 bits, for every x < size << 20."""

Indices = NDArray[np.int16]
Words = NDArray[np.uint16]
Shifts = NDArray[np.int8]
Ranges = NDArray[np.uint32]
Longs = NDArray[np.uint64]
Symbols = NDArray[np.uint8]
Steps = tuple[Shifts, ...]


# Encoding goes from the last symbol to the first; words and escapes grow downwards.


@kernel
def push(
    q: Indices,
    level: Steps,
    ranges: Ranges,
    refine: Words,
    states: Longs,
    words: Words,
    escapes: Words,
    ends: Longs,
) -> None:
    """Encode a group's symbols; `ends` says where words and escapes begin."""
    before, after, start = level
    line, kinds = np.zeros(q.shape[1], np.uint8), np.zeros(8, np.uint32)
    for c in range(len(q) - 1, -1, -1):
        if after[c] == before[c]:
            continue
        begin = start[c] if before[c] == NONE else before[c]
        for shift in range(after[c] + 1, begin + 1):
            _kinds(refine[c, shift], shift & 1, kinds)
            _refinements(q[c], shift, line)
            _push_line(line, kinds, states, words, ends)
        if before[c] == NONE:
            if _firsts(q[c], begin, line) >= ESCAPE:
                _push_escapes(q[c], begin, escapes, ends)
            _push_line(line, ranges[c], states, words, ends)


@inlined
def _kinds(table: Words, odd: int, kinds: Ranges) -> None:
    """Fill the ranges of refinements: from 0 to 0, -1, 1; from 1 to the halves; from beyond."""
    zero, negative = np.int64(table[0]), np.int64(table[1])
    kinds[0] = zero << 16 if odd else NOTHING
    kinds[1] = zero | negative << 16
    kinds[2] = zero + negative | (TOTAL - zero - negative) << 16
    for kind in (0, 1):
        half = np.int64(table[2 + kind])
        kinds[3 + 2 * kind], kinds[4 + 2 * kind] = half << 16, half | (TOTAL - half) << 16


@inlined
def _refinements(row: Indices, shift: int, line: Symbols) -> None:
    """Find each token's kind when going from a shift to the next finer one."""
    offset, finer, odd = np.int32(OFFSETS[shift]), np.int32(OFFSETS[shift - 1]), np.int32(shift & 1)
    for t in range(len(row)):
        value = np.int32(row[t])
        magnitude = np.int32(abs(value))
        a = shifted_right(np.int32(magnitude + offset), shift)
        b = shifted_right(np.int32(magnitude + finer), shift - 1)
        of_zero = np.int32(1) if value < 0 else np.int32(2)
        of_zero = of_zero if b != 0 else np.int32(0)
        of_more = np.int32(4 + b - 2 * a - odd)
        of_more = np.int32(of_more + 2) if a > 1 else of_more
        line[t] = np.uint8(of_more if a > 0 else of_zero)


@inlined
def _firsts(row: Indices, shift: int, line: Symbols) -> np.int32:
    """Find the symbol of each token's first index; returns the greatest magnitude."""
    offset, greatest = np.int32(OFFSETS[shift]), np.int32(0)
    for t in range(len(row)):
        value = np.int32(row[t])
        b = shifted_right(np.int32(np.int32(abs(value)) + offset), shift)
        greatest = most(greatest, b)
        b = least(b, np.int32(ESCAPE))
        line[t] = np.uint8(np.int32(ESCAPE - b) if value < 0 else np.int32(ESCAPE + b))
    return greatest


@inlined
def _push_escapes(row: Indices, shift: int, escapes: Words, ends: Longs) -> None:
    for t in range(len(row) - 1, -1, -1):
        b = (abs(np.int64(row[t])) + OFFSETS[shift]) >> shift
        if b >= ESCAPE:
            ends[1] -= np.uint64(1)
            escapes[ends[1]] = np.uint16(b - ESCAPE)


@inlined
def _put(x: Any, one: Any, words: Words, at: Any) -> tuple[Any, Any]:  # noqa: ANN401 -- numbers inside a kernel
    """Push a symbol; returns the state and where the words begin."""
    size, low = np.uint64(one >> 16), np.uint64(one & 0xFFFF)
    words[at - np.uint64(1)] = np.uint16(x & np.uint64(0xFFFF))
    over = np.uint64(x >= size << 20)
    x >>= over << 4
    whole = x * _INVERSES[size] >> _INVERSE_BITS
    return x + low + whole * (np.uint64(TOTAL) - size), at - over


@inlined
def _push_line(line: Symbols, ranges: Ranges, states: Longs, words: Words, ends: Longs) -> None:
    """Push a symbol for each token, the last one first."""
    at, whole = ends[0], len(line) >> 2 << 2
    for t in range(len(line) - 1, whole - 1, -1):
        states[t & 3], at = _put(states[t & 3], ranges[line[t]], words, at)
    a, b, c, d = states[0], states[1], states[2], states[3]
    for turn in range(whole >> 2):
        stop = np.uint64(whole - 4 * turn)
        d, at = _put(d, ranges[line[stop - np.uint64(1)]], words, at)
        c, at = _put(c, ranges[line[stop - np.uint64(2)]], words, at)
        b, at = _put(b, ranges[line[stop - np.uint64(3)]], words, at)
        a, at = _put(a, ranges[line[stop - np.uint64(4)]], words, at)
    states[0], states[1], states[2], states[3] = a, b, c, d
    ends[0] = at


@kernel
def pull(  # noqa: PLR0913, PLR0917
    q: NDArray[np.int32],
    level: Steps,
    ranges: Ranges,
    guesses: Symbols,
    refine: Words,
    states: Longs,
    words: Words,
    count: int,
    escapes: Words,
    ends: Longs,
) -> bool:
    """Decode all components; `ends` says how many words and escapes are read.

    Words have room behind their `count` for those that a component looks at beyond them.

    Returns: whether there were as many as were wanted.
    """
    before, after, start = level
    tokens = q.shape[1]
    found, edges = np.zeros(tokens, np.uint8), np.zeros(tokens, np.uint32)
    classes, kinds = np.zeros(3, np.uint32), np.zeros(12, np.uint32)
    for c in range(len(q)):
        if after[c] == before[c]:
            continue
        shift = int(before[c])
        if shift == NONE:
            shift = int(start[c])
            _pull_firsts(guesses[c], ranges[c], states, words, ends, found)
            if not _first_values(found, escapes, ends, q[c]) or ends[0] > count:
                return False
        while shift > after[c]:
            _classes(refine[c, shift], shift & 1, classes, kinds)
            _edges(q[c], classes, edges)
            _pull_line(edges, kinds, states, words, ends, found)
            if ends[0] > count:
                return False
            _refined(found, shift & 1, q[c])
            shift -= 1
    return True


@inlined
def _take(x: Any, one: Any, words: Words, at: Any) -> tuple[Any, Any]:  # noqa: ANN401 -- numbers inside a kernel
    """Pop a symbol of a range; returns the state and the next word's place."""
    size, low = np.uint64(one >> 16), np.uint64(one & 0xFFFF)
    x = size * (x >> PROBABILITY_BITS) + (x & np.uint64(TOTAL - 1)) - low
    under, word = x < np.uint64(LOW), np.uint64(words[at])
    return x << 16 | word if under else x, at + np.uint64(under)


@inlined
def _first(x: Any, guesses: Symbols, ranges: Ranges) -> Any:  # noqa: ANN401 -- numbers inside a kernel
    """Return the symbol in whose range a state lies."""
    slot = np.int64(x & np.uint64(TOTAL - 1))
    symbol = np.uint64(guesses[np.uint64(slot // (TOTAL // GUESSES))])
    while slot >= np.int64(ranges[symbol] & 0xFFFF) + np.int64(ranges[symbol] >> 16):
        symbol += np.uint64(1)
    return symbol


@inlined
def _pull_firsts(
    guesses: Symbols, ranges: Ranges, states: Longs, words: Words, ends: Longs, found: Symbols
) -> None:
    """Pop a first symbol for each token."""
    at, whole = ends[0], len(found) >> 2 << 2
    a, b, c, d = states[0], states[1], states[2], states[3]
    for turn in range(whole >> 2):
        first = np.uint64(4 * turn)
        one = _first(a, guesses, ranges)
        a, at = _take(a, ranges[one], words, at)
        found[first] = one
        one = _first(b, guesses, ranges)
        b, at = _take(b, ranges[one], words, at)
        found[first + np.uint64(1)] = one
        one = _first(c, guesses, ranges)
        c, at = _take(c, ranges[one], words, at)
        found[first + np.uint64(2)] = one
        one = _first(d, guesses, ranges)
        d, at = _take(d, ranges[one], words, at)
        found[first + np.uint64(3)] = one
    states[0], states[1], states[2], states[3] = a, b, c, d
    for t in range(whole, len(found)):
        one = _first(states[t & 3], guesses, ranges)
        states[t & 3], at = _take(states[t & 3], ranges[one], words, at)
        found[t] = one
    ends[0] = at


@inlined
def _first_values(found: Symbols, escapes: Words, ends: Longs, row: NDArray[np.int32]) -> bool:
    """Turn first symbols into indices; returns whether there were escapes enough."""
    greatest = np.int32(0)
    for t in range(len(row)):
        value = np.int32(np.int32(found[t]) - ESCAPE)
        greatest = most(greatest, np.int32(abs(value)))
        row[t] = value
    if greatest < ESCAPE:
        return True
    for t in range(len(row)):
        if abs(row[t]) == ESCAPE:
            if ends[1] >= len(escapes):
                return False
            excess = np.int32(escapes[ends[1]])
            ends[1] += np.uint64(1)
            row[t] += excess if row[t] > 0 else -excess
    return True


@inlined
def _classes(table: Words, odd: int, classes: Ranges, kinds: Ranges) -> None:
    """Fill where the parts of a refinement begin, and their ranges, for magnitudes 0, 1 and more.

    An entry of `classes` has the first of its `kinds` in the lowest bits, above these where the
    second and, above that, where the third of its parts begin.
    """
    zero, negative = np.int64(table[0]), np.int64(table[1])
    third = zero + negative
    if odd:
        classes[0] = zero << 4 | third << 17
        kinds[0], kinds[1] = zero << 16, zero | negative << 16
        kinds[2] = third | (TOTAL - third) << 16
    else:
        classes[0], kinds[0] = TOTAL << 4 | TOTAL << 17, NOTHING
    for kind in (1, 2):
        half, first = np.int64(table[1 + kind]), 4 * kind
        classes[kind] = first | half << 4 | TOTAL << 17
        kinds[first], kinds[first + 1] = half << 16, half | (TOTAL - half) << 16


@inlined
def _edges(row: NDArray[np.int32], classes: Ranges, edges: Ranges) -> None:
    """Say of each token of which class it is."""
    none, one, more = classes[0], classes[1], classes[2]
    for t in range(len(row)):
        magnitude = np.int32(abs(row[t]))
        edges[t] = none if magnitude == 0 else one if magnitude == 1 else more


@inlined
def _part(x: Any, edge: Any) -> Any:  # noqa: ANN401 -- numbers inside a kernel
    """Return in which part of its class's range a state lies."""
    slot = np.uint32(x & np.uint64(TOTAL - 1))
    second, third = np.uint32(edge >> 4) & np.uint32(0x1FFF), np.uint32(edge >> 17)
    return np.uint64(slot >= second) + np.uint64(slot >= third)


@inlined
def _pull_line(
    edges: Ranges, kinds: Ranges, states: Longs, words: Words, ends: Longs, found: Symbols
) -> None:
    """Pop a refinement for each token."""
    at, whole = ends[0], len(found) >> 2 << 2
    a, b, c, d = states[0], states[1], states[2], states[3]
    for turn in range(whole >> 2):
        first = np.uint64(4 * turn)
        edge = edges[first]
        one = _part(a, edge)
        a, at = _take(a, kinds[np.uint64(edge & 15) + one], words, at)
        found[first] = one
        edge = edges[first + np.uint64(1)]
        one = _part(b, edge)
        b, at = _take(b, kinds[np.uint64(edge & 15) + one], words, at)
        found[first + np.uint64(1)] = one
        edge = edges[first + np.uint64(2)]
        one = _part(c, edge)
        c, at = _take(c, kinds[np.uint64(edge & 15) + one], words, at)
        found[first + np.uint64(2)] = one
        edge = edges[first + np.uint64(3)]
        one = _part(d, edge)
        d, at = _take(d, kinds[np.uint64(edge & 15) + one], words, at)
        found[first + np.uint64(3)] = one
    states[0], states[1], states[2], states[3] = a, b, c, d
    for t in range(whole, len(found)):
        one = _part(states[t & 3], edges[t])
        kind = np.uint64(edges[t] & 15) + one
        states[t & 3], at = _take(states[t & 3], kinds[kind], words, at)
        found[t] = one
    ends[0] = at


@inlined
def _refined(found: Symbols, odd: int, row: NDArray[np.int32]) -> None:
    """Turn parts into the finer indices."""
    extra = np.int32(odd - 1)
    for t in range(len(row)):
        value, part = row[t], np.int32(found[t])
        magnitude = np.int32(np.int32(2 * np.int32(abs(value))) + extra + part)
        of_zero = np.int32(1 if part == 2 else -part)  # noqa: PLR2004
        of_more = magnitude if value > 0 else np.int32(-magnitude)
        row[t] = of_more if value != 0 else of_zero
