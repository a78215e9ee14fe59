"""Encoder: who encodes an exact copy again, for a demotion. The core has no codec of its own."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from tierkv import frame
from tierkv.codec import Profile
from tierkv.identity import Identity


class Encoded(NamedTuple):
    """A frame that was encoded again: memory for a tier's buffers, and its bytes.

    The payload lies behind the header's place, which is still blank.
    """

    memory: memoryview
    nbytes: int


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

    def encode(
        self,
        identity: Identity,
        header: frame.Header,
        runs: Sequence[tuple[int, int]],
        profile: Profile,
    ) -> Encoded | Lost:
        """Return the frame that a frame's block has in another profile.

        Args:
            identity: of the model whose block it is.
            header: of the frame, which is exact.
            runs: (offset, bytes) of the whole frame in the arena, where it does not change.
            profile: that needs no calibration.
        """
