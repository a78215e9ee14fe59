"""Layout 2 of `lossless`: bfloat16 exponents as codes of two levels, everything else as it is.

A channel of KV is nearly normal: half of its exponents are two neighbours, and nine of ten are
five. So a value gets two bits, which say how far its exponent is below its column's *base* (0 to 2)
or that three more bits follow, which do the same for seven more exponents or say that the exponent
itself follows. That is within a tenth of a bit of what entropy coding takes, and codes of 64 values
at a time are bits of words, which a few instructions gather and spread: no table, no branch.

Behind the header of `lossless`, whose piece is a whole number of rows, in little-endian:

    u32  columns       values in a row
    u32  seconds       values with a second level
    for each piece:
      u8   greatest    base; then for each column, in four bits, how far its own is below it
    for each piece, for each 64 values of it (its last may have fewer; their other bits are zero):
      u64  one, u64 two      bit i is that of value i in its first level
    u8   of each value: sign, seven bits of mantissa
    for each piece, for each 64 values: of the n values in which one and two are both set
      n bits, n bits, n bits   their second level, lowest bit first, each n in order of values
    zero bits up to a whole byte
    u8   exponent      of values whose three bits of the second level are all set
    8    zero bytes

A code is the sum of both levels, 0 to 9 or 10 for an escape. It stands for the exponent base - code
for 0 to 7, base + 2 for 8 and base + 1 for 9, modulo 256.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from tierkv_codecs.bits import Bytes, Halves
from tierkv_codecs.codec import CodecError
from tierkv_codecs.exponent_kernels import SECOND_BITS, TILE, Scratch, Sections, code, restore
from tierkv_codecs.lanes import LANES

TABLE = struct.Struct("<II")
PAD = 8
"""Bytes that are read or written at once behind the last bits."""
LEAST = 128
"""Values in a piece at least, where a block has so many."""
MOST = 128 * 1024
"""Values in a piece at most, of several tokens: its exponents are looked at twice, in cache."""
SLICE = 3
"""Axes of the keys or values of one layer: token, head, dim."""
ROWS = 32
"""With fewer tokens a base for each channel costs more than it saves."""
ESCAPES = 8
"""One value of so many may be an escape; where more are, exponents are not what this is for."""


def shape_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return piece and columns: slices [token, head, dim], cut or joined; total not 0."""
    total, one = prod(shape), prod(shape[-SLICE:])
    rows = shape[-SLICE] if len(shape) >= SLICE else 1
    cuts = -(-one // MOST)
    if rows < ROWS:
        return min(total, -(-one // cuts) * -(-LEAST // one)), 1
    columns = one // rows
    return -(-rows // min(cuts, rows // ROWS)) * columns, columns


def coded(values: Halves, shape: Sequence[int], target: Bytes) -> int | None:
    """Write columns and all that follows; return its length, or None where it does not suit.

    `values` are those of a block of that shape, in order; `target` has as many bytes as they.
    """
    if not LEAST <= values.size < 2**32:
        return None
    piece, columns = shape_of(shape)
    sizes = _sizes(values.size, piece, columns)
    room = values.size // ESCAPES
    if TABLE.size + sum(sizes) + SECOND_BITS * values.size // 8 + room + 2 * PAD > target.size:
        return None
    at = list(accumulate(sizes, initial=TABLE.size))
    shifts, words, signs = (target[one:other] for one, other in pairwise(at))
    to = Sections(shifts, words, signs, target[at[-1] :], np.empty(room, np.uint8))
    seconds, escapes = code(values, piece, columns, to, _scratch(columns))
    if escapes > room:
        return None
    end: int = at[-1] + -(-SECOND_BITS * seconds // 8)
    target[end : end + escapes] = to.escapes[:escapes]
    target[end + escapes : end + escapes + PAD] = 0
    target[: TABLE.size] = np.frombuffer(TABLE.pack(columns, seconds), np.uint8)
    return end + escapes + PAD


def restored(payload: Bytes, piece: int, values: Halves) -> None:
    """Fill the values of a block from what `coded` wrote.

    Raises: CodecError: the payload is not one of a block of so many values.
    """
    if payload.size < TABLE.size:
        raise CodecError("the payload is too short for its table")
    columns, seconds = TABLE.unpack(payload[: TABLE.size].tobytes())
    if not 1 <= columns <= piece <= values.size or piece % columns:
        raise CodecError(f"no block of {values.size} values has pieces of {piece} by {columns}")
    sizes = _sizes(values.size, piece, columns)
    at = list(accumulate(sizes, initial=TABLE.size))
    escapes, end = at[-1] + -(-SECOND_BITS * seconds // 8), payload.size - PAD
    if end < escapes:
        raise CodecError("the payload is too short for its sections")
    shifts, words, signs = (payload[one:other] for one, other in pairwise(at))
    of = Sections(shifts, words, signs, payload[at[-1] :], payload[escapes:end])
    if not restore(values, piece, columns, seconds, of, _scratch(columns)):
        raise CodecError("the payload's sections are not of one block")


def _sizes(count: int, piece: int, columns: int) -> tuple[int, int, int]:
    """Return the bytes of bases, of words and of signs and mantissas."""
    whole, rest = divmod(count, piece)
    pieces = whole + (rest > 0)
    groups = whole * -(-piece // LANES) + -(-rest // LANES)
    return pieces * (1 + (columns + 1) // 2), groups * 2 * LANES // 8, count


def _scratch(columns: int) -> Scratch:
    return Scratch(
        np.empty(columns + LANES, np.uint8),
        np.empty(TILE, np.uint8),
        np.empty(LANES, np.uint16),
        np.empty(columns, np.int32),
        np.empty(columns, np.int32),
    )
