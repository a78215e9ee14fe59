"""What a codec is, and the registry that finds one by name or by id.

A codec is pure: it keeps nothing between calls, starts no threads, reads no clock, and gives the
same bytes for the same block in any process. Its id names one byte format for ever: a changed
format is a new codec with a new id, and the old one goes on decoding.

Integrity is not a codec's matter. The frame carries checksums; a codec only promises that bytes
which are not its own never make it touch memory outside its buffers or allocate more than the
shape of `out` allows. Damage that still looks well-formed decodes to other values.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch

from tierkv import frame
from tierkv.errors import ErrorKind, TierKVError, incompatible, invalid
from tierkv.identity import LayerSpec
from tierkv.part import Part

NO_ARTIFACT = frame.NO_ARTIFACT
SINKS = 4
"""Tokens at the start of a sequence that every lossy codec stores exactly: coding these four costs
60 times the KL of all others (KVTC, arXiv 2511.01815, section B)."""


class Place(NamedTuple):
    """Where a block stands: what a codec needs to know of it beside its values.

    `layers` describes the block's first axis, in order; `part` says which layers and heads of the
    identity these are; `position` is that of the block's first token in its sequence.
    """

    layers: tuple[LayerSpec, ...]
    part: Part
    position: int

    def sinks(self, tokens: int) -> int:
        """Return how many of a block's first tokens are stored exactly by a lossy codec."""
        return min(max(SINKS - self.position, 0), tokens)


class CodecError(TierKVError):
    """A block, a buffer or a payload that a codec cannot work on: never retry."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.INVALID, message)


class Unsuited(CodecError):  # noqa: N818 -- an answer, not a fault: the block goes lossless
    """A sound block that this codec cannot take; the caller encodes it losslessly instead.

    `reason` is one of few short texts, so that it can be counted and said once.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the block cannot be coded: {reason}")
        self.reason = reason


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

    @property
    def artifact(self) -> bytes:
        """Digest (32 bytes) of the calibration that the format needs; `NO_ARTIFACT` for none."""
        ...

    def bound(self, raw_bytes: int) -> int:
        """Return the most bytes that the payload of a block of `raw_bytes` can take."""
        ...

    def encode(self, block: torch.Tensor, out: torch.Tensor, place: Place) -> tuple[int, ...]:
        """Write the payload of `block` at the start of `out`; return its segments' lengths.

        The caller gives a block in canonical order ([layer, K/V, token, head, dim], keys with
        RoPE, any strides; an exact codec takes any shape), a contiguous uint8 vector in host
        memory of at least `bound(bytes of the block)`, and the block's place. The codec leaves the
        block as it is and may have used all of `out`. Any prefix of the segments is a valid payload
        of a progressive codec; every other codec has one segment. A lossy codec stores the tokens
        of `place.sinks` exactly and gives finite values for finite ones.

        Raises:
            Unsuited: a sound block with values, a shape or a RoPE that this codec cannot take.
            CodecError: `out` is too small or of the wrong kind, or the dtype is not supported.
        """
        ...

    def decode(
        self, payload: torch.Tensor, segments: tuple[int, ...], out: torch.Tensor, place: Place
    ) -> None:
        """Fill `out`, which has the shape and dtype of the encoded block and any strides.

        `place` is the one given to `encode`. After an error the values in `out` are undefined.

        Raises:
            CodecError: the payload is not one that this codec makes for a block like `out`.
        """
        ...


class CodecRegistry:
    """Codecs by name, and by id and artifact; a fixed codec's id is taken once and for ever.

    Settings of one calibrated codec are several names for one id and artifact: any of them decodes
    what another has encoded, and the first is the one that is found.
    """

    def __init__(self, codecs: Iterable[Codec] = ()) -> None:
        self._by_name: dict[str, Codec] = {}
        self._by_format: dict[tuple[int, bytes], Codec] = {}
        for codec in codecs:
            self.add(codec)

    def add(self, codec: Codec) -> None:
        """Add a codec. Raises: TierKVError (invalid) when its name or id is taken."""
        if codec.name in self._by_name:
            raise invalid(f"codec name {codec.name!r} is taken; a changed format is a new codec")
        one = (codec.id, codec.artifact)
        taken = [other.name for other in self._by_name.values() if other.id == codec.id]
        if taken and (codec.artifact == NO_ARTIFACT or (codec.id, NO_ARTIFACT) in self._by_format):
            raise invalid(
                f"codec id {codec.id} is taken by {taken[0]!r}; give {codec.name!r} another"
            )
        self._by_name[codec.name] = codec
        self._by_format.setdefault(one, codec)

    def named(self, name: str) -> Codec:
        """Return the codec of that name. Raises: TierKVError (invalid) naming the known ones."""
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(sorted(self._by_name))
            raise invalid(f"codec {name!r} is not known; use one of {known}") from None

    def of_id(self, codec_id: int, artifact: bytes = NO_ARTIFACT) -> Codec:
        """Return the codec of that id and artifact.

        Raises: TierKVError (incompatible): a newer writer's, or one with another calibration.
        """
        try:
            return self._by_format[codec_id, artifact]
        except KeyError:
            known = ", ".join(str(number) for number in sorted({at for at, _ in self._by_format}))
            about = "" if artifact == NO_ARTIFACT else f" with artifact {artifact.hex()[:16]}"
            raise incompatible(
                f"codec id {codec_id}{about} is not known; this version reads {known}"
            ) from None

    def artifacts(self, profiles: Iterable[str]) -> tuple[bytes, ...]:
        """Return the artifacts that a put names: of its profiles, then of what else can be decoded.

        Raises: TierKVError (invalid): no codec has one of the profiles.
        """
        first = tuple(self.named(name).artifact for name in profiles)
        more = {codec.artifact for codec in self._by_name.values()} - {NO_ARTIFACT, *first}
        return (*first, *sorted(more))

    def all(self) -> tuple[Codec, ...]:
        """Return every codec, in order of id."""
        return tuple(sorted(self._by_name.values(), key=lambda codec: codec.id))
