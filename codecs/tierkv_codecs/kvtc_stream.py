"""The entropy stage of `kvtc`: nested indices of coefficients to bytes and back.

A coefficient is an index q, its value in steps rounded to the nearest integer. Coarser indices nest
in it: at *shift* s a magnitude m becomes (m + OFFSETS[s]) >> s, a uniform quantiser of step 2^s
whose zero cell is about two thirds or four thirds of a step wide, in turn. So a shift of one less
refines every cell, and what is coded for a coarse index is never coded again.

A component is coded first at some shift (its *first*: a signed index up to +-ESCAPE, beyond that an
escape), then refined from shift to shift. Every symbol has a probability calibrated for its
component and its context: which shift, and whether the coarser magnitude is 0, 1 or more. Symbols
go through one range asymmetric coder (rANS, arXiv 1311.2540) of LANES interleaved 32-bit states, 12
bits of probability and 16-bit words; token t uses state t mod LANES.

These functions are integer only, so their bytes are the same on every machine.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv_codecs.bits import inlined, kernel

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
MOST = (1 << 15) - 1
"""The largest magnitude of an index."""
KINDS = 7
"""Ways that a refinement can go."""
GUESSES = 128
"""Parts of the range whose first symbol is known: a search begins there."""
MANY = 16
"""For so many tokens it pays to find out these symbols; a search for fewer begins at the first."""

Indices = NDArray[np.int16]
Words = NDArray[np.uint16]
Shifts = NDArray[np.int8]
Longs = NDArray[np.int64]
Steps = tuple[Shifts, ...]


class Tables(NamedTuple):
    """Probabilities of one side, in 1/4096, for `r` components.

    first: u16 [r, FIRST_SYMBOLS], of the indices -ESCAPE to ESCAPE at the first shift.
    refine: u16 [r, SHIFTS, 4]: when going from shift s to s - 1, of staying at zero, of becoming
        negative (what is left: positive), and of the lower half of a cell with magnitude 1, and
        with a greater one.
    """

    first: NDArray[np.uint16]
    refine: NDArray[np.uint16]


class Level(NamedTuple):
    """What one segment does to one side's components: int8 [r] each.

    before, after: the shift that earlier segments left and that this one leaves; NONE: not coded.
    start: the shift of the first index, where `before` is NONE and `after` is not.
    """

    before: NDArray[np.int8]
    after: NDArray[np.int8]
    start: NDArray[np.int8]


Stream = tuple[NDArray[np.uint32], Words, Words]
"""States, words and escapes."""


class StreamError(Exception):
    """The words are not what `encode` makes for these tables."""


def encode(parts: Sequence[tuple[Indices, Level]], tables: Tables) -> Stream:
    """Return final states [LANES], words and escapes of one side.

    Args:
        parts: indices int16 [r, tokens] of groups of tokens, one behind the other, each with what
            happens to it; of the first r components.
        tables: of the side.
    """
    cut = [(indices, Level(*(of[: len(indices)] for of in level))) for indices, level in parts]
    most = sum(indices.shape[1] * _passes(level) for indices, level in cut)
    # One more than there can be: a word is written before it is known whether it is one.
    words, escapes = np.empty(most + 1, np.uint16), np.empty(most, np.uint16)
    states = np.full(LANES, LOW, np.int64)
    at, escaped = words.size, escapes.size
    for indices, level in reversed(cut):
        at, escaped = _push(
            indices, tuple(level), tuple(tables), OFFSETS, states, words, at, escapes, escaped
        )
    return states.astype(np.uint32), words[at:].copy(), escapes[escaped:].copy()


def decode(parts: Sequence[tuple[NDArray[np.int32], Level]], tables: Tables, of: Stream) -> None:
    """Bring indices int32 [r, tokens], as `level.before` left them, to `level.after` in place.

    Raises: StreamError where states, words or escapes end early or late.
    """
    states, words, escapes = of[0].astype(np.int64), of[1], of[2]
    # A component looks at most so many words beyond the end before that is noticed.
    room = max((coarse.shape[1] for coarse, _ in parts), default=0) + 1
    more = np.concatenate([words, np.zeros(room, np.uint16)])
    at = escaped = 0
    for coarse, level in parts:
        at, escaped = _pull(
            coarse, tuple(level), tuple(tables), states, more, words.size, at, escapes, escaped
        )
        if at > words.size:
            raise StreamError
    if at != words.size or escaped != escapes.size or (states != LOW).any():
        raise StreamError


def coarsened(indices: Indices, shifts: Shifts) -> NDArray[np.int32]:
    """Return int32 [r, tokens], what `decode` gives for these indices at shifts int8 [r]."""
    coded = shifts < NONE
    by = np.where(coded, shifts, 0)[:, None]
    magnitudes = (np.abs(indices.astype(np.int32)) + OFFSETS[by]) >> by
    coarse: NDArray[np.int32] = np.sign(indices) * magnitudes * coded[:, None]
    return coarse


def _passes(level: Level) -> int:
    """Return the symbols that a token has at most."""
    begin = np.where(level.before == NONE, level.start + 1, level.before)
    return int(np.where(level.after != level.before, begin - level.after, 0).sum())


# Kernels: one symbol costs about as much as one wrongly guessed branch, so what depends on a value
# is chosen without branches.


@inlined
def _put(x: Any, low: Any, size: Any, words: Words, at: Any) -> tuple[Any, Any]:  # noqa: ANN401 -- int64 inside a kernel
    """Push a symbol; returns the state and where the words begin."""
    words[at - 1] = np.uint16(x & 0xFFFF)
    over = np.int64(x >= size << 20)
    x >>= over << 4
    whole = np.int64(np.uint32(x) // np.uint32(size))
    return (whole << 12) + (x - whole * size) + low, at - over


@kernel
def _push(  # noqa: PLR0913, PLR0917
    q: Indices,
    level: Steps,
    tables: tuple[Words, ...],
    offsets: NDArray[np.int32],
    states: Longs,
    words: Words,
    at: int,
    escapes: Words,
    escaped: int,
) -> tuple[int, int]:
    """Encode a group's symbols from the last to the first; words and escapes grow downwards."""
    before, after, start = level
    first, refine = tables
    starts = np.zeros(FIRST_SYMBOLS + 1, np.int64)
    lows, sizes = np.zeros(KINDS, np.int64), np.zeros(KINDS, np.int64)
    for c in range(len(q) - 1, -1, -1):
        if after[c] == before[c]:
            continue
        begin = start[c] if before[c] == NONE else before[c]
        for shift in range(after[c] + 1, begin + 1):
            _kinds(refine[c, shift], lows, sizes)
            at = _push_refined(q[c], shift, offsets, lows, sizes, states, words, at)
        if before[c] == NONE:
            _starts(first[c], starts)
            at, escaped = _push_first(
                q[c], begin, offsets[begin], starts, states, words, at, escapes, escaped
            )
    return at, escaped


