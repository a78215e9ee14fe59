"""Stat: what a store says about itself, the answer to `StatCall`.

The store builds a `StoreStat`; `to_wire` makes it the plain dict that travels, `from_wire` reads
one of the same or another release (unknown fields are ignored, missing ones have their default).
All numbers are in base units: bytes, seconds, blocks. Totals only grow while `epoch` stays; a rate
is the difference of two answers over the difference of their `uptime_s`.
"""

from typing import Any, Literal

import msgspec

from tierkv.errors import incompatible

TierState = Literal["ok", "degraded", "lost", "off"]
"""ok: works. degraded: serves, but `problem` limits it (full of held blocks, write budget spent).
lost: the medium does not answer (a probe failed, a breaker is open). off: not configured."""


class TierStat(msgspec.Struct, frozen=True, kw_only=True):
    """One tier. used + dead + free = capacity, allocated bytes; capacity 0: not bounded by us."""

    name: str
    state: TierState = "ok"
    problem: str = ""
    """What is wrong and the fix, for people; empty when `state` is ok."""
    durable: bool = False
    capacity_bytes: int = 0
    used_bytes: int = 0
    dead_bytes: int = 0
    """Space that only a reclaim frees."""
    free_bytes: int = 0
    placements: int = 0
    """Copies of frames, in the state `ready`."""
    read_bytes: int = 0
    written_bytes: int = 0
    read_bps: float = 0.0
    """Bandwidth that decisions use, bytes per second: a guess until measured, and always of RAM."""
    write_bps: float = 0.0
    latency_s: float = 0.0
    """Seconds until the first byte of a read."""
    expected_read_s: float = 0.0
    """What the cost model expected reads to take, by the rates of their moment."""
    read_s: float = 0.0
    """What the same reads took, of jobs side by side each for itself."""
    read_error_s: float = 0.0
    """Sum of the differences of each read, whatever their sign."""


class WriteBehindStat(msgspec.Struct, frozen=True, kw_only=True):
    """The queue of copies on their way to lower tiers."""

    queued_frames: int = 0
    queued_bytes: int = 0
    limit_bytes: int = 0
    oldest_s: float = 0.0
    """Age of the frame that has waited longest."""
    going_bytes: int = 0
    """Bytes of RAM that demotions under way will free."""


class HoldStat(msgspec.Struct, frozen=True, kw_only=True):
    """What clients hold now."""

    clients: int = 0
    matches: int = 0
    transfers: int = 0
    reservations: int = 0
    held_bytes: int = 0
    """Bytes in RAM that cannot be evicted now."""


class ProfileStat(msgspec.Struct, frozen=True, kw_only=True):
    """What the gate gives a profile for one model, artifact and length of context."""

    profile: str
    model: str = ""
    kv_dtype: str = ""
    artifact: str = ""
    """Hex digest, empty for none."""
    context: int = 0
    """Tokens that were measured; it holds up to the next longer one, the longest to twice that."""
    fidelity_class: str = "rejected"
    kl: float = 0.0
    """Nats per token: the worst domain's mean, the upper end of its interval."""
    why: str = ""
    """What stands against a better class."""


class StoreStat(msgspec.Struct, frozen=True, kw_only=True):
    """The store as a whole."""

    version: str = ""
    epoch: int = 0
    """Differs for every arena: totals start from 0 when it changes."""
    uptime_s: float = 0.0
    tiers: tuple[TierStat, ...] = ()
    """Fastest first; tiers that are off may be listed."""
    enabled: dict[str, str] = {}
    """What is in effect and why: policy, profiles, sync, shared. For people."""
    matches: int = 0
    asked_blocks: int = 0
    hits_by_tier_blocks: dict[str, int] = {}
    """Blocks answered, by the tier they were in when asked for.

    `hbm`: those that clients said they had in a cache of their own."""
    miss_blocks: int = 0
    put_blocks: int = 0
    """Blocks that became visible."""
    known_blocks: int = 0
    """Blocks offered that were there already."""
    refused_blocks: int = 0
    """Blocks offered and not taken; `counters` say why."""
    served_bytes: int = 0
    """Encoded bytes handed to engines by `get`."""
    stored_bytes: int = 0
    """Encoded bytes that engines wrote."""
    saved_s: float = 0.0
    """The ledger: predicted recompute time less load time, of loads that were faster."""
    lost_s: float = 0.0
    """The ledger: time lost by loads that were slower."""
    holds: HoldStat = HoldStat()
    write_behind: WriteBehindStat = WriteBehindStat()
    profiles: tuple[ProfileStat, ...] = ()
    """Every entry of the gate; profiles that lose nothing are always allowed and not listed."""
    profile_refusals: dict[str, int] = {}
    """Puts that could not use a lossy profile which the client can encode: "profile: reason"."""
    counters: dict[str, int] = {}
    """Every refusal and failure by name, see `COUNTERS`; a name is there from its first event."""


