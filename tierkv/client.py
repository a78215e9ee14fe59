"""The client: what an engine connector holds. The same over an embedded store and over a sidecar.

Nothing here raises into an engine: a store that is gone, slow or refuses is a miss, and counted by
the channel. The one exception is a caller's own wrong argument.
"""

import time
from types import TracebackType
from typing import Any, Protocol, Self

from tierkv import frame
from tierkv.calls import (
    Call,
    ClaimCall,
    ClearCall,
    ClearReply,
    FlushCall,
    FlushReply,
    GetCall,
    GetReply,
    IdentityCall,
    MatchCall,
    MatchReply,
    PutCall,
    PutReply,
    ReleaseCall,
    SettleCall,
    StatCall,
    WaitCall,
    frames_of,
)
from tierkv.codec import RAW
from tierkv.identity import Identity, to_wire
from tierkv.key import KEY_BYTES
from tierkv.namespace import digest_of
from tierkv.part import PACKED_BYTES, Part
from tierkv.reservation import Pieces, Reservation

MISS = MatchReply(match=0, blocks=0)


class Channel(Protocol):
    """How calls reach a store: in process, or over a socket."""

    def call(self, call: Call, timeout_s: float | None = None) -> Any | None:  # noqa: ANN401
        """Send and wait for the reply; None when the store cannot answer in time."""

    def post(self, call: Call) -> None:
        """Send without a reply; lost when the store is gone."""

    def borrow(self) -> memoryview | None:
        """Pin the arena's mapping and return it, None when there is none now."""

    def give_back(self) -> None:
        """End one `borrow`; no view of the arena may be used after it."""

    def close(self) -> None:
        """End the connection and everything it holds."""


class Transfer:
    """Frames of a leased match, readable in place until close."""

    def __init__(
        self, channel: Channel, reply: GetReply, call: MatchCall, frames: list[Pieces]
    ) -> None:
        self._channel = channel
        self._number = reply.transfer
        self._verify = reply.verify
        self._call = call
        self._frames = frames
        self._namespace = digest_of(call.namespace)
        cut = range(0, len(call.parts), PACKED_BYTES)
        self._parts = [Part.unpack(call.parts[at : at + PACKED_BYTES]) for at in cut]
        self._contents: dict[int, bytes] = {}
        self._damaged: set[int] = set()
        self._raw, self._looked, self._began, self._copied = True, 0, 0.0, (0, 0.0)

    @property
    def units(self) -> int:
        """Count of frames, block-major."""
        return len(self._frames)

    def header(self, unit: int) -> frame.Header | None:
        """Return the frame's header, None when the bytes are not the content that was matched."""
        head = self._frames[unit][0]
        parsed = frame.parse(head[: frame.MAX_HEADER_BYTES])
        if isinstance(parsed, frame.Refusal):  # the store may have been sealing it meanwhile
            parsed = frame.parse(head[: frame.MAX_HEADER_BYTES])
        block, part = divmod(unit, len(self._parts))
        if self._harmed(unit, parsed):
            self._damaged.add(unit)
            return None
        if (
            isinstance(parsed, frame.Refusal)
            or parsed.key != self._call.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]
            or parsed.part != self._parts[part]
            or parsed.fingerprint != self._call.fingerprint
            or parsed.namespace != self._namespace
            or parsed.fidelity < self._call.fidelity
        ):
            return None
        self._contents[unit] = bytes(head[: frame.CONTENT.stop])
        return parsed

    def _harmed(self, unit: int, parsed: frame.Header | frame.Refusal) -> bool:
        """Return whether a frame's bytes do not agree with themselves, whoever asked for it."""
        if isinstance(parsed, frame.Refusal):
            return parsed is frame.Refusal.CORRUPT
        return self._verify and not frame.verify(parsed, self._frames[unit])

    def headers(self) -> list[frame.Header]:
        """Return the headers from the first frame on, up to the first doubt.

        A reader takes them all before its first copy: code and data of the one do not push those
        of the other out of the processor's caches frame by frame.
        """
        headers: list[frame.Header] = []
        for unit in range(len(self._frames)):
            header = self.header(unit)
            if header is None:
                break
            headers.append(header)
        return headers

    def intact(self, units: int) -> int:
        """Return how many of the first `units` frames are unchanged, up to one that is not.

        It ends the copies that the first `payload` began: the store is told how long they took.
        """
        if self._raw and self._began:
            self._copied = self._looked, time.perf_counter() - self._began
        return next((unit for unit in range(units) if not self.unchanged(unit)), units)

    def payload(self, unit: int, header: frame.Header) -> Pieces:
        """Return the encoded bytes of a frame as views of the arena, in order."""
        self._began = self._began or time.perf_counter()
        self._raw &= header.codec_id == RAW.codec_id
        self._looked += header.payload_bytes
        pieces = self._frames[unit]
        start, length = header.header_bytes, header.payload_bytes
        if len(pieces[0]) >= start + length:
            return [pieces[0][start : start + length]]
        return frame.cut(pieces, start, length)

    def unchanged(self, unit: int) -> bool:
        """Return whether the frame still names the same content; call it after the copy out."""
        there = bytes(self._frames[unit][0][: frame.CONTENT.stop])
        before = self._contents.get(unit, b"")
        same = there == before or there[frame.CONTENT] == before[frame.CONTENT]  # sealed meanwhile
        return same and there.startswith(frame.MAGIC)

    def close(self) -> None:
        """Let the store have the frames back. Idempotent."""
        if self._number:
            self._frames = []
            damaged, (nbytes, seconds) = tuple(sorted(self._damaged)), self._copied
            self._channel.post(
                ReleaseCall(
                    transfer=self._number, damaged=damaged, copied_bytes=nbytes, copied_s=seconds
                )
            )
            self._number = 0
            self._channel.give_back()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


