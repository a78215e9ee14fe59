"""The calls between a client and a store: plain data, the same embedded and over the socket.

A *unit* is one (key, part). Units of a call are numbered block-major: unit = block * parts + part.
Arrays travel as little-endian bytes: keys n x 32, parts m x 10 (`Part.pack`), sizes and runs int64.
A *run* is (offset, length) in the arena; a frame is one or more runs, `run_counts` says how many
for each unit, uint16.
"""

import msgspec
import numpy as np

PROTOCOL = 1
MAX_MESSAGE_BYTES = 16 << 20
MAX_UNITS = 65536
MAX_SESSION = 256
PIN_S = 3600.0


class Call(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag_field="op", gc=False):
    """Base of all requests."""


class Hello(Call, frozen=True, tag="hello"):
    """First call of a connection. `closed` names earlier sessions of this process that are over."""

    protocol: int
    client: str
    closed: tuple[int, ...] = ()


class Welcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Answer to Hello; the arena's descriptor comes with it. `epoch` differs for every arena."""

    protocol: int
    session: int
    epoch: int
    arena_bytes: int
    page_bytes: int
    max_message_bytes: int
    max_units: int


class MatchCall(Call, frozen=True, tag="match"):
    """Ask for the longest run of a chain, at no less than `fidelity`, leased in RAM.

    Recomputing n tokens at position p takes linear * n + quadratic * (p * n + n * n / 2) seconds;
    both 0 means unknown: load whatever there is. `deadline_s` bounds the stage and the lease.
    """

    namespace: str
    fingerprint: bytes
    keys: bytes
    parts: bytes
    fidelity: int
    position: int
    tokens_per_block: int
    raw_bytes: int
    """Raw bytes of one block over all parts."""
    linear: float = 0.0
    quadratic: float = 0.0
    deadline_s: float = 10.0
    fetch: bool = False
    """Turn the lease into a transfer at once when the answer is final: saves a round trip."""
    session: str = ""
    """Names the conversation or agent run, at most `MAX_SESSION` characters; empty: not known."""
    ttl_s: float | None = None
    """After so many seconds without a call of the chain nobody will ask for it; None: not known."""
    closed: bool = False
    """The session is over: no call of it follows this one."""
    pin: bool = False
    """Give the chain up last, for `ttl_s`, or where that is None for `PIN_S`."""
    windows: bytes = b""
    """uint32 window of each part in blocks, see `tierkv.windows`; empty: all need all blocks.

    A match with windows is claimed part by part; it cannot be fetched."""
    held: int = 0
    """Blocks from the first on that the client has in a cache of its own: used like the others, but
    neither leased nor brought up. The answer counts them where it goes on behind them, and is
    claimed, not fetched. With windows it is 0."""


