"""Checks: what a call from another process must keep before the store sees it. Pure."""

import math
from collections.abc import Callable
from typing import Any

from tierkv import calls
from tierkv.key import KEY_BYTES
from tierkv.limits import hint_problem
from tierkv.part import PACKED_BYTES

MAX_NAME = 256
MAX_CLOSED = 4096
MAX_TOKENS = 1 << 16
MAX_POSITION = 1 << 31
MAX_RAW_BYTES = 1 << 40
MAX_DEADLINE_S = 86400.0
MAX_IDENTITY_BYTES = 4 << 20
_FINGERPRINT_BYTES = 32
_SIZE_BYTES = 8
_WINDOW_BYTES = 4


def wrong(call: calls.Call) -> str:
    """Return what is out of bounds in a call, "" when nothing is."""
    check = _CHECKS.get(type(call))
    return "" if check is None else check(call)


def _match(call: calls.MatchCall) -> str:
    if not (0 <= call.linear < math.inf and 0 <= call.quadratic < math.inf):
        return "linear and quadratic must be finite and at least 0"
    if not 0 < call.raw_bytes <= MAX_RAW_BYTES:
        return f"raw_bytes is {call.raw_bytes}"
    if call.windows and len(call.windows) * PACKED_BYTES != len(call.parts) * _WINDOW_BYTES:
        return "windows must be empty or have one for each part"
    return _deadline(call.deadline_s) or _content(call) or _units(call.keys, call.parts)


def _put(call: calls.PutCall) -> str:
    if len(call.raw_bytes) * PACKED_BYTES != len(call.parts) * _SIZE_BYTES:
        return "raw_bytes must have one size for each part"
    return _content(call) or _units(call.keys, call.parts)


def _flush(call: calls.FlushCall) -> str:
    return _deadline(call.deadline_s) or _name(call.namespace) or _units(call.keys, call.parts)


def _get(call: calls.GetCall | calls.ClaimCall) -> str:
    return "" if 0 <= call.blocks <= calls.MAX_UNITS else f"blocks is {call.blocks}"


def _release(call: calls.ReleaseCall) -> str:
    count = len(call.damaged)
    return f"{count} damaged units" if count > calls.MAX_UNITS else ""


def _claim(call: calls.ClaimCall) -> str:
    if not 0 <= call.start <= calls.MAX_UNITS:
        return f"start is {call.start}"
    return _get(call) or _units(b"", call.parts)


def _commit(call: calls.CommitCall) -> str:
    return "lengths must be whole int64" if len(call.lengths) % _SIZE_BYTES else ""


def _identity(call: calls.IdentityCall) -> str:
    size = len(call.identity)
    return f"an identity of {size} bytes" if size > MAX_IDENTITY_BYTES else ""


def _clear(call: calls.ClearCall) -> str:
    return _name(call.namespace)


def _hello(call: calls.Hello) -> str:
    if len(call.closed) > MAX_CLOSED:
        return f"{len(call.closed)} closed sessions"
    return _name(call.client)


_CHECKS: dict[type[calls.Call], Callable[[Any], str]] = {
    calls.Hello: _hello,
    calls.MatchCall: _match,
    calls.PutCall: _put,
    calls.FlushCall: _flush,
    calls.GetCall: _get,
    calls.ReleaseCall: _release,
    calls.ClaimCall: _claim,
    calls.CommitCall: _commit,
    calls.ClearCall: _clear,
    calls.IdentityCall: _identity,
}


def _content(call: calls.MatchCall | calls.PutCall) -> str:
    if len(call.fingerprint) != _FINGERPRINT_BYTES:
        return f"the fingerprint has {len(call.fingerprint)} bytes"
    if not 0 < call.tokens_per_block <= MAX_TOKENS:
        return f"tokens_per_block is {call.tokens_per_block}"
    if not 0 <= call.position < MAX_POSITION:
        return f"position is {call.position}"
    return _name(call.namespace) or hint_problem(call)


def _units(keys: bytes, parts: bytes) -> str:
    if not parts or len(keys) % KEY_BYTES or len(parts) % PACKED_BYTES:
        return "keys or parts are cut short"
    units = len(keys) // KEY_BYTES * (len(parts) // PACKED_BYTES)
    return f"{units} units; at most {calls.MAX_UNITS}" if units > calls.MAX_UNITS else ""


def _name(name: str) -> str:
    return f"a name of {len(name)} characters" if len(name) > MAX_NAME else ""


def _deadline(seconds: float) -> str:
    return "" if 0 <= seconds <= MAX_DEADLINE_S else f"a deadline of {seconds} seconds"
