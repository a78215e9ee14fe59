"""Codec `lossless` (id 2): exponents as short codes, or byte planes that zstd Huffman-codes.

The exponents of KV take few values and its mantissas are noise, so exponents shrink to about 3 bits
and the rest does not shrink at all. Coding only what shrinks is what makes this fast. bfloat16 is
coded by `exponents`, and any other dtype, or what that does not suit, in planes. There zstd is set
to do nothing but its literal coding: the smallest hash table and the longest match it knows leave
its search almost nothing to find or to spend time on.

Payload, all integers little-endian:

    u8   layout        0: the block's bytes as they are follow; 1: planes; 2: see `exponents`
    u8   itemsize      1, 2 or 4
    u16  zero
    u32  piece         values in each piece but the last; 0 in layout 0, in layout 1 at least 4096
                       unless the block has fewer
    layout 1, for each piece, for each plane from the least significant byte up:
      u32  length      of the plane in bytes: as many as the piece has values means stored,
                       fewer means one zstd frame
    layout 1, in the same order: the planes

A piece of planes is one (layer, K or V) where that has a fitting size, because each piece has its
own Huffman table and keys and values are distributed differently. Its size is the encoder's choice.
A block that would not shrink takes layout 0, so the payload is never more than 8 bytes above the
raw size.
"""

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from tierkv_codecs import exponents
from tierkv_codecs.bits import kernel
from tierkv_codecs.codec import NO_ARTIFACT, CodecError, Place
from tierkv_codecs.tensors import (
    bits_of,
    bytes_of,
    check_out,
    check_payload,
    is_plain,
    raw_bytes_of,
)

HEADER = struct.Struct("<BBHI")
STORED, PLANES, EXPONENTS = 0, 1, 2
PIECE_MAX = 128 * 1024
"""Values in a piece at most: one zstd block, and its planes stay in the second-level cache."""
PIECE_GOOD = 64 * 1024
"""Small slices are joined up to this many values, so that calls do not outweigh the coding."""
PIECE_MIN = 32 * 1024
PIECE_FLOOR = 4096
"""No payload has smaller pieces: a table is never long compared with the planes it describes."""
PAIR = 2
"""Planes of a two-byte value."""
SAMPLE_RUNS, SAMPLE_RUN = 8, 512
WORTH_CODING = 0.95
"""A lower plane is coded when a sample of it shrinks below this."""

Bytes = NDArray[np.uint8]
Values = NDArray[np.unsignedinteger]