@kernel
def _starts(table: Words, starts: Longs) -> None:
    """Add up probabilities."""
    for i in range(FIRST_SYMBOLS):
        starts[i + 1] = starts[i] + np.int64(table[i])


@kernel
def _kinds(table: Words, lows: Longs, sizes: Longs) -> None:
    """Fill the ranges of refinements: from 0 to 0, -1, 1; from 1 to the halves; from beyond."""
    zero, negative = np.int64(table[0]), np.int64(table[1])
    lows[0], sizes[0] = 0, zero
    lows[1], sizes[1] = zero, negative
    lows[2], sizes[2] = zero + negative, TOTAL - zero - negative
    for kind in (0, 1):
        half = np.int64(table[2 + kind])
        lows[3 + 2 * kind], sizes[3 + 2 * kind] = 0, half
        lows[4 + 2 * kind], sizes[4 + 2 * kind] = half, TOTAL - half


@kernel
def _push_first(  # noqa: PLR0913, PLR0917
    row: Indices,
    shift: int,
    offset: int,
    starts: Longs,
    states: Longs,
    words: Words,
    at: int,
    escapes: Words,
    escaped: int,
) -> tuple[int, int]:
    for t in range(len(row) - 1, -1, -1):
        value = np.int64(row[t])
        b = (abs(value) + offset) >> shift
        if b >= ESCAPE:
            escaped -= 1
            escapes[escaped] = np.uint16(b - ESCAPE)
            b = np.int64(ESCAPE)
        symbol = ESCAPE + (b if value >= 0 else -b)
        low = starts[symbol]
        states[t & 3], at = _put(states[t & 3], low, starts[symbol + 1] - low, words, at)
    return at, escaped


@kernel
def _push_refined(
    row: Indices,
    shift: int,
    offsets: NDArray[np.int32],
    lows: Longs,
    sizes: Longs,
    states: Longs,
    words: Words,
    at: int,
) -> int:
    offset, finer, odd = np.int64(offsets[shift]), np.int64(offsets[shift - 1]), shift & 1
    for t in range(len(row) - 1, -1, -1):
        value = np.int64(row[t])
        a = (abs(value) + offset) >> shift
        b = (abs(value) + finer) >> (shift - 1)
        if a == 0 and odd == 0:
            continue
        of_zero = np.int64(b != 0) * (1 + np.int64(value > 0))
        of_more = 3 + 2 * np.int64(a > 1) + b - (2 * a - 1 + odd)
        kind = of_more if a > 0 else of_zero
        states[t & 3], at = _put(states[t & 3], lows[kind], sizes[kind], words, at)
    return at


