"""Frames and aligned memory for tests of tiers and of what stands on them.

`make_frame(1, nbytes=5000)` is a sound, sealed frame under `key_of(1)`.
`frame.item(locator)` writes it; `empty_item(frame.id, locator, frame.nbytes)` reads it, and
`content(item)` is then `frame.data`.
"""

import hashlib
import mmap
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tierkv import frame
from tierkv.fidelity import Fidelity
from tierkv.part import Part
from tierkv.tier import ALIGN, FrameId, Item

WHOLE = Part(0, 0, 2, 0, 2)
NAMESPACE = b"test namespace.."
SMALLEST = frame.header_bytes(1)


def rounded(nbytes: int) -> int:
    """Return bytes rounded up to 4096."""
    return -(-nbytes // ALIGN) * ALIGN


def aligned(nbytes: int) -> memoryview:
    """Return zeroed writable memory at a 4096-aligned address, its length rounded up to 4096."""
    return memoryview(mmap.mmap(-1, max(rounded(nbytes), ALIGN)))


def key_of(number: int) -> bytes:
    """Return a 32-byte key that is the same in every run."""
    return hashlib.sha256(b"tests.frames %d" % number).digest()


def spread(nbytes: int, cuts: Sequence[int] = ()) -> list[memoryview]:
    """Return aligned pieces that hold a frame; each of `cuts` is a piece's bytes (4096 multiples).

    Cuts past the frame are ignored; what they leave goes into a last piece.
    """
    out: list[memoryview] = []
    rest = rounded(nbytes)
    for cut in cuts:
        if 0 < cut < rest:
            out.append(aligned(cut))
            rest -= cut
    return [*out, aligned(rest)]


class Sample(NamedTuple):
    """A frame's name, header and exact bytes."""

    id: FrameId
    header: frame.Header
    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of header and payload."""
        return len(self.data)

    def pieces(self, cuts: Sequence[int] = ()) -> list[memoryview]:
        """Return aligned pieces filled with this frame (see `spread`)."""
        pieces = spread(self.nbytes, cuts)
        at = 0
        for piece in pieces:
            part = self.data[at : at + len(piece)]
            piece[: len(part)] = part
            at += len(piece)
        return pieces

    def item(self, locator: int, cuts: Sequence[int] = ()) -> Item:
        """Return an item that writes this frame at a locator."""
        return Item(self.id, locator, self.nbytes, self.pieces(cuts))


def make_frame(
    number: int,
    *,
    nbytes: int = 10_000,
    segments: int = 1,
    part: Part = WHOLE,
    version: int = 0,
    seal: bool = True,
    **fields: Any,
) -> Sample:
    """Return a frame of exactly `nbytes` bytes (at least the header's) under `key_of(number)`.

    Args:
        number: names the key; also the header's position, in blocks of 64 tokens.
        nbytes: header and payload.
        segments: payload segments, about equal.
        part: what part of the block it holds.
        version: another one gives other payload bytes under the same name.
        seal: whether the header carries payload checksums.
        fields: other header fields (`generation`, `codec_id`, `fidelity`, `namespace`, `flags`).
    """
    payload = nbytes - frame.header_bytes(segments)
    assert payload >= 0, f"{segments} segments need a frame of {frame.header_bytes(segments)} bytes"
    step, rest = divmod(payload, segments)
    header = frame.Header(
        codec_id=1, flags=0, fidelity=Fidelity.EXACT, tokens=64, position=number * 64 % 2**32,
        generation=0, fingerprint=key_of(-1), key=key_of(number), namespace=NAMESPACE,
        artifact=bytes(32), part=part, raw_bytes=payload, epoch=0,
        segments=(step + rest, *(step,) * (segments - 1)),
    )  # fmt: skip
    header = msgspec.structs.replace(header, **fields)
    body = random.Random(f"{number} {part} {version}").randbytes(payload)
    if seal:
        header = frame.seal(header, [bytearray(frame.pack(header) + body)])
    return Sample(FrameId(header.key, part), header, frame.pack(header) + body)


def empty_item(id_: FrameId, locator: int, nbytes: int, cuts: Sequence[int] = ()) -> Item:
    """Return an item that reads a frame into fresh memory."""
    return Item(id_, locator, nbytes, spread(nbytes, cuts))


def content(item: Item) -> bytes:
    """Return the frame's bytes in an item's memory."""
    return b"".join(frame.cut(item.pieces, 0, item.nbytes))
