"""Encoder: who encodes an exact copy again, for a demotion. The core has no codec of its own."""

from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from tierkv import frame
from tierkv.codec import Profile
from tierkv.identity import Identity


class Encoded(NamedTuple):
    """A frame that was encoded again: memory for a tier's buffers, and its bytes.

    The payload lies behind the header's place, which is still blank. `segments` are as many as a
    header of its profile names; those that it does not have are empty.
    """

    memory: memoryview
    segments: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole frame."""
        return frame.header_bytes(len(self.segments)) + sum(self.segments)


class Lost(Enum):
    """Why there is no encoded frame."""

    REFUSED = "encode_refused"
    """The codec cannot take this block."""
    FAILED = "encode_failed"
    """Whoever encoded it died or took too long: perhaps because of this block."""
    DOWN = "encode_down"
    """Nobody could be asked now."""


class Encoder(Protocol):
    """Asked on the `encode` lane, outside the store's lock, one call at a time."""

    @property
    def state(self) -> str:
        """What it is doing, for people. For any thread."""

    @property
    def artifacts(self) -> Collection[bytes]:
        """Digests of the calibrations that it encodes by; `NO_ARTIFACT` for the fixed codecs.

        The levels of a calibration are the usual ones: its n-th is the profile of n levels.
        """

    def encode(
        self,
        identity: Identity,
        header: frame.Header,
        runs: Sequence[tuple[int, int]],
        profile: Profile,
        artifact: bytes,
    ) -> Encoded | Lost:
        """Return the frame that a frame's block has in another profile.

        Args:
            identity: of the model whose block it is.
            header: of the frame, which is exact.
            runs: (offset, bytes) of the whole frame in the arena, where it does not change.
            profile: wanted.
            artifact: digest of the calibration that it needs, one of `artifacts`.
        """