@kernel
def _pull(  # noqa: PLR0913, PLR0917
    q: NDArray[np.int32],
    level: Steps,
    tables: tuple[Words, ...],
    states: Longs,
    more: Words,
    count: int,
    at: int,
    escapes: Words,
    escaped: int,
) -> tuple[int, int]:
    """Decode all components; return how many words and escapes are read: one too many is an error.

    `more` has room behind its `count` words for those that a component looks at beyond them.
    """
    before, after, start = level
    first, refine = tables
    starts = np.zeros(FIRST_SYMBOLS + 1, np.int64)
    guesses = np.zeros(GUESSES, np.int64)
    lows, sizes = np.zeros(KINDS, np.int64), np.zeros(KINDS, np.int64)
    for c in range(len(q)):
        if after[c] == before[c]:
            continue
        shift = int(before[c])
        if shift == NONE:
            shift = int(start[c])
            _starts(first[c], starts)
            if q.shape[1] >= MANY:
                _guess(starts, guesses)
            at, escaped = _pull_first(q[c], guesses, starts, states, more, at, escapes, escaped)
            if at > count or escaped > escapes.size:
                return count + 1, escaped
        while shift > after[c]:
            _kinds(refine[c, shift], lows, sizes)
            if shift & 1:
                at = _pull_odd(q[c], lows, sizes, states, more, at)
            else:
                at = _pull_even(q[c], lows, sizes, states, more, at)
            if at > count:
                return count + 1, escaped
            shift -= 1
    return at, escaped


@kernel
def _guess(starts: Longs, guesses: Longs) -> None:
    """Fill in the symbol with which each of equal parts of the range begins."""
    symbol = 0
    for part in range(GUESSES):
        while part * (TOTAL // GUESSES) >= starts[symbol + 1]:
            symbol += 1
        guesses[part] = symbol


@inlined
def _take(x: Any, low: Any, size: Any, words: Words, at: Any) -> tuple[Any, Any]:  # noqa: ANN401 -- int64 inside a kernel
    """Pop a symbol; returns the state and the next word's place."""
    x = size * (x >> 12) + (x & (TOTAL - 1)) - low
    under, word = x < LOW, np.int64(words[at])
    return (x << 16) | word if under else x, at + np.int64(under)


@kernel
def _pull_first(
    row: NDArray[np.int32],
    guesses: Longs,
    starts: Longs,
    states: Longs,
    words: Words,
    at: int,
    escapes: Words,
    escaped: int,
) -> tuple[int, int]:
    for t in range(len(row)):
        x = states[t & 3]
        slot = x & (TOTAL - 1)
        i = guesses[slot // (TOTAL // GUESSES)]
        while slot >= starts[i + 1]:
            i += 1
        low = starts[i]
        states[t & 3], at = _take(x, low, starts[i + 1] - low, words, at)
        b = i - ESCAPE
        if abs(b) == ESCAPE:
            if escaped >= escapes.size:
                return at, escapes.size + 1
            excess = np.int64(escapes[escaped])
            escaped += 1
            b = b + excess if b > 0 else b - excess
        row[t] = b
    return at, escaped


@kernel
def _pull_odd(
    row: NDArray[np.int32],
    lows: Longs,
    sizes: Longs,
    states: Longs,
    words: Words,
    at: int,
) -> int:
    """Refine a row from an odd shift, whose zero cells are cut in three."""
    for t in range(len(row)):
        value, x = np.int64(row[t]), states[t & 3]
        a, slot = abs(value), x & (TOTAL - 1)
        some, positive = np.int64(slot >= lows[1]), np.int64(slot >= lows[2])
        base = 3 + 2 * np.int64(a > 1)
        upper = np.int64(slot >= lows[base + 1])
        kind = base + upper if a > 0 else some + positive
        states[t & 3], at = _take(x, lows[kind], sizes[kind], words, at)
        b = 2 * a + upper
        b = b if value > 0 else -b
        row[t] = b if a > 0 else 2 * positive - some
    return at


@kernel
def _pull_even(
    row: NDArray[np.int32],
    lows: Longs,
    sizes: Longs,
    states: Longs,
    words: Words,
    at: int,
) -> int:
    """Refine a row from an even shift, whose zero cells stay whole: nothing is read for them."""
    for t in range(len(row)):
        value, x = np.int64(row[t]), states[t & 3]
        a, slot = abs(value), x & (TOTAL - 1)
        base = 3 + 2 * np.int64(a > 1)
        upper = np.int64(slot >= lows[base + 1])
        taken, to = _take(x, lows[base + upper], sizes[base + upper], words, at)
        states[t & 3] = taken if a > 0 else x
        at = to if a > 0 else at
        b = 2 * a - 1 + upper
        b = b if value > 0 else -b
        row[t] = b if a > 0 else 0
    return at
