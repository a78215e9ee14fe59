"""What a codec is, and the registry that finds one by name or by id.

A codec is pure: it keeps nothing between calls, starts no threads, reads no clock, and gives the
same bytes for the same block in any process. Its id names one byte format for ever: a changed
format is a new codec with a new id, and the old one goes on decoding.

Integrity is not a codec's matter. The frame carries checksums; a codec only promises that bytes
which are not its own never make it touch memory outside its buffers or allocate more than the
shape of `out` allows. Damage that still looks well-formed decodes to other values.
"""

from typing import Protocol

import torch

from tierkv.errors import ErrorKind, TierKVError, incompatible, invalid


class CodecError(TierKVError):
    """A block, a buffer or a payload that a codec cannot work on: never retry."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.INVALID, message)


class Codec(Protocol):
    """One byte format for blocks. Implementations are frozen dataclasses."""

    @property
    def id(self) -> int:
        """The number of the byte format, written in every frame."""
        ...

    @property
    def name(self) -> str:
        """The name that settings and profiles use."""
        ...

    @property
    def lossy(self) -> bool:
        """Whether a decoded block may differ from the encoded one."""
        ...

    def bound(self, raw_bytes: int) -> int:
        """Return the most bytes that the payload of a block of `raw_bytes` can take."""
        ...

    def encode(self, block: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
        """Write the payload of `block` at the start of `out`; return its segments' lengths.

        The caller gives a block in canonical order ([layer, K/V, token, head, dim] or a part of
        it; any shape and strides are encoded) and a contiguous uint8 vector in host memory of at
        least `bound(bytes of the block)`. The codec leaves the block as it is and may have used
        all of `out`. Any prefix of the segments is a valid payload of a progressive codec; an
        exact codec has one segment.

        Raises:
            CodecError: `out` is too small or of the wrong kind, or the dtype is not supported.
        """
        ...

    def decode(self, payload: torch.Tensor, segments: tuple[int, ...], out: torch.Tensor) -> None:
        """Fill `out`, which has the shape and dtype of the encoded block and any strides.

        After an error the values in `out` are undefined.

        Raises:
            CodecError: the payload is not one that this codec makes for a block like `out`.
        """
        ...


class CodecRegistry:
    """Codecs by name and by id; both are taken once and for ever."""

    def __init__(self) -> None:
        self._by_name: dict[str, Codec] = {}
        self._by_id: dict[int, Codec] = {}

    def add(self, codec: Codec) -> None:
        """Add a codec. Raises: TierKVError (invalid) when its name or id is taken."""
        if codec.name in self._by_name:
            raise invalid(f"codec name {codec.name!r} is taken; a changed format is a new codec")
        if codec.id in self._by_id:
            taken = self._by_id[codec.id].name
            raise invalid(f"codec id {codec.id} is taken by {taken!r}; give {codec.name!r} another")
        self._by_name[codec.name] = codec
        self._by_id[codec.id] = codec

    def named(self, name: str) -> Codec:
        """Return the codec of that name. Raises: TierKVError (invalid) naming the known ones."""
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(sorted(self._by_name))
            raise invalid(f"codec {name!r} is not known; use one of {known}") from None

    def of_id(self, codec_id: int) -> Codec:
        """Return the codec of that id. Raises: TierKVError (incompatible): a newer writer's."""
        try:
            return self._by_id[codec_id]
        except KeyError:
            known = ", ".join(str(number) for number in sorted(self._by_id))
            raise incompatible(
                f"codec id {codec_id} is not known; this version reads {known}"
            ) from None

    def all(self) -> tuple[Codec, ...]:
        """Return every codec, in order of id."""
        return tuple(self._by_id[number] for number in sorted(self._by_id))
