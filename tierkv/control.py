"""Control: what a store answers to its clients. `TierKV` is the one implementation.

Every method is quick and never blocks on I/O; those with `done` answer later, from any thread,
exactly once. `owner` is one client process's session; what it holds ends with `disown`.
"""

from collections.abc import Callable
from typing import Any, Protocol

from tierkv import calls


class Control(Protocol):
    """The calls of `calls.py`, embedded."""

    def match(self, owner: int, call: calls.MatchCall) -> calls.MatchReply:
        """Answer from RAM and start a stage for what lies below."""

    def wait(
        self, owner: int, call: calls.WaitCall, done: Callable[[calls.MatchReply], None]
    ) -> None:
        """Answer when the match is final; at once when it is already or is unknown."""

    def settle(self, owner: int, call: calls.SettleCall) -> calls.MatchReply:
        """Make the match final now; a `wait` for it is answered too."""

    def release(self, owner: int, call: calls.ReleaseCall) -> None:
        """End a match or a transfer."""

    def get(self, owner: int, call: calls.GetCall) -> calls.GetReply:
        """Turn a lease into a transfer."""

    def claim(self, owner: int, call: calls.ClaimCall) -> calls.GetReply:
        """Give a transfer of units of a match, which stays open."""

    def put(self, owner: int, call: calls.PutCall) -> calls.PutReply:
        """Reserve space for what is worth storing."""

    def commit(self, owner: int, call: calls.CommitCall) -> calls.Done:
        """Make written units visible."""

    def introduce(self, owner: int, call: calls.IdentityCall) -> calls.Done:
        """Learn of a model."""

    def abort(self, owner: int, call: calls.AbortCall) -> calls.Done:
        """Give a reservation up."""

    def flush(self, call: calls.FlushCall, done: Callable[[calls.FlushReply], None]) -> None:
        """Answer when everything asked for is durable, failed, or the deadline passed."""

    def clear(self, call: calls.ClearCall, done: Callable[[calls.ClearReply], None]) -> None:
        """Answer when no tier can serve the namespace's old blocks any more."""

    def stat(self, call: calls.StatCall, done: Callable[[dict[str, Any]], None]) -> None:
        """Answer with counters and tiers."""

    def policy(self, owner: int, call: calls.PolicyCall) -> calls.PolicyReply:
        """Change the policy, or only say which one decides."""

    def explain(self, owner: int, call: calls.ExplainCall) -> dict[str, Any]:
        """Say why a block is where it is, or why the last drop was made."""

    def tick(self) -> float:
        """End what is past its deadline; returns seconds until the next deadline (at most 1)."""

    def end_leases(self, owner: int) -> bool:
        """The owner's connection is gone but its process may live: its matches end.

        Transfers and reservations stay: the process may still be copying.

        Returns: whether there are any.
        """

    def disown(self, owner: int) -> None:
        """The owner's process is gone, or says it has stopped.

        Transfers and reservations end too.
        """

    def close(self, grace_s: float) -> None:
        """Flush what is worth most within `grace_s` seconds and stop."""


Act = Callable[[int, Any], Any]
Later = Callable[[int, Any, Callable[[Any], None]], None]


def acts(control: Control) -> dict[type[calls.Call], Act]:
    """Return what answers each call at once, given its owner and the call."""
    return {
        calls.MatchCall: control.match,
        calls.SettleCall: control.settle,
        calls.ReleaseCall: control.release,
        calls.GetCall: control.get,
        calls.ClaimCall: control.claim,
        calls.PutCall: control.put,
        calls.CommitCall: control.commit,
        calls.AbortCall: control.abort,
        calls.IdentityCall: control.introduce,
        calls.PolicyCall: control.policy,
        calls.ExplainCall: control.explain,
    }


def deferred(control: Control) -> dict[type[calls.Call], Later]:
    """Return what answers each other call later, given its owner, the call and `done`."""
    return {
        calls.WaitCall: control.wait,
        calls.FlushCall: lambda _owner, call, done: control.flush(call, done),
        calls.ClearCall: lambda _owner, call, done: control.clear(call, done),
        calls.StatCall: lambda _owner, call, done: control.stat(call, done),
    }
