"""Reservation: a writer's hold, as its client sees it: where payloads go, and what was written."""

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierkv import frame
from tierkv.calls import AbortCall, CommitCall, Done, PutReply, frames_of
from tierkv.codec import RAW, profile_of

if TYPE_CHECKING:
    from tierkv.client import Channel

Pieces = list[memoryview]


class Written(NamedTuple):
    """A unit that was written: the number of its profile, and the bytes of each segment.

    No segments: the unit is given up.
    """

    profile: int
    segments: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes of the payload."""
        return sum(self.segments)


GIVEN_UP = Written(0, ())


class Reservation:
    """Space for the units a put should write; ends by commit, abort or the owner's death."""

    def __init__(self, channel: "Channel", reply: PutReply, arena: memoryview) -> None:
        self._channel = channel
        small = reply.beside
        self._frames = frames_of(arena, reply.run_counts, reply.runs)
        self._beside = frames_of(arena, small.run_counts, small.runs) if small else []
        self.number = reply.reservation
        self.profile = reply.profile
        self.profiles = profile_of(reply.profile), profile_of(reply.fallback)
        """Of its units, and of those that the first cannot take."""
        self.known = reply.known
        self.refused = reply.refused
        self.units: list[int] = np.frombuffer(reply.units, "<u4").tolist()
        self.beside = profile_of(small.profile) if small else None
        """Of a second copy of each unit, if there is to be one."""
        self._header_bytes = reply.header_bytes, small.header_bytes if small else 0
        self._seal = reply.seal

    def payload(self, index: int) -> Pieces:
        """Return where the payload of `units[index]` goes: views of the arena, in order."""
        return _behind(self._frames[index], self._header_bytes[0])

    def payload_beside(self, index: int) -> Pieces:
        """As `payload`, of its second copy."""
        return _behind(self._beside[index], self._header_bytes[1])

    def commit(self, lengths: Sequence[int]) -> int:
        """Make the units visible; `lengths` are payload bytes, 0 gives a unit and the rest up.

        Returns: the count of units that became visible, 0 when the store is gone.
        """
        return self.commit_written([Written(self.profiles[0].number, (one,)) for one in lengths])

    def commit_written(
        self, units: Sequence[Written], copied_s: float = 0.0, beside: Sequence[Written] = ()
    ) -> int:
        """Make units visible that may be of other profiles than the one the store chose.

        `copied_s` are the seconds that writing them took; 0 tells the store nothing. Of `beside`,
        their second copies, each may be given up alone.

        Returns: the count of units that became visible, 0 when the store is gone.
        """
        if not self.number:
            return 0
        most = self.profiles[0].segments
        sums, segments = self._sums(units, most, self.payload)
        second = self.beside.segments if self.beside and beside else 1
        beside_sums, beside_segments = self._sums(beside, second, self.payload_beside)
        self._frames = self._beside = []
        same = all(unit.profile == self.profiles[0].number or not unit.length for unit in units)
        call = CommitCall(
            reservation=self.number,
            lengths=struct.pack(f"<{len(units)}q", *(unit.length for unit in units)),
            checksums=sums,
            profiles=b"" if same else bytes(unit.profile for unit in units),
            segments=b"" if most == 1 else segments,
            copied_s=copied_s if same and self.profile == RAW.name else 0.0,
            beside=beside_segments,
            beside_checksums=beside_sums,
        )
        reply = self._channel.call(call)
        self.number = 0
        self._channel.give_back()
        return reply.units if isinstance(reply, Done) else 0

    def _sums(
        self, units: Sequence[Written], most: int, payload: Callable[[int], Pieces]
    ) -> tuple[bytes, bytes]:
        """Return the checksums of copies where they are wanted, and the bytes of each segment."""
        segments = [(*unit.segments, *(0,) * (most - len(unit.segments))) for unit in units]
        sums = [
            frame.digest(frame.cut(payload(index), sum(cut[:at]), cut[at]))
            for index, cut in enumerate(segments)
            for at in range(most)
            if self._seal
        ]
        flat = [length for cut in segments for length in cut]
        return b"".join(sums), struct.pack(f"<{len(flat)}q", *flat)

    def abort(self) -> None:
        """Give everything up. Idempotent."""
        if self.number:
            self._frames = self._beside = []
            self._channel.post(AbortCall(reservation=self.number))
            self.number = 0
            self._channel.give_back()


def _behind(pieces: Pieces, header_bytes: int) -> Pieces:
    """Return a frame's memory behind its header."""
    if len(pieces) == 1:
        return [pieces[0][header_bytes:]]
    return frame.cut(pieces, header_bytes, frame.MAX_PAYLOAD_BYTES)
