"""Encoder: who encodes an exact copy again, for a demotion. The core has no codec of its own."""

from collections.abc import Sequence
from typing import Protocol

from tierkv import frame
from tierkv.codec import Profile


class Encoder(Protocol):
    """Runs on the `encode` lane, outside the store's lock, one call at a time."""

    def encode(
        self,
        header: frame.Header,
        payload: Sequence[memoryview],
        profile: Profile,
        out: memoryview,
    ) -> int:
        """Write the payload that a frame's block has in another profile.

        Args:
            header: of the frame, which is exact.
            payload: of the frame, in place; it does not change meanwhile.
            profile: that needs no calibration.
            out: writable memory of at least `raw_bytes + profile.bound_extra`.

        Returns: the bytes written; 0 where the model is not known or the block cannot be taken.
        """
