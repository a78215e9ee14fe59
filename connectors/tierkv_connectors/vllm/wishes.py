"""Wishes: what one request asks of tierkv, in `kv_transfer_params["tierkv"]`."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from tierkv.calls import MAX_SESSION, MatchCall, PutCall
from tierkv.limits import MAX_TTL_S
from tierkv_connectors.vllm.kept import checked, class_of

C = TypeVar("C", MatchCall, PutCall)


class Hints(NamedTuple):
    """What a request says of the future of its chain, as `calls.MatchCall` has it."""

    session: str = ""
    ttl_s: float | None = None
    closed: bool = False
    pin: bool = False

    def on(self, call: C) -> C:
        """Return a call that carries these hints."""
        return call if self == NO_HINTS else msgspec.structs.replace(call, **self._asdict())


NO_HINTS = Hints()


class Wishes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_transfer_params["tierkv"]` of one request."""

    store: bool = True
    """False: nothing of this request is kept."""
    fidelity: str = ""
    """The least class that may be served; "": the engine's."""
    session: Annotated[str, msgspec.Meta(max_length=MAX_SESSION)] = ""
    """Names the conversation or agent run; "": vLLM's own session id, where it has one."""
    ttl_s: Annotated[float, msgspec.Meta(gt=0.0, le=MAX_TTL_S)] | None = None
    """After so many seconds without another request for it nobody will ask; None: not known."""
    closed: bool = False
    """The session is over with this request."""
    pin: bool = False
    """Give its blocks up last, for `ttl_s`, or where that is None for an hour."""

    def hints(self, session: str | None) -> Hints:
        """Return the hints, with vLLM's own session id where the request names no session."""
        named = self.session or (session or "")[:MAX_SESSION]
        return Hints(named, self.ttl_s, self.closed, self.pin)


def wishes_of(params: Mapping[str, Any] | None) -> Wishes:
    """Return a request's wishes. Raises: TierKVError (invalid) naming the wrong one."""
    wishes = checked('kv_transfer_params["tierkv"]', (params or {}).get("tierkv", {}), Wishes)
    if wishes.fidelity:
        class_of(wishes.fidelity)
    return wishes
