"""Frame: the only thing a tier stores (docs/FORMAT.md section 3).

A header, then the payload in 1..n segments. The header alone is enough to refuse a frame. Any
prefix of the segments is a valid frame. A frame in RAM is unsealed: its segment checksums are zero.
`seal` fills them when bytes leave RAM and `verify` checks them when they come back. Every length is
bounded before anything is allocated from it.
"""

import enum
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import xxhash

from tierkv.errors import invalid
from tierkv.fidelity import FIDELITIES, Fidelity
from tierkv.part import Part

Buffer: TypeAlias = memoryview | bytearray

MAGIC = b"TKVF"
VERSION = 1
MAX_HEADER_BYTES = 4096
MAX_SEGMENTS = 128
MAX_PAYLOAD_BYTES = 1 << 30
HASH_STEP = 1 << 20

LOSSY = 1
DERIVED = 2
SEALED = 4

_FIXED = struct.Struct("<4sHHHHBBHIIQ32s32s16s32s10s6xQQ16xQQ")
NO_ARTIFACT = bytes(32)
"""The artifact of a codec that needs no calibration."""

_CHECKSUM_AT = _FIXED.size - 8
_CHECKSUM = struct.Struct("<Q")
_POSITION, _POSITION_AT = struct.Struct("<I"), 20
_KEY, _PART = slice(64, 96), slice(144, 154)
_SIZES, _SIZES_AT = struct.Struct("<QQ"), 160
_FLAGS = struct.Struct("<10xH")
_NO_CHECKSUM = bytes(8)
_UNSEALED = bytes(16)
_SEGMENT = struct.Struct("<Q16s")
_ALIGN = 64

CONTENT = slice(16, 168)
"""Header bytes that name the content and never change while a frame lives; readers compare them."""


class Refusal(enum.Enum):
    """Why bytes are not the frame that was asked for. All are misses."""

    CORRUPT = "corrupt"
    """Broken bytes: the copy is dropped."""
    UNKNOWN = "unknown"
    """A version, codec or class this release does not know: nothing is dropped."""


class Header(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a frame says of itself.

    `segments` holds payload bytes; `checksums` is empty unless sealed. `epoch` is that of the arena
    the frame was first written in: it tells where a frame comes from and nothing of its content.
    """

    codec_id: int
    flags: int
    fidelity: Fidelity
    tokens: int
    position: int
    generation: int
    fingerprint: bytes
    key: bytes
    namespace: bytes
    artifact: bytes
    part: Part
    raw_bytes: int
    epoch: int
    segments: tuple[int, ...]
    checksums: tuple[bytes, ...] = ()

    @property
    def header_bytes(self) -> int:
        """Bytes before the payload."""
        return header_bytes(len(self.segments))

    @property
    def payload_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.segments)

    @property
    def frame_bytes(self) -> int:
        """Bytes of header and payload."""
        return self.header_bytes + self.payload_bytes


def header_bytes(segments: int) -> int:
    """Return the header's size for a count of segments: a multiple of 64."""
    size = _FIXED.size + segments * _SEGMENT.size
    return (size + _ALIGN - 1) // _ALIGN * _ALIGN


def payload_bound(raw_bytes: int) -> int:
    """Return the most payload bytes any codec may make of raw bytes."""
    return raw_bytes + raw_bytes // 64 + 4096


def pack(header: Header) -> bytes:
    """Return the header's bytes. Raises: TierKVError (invalid) when a length is out of bounds."""
    count = len(header.segments)
    if not 1 <= count <= MAX_SEGMENTS or header.payload_bytes > MAX_PAYLOAD_BYTES:
        raise invalid(
            f"a frame has 1 to {MAX_SEGMENTS} segments and at most {MAX_PAYLOAD_BYTES} payload "
            f"bytes, not {count} of {header.payload_bytes}"
        )
    size = header_bytes(count)
    flags = header.flags | SEALED if header.checksums else header.flags & ~SEALED
    fields = (
        MAGIC, VERSION, size, header.codec_id, flags, header.fidelity, 0, count,
        header.tokens, header.position, header.generation, header.fingerprint, header.key,
        header.namespace, header.artifact, header.part.pack(), header.raw_bytes,
        header.payload_bytes, header.epoch, 0,
    )  # fmt: skip
    checksums = header.checksums or (_UNSEALED,) * count
    if len(checksums) != count:
        raise invalid(f"{count} segments have {len(checksums)} checksums")
    table = [_SEGMENT.pack(*pair) for pair in zip(header.segments, checksums, strict=True)]
    out = (_FIXED.pack(*fields) + b"".join(table)).ljust(size, b"\0")
    checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(out))
    return out[:_CHECKSUM_AT] + checksum + out[_CHECKSUM_AT + 8 :]