class _Contexts(threading.local):
    """A thread's own zstd contexts: one must not be used by two threads at a time."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST,
                window_log=17,
                hash_log=6,
                chain_log=6,
                search_log=1,
                min_match=7,
                target_length=0,
                write_content_size=True,
            )
        )
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


@dataclass(frozen=True)
class Lossless:
    """Exact, and 1.48 times smaller; `python -m bench.codecs` measures it beside others."""

    id: int = 2
    name: str = "lossless"
    lossy: bool = False
    artifact: bytes = NO_ARTIFACT

    def bound(self, raw_bytes: int) -> int:
        return HEADER.size + raw_bytes

    def encode(
        self,
        block: torch.Tensor,
        out: torch.Tensor,
        place: Place,  # noqa: ARG002 -- exact wherever it stands
    ) -> tuple[int, ...]:
        size = raw_bytes_of(block)
        check_out(out, self.bound(size))
        plain = block if is_plain(block) else bits_of(block).cpu().contiguous()
        source = bytes_of(plain)
        target = out[: self.bound(size)].numpy()
        length = _encode(_values(source, block.itemsize), block, target)
        if length is None:
            target[: HEADER.size] = _header(STORED, block.itemsize, 0)
            out[HEADER.size : HEADER.size + size].copy_(source)
            length = HEADER.size + size
        return (length,)

    def decode(
        self,
        payload: torch.Tensor,
        segments: tuple[int, ...],
        out: torch.Tensor,
        place: Place,  # noqa: ARG002 -- exact wherever it stands
    ) -> None:
        check_payload(payload, segments)
        size = raw_bytes_of(out)
        plain = out if is_plain(out) else torch.empty(out.shape, dtype=out.dtype)
        target = bytes_of(plain)
        if payload.numel() > self.bound(size):
            raise CodecError(f"a payload of {payload.numel()} bytes is too long for {size}")
        layout, piece = _read_header(payload.numpy(), out.itemsize)
        if layout == EXPONENTS:
            _restore_exponents(payload.numpy(), piece, _values(target, out.itemsize))
        elif layout == STORED:
            if payload.numel() != HEADER.size + size:
                raise CodecError(f"a stored payload of {payload.numel()} bytes cannot fill {size}")
            target.copy_(payload[HEADER.size :])
        else:
            _decode_planes(payload.numpy(), piece, _values(target, out.itemsize))
        if plain is not out:
            bits_of(out).copy_(bits_of(plain))


def _encode(values: Values, block: torch.Tensor, target: Bytes) -> int | None:
    """Write layout 2 or 1 into `target`; return its length, or None when neither fits there."""
    if block.dtype == torch.bfloat16 and not _shrinks(values, 0):
        rest = target[HEADER.size :]
        length = exponents.coded(values, block.shape, rest)
        if length is not None:
            piece, _ = exponents.shape_of(block.shape)
            target[: HEADER.size] = _header(EXPONENTS, block.itemsize, piece)
            return HEADER.size + length
    return _encode_planes(values, _piece_of(block.shape), target)


def _values(flat: torch.Tensor, itemsize: int) -> Values:
    values: Values = flat.numpy().view(np.dtype(f"<u{itemsize}"))
    return values


def _piece_of(shape: torch.Size) -> int:
    """Return how many values a piece gets: a slice [token, head, dim], cut or joined to fit."""
    total = prod(shape)
    one = prod(shape[-3:])
    if one > PIECE_MAX:
        cuts = -(-one // PIECE_MAX)
        return -(-one // cuts)
    if one < PIECE_MIN:
        return min(total, max(one, 1) * (PIECE_GOOD // max(one, 1)))
    return one


def _header(layout: int, itemsize: int, piece: int) -> Bytes:
    return np.frombuffer(HEADER.pack(layout, itemsize, 0, piece), np.uint8)


def _encode_planes(values: Values, piece: int, target: Bytes) -> int | None:
    """Write layout 1 into `target`; return its length, or None when it does not fit there."""
    itemsize = values.itemsize
    if values.size == 0:
        return None
    lengths: list[int] = []
    end = HEADER.size + 4 * itemsize * -(-values.size // piece)
    coded = [_shrinks(values, plane) for plane in range(itemsize - 1)] + [True]
    scratch = np.empty(min(piece, values.size), np.uint8)
    for start in range(0, values.size, piece):
        part = values[start : start + piece]
        for plane in range(itemsize):
            code = _code(part, plane, scratch) if coded[plane] else None
            length = part.size if code is None else code.size
            if end + length > target.size:
                return None
            where = target[end : end + length]
            if code is None:
                _cut(part, plane, where)
            else:
                where[:] = code
            lengths.append(length)
            end += length
    target[: HEADER.size] = _header(PLANES, itemsize, piece)
    table = np.array(lengths, "<u4").view(np.uint8)
    target[HEADER.size : HEADER.size + table.size] = table
    return end


def _code(part: Values, plane: int, scratch: Bytes) -> Bytes | None:
    """Return the plane of `part` as a zstd frame, or None when that is no shorter."""
    raw = scratch[: part.size]
    _cut(part, plane, raw)
    frame = _contexts.compressor.compress(raw.data)
    return np.frombuffer(frame, np.uint8) if len(frame) < part.size else None


def _cut(values: Values, plane: int, into: Bytes) -> None:
    """Write one plane of values."""
    if values.itemsize != PAIR:
        np.right_shift(values, 8 * plane, out=into, casting="unsafe")
    elif plane:
        _cut_high(values, into)
    else:
        _cut_low(values, into)


@kernel
def _cut_low(values: Values, into: Bytes) -> None:
    for at in range(len(into)):
        into[at] = np.uint8(values[at])


@kernel
def _cut_high(values: Values, into: Bytes) -> None:
    for at in range(len(into)):
        into[at] = np.uint8(values[at] >> 8)


def _shrinks(values: Values, plane: int) -> bool:
    """Guess from a few runs spread over the block whether a lower plane is more than noise."""
    step = (values.size - SAMPLE_RUN) // (SAMPLE_RUNS - 1)
    if step >= SAMPLE_RUN:
        sample = np.concatenate([values[run * step :][:SAMPLE_RUN] for run in range(SAMPLE_RUNS)])
    else:
        sample = values  # runs that overlap are the same twice, which shrinks
    code = _code(sample, plane, np.empty(sample.size, np.uint8))
    return code is not None and code.size < WORTH_CODING * sample.size


def _read_header(payload: Bytes, itemsize: int) -> tuple[int, int]:
    """Return layout and piece size. Raises: CodecError for anything that `encode` cannot write."""
    if payload.size < HEADER.size:
        raise CodecError(f"a lossless payload has at least {HEADER.size} bytes, not {payload.size}")
    layout, written, zero, piece = HEADER.unpack(payload[: HEADER.size].tobytes())
    if layout not in {STORED, PLANES, EXPONENTS} or zero != 0 or (piece == 0) != (layout == STORED):
        raise CodecError("the header is not one of a lossless payload")
    if written != itemsize:
        raise CodecError(f"the payload has values of {written} bytes; the block's have {itemsize}")
    return int(layout), int(piece)


class _Piece(NamedTuple):
    """Where one piece lies: its values in the block, its planes (lowest first) in the payload."""

    start: int
    stop: int
    planes: list[slice]


def _pieces(payload: Bytes, piece: int, size: int, itemsize: int) -> Iterator[_Piece]:
    """Yield the pieces. Raises: CodecError where the table does not describe this payload."""
    if size == 0 or piece < min(size, PIECE_FLOOR):
        raise CodecError(f"pieces of {piece} values are too small for a block of {size}")
    count = -(-size // piece)
    end = HEADER.size + 4 * itemsize * count
    if payload.size < end:
        raise CodecError("the payload is too short for its table")
    lengths = payload[HEADER.size : end].view("<u4").tolist()
    if end + sum(lengths) != payload.size:
        raise CodecError(f"planes of {sum(lengths)} bytes cannot end the payload at {payload.size}")
    for number in range(count):
        start = number * piece
        stop = min(start + piece, size)
        planes = []
        for length in lengths[number * itemsize : (number + 1) * itemsize]:
            if not 0 < length <= stop - start:
                raise CodecError(f"a plane of {length} bytes is not one of {stop - start} values")
            planes.append(slice(end, end + length))
            end += length
        yield _Piece(start, stop, planes)


def _restore_exponents(payload: Bytes, piece: int, target: Values) -> None:
    if target.itemsize != PAIR:
        raise CodecError("only values of two bytes are coded by exponents")
    exponents.restored(payload[HEADER.size :], piece, target)


def _decode_planes(payload: Bytes, piece: int, target: Values) -> None:
    for start, stop, planes in _pieces(payload, piece, target.size, target.itemsize):
        into = target[start:stop]
        if len(planes) == PAIR:
            _join(
                _plane(payload[planes[0]], into.size), _plane(payload[planes[1]], into.size), into
            )
            continue
        *lower, top = planes
        into[:] = _plane(payload[top], into.size)
        for plane in reversed(lower):
            np.left_shift(into, 8, out=into)
            np.bitwise_or(into, _plane(payload[plane], into.size), out=into)


@kernel
def _join(low: Bytes, high: Bytes, into: Values) -> None:
    """Fill two-byte values from their planes, in one pass where numpy takes three."""
    for at in range(len(into)):
        into[at] = np.uint16(low[at]) | (np.uint16(high[at]) << 8)


def _plane(code: Bytes, size: int) -> Bytes:
    """Return the `size` bytes of a plane: the stored ones, or those in a zstd frame."""
    if code.size == size:
        return code
    try:
        # The frame's own claim decides what zstd allocates, so it is checked first.
        if zstandard.frame_content_size(code.data) != size:
            raise CodecError(f"a plane's frame does not hold the {size} bytes of its piece")
        plane = _contexts.decompressor.decompress(code.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"a plane's frame is damaged: {error}") from error
    if len(plane) != size:
        raise CodecError(f"a plane has {len(plane)} bytes; its piece has {size} values")
    return np.frombuffer(plane, np.uint8)