class GetReply(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where the frames lie; transfer 0: the lease is gone, a miss."""

    transfer: int
    run_counts: bytes = b""
    runs: bytes = b""
    verify: bool = False
    """Compare the payload checksums of these frames."""


class MatchReply(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`blocks` are leased under `match`, but for those that the client holds itself.

    While `pending`, more are on their way; ask `WaitCall`.
    """

    match: int
    blocks: int
    pending: bool = False
    eta_s: float = 0.0
    load_s: float = 0.0
    recompute_s: float = 0.0
    sources: dict[str, int] = {}
    """Blocks of the answer by the tier they came from."""
    got: GetReply | None = None
    """The transfer of all `blocks`, when the call asked to fetch; its lease is closed then."""
    reach: int = 0
    """With windows: blocks that the parts without one have, in any tier known here. Where that is
    more than `blocks`, what a hit of that length lacks is windows."""


class WaitCall(Call, frozen=True, tag="wait"):
    """Answered when a pending match is final.

    Everything staged arrived, failed, or its deadline.
    """

    match: int


class ReleaseCall(Call, frozen=True, tag="release"):
    """End a match that will not be fetched, or a transfer. One way; unknown numbers are ignored."""

    match: int = 0
    transfer: int = 0
    damaged: tuple[int, ...] = ()
    """Units of the transfer whose bytes do not agree with themselves: their copy in RAM goes."""
    copied_bytes: int = 0
    """Of a transfer of raw frames: payload bytes copied out of the arena, 0 where not told."""
    copied_s: float = 0.0
    """The seconds that took."""


class GetCall(Call, frozen=True, tag="get"):
    """Turn the lease of a final match into a transfer of its first `blocks` blocks."""

    match: int
    blocks: int


class ClaimCall(Call, frozen=True, tag="claim"):
    """Ask for a transfer of some units of a final match that another session may have asked for.

    Its lease goes on: every rank of an engine claims its own parts of what the scheduler matched.
    Whoever is told the number may claim; numbers of other sidecars are not known here.
    """

    match: int
    start: int
    """First block; as many follow as `blocks`."""
    blocks: int
    parts: bytes
    """Those of the match that are wanted."""


class PutCall(Call, frozen=True, tag="put"):
    """Offer sealed blocks. `profiles` are those the client can encode; the store picks one.

    `keys` is the whole chain from its first block; blocks before `start` are touched, not offered.
    If one of those is gone all are refused: a block behind a gap could not be found.
    `position` is that of the chain's first token. `fidelity` is the least class that readers of the
    blocks ask for. If they are `derived`, computed on KV that has lost something, that KV is of
    this class, and so they are at most.
    """

    namespace: str
    fingerprint: bytes
    keys: bytes
    parts: bytes
    raw_bytes: bytes
    """int64 raw bytes of each part of a block."""
    fidelity: int
    position: int
    tokens_per_block: int
    start: int = 0
    profiles: tuple[str, ...] = ("raw",)
    derived: bool = False
    family: bytes = b""
    """`Identity.family`, by which the gate knows the model; without it no profile may lose."""
    artifacts: tuple[bytes, ...] = ()
    """Digest of each profile's artifact, in their order; empty, or left out at the end: none.

    What follows them is of artifacts whose frames the client decodes, too."""
    session: str = ""
    """Names the conversation or agent run, at most `MAX_SESSION` characters; empty: not known."""
    ttl_s: float | None = None
    """After so many seconds without a call of the chain nobody will ask for it; None: not known."""
    closed: bool = False
    """The session is over: no call of it follows this one."""
    pin: bool = False
    """Give the chain up last, for `ttl_s`, or where that is None for `PIN_S`."""


class Beside(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where a progressive copy of each unit of a put goes, too, as in `PutReply`.

    A unit whose payload does not fit has none.
    """

    profile: str
    header_bytes: int
    run_counts: bytes
    runs: bytes


class PutReply(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Which units to write (uint32 unit numbers, ascending) and where; reservation 0: none.

    Each unit's runs hold its frame: `header_bytes` that the store writes at commit, then the
    payload.
    """

    reservation: int
    profile: str = "raw"
    known: int = 0
    refused: int = 0
    units: bytes = b""
    header_bytes: int = 0
    run_counts: bytes = b""
    runs: bytes = b""
    seal: bool = False
    """Send the payload checksums with the commit: RAM is verified on every read."""
    fallback: str = "lossless"
    """Profile of a block that `profile` cannot take."""
    stranger: bool = False
    """The model is not known here: introduce it (`IdentityCall`)."""
    beside: Beside | None = None
    """Encode the units once more. Who does not leaves `CommitCall.beside` empty."""


class CommitCall(Call, frozen=True, tag="commit"):
    """Make written units visible: int64 payload bytes of each unit, 0 gives it and the rest up.

    `checksums`: xxh3-128 of each payload, n x 16 bytes, when the reply to the put asked for them.
    Where the reply's profile has s > 1 segments, `segments` gives the int64 bytes of each, n x s;
    the last may be 0, and checksums are those of the segments.
    """

    reservation: int
    lengths: bytes
    checksums: bytes = b""
    profiles: bytes = b""
    """A byte for each unit, the number of its profile: empty when all have the reply's."""
    segments: bytes = b""
    copied_s: float = 0.0
    """Seconds of copying, where all units are raw; 0: not told."""
    beside: bytes = b""
    """int64 bytes of each segment of the copies beside the units, n x s: zeros give one up."""
    beside_checksums: bytes = b""
    """As `checksums`."""


class IdentityCall(Call, frozen=True, tag="identity"):
    """Introduce a model whose blocks this client puts, so that they can be encoded again."""

    identity: bytes
    """See `tierkv.identity.to_wire`."""


class SettleCall(Call, frozen=True, tag="settle"):
    """Make a pending match final now, with what has arrived; the rest of its stage is given up."""

    match: int


class AbortCall(Call, frozen=True, tag="abort"):
    """Give a reservation up."""

    reservation: int


class FlushCall(Call, frozen=True, tag="flush"):
    """Wait until blocks are durable in a lower tier, at most `deadline_s`."""

    namespace: str
    keys: bytes
    parts: bytes
    deadline_s: float


class FlushReply(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One byte per unit: 1 where a durable copy exists."""

    durable: bytes


class ClearCall(Call, frozen=True, tag="clear"):
    """Make every block of a namespace a miss in every tier from the answer on."""

    namespace: str


class ClearReply(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Frames removed and failures by tier; the new minimum generation."""

    generation: int
    removed: dict[str, int]
    failed: dict[str, str]


class StatCall(Call, frozen=True, tag="stat"):
    """Ask for the counters and the state of every tier; `probe` tries each medium."""

    probe: bool = False


class PolicyCall(Call, frozen=True, tag="policy"):
    """Let another policy decide from now on: a value of `[store] policy`; empty only asks."""

    name: str = ""


class PolicyReply(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The policy that decides now."""

    name: str


class ExplainCall(Call, frozen=True, tag="explain"):
    """Ask why a block is where it is; without a key, why the last drop was made."""

    key: bytes = b""


class Done(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Answer to commit and abort: units that became visible."""

    units: int = 0


AnyCall = (
    Hello
    | MatchCall
    | WaitCall
    | SettleCall
    | ReleaseCall
    | GetCall
    | ClaimCall
    | PutCall
    | CommitCall
    | IdentityCall
    | AbortCall
    | FlushCall
    | ClearCall
    | StatCall
    | PolicyCall
    | ExplainCall
)


def frames_of(arena: memoryview, run_counts: bytes, runs: bytes) -> list[list[memoryview]]:
    """Return the views of each unit's runs."""
    pairs = np.frombuffer(runs, "<i8").reshape(-1, 2).tolist()
    out: list[list[memoryview]] = []
    at = 0
    for count in np.frombuffer(run_counts, "<u2").tolist():
        out.append([arena[start : start + length] for start, length in pairs[at : at + count]])
        at += count
    return out