class Stamp:
    """Packs headers of as many segments that differ from a first one in what `pack` is told.

    Raises: TierKVError (invalid), see `frame.pack`.
    """

    def __init__(self, first: Header) -> None:
        self._bytes = bytearray(pack(first))

    def pack(
        self,
        key: bytes,
        part: bytes,
        position: int,
        raw_bytes: int,
        segments: Sequence[int],
        checksums: bytes,
    ) -> bytearray:
        """Return a header's bytes, which hold until the next call.

        `part` is packed; `checksums` are n x 16 bytes, b"" where the first one is unsealed.
        """
        out = self._bytes
        _POSITION.pack_into(out, _POSITION_AT, position)
        out[_KEY], out[_PART] = key, part
        _SIZES.pack_into(out, _SIZES_AT, raw_bytes, sum(segments))
        for number, length in enumerate(segments):
            checksum = checksums[16 * number : 16 * number + 16] or _UNSEALED
            _SEGMENT.pack_into(out, _FIXED.size + number * _SEGMENT.size, length, checksum)
        out[_CHECKSUM_AT : _CHECKSUM_AT + 8] = _NO_CHECKSUM
        _CHECKSUM.pack_into(out, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(out))
        return out


def parse(data: Buffer | bytes) -> Header | Refusal:
    """Read a header from the first bytes of a frame; never reads past `MAX_HEADER_BYTES`."""
    if len(data) < _FIXED.size:
        return Refusal.CORRUPT
    fields = _FIXED.unpack_from(data)
    refusal = _refuse(fields, len(data))
    if refusal is not None:
        return refusal
    size, codec_id, flags, fidelity, _, count = fields[2:8]
    raw = bytes(data[:size])
    covered = raw[:_CHECKSUM_AT] + _NO_CHECKSUM + raw[_CHECKSUM_AT + 8 :]
    if xxhash.xxh3_64_intdigest(covered) != fields[-1]:
        return Refusal.CORRUPT
    if fidelity not in FIDELITIES:
        return Refusal.UNKNOWN
    segments, checksums = _parse_segments(raw, count)
    raw_bytes, payload_bytes = fields[16], fields[17]
    if sum(segments) != payload_bytes or payload_bytes > min(
        payload_bound(raw_bytes), MAX_PAYLOAD_BYTES
    ):
        return Refusal.CORRUPT
    return Header(
        codec_id=codec_id,
        flags=flags & ~SEALED,
        fidelity=FIDELITIES[fidelity],
        tokens=fields[8],
        position=fields[9],
        generation=fields[10],
        fingerprint=fields[11],
        key=fields[12],
        namespace=fields[13],
        artifact=fields[14],
        part=Part.unpack(fields[15]),
        raw_bytes=raw_bytes,
        epoch=fields[18],
        segments=segments,
        checksums=checksums if flags & SEALED else (),
    )


def _refuse(fields: tuple[Any, ...], length: int) -> Refusal | None:
    """Look at the fields that say how to read the others, of `length` bytes."""
    magic, version, size, _, _, _, zero, count = fields[:8]
    if magic != MAGIC:
        return Refusal.CORRUPT
    if version != VERSION:
        return Refusal.UNKNOWN
    sound = 1 <= count <= MAX_SEGMENTS and size == header_bytes(count) <= length and not zero
    return None if sound else Refusal.CORRUPT


def _parse_segments(raw: bytes, count: int) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
    if count == 1:
        length, checksum = _SEGMENT.unpack_from(raw, _FIXED.size)
        return (length,), (checksum,)
    end = _FIXED.size + count * _SEGMENT.size
    pairs = list(_SEGMENT.iter_unpack(memoryview(raw)[_FIXED.size : end]))
    return tuple(length for length, _ in pairs), tuple(checksum for _, checksum in pairs)


def seal(header: Header, pieces: Sequence[Buffer]) -> Header:
    """Return the header with the checksums of its payload.

    Args:
        header: of the frame in `pieces`.
        pieces: the frame's bytes in order, header first; the bytes past the frame are ignored.
    """
    return msgspec.structs.replace(header, checksums=tuple(_digests(header, pieces)))


