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
from numba import njit
from numpy.typing import NDArray

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

Indices = NDArray[np.int16]
Words = NDArray[np.uint16]


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
    found = [(np.empty((0, 2), np.uint32), np.empty(0, np.uint16))]
    for indices, level in parts:
        cut = (of[: len(indices)] for of in level)
        found.append(_symbols(indices, *cut, *tables, OFFSETS))
    states, words = _push(np.concatenate([symbols for symbols, _ in found]))
    return states, words, np.concatenate([escapes for _, escapes in found])


def decode(parts: Sequence[tuple[NDArray[np.int32], Level]], tables: Tables, of: Stream) -> None:
    """Bring indices int32 [r, tokens], as `level.before` left them, to `level.after` in place.

    Raises: StreamError where states, words or escapes end early or late.
    """
    states, words, escapes = of[0].copy(), of[1], of[2]
    # A component reads at most a word a token beyond the end before that is noticed.
    room = max((coarse.shape[1] for coarse, _ in parts), default=0)
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


def coarsened(indices: Indices, shifts: NDArray[np.int8]) -> NDArray[np.int32]:
    """Return int32 [r, tokens], what `decode` gives for these indices at shifts int8 [r]."""
    coded = shifts < NONE
    by = np.where(coded, shifts, 0)[:, None]
    magnitudes = (np.abs(indices.astype(np.int32)) + OFFSETS[by]) >> by
    coarse: NDArray[np.int32] = np.sign(indices) * magnitudes * coded[:, None]
    return coarse


def _jit(function: Any) -> Any:  # noqa: ANN401 - numba has no types
    return njit(nogil=True, cache=True)(function)


