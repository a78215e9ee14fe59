"""Kernels of the lossless layout `exponents`: 64 values at a time, as bits of words."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from tierkv_codecs.bits import Bytes, Halves, Integers, inlined, kernel, least, most
from tierkv_codecs.copies import LEAST_BYTES, LINE, fence, past_caches
from tierkv_codecs.lanes import (
    BYTE,
    HALF,
    LANES,
    NONE,
    ONE,
    deposit,
    every,
    extract,
    lowered,
    lowest,
    ones,
    put_word,
    read,
    vector,
    word_at,
    write,
)

SECOND = 3
"""Codes of the first level; the next one says that the second level goes on."""
CODES = 10
"""Codes of both levels; the next one says that the exponent itself follows."""
ABOVE = 2
"""Exponents above the base that have codes: the last two."""
SECOND_BITS = 3
WEIGHTS = (-1, -2, -4, ABOVE)
"""What each bit of a code adds to the base."""
FAR = 8
"""Exponents further from a column's mean than this count as this far."""
TILE = 32 * LANES
"""Values whose exponents are found before they are joined with the rest: they stay in L1."""
ALL = np.uint64(2**64 - 1)
HALF_WORD = 32
LOW = np.uint64(2**HALF_WORD - 1)
AT_ONCE = 56
"""Bits that can be appended at once to up to seven that wait."""
LINE_VALUES = LINE // 2


class Sections(NamedTuple):
    """Sections of a payload."""

    shifts: Bytes
    """Of each piece: a byte, and four bits for each column."""
    words: Bytes
    """Of each 64 values of a piece, two words of 8 bytes: the bits of their first level."""
    signs: Bytes
    """Of each value: sign and mantissa."""
    second: Bytes
    """Bits of the second level, and 8 bytes behind them."""
    escapes: Bytes
    """Exponents that have no code."""


class Scratch(NamedTuple):
    """Memory of a kernel's own."""

    bases: Bytes
    """Of the columns of a piece, one after the other, and again from the start for 64 more."""
    tile: Bytes
    """TILE bytes."""
    part: Halves
    """64 values."""
    mean: Integers
    """As many as columns."""
    total: Integers
    """As many."""