def is_sealed(data: Buffer) -> bool:
    """Return whether a frame's header says that it is sealed; nothing else of it is looked at."""
    return len(data) >= _FIXED.size and bool(_FLAGS.unpack_from(data)[0] & SEALED)


def verify(header: Header, pieces: Sequence[Buffer]) -> bool:
    """Return whether a sealed frame's payload has the checksums its header names."""
    if not header.checksums or sum(len(piece) for piece in pieces) < header.frame_bytes:
        return False
    return tuple(_digests(header, pieces)) == header.checksums


def truncate(header: Header, segments: int) -> Header:
    """Return the header of the frame's first segments, itself a valid frame.

    It keeps its size, so that the payload stays where it is: the others become empty.
    """
    rest = len(header.segments) - segments
    empty = (digest([]),) * rest if header.checksums else ()
    return msgspec.structs.replace(
        header,
        segments=(*header.segments[:segments], *(0,) * rest),
        checksums=(*header.checksums[:segments], *empty),
    )


def shortened(header: Header, nbytes: int) -> Header | None:
    """Return the header of the prefix of a frame that has `nbytes`; None: no segment ends there."""
    end = header.header_bytes
    for number, length in enumerate(header.segments, 1):
        end += length
        if end == nbytes:
            return truncate(header, number)
    return None


def _digests(header: Header, pieces: Sequence[Buffer]) -> Iterable[bytes]:
    start = header.header_bytes
    for length in header.segments:
        yield digest(cut(pieces, start, length))
        start += length


def digest(pieces: Sequence[Buffer]) -> bytes:
    """Return the xxh3-128 of the pieces taken as one run of bytes; the GIL is free meanwhile.

    Between steps the core is offered to others: a thread whose disk has answered would otherwise
    wait for the rest of a time slice, up to 3 ms, while the disk idles.
    """
    state = xxhash.xxh3_128()
    for piece in pieces:
        for at in range(0, len(piece), HASH_STEP):
            if at:
                os.sched_yield()
            state.update(piece[at : at + HASH_STEP])
    return state.digest()


class Watch:
    """Makes the checksums of a frame while it arrives: its bytes are in the core's caches then.

    Args:
        pieces: where the frame arrives, in order, header first.
    """

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        self._pieces = pieces
        self._seen = 0
        self._begin()

    def _begin(self) -> None:
        self._at = 0
        self._left: list[int] = []
        self._state = xxhash.xxh3_128()
        self._sums: list[bytes] = []

    def landed(self, nbytes: int) -> None:
        """Take in that the first `nbytes` lie there; no more than last time: it begins anew."""
        if nbytes <= self._seen:
            self._begin()
        self._seen = nbytes
        if not self._at:
            header = parse(bytes(next(iter(cut(self._pieces, 0, MAX_HEADER_BYTES)), b"")))
            if isinstance(header, Refusal) or header.header_bytes > nbytes:
                return
            self._at, self._left = header.header_bytes, list(header.segments)
        while self._left and self._at < nbytes:
            some = min(self._left[0], nbytes - self._at)
            for piece in cut(self._pieces, self._at, some):
                self._state.update(piece)
            self._at += some
            self._left[0] -= some
            self._end_segments()

    def verified(self, header: Header) -> bool | None:
        """Return whether the checksums are those of a sealed header; None: not all was seen."""
        if self._seen != header.frame_bytes or self._at != header.frame_bytes:
            return None
        count = len(self._sums)  # of a prefix, the segments behind it are empty
        same = bool(header.checksums) and tuple(self._sums) == header.checksums[:count]
        return same and not any(header.segments[count:])

    def _end_segments(self) -> None:
        while self._left and not self._left[0]:
            self._left.pop(0)
            self._sums.append(self._state.digest())
            self._state = xxhash.xxh3_128()


def cut(pieces: Sequence[Buffer], start: int, length: int) -> list[memoryview]:
    """Return views of `length` bytes from `start` of the pieces taken as one run of bytes."""
    if len(pieces) == 1:
        view = memoryview(pieces[0])[start : start + length]
        return [view] if view else []
    out: list[memoryview] = []
    for piece in pieces:
        size = len(piece)
        if start < size and length:
            view = memoryview(piece)[start : start + length]
            out.append(view)
            length -= len(view)
        start = max(start - size, 0)
    return out
