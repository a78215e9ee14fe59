"""Wire: how calls and replies travel over the sidecar's Unix socket.

A message is a header, three little-endian uint32 (body bytes, sequence, kind), then the body in
msgpack: one of `calls.AnyCall` to the sidecar, the reply of that call or a `Problem` back. Calls
may be sent without waiting for replies; a reply carries the sequence of its call, and replies to
calls that wait for something (wait, flush, clear, stat) may come later than those of later calls.
Sequence 0 asks for no reply. The first call is Hello; with its reply comes the arena's descriptor.

Beside the socket PATH lie PATH.lock, which the sidecar holds for its life, and PATH.arena, which
everybody holds shared who maps an arena. A sidecar takes the latter alone before it reserves
memory, so that two arenas never exist at once. Neither file is ever removed.
"""

import struct
from pathlib import Path
from typing import Any

import msgspec

from tierkv import calls

HEADER = struct.Struct("<III")
REPLY = 0
PROBLEM = 1
MAX_SEQUENCE = 0xFFFF_FFFF
MAX_FIRST_BYTES = 16384
"""A peer that has not said Hello may not send more than this."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Why a call was refused: an `ErrorKind`'s value, or "bug", and a message for people."""

    kind: str
    message: str


ENCODER = msgspec.msgpack.Encoder()
CALLS: msgspec.msgpack.Decoder[calls.AnyCall] = msgspec.msgpack.Decoder(calls.AnyCall)
PROBLEMS = msgspec.msgpack.Decoder(Problem)
REPLIES: dict[type[calls.Call], msgspec.msgpack.Decoder[Any]] = {
    calls.Hello: msgspec.msgpack.Decoder(calls.Welcome),
    calls.MatchCall: msgspec.msgpack.Decoder(calls.MatchReply),
    calls.WaitCall: msgspec.msgpack.Decoder(calls.MatchReply),
    calls.SettleCall: msgspec.msgpack.Decoder(calls.MatchReply),
    calls.GetCall: msgspec.msgpack.Decoder(calls.GetReply),
    calls.ClaimCall: msgspec.msgpack.Decoder(calls.GetReply),
    calls.PutCall: msgspec.msgpack.Decoder(calls.PutReply),
    calls.CommitCall: msgspec.msgpack.Decoder(calls.Done),
    calls.AbortCall: msgspec.msgpack.Decoder(calls.Done),
    calls.IdentityCall: msgspec.msgpack.Decoder(calls.Done),
    calls.FlushCall: msgspec.msgpack.Decoder(calls.FlushReply),
    calls.ClearCall: msgspec.msgpack.Decoder(calls.ClearReply),
    calls.StatCall: msgspec.msgpack.Decoder(dict[str, Any]),
    calls.PolicyCall: msgspec.msgpack.Decoder(calls.PolicyReply),
    calls.ExplainCall: msgspec.msgpack.Decoder(dict[str, Any]),
}
"""A reply's decoder by the type of its call; release has none."""

_BLANK = bytes(HEADER.size)


def append(out: bytearray, sequence: int, kind: int, body: Any) -> None:  # noqa: ANN401
    """Add a message to the end of `out`."""
    at = len(out)
    out += _BLANK
    ENCODER.encode_into(body, out, -1)
    HEADER.pack_into(out, at, len(out) - at - HEADER.size, sequence, kind)


def undo(reply: object) -> calls.Call | None:
    """Return the call that gives back what a reply handed out, None when that is nothing."""
    match reply:
        case calls.MatchReply(got=calls.GetReply(transfer=number)) if number:
            return calls.ReleaseCall(transfer=number)
        case calls.MatchReply(match=number) if number:
            return calls.ReleaseCall(match=number)
        case calls.GetReply(transfer=number) if number:
            return calls.ReleaseCall(transfer=number)
        case calls.PutReply(reservation=number) if number:
            return calls.AbortCall(reservation=number)
    return None


def lock_path(socket: Path) -> Path:
    """Return the file that the one sidecar of a socket locks."""
    return socket.with_name(f"{socket.name}.lock")


def arena_path(socket: Path) -> Path:
    """Return the file that everybody locks who maps an arena."""
    return socket.with_name(f"{socket.name}.arena")