def _typed_spread(
    _context: Any,  # noqa: ANN401 -- numba's types
    one: Any,  # noqa: ANN401
    two: Any,  # noqa: ANN401
    four: Any,  # noqa: ANN401
    eight: Any,  # noqa: ANN401
    bases: Any,  # noqa: ANN401
    to: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    def make(builder: Any, arguments: Any) -> None:  # noqa: ANN401
        *words, bases, to = arguments
        total = read(builder, bases, vector(BYTE))
        for word, weight in zip(words, WEIGHTS, strict=True):
            lanes = builder.sext(builder.bitcast(word, vector(ir.IntType(1))), vector(BYTE))
            total = builder.add(total, builder.and_(lanes, every(weight % 256)))
        write(builder, total, to)

    return types.void(one, two, four, eight, bases, to), lowered(make)


def _typed_split(_context: Any, of: Any, bases: Any, signs: Any) -> Any:  # noqa: ANN401
    def make(builder: Any, arguments: Any) -> Any:  # noqa: ANN401
        of, bases, signs = arguments
        values = read(builder, of, vector(HALF))
        low = builder.trunc(values, vector(BYTE))
        high = builder.trunc(builder.lshr(values, every(8, kind=HALF)), vector(BYTE))
        rest = builder.or_(builder.and_(high, every(0x80)), builder.and_(low, every(0x7F)))
        write(builder, rest, signs)
        exponent = builder.or_(builder.shl(high, every(1)), builder.lshr(low, every(7)))
        code = builder.sub(read(builder, bases, vector(BYTE)), exponent)
        above = builder.icmp_unsigned(">=", code, every(256 - ABOVE))
        beside = builder.select(above, builder.add(code, every(CODES)), every(CODES))
        code = builder.select(builder.icmp_unsigned("<", code, every(CODES - ABOVE)), code, beside)
        is_first = builder.icmp_unsigned("<", code, every(SECOND))
        first = builder.select(is_first, code, every(SECOND))
        second = builder.sub(code, first)
        bits = [(first, 0), (first, 1), (second, 0), (second, 1), (second, 2)]
        words = []
        for part, bit in bits:
            moved = builder.lshr(part, every(bit)) if bit else part
            lanes = builder.trunc(moved, vector(ir.IntType(1)))
            words.append(builder.bitcast(lanes, ir.IntType(64)))
        pack: Any = cgutils.pack_array
        return pack(builder, words)

    words: Any = types.UniTuple
    return words(types.uint64, 5)(of, bases, signs), lowered(make)


def _join(builder: Any, exponents: Any, signs: Any) -> Any:  # noqa: ANN401
    """Return 32 values of two bytes, as bytes."""
    few = vector(BYTE, LINE_VALUES)
    exponents, signs = read(builder, exponents, few), read(builder, signs, few)
    count = LINE_VALUES
    low = builder.or_(
        builder.shl(exponents, every(7, count=count)),
        builder.and_(signs, every(0x7F, count=count)),
    )
    high = builder.or_(
        builder.lshr(exponents, every(1, count=count)),
        builder.and_(signs, every(0x80, count=count)),
    )
    order = [at // 2 + at % 2 * count for at in range(2 * count)]
    return builder.shuffle_vector(low, high, ir.Constant(vector(ir.IntType(32)), order))


def _typed_join(_context: Any, exponents: Any, signs: Any, to: Any) -> Any:  # noqa: ANN401
    def make(builder: Any, arguments: Any) -> None:  # noqa: ANN401
        write(builder, _join(builder, *arguments[:2]), arguments[2])

    return types.void(exponents, signs, to), lowered(make)


def _typed_join_past(_context: Any, exponents: Any, signs: Any, to: Any) -> Any:  # noqa: ANN401
    def make(builder: Any, arguments: Any) -> None:  # noqa: ANN401
        line = _join(builder, *arguments[:2])
        past_caches(builder, line, builder.inttoptr(arguments[2], line.type.as_pointer()))

    return types.void(exponents, signs, to), lowered(make)


_spread: Callable[..., Any] = intrinsic(_typed_spread)
"""Write the exponents of 64 values, from the four bits of their codes and their bases."""
_split: Callable[..., Any] = intrinsic(_typed_split)
"""Write signs and mantissas of 64 values; return the words of both levels."""
_line: Callable[..., Any] = intrinsic(_typed_join)
"""Write 32 values, from their exponents and the rest of them."""
_line_past: Callable[..., Any] = intrinsic(_typed_join_past)
"""The same past the caches, to a place that is a multiple of a line; `fence` must follow."""


@inlined
def _taken(address: Any, bit: Any, count: Any) -> Any:  # noqa: ANN401 -- integers inside a kernel
    """Return a word whose lowest `count` bits, at most 64, are those from a bit on."""
    at, by = address + (bit >> 3), bit & 7
    word = word_at(at) >> np.uint64(by)
    if by + count > LANES:
        word |= word_at(at + 8) << np.uint64(LANES - by)
    return word


@inlined
def _wide(shifts: Bytes, columns: Any, bases: Bytes) -> None:  # noqa: ANN401
    """Read the bases of a piece."""
    greatest = shifts[0]
    for column in range(columns):
        below = shifts[1 + (column >> 1)] >> (4 * (column & 1))
        bases[column] = greatest - (below & 15)
    for column in range(columns, columns + LANES):
        bases[column] = bases[column - columns]


@kernel
def restore(
    target: Halves, piece: int, columns: int, seconds: int, of: Sections, scratch: Scratch
) -> bool:
    """Fill the values; returns whether the payload has just what they need."""
    to, words, signs, second, bases, tile = (
        target.ctypes.data, of.words.ctypes.data, of.signs.ctypes.data, of.second.ctypes.data,
        scratch.bases.ctypes.data, scratch.tile.ctypes.data,
    )  # fmt: skip
    each, step = 1 + (columns + 1) // 2, LANES % columns
    seen, escaped, past = 0, 0, target.nbytes >= LEAST_BYTES
    for start in range(0, len(target), piece):
        stop, offset = min(start + piece, len(target)), 0
        _wide(of.shifts[start // piece * each :], columns, scratch.bases)
        for first in range(start, stop, TILE):
            last = min(first + TILE, stop)
            for group in range(0, last - first, LANES):
                one, two = word_at(words), word_at(words + 8)
                words += 16
                more = one & two
                count, bit = ones(more), SECOND_BITS * seen
                seen += count
                if seen > seconds:
                    return False
                a = deposit(_taken(second, bit, count), more)
                b = deposit(_taken(second, bit + count, count), more)
                c = deposit(_taken(second, bit + 2 * count, count), more)
                carry = one & a
                over = (two & b) | (carry & (two ^ b))
                _spread(one ^ a, two ^ b ^ carry, c ^ over, c & over, bases + offset, tile + group)
                deep = a & b & c
                while deep != NONE:
                    if escaped == len(of.escapes):
                        return False
                    scratch.tile[group + lowest(deep)] = of.escapes[escaped]
                    escaped += 1
                    deep &= deep - ONE
                offset += step
                if offset >= columns:
                    offset -= columns
            _join_tile(past, to + 2 * first, signs + first, tile, last - first)
            for at in range((last - first) // LINE_VALUES * LINE_VALUES, last - first):
                exponent, rest = np.uint16(scratch.tile[at]), np.uint16(of.signs[first + at])
                sign, mantissa = rest >> 7 << 15, rest & 0x7F
                target[first + at] = np.uint16(sign | exponent << 7 | mantissa)
    fence()
    return seen == seconds and escaped == len(of.escapes)


@inlined
def _join_tile(past: Any, to: Any, signs: Any, tile: Any, count: Any) -> None:  # noqa: ANN401
    """Write the whole lines of a tile."""
    if past and to % LINE == 0:
        for at in range(0, count // LINE_VALUES * LINE_VALUES, LINE_VALUES):
            _line_past(tile + at, signs + at, to + 2 * at)
    else:
        for at in range(0, count // LINE_VALUES * LINE_VALUES, LINE_VALUES):
            _line(tile + at, signs + at, to + 2 * at)


@inlined
def _exponent(value: Any) -> Any:  # noqa: ANN401 -- a value's bits inside a kernel
    return (np.int32(value) >> 7) & 0xFF


@inlined
def _near(value: Any, mean: Any) -> Any:  # noqa: ANN401 -- integers inside a kernel
    """Return a value's exponent, or the nearest that counts."""
    return least(most(_exponent(value), mean - FAR), mean + FAR)


@inlined
def _sums(part: Halves, columns: Any, mean: Integers, total: Integers) -> None:  # noqa: ANN401
    """Sum the exponents of each column, and then again what counts of them."""
    for column in range(columns):
        mean[column] = total[column] = 0
    for row in range(0, len(part), columns):
        values = part[row : row + columns]
        for column in range(len(values)):
            mean[column] += _exponent(values[column])
    for column in range(columns):
        mean[column] //= len(part) // columns
    for row in range(0, len(part), columns):
        values = part[row : row + columns]
        for column in range(len(values)):
            total[column] += _near(values[column], mean[column])


@inlined
def _sum(part: Halves, total: Integers) -> None:
    """Do so for one column."""
    all_of_them, near = np.int32(0), np.int32(0)
    for at in range(len(part)):
        all_of_them += _exponent(part[at])
    mean = np.int32(all_of_them // len(part))
    for at in range(len(part)):
        near += _near(part[at], mean)
    total[0] = near


@kernel
def _choose(part: Halves, columns: int, scratch: Scratch, shifts: Bytes) -> None:
    """Choose the bases of a piece, 11/8 above the mean exponent, rounded, and write them."""
    total = scratch.total
    if columns == 1:
        _sum(part, total)
    else:
        _sums(part, columns, scratch.mean, total)
    rows, high = len(part) // columns, np.int32(0)
    for column in range(columns):
        total[column] = least(np.int32((8 * total[column] + 15 * rows) // (8 * rows)), 255)
        high = most(high, total[column])
    shifts[0] = high
    for at in range(1, len(shifts)):
        shifts[at] = 0
    for column in range(columns):
        below = least(high - total[column], np.int32(15))
        shifts[1 + (column >> 1)] |= below << (4 * (column & 1))


@inlined
def _appended(to: Any, held: Any, fill: Any, bits: Any, count: Any) -> Any:  # noqa: ANN401
    """Write at most 56 bits behind up to seven that are held; return where that ends."""
    held |= bits << np.uint64(fill)
    put_word(held, to)
    fill += count
    return to + (fill >> 3), held >> np.uint64(fill & ~7), fill & 7


@inlined
def _append(to: Any, held: Any, fill: Any, bits: Any, count: Any) -> Any:  # noqa: ANN401
    """Write up to 64 bits so."""
    if count > AT_ONCE:
        to, held, fill = _appended(to, held, fill, bits & LOW, HALF_WORD)
        bits >>= np.uint64(HALF_WORD)
        count -= HALF_WORD
    return _appended(to, held, fill, bits, count)


@inlined
def _split_part(source: Halves, signs: Bytes, scratch: Scratch, bases: Any) -> Any:  # noqa: ANN401
    """Split the last values of a piece, fewer than 64."""
    part, tile = scratch.part, scratch.tile
    for at in range(len(source)):
        part[at] = source[at]
    one, two, a, b, c = _split(part.ctypes.data, bases, tile.ctypes.data)
    for at in range(len(source)):
        signs[at] = tile[at]
    mask = ALL >> np.uint64(LANES - len(source))
    return one & mask, two & mask, a & mask, b & mask, c & mask


@kernel
def code(
    source: Halves, piece: int, columns: int, to: Sections, scratch: Scratch
) -> tuple[int, int]:
    """Write the sections; returns how many values have a second level, and how many escapes.

    Escapes are not written where their section has no room.
    """
    of, words, signs, second, bases = (
        source.ctypes.data, to.words.ctypes.data, to.signs.ctypes.data, to.second.ctypes.data,
        scratch.bases.ctypes.data,
    )  # fmt: skip
    each, step = 1 + (columns + 1) // 2, LANES % columns
    held, fill, seconds, escaped = NONE, 0, 0, 0
    for start in range(0, len(source), piece):
        stop, offset = min(start + piece, len(source)), 0
        shifts = to.shifts[start // piece * each :][:each]
        _choose(source[start:stop], columns, scratch, shifts)
        _wide(shifts, columns, scratch.bases)
        for first in range(start, stop, LANES):
            if stop - first >= LANES:
                one, two, a, b, c = _split(of + 2 * first, bases + offset, signs + first)
            else:
                one, two, a, b, c = _split_part(
                    source[first:stop], to.signs[first:stop], scratch, bases + offset
                )
            more = one & two
            put_word(one, words)
            put_word(two, words + 8)
            words += 16
            count = ones(more)
            seconds += count
            second, held, fill = _append(second, held, fill, extract(a, more), count)
            second, held, fill = _append(second, held, fill, extract(b, more), count)
            second, held, fill = _append(second, held, fill, extract(c, more), count)
            deep = a & b & c
            while deep != NONE:
                if escaped < len(to.escapes):
                    to.escapes[escaped] = _exponent(source[first + lowest(deep)])
                escaped += 1
                deep &= deep - ONE
            offset += step
            if offset >= columns:
                offset -= columns
    put_word(held, second)
    return seconds, escaped