class Client:
    """Match, get and put blocks of a store; a miss when the store is not there."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._open: dict[int, MatchCall] = {}
        self._fetched: dict[int, Transfer] = {}
        self._models: dict[bytes, Identity] = {}

    def introduce(self, identity: Identity) -> None:
        """Know a model by its family; a store is told when it asks, and may encode its blocks."""
        self._models[identity.family] = identity

    def match(self, call: MatchCall) -> MatchReply:
        """Return the longest usable run; `pending` when more is on its way (see `wait`)."""
        arena = self._channel.borrow() if call.fetch else None
        reply = self._channel.call(call)
        got = reply.got if isinstance(reply, MatchReply) else None
        if arena is not None and (got is None or not got.transfer):
            self._channel.give_back()
        if not isinstance(reply, MatchReply):
            return MISS
        if got is not None and arena is not None and got.transfer:
            frames = frames_of(arena, got.run_counts, got.runs)
            self._fetched[reply.match] = Transfer(self._channel, got, call, frames)
        elif reply.match:
            self._open[reply.match] = call
        return reply

    def wait(self, match: int, timeout_s: float) -> MatchReply:
        """Return the final answer of a pending match, after `timeout_s` with what has arrived."""
        reply = self._channel.call(WaitCall(match=match), timeout_s)
        if not isinstance(reply, MatchReply):
            reply = self._channel.call(SettleCall(match=match))
        if isinstance(reply, MatchReply) and not reply.match:
            self._open.pop(match, None)
        return reply if isinstance(reply, MatchReply) else MISS

    def release(self, match: int) -> None:
        """End a match that will not be fetched. Idempotent."""
        fetched = self._fetched.pop(match, None)
        if fetched is not None:
            fetched.close()
        if self._open.pop(match, None) is not None:
            self._channel.post(ReleaseCall(match=match))

    def get(self, match: int, blocks: int) -> Transfer | None:
        """Turn a final match into a transfer of its first `blocks` blocks; None is a miss.

        A match that was asked to fetch has its transfer already, of all its blocks.
        """
        fetched = self._fetched.pop(match, None)
        if fetched is not None:
            return fetched
        call = self._open.get(match)
        arena = self._channel.borrow() if call is not None else None
        if call is None or arena is None:
            self.release(match)
            return None
        reply = self._channel.call(GetCall(match=match, blocks=blocks))
        if not isinstance(reply, GetReply) or not reply.transfer:
            self._channel.give_back()
            self.release(match)
            return None
        del self._open[match]
        frames = frames_of(arena, reply.run_counts, reply.runs)
        return Transfer(self._channel, reply, call, frames)

    def claim(self, match: int, start: int, call: MatchCall) -> Transfer | None:
        """Return a transfer of units of a final match that another process asked for.

        Args:
            match: its number there; that process releases it.
            start: number of the first block wanted in that match.
            call: the question again, with the keys of the wanted blocks and the wanted parts only.
        """
        arena = self._channel.borrow()
        if arena is None:
            return None
        blocks = len(call.keys) // KEY_BYTES
        wanted = ClaimCall(match=match, start=start, blocks=blocks, parts=call.parts)
        reply = self._channel.call(wanted)
        if not isinstance(reply, GetReply) or not reply.transfer:
            self._channel.give_back()
            return None
        frames = frames_of(arena, reply.run_counts, reply.runs)
        return Transfer(self._channel, reply, call, frames)

    def put(self, call: PutCall) -> Reservation | None:
        """Ask where to write blocks; None when there is nothing to write or nobody to ask."""
        arena = self._channel.borrow()
        if arena is None:
            return None
        reply = self._channel.call(call)
        if isinstance(reply, PutReply) and reply.stranger and call.family in self._models:
            self._channel.post(IdentityCall(identity=to_wire(self._models[call.family])))
        if not isinstance(reply, PutReply) or not reply.reservation:
            self._channel.give_back()
            return None
        return Reservation(self._channel, reply, arena)

    def flush(self, call: FlushCall) -> bytes:
        """Wait until blocks are durable; one byte per unit, 1 where they are."""
        reply = self._channel.call(call, call.deadline_s + 1.0)
        if isinstance(reply, FlushReply):
            return reply.durable
        return bytes(len(call.keys) // KEY_BYTES * (len(call.parts) // PACKED_BYTES))

    def clear(self, namespace: str, timeout_s: float = 60.0) -> ClearReply | None:
        """Make a namespace empty in every tier; None when the store did not answer."""
        reply = self._channel.call(ClearCall(namespace=namespace), timeout_s)
        return reply if isinstance(reply, ClearReply) else None

    def stat(self, *, probe: bool = False) -> dict[str, Any] | None:
        """Return the store's counters, None when it did not answer."""
        reply = self._channel.call(StatCall(probe=probe), 5.0)
        return reply if isinstance(reply, dict) else None

    def close(self) -> None:
        """End the connection; leases end with it."""
        self._channel.close()
