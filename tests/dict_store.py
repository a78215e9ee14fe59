"""A store in one dict, to test a connector against what a real store does rarely.

It can lay frames in many runs, change them while they are read, answer late, and be gone.
"""

import itertools
from typing import Any

import numpy as np

from tierkv import calls, frame
from tierkv.codec import BY_NUMBER, Profile, profile_of
from tierkv.fidelity import Fidelity
from tierkv.key import KEY_BYTES
from tierkv.namespace import digest_of
from tierkv.part import PACKED_BYTES, Part

Run = tuple[int, int]


class DictStore:
    """A `Channel` over an arena of its own; profiles are taken as the client prefers them."""

    def __init__(self, arena_bytes: int = 64 << 20, run_bytes: int = 1 << 30) -> None:
        self.arena = memoryview(bytearray(arena_bytes))
        self.frames: dict[bytes, list[Run]] = {}
        self.run_bytes = run_bytes
        self.gone = False
        self.pending = False
        self.borrowed = 0
        self.log: list[calls.Call] = []
        self._next = 0
        self._numbers = itertools.count(1)
        self._open: dict[int, Any] = {}

    def call(self, call: calls.Call, timeout_s: float | None = None) -> Any | None:
        self.log.append(call)
        return None if self.gone else getattr(self, f"_{type(call).__name__}")(call)

    def post(self, call: calls.Call) -> None:
        self.log.append(call)
        if isinstance(call, calls.ReleaseCall):
            self._open.pop(call.match or call.transfer, None)
        elif isinstance(call, calls.AbortCall):
            self._open.pop(call.reservation, None)

    def borrow(self) -> memoryview | None:
        self.borrowed += not self.gone
        return None if self.gone else self.arena

    def give_back(self) -> None:
        self.borrowed -= 1

    def close(self) -> None:
        self.gone = True

    @property
    def held(self) -> int:
        """Matches, transfers and reservations that nobody ended."""
        return len(self._open)

    def bytes_of(self, number: int) -> memoryview:
        """Return the first run of the frame that was stored as the `number`th."""
        start, length = list(self.frames.values())[number][0]
        return self.arena[start : start + length]

    def _MatchCall(self, call: calls.MatchCall) -> calls.MatchReply:  # noqa: N802
        keys = _split(call.keys, KEY_BYTES)
        held = list(itertools.takewhile(self.frames.__contains__, keys))
        number = next(self._numbers)
        self._open[number] = held
        if self.pending:
            return calls.MatchReply(match=number, blocks=0, pending=True)
        return calls.MatchReply(match=number, blocks=len(held), sources={"host": len(held)})

    def _WaitCall(self, call: calls.WaitCall) -> calls.MatchReply:  # noqa: N802
        count = len(self._open[call.match])
        return calls.MatchReply(match=call.match, blocks=count, sources={"nvme": count})

    def _GetCall(self, call: calls.GetCall) -> calls.GetReply:  # noqa: N802
        keys = self._open.pop(call.match)[: call.blocks]
        number = next(self._numbers)
        self._open[number] = keys
        counts, runs = _packed([self.frames[key] for key in keys])
        return calls.GetReply(transfer=number, run_counts=counts, runs=runs)

    def _PutCall(self, call: calls.PutCall) -> calls.PutReply:  # noqa: N802
        assert len(call.parts) == PACKED_BYTES, "one part is enough here"
        keys = _split(call.keys, KEY_BYTES)
        units = [number for number, key in enumerate(keys) if key not in self.frames]
        if not units:
            return calls.PutReply(reservation=0, known=len(keys))
        raw = int(np.frombuffer(call.raw_bytes, "<i8")[0])
        size = frame.header_bytes(1) + raw + profile_of(call.profiles[0]).bound_extra
        places = [self._place(size) for _ in units]
        number = next(self._numbers)
        self._open[number] = (call, units, places)
        counts, runs = _packed(places)
        return calls.PutReply(
            reservation=number,
            profile=call.profiles[0],
            known=len(keys) - len(units),
            units=np.array(units, "<u4").tobytes(),
            header_bytes=frame.header_bytes(1),
            run_counts=counts,
            runs=runs,
        )

    def _CommitCall(self, call: calls.CommitCall) -> calls.Done:  # noqa: N802
        put, units, places = self._open.pop(call.reservation)
        lengths = np.frombuffer(call.lengths, "<i8").tolist()
        done = 0
        numbers = call.profiles or bytes([profile_of(put.profiles[0]).number]) * len(units)
        for unit, runs, length, number in zip(units, places, lengths, numbers, strict=True):
            if length:
                key = put.keys[unit * KEY_BYTES : (unit + 1) * KEY_BYTES]
                packed = frame.pack(_header(put, key, unit, length, BY_NUMBER[number]))
                self.arena[runs[0][0] : runs[0][0] + len(packed)] = packed
                self.frames[key] = runs
                done += 1
        return calls.Done(units=done)

    def _place(self, size: int) -> list[Run]:
        runs = []
        while size > 0:
            length = min(self.run_bytes, size)
            runs.append((self._next, length))
            self._next += length + 4096  # so that runs never touch
            size -= length
        assert self._next <= len(self.arena), "give this store a larger arena"
        return runs


def _header(
    put: calls.PutCall, key: bytes, unit: int, length: int, profile: Profile
) -> frame.Header:
    return frame.Header(
        codec_id=profile.codec_id,
        flags=frame.LOSSY if profile.lossy else 0,
        fidelity=Fidelity(put.fidelity),
        tokens=put.tokens_per_block,
        position=put.position + unit * put.tokens_per_block,
        generation=0,
        fingerprint=put.fingerprint,
        key=key,
        namespace=digest_of(put.namespace),
        artifact=bytes(32),
        part=Part.unpack(put.parts),
        raw_bytes=int(np.frombuffer(put.raw_bytes, "<i8")[0]),
        epoch=1,
        segments=(length,),
    )


def _packed(places: list[list[Run]]) -> tuple[bytes, bytes]:
    counts = np.array([len(runs) for runs in places], "<u2").tobytes()
    return counts, np.array([run for runs in places for run in runs], "<i8").tobytes()


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]