@_jit
def _symbols(q, before, after, start, first, refine, offsets):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return uint32 [n, 2] (start of the range; its size and lane) in decoding order; escapes."""
    components, tokens = q.shape
    count = 0
    for c in range(components):
        if after[c] != before[c]:
            passes = (start[c] + 1 if before[c] == NONE else before[c]) - after[c]
            count += passes * tokens
    out = np.empty((count, 2), np.uint32)
    escapes = np.empty(tokens * components, np.uint16)
    n, escaped = 0, 0
    for c in range(components):
        if after[c] == before[c]:
            continue
        shift = before[c]
        if shift == NONE:
            shift = start[c]
            escaped = _first_symbols(
                q[c], shift, offsets[shift], first[c], out[n:], escapes, escaped
            )
            n += tokens
        while shift > after[c]:
            n += _refine_symbols(q[c], shift, offsets, refine[c, shift], out[n:])
            shift -= 1
    return out[:n], escapes[:escaped].copy()


@_jit
def _ranges(table):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    ranges = np.zeros(FIRST_SYMBOLS + 1, np.uint32)
    for i in range(FIRST_SYMBOLS):
        ranges[i + 1] = ranges[i] + table[i]
    return ranges


@_jit
def _first_symbols(row, shift, offset, table, out, escapes, escaped):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    ranges = _ranges(table)
    for t in range(row.size):
        value = np.int32(row[t])
        b = (abs(value) + offset) >> shift
        if b >= ESCAPE:
            escapes[escaped] = b - ESCAPE
            escaped += 1
            b = ESCAPE
        symbol = ESCAPE + (b if value >= 0 else -b)
        out[t, 0] = ranges[symbol]
        out[t, 1] = ((ranges[symbol + 1] - ranges[symbol]) << 2) | (t & 3)
    return escaped


@_jit
def _refine_symbols(row, shift, offsets, table, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    zero, negative = np.uint32(table[0]), np.uint32(table[1])
    one, more = np.uint32(table[2]), np.uint32(table[3])
    offset, finer, odd = offsets[shift], offsets[shift - 1], shift & 1
    n = 0
    for t in range(row.size):
        value = np.int32(row[t])
        a = (abs(value) + offset) >> shift
        b = (abs(value) + finer) >> (shift - 1)
        if a == 0:
            if odd == 0:
                continue
            low, size = np.uint32(0), zero
            if b != 0:
                low = zero if value < 0 else zero + negative
                size = negative if value < 0 else np.uint32(TOTAL) - zero - negative
        else:
            half = one if a == 1 else more
            upper = b != 2 * a - 1 + odd
            low = half if upper else np.uint32(0)
            size = np.uint32(TOTAL) - half if upper else half
        out[n, 0] = low
        out[n, 1] = (size << 2) | (t & 3)
        n += 1
    return n


@_jit
def _push(symbols):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    count = symbols.shape[0]
    words = np.empty(count, np.uint16)
    at = count
    states = np.full(LANES, LOW, np.uint32)
    for i in range(count - 1, -1, -1):
        low = symbols[i, 0]
        size = symbols[i, 1] >> 2
        lane = symbols[i, 1] & 3
        x = states[lane]
        if np.uint64(x) >= np.uint64(size) << np.uint64(20):
            at -= 1
            words[at] = x & np.uint32(0xFFFF)
            x >>= np.uint32(16)
        whole = x // size
        states[lane] = (whole << np.uint32(12)) + (x - whole * size) + low
    return states, words[at:].copy()


@_jit
def _pull(q, level, tables, states, more, count, at, escapes, escaped):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0913, PLR0917
    """Decode all components; return how many words and escapes are read: one too many is an error.

    `more` has room behind its `count` words for those that a component reads at most.
    """
    before, after, start = level
    first, refine = tables
    for c in range(q.shape[0]):
        if after[c] == before[c]:
            continue
        shift = before[c]
        if shift == NONE:
            shift = start[c]
            at, escaped = _pull_first(q[c], first[c], states, more, at, escapes, escaped)
            if at > count or escaped > escapes.size:
                return count + 1, escaped
        while shift > after[c]:
            at = _pull_refine(q[c], shift & 1, refine[c, shift], states, more, at)
            if at > count:
                return count + 1, escaped
            shift -= 1
    return at, escaped


@_jit
def _pull_first(row, table, states, words, at, escapes, escaped):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    ranges = _ranges(table)
    for t in range(row.size):
        x = states[t & 3]
        slot = x & np.uint32(TOTAL - 1)
        i = ESCAPE
        while slot < ranges[i]:
            i -= 1
        while slot >= ranges[i + 1]:
            i += 1
        x = (ranges[i + 1] - ranges[i]) * (x >> np.uint32(12)) + slot - ranges[i]
        if x < LOW:
            x = (x << np.uint32(16)) | np.uint32(words[at])
            at += 1
        states[t & 3] = x
        b = np.int64(i - ESCAPE)
        if abs(b) == ESCAPE:
            if escaped >= escapes.size:
                return at, escapes.size + 1
            excess = np.int64(escapes[escaped])
            escaped += 1
            b = b + excess if b > 0 else b - excess
        row[t] = b
    return at, escaped


@_jit
def _pull_refine(row, odd, table, states, words, at):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    zero, negative = np.uint32(table[0]), np.uint32(table[1])
    one, more = np.uint32(table[2]), np.uint32(table[3])
    for t in range(row.size):
        a = row[t]
        if a == 0 and odd == 0:
            continue
        x = states[t & 3]
        slot = x & np.uint32(TOTAL - 1)
        if a == 0:
            low, size, b = np.uint32(0), zero, np.int32(0)
            if slot >= zero:
                below = slot < zero + negative
                low = zero if below else zero + negative
                size = negative if below else np.uint32(TOTAL) - zero - negative
                b = np.int32(-1) if below else np.int32(1)
        else:
            half = one if abs(a) == 1 else more
            upper = slot >= half
            low = half if upper else np.uint32(0)
            size = np.uint32(TOTAL) - half if upper else half
            b = 2 * abs(a) - 1 + odd + (1 if upper else 0)
            b = b if a > 0 else -b
        x = size * (x >> np.uint32(12)) + slot - low
        if x < LOW:
            x = (x << np.uint32(16)) | np.uint32(words[at])
            at += 1
        states[t & 3] = x
        row[t] = b
    return at
