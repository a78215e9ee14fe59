"""Use: a call that names a whole chain, as policies are told of it."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tierkv import windows
from tierkv.calls import MatchCall, PutCall
from tierkv.cost import Recompute


class Use(NamedTuple):
    """A call that names a whole chain, from its first block on, in keys of n x 32 bytes.

    `tokens` and `raw_bytes` are of one block, over the numbered `parts`; `now` in seconds. A match
    has `asked` for it; a put goes on with what a match asked for, or begins a chain. What follows
    are the client's hints, see `calls`.
    """

    now: float
    keys: bytes
    parts: tuple[int, ...]
    position: int
    tokens: int
    raw_bytes: int
    model: bytes = b""
    """Fingerprint of the identity: what prefill costs is learnt for each."""
    recompute: Recompute = Recompute(0.0, 0.0)
    asked: bool = True
    session: str = ""
    ttl_s: float | None = None
    closed: bool = False
    pin: bool = False
    windowed: tuple[int, ...] = ()
    """Parts of which a hit needs only its last blocks."""


def use_of(call: MatchCall | PutCall, parts: Sequence[int], raw_bytes: int, now: float) -> Use:
    """Return what a policy is told of a call; `raw_bytes` of one block over its parts."""
    recompute, windowed = Recompute(0.0, 0.0), tuple[int, ...]()
    if isinstance(call, MatchCall):
        recompute = Recompute(call.linear, call.quadratic)
        sizes = windows.unpack(call.windows, len(parts))
        windowed = tuple(itertools.compress(parts, sizes))
    return Use(
        now, call.keys, tuple(parts), call.position, call.tokens_per_block, raw_bytes,
        call.fingerprint, recompute, isinstance(call, MatchCall),
        call.session, call.ttl_s, call.closed, call.pin, windowed,
    )  # fmt: skip
