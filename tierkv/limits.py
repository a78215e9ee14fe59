"""Limits: what a call may ask for, checked before anything is done with it."""

import struct

import numpy as np

from tierkv.calls import MAX_SESSION, MAX_UNITS, MatchCall, PutCall
from tierkv.errors import invalid
from tierkv.key import KEY_BYTES

MAX_DEADLINE_S = 3600.0
MAX_TTL_S = 30 * 86400.0
_KEY = struct.Struct(f"{KEY_BYTES}s")


def seconds_of(deadline_s: float) -> float:
    """Return a call's deadline. Raises: TierKVError (invalid) when it would hold without end."""
    if not 0 <= deadline_s <= MAX_DEADLINE_S:
        raise invalid(f"a deadline is 0 to {MAX_DEADLINE_S:.0f} seconds, not {deadline_s}")
    return deadline_s


def hint_problem(call: MatchCall | PutCall) -> str:
    """Return what is out of bounds in a call's hints, "" when nothing is."""
    if len(call.session) > MAX_SESSION:
        return f"session has {len(call.session)} characters; at most {MAX_SESSION}"
    if call.ttl_s is not None and not 0 < call.ttl_s <= MAX_TTL_S:
        return f"ttl_s is {call.ttl_s}: give seconds above 0 and at most {MAX_TTL_S:.0f}, or None"
    return ""


def check_hints(call: MatchCall | PutCall) -> None:
    """Refuse hints out of bounds. Raises: TierKVError (invalid)."""
    if why := hint_problem(call):
        raise invalid(why)


def count_keys(packed: bytes, parts: int) -> int:
    """Return how many keys a call has.

    Raises: TierKVError (invalid) when out of bounds or not distinct.
    """
    count = len(packed) // KEY_BYTES
    if len(packed) % KEY_BYTES or count * parts > MAX_UNITS:
        raise invalid(f"keys are n x {KEY_BYTES} bytes and at most {MAX_UNITS} units")
    if count == 1:  # a lone block must not pay for what long chains save
        return count
    words = np.sort(np.frombuffer(packed, np.uint64)[:: KEY_BYTES // 8])
    alike = (words[1:] == words[:-1]).any()
    if alike and len(set(_KEY.iter_unpack(packed))) < count:
        raise invalid("a chain names each key once")
    return count