COUNTERS: dict[str, str] = {
    "put_declined": "Blocks not stored: the policy expects to save less than they would cost.",
    "put_refused_full": "Blocks not stored: RAM had no room that could be made without I/O.",
    "put_refused_gap": "Blocks not stored: those before them are gone, so nobody could find them.",
    "put_refused_gate": "Blocks not stored: no profile that the client can encode is allowed.",
    "put_fallback": "Blocks that the chosen codec could not take and another one did.",
    "put_beside": "Progressive copies stored beside plain ones, in the same put.",
    "stage_refused_full": "Frames below RAM not brought up: no room in RAM.",
    "stage_late": "Frames below RAM that had not arrived at their deadline.",
    "stage_failed": "Frames below RAM whose read failed.",
    "lease_expired": "Matches that ended at their deadline, never fetched.",
    "owner_died": "Client processes that ended while they held something.",
    "demote_dropped": "Frames not copied down: the write-behind queue was full.",
    "demote_declined": "Frames not copied down: the policy expects them to earn nothing there.",
    "demote_throttled": "Frames not copied down: a write budget or a breaker refused.",
    "demote_failed": "Frames not copied down: an I/O error, or the tier was full.",
    "downgraded": "Copies cut short where they lie, to a coarser profile; not a failure.",
    "demoted": "Copies that left RAM for a lower tier; not a failure.",
    "promoted": "Copies read up from a lower tier; not a failure.",
    "encoded": "Copies encoded again on their way down; not a failure.",
    "encode_refused": "Copies that a demotion could not encode again: the codec cannot take them.",
    "encode_failed": "Copies that stayed because the codec worker died or hung over them.",
    "encode_down": "Copies that stayed because there was no codec worker to encode them.",
    "moves_refused": "Moves that a policy named and that were not lawful: a bug of the policy.",
    "sync_failed": "Flushes that could not make blocks durable.",
    "off_nvme": "Times that NVMe was left alone for some seconds: it failed or hung.",
    "off_redis": "Times that Redis was left alone for some seconds: it failed or hung.",
    "missing": "Copies that were not where they should be: evicted or expired there.",
    "corrupt": "Copies dropped because a checksum or a header did not fit.",
    "unknown_format": "Copies kept but not used: of a version or codec not known or not allowed.",
    "invariant_broken": "Bookkeeping did not add up; the store answers only misses since.",
    "no_reuse_across_restarts": "1: nothing found at start was asked for, and much was stored.",
    "call_refused": "Calls with an argument out of bounds.",
    "server_accept_failed": "Connections not accepted: the process has no descriptors left.",
    "server_connections": "Connections accepted; not a failure.",
    "server_refused_calls": "Calls that the store refused, or one client had too many of.",
    "server_refused_connections": "Connections from a user who may not, or beyond the limit.",
    "server_closed_malformed": "Connections closed: bytes that are no call.",
    "server_closed_slow_reader": "Connections closed: answers were left unread.",
    "server_bugs": "Errors inside tierkv; the log has the trace.",
}
"""The names that `StoreStat.counters` uses, with their meaning. Beside them stand TIER_read_STATUS
and TIER_write_STATUS: frames of I/O that did not end with "done" (`tier.Status`)."""


def to_wire(stat: StoreStat) -> dict[str, Any]:
    """Return the dict that answers a `StatCall`."""
    wire: dict[str, Any] = msgspec.to_builtins(stat)
    return wire


def from_wire(wire: dict[str, Any]) -> StoreStat:
    """Read the answer to a `StatCall`.

    Raises: TierKVError: it is not one.
    """
    try:
        return msgspec.convert(wire, StoreStat)
    except msgspec.ValidationError as error:
        raise incompatible(f"the sidecar's counters cannot be read ({error}): upgrade") from error
