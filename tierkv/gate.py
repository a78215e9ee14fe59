"""Gate: which lossy profile a model may use, by what its loss was measured to be.

A gate file is JSON that `tierkv eval` writes and people can read: thresholds, and an entry for each
(model family, profile, artifact, KV dtype, context length) with what was measured in each domain.
An entry's class is never written down: it follows from its numbers and the file's thresholds, so
changing a threshold is one edit. Every number counts by the end of its 95% interval that speaks
against the profile, and the worst domain decides.

    near lossless   KL mean <= 0.001   KL p99 <= 0.01   top-1 >= 97%
    safe                       0.01             0.1             92%
    economy                    0.05             0.5             85%      above: rejected

In every class each needle that the model finds in exact KV must be found. KL is in nats per token.
The thresholds are the defaults; they were chosen on SmolLM2-135M at 1,024 tokens of context.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec

from tierkv.errors import TierKVError, invalid, unavailable
from tierkv.fidelity import Fidelity
from tierkv.identity import DTYPE_BYTES

FORMAT = "tierkv.gate"
VERSION = 1
MAX_FILE_BYTES = 8 << 20
MAX_ENTRIES = 4096
MAX_CONTEXT = 1 << 31
REACH = 2
"""An entry speaks for contexts up to this many times the longest measured one."""
HEX_DIGEST = 64


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a class asks for: most KL in nats per token, least share of equal top-1 tokens."""

    kl_mean: float
    kl_p99: float
    top1: float


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of each class; a better class never allows more than a worse one."""

    near_lossless: Limit = Limit(kl_mean=0.001, kl_p99=0.01, top1=0.97)
    safe: Limit = Limit(kl_mean=0.01, kl_p99=0.1, top1=0.92)
    economy: Limit = Limit(kl_mean=0.05, kl_p99=0.5, top1=0.85)

    def classes(self) -> tuple[tuple[Fidelity, Limit], ...]:
        """Return the limits by class, the best first."""
        return (
            (Fidelity.NEAR_LOSSLESS, self.near_lossless),
            (Fidelity.SAFE, self.safe),
            (Fidelity.ECONOMY, self.economy),
        )


class Domain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a profile did to one kind of text; `lo` and `hi` are ends of a 95% interval.

    `dnll` is what the right next token lost, in nats. Needles count only where the model finds them
    in exact KV.
    """

    domain: str
    sequences: int
    tokens: int
    kl_mean: float
    kl_lo: float
    kl_hi: float
    kl_p99: float
    kl_p99_hi: float
    top1: float
    top1_lo: float
    dnll: float
    needle_ok: int = 0
    needle_n: int = 0

    def misses(self, limit: Limit) -> str:
        """Return what of a limit does not hold, empty when all does."""
        kl_mean, kl_p99 = max(self.kl_mean, self.kl_hi), max(self.kl_p99, self.kl_p99_hi)
        top1 = min(self.top1, self.top1_lo)
        if kl_mean > limit.kl_mean:
            return f"{self.domain}: mean KL up to {kl_mean:.2g} > {limit.kl_mean:g}"
        if kl_p99 > limit.kl_p99:
            return f"{self.domain}: p99 KL up to {kl_p99:.2g} > {limit.kl_p99:g}"
        if top1 < limit.top1:
            return f"{self.domain}: top-1 down to {top1:.1%} < {limit.top1:.1%}"
        if self.needle_ok < self.needle_n:
            return f"{self.domain}: {self.needle_ok} of {self.needle_n} needles found"
        return ""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One profile measured on one model. Digests are hex; `artifact` is empty for none.

    `family` is `Identity.family`; `model` and `ratio` are for people.
    """

    model: str
    family: str
    kv_dtype: str
    profile: str
    artifact: str
    context: int
    """Tokens of prefix that were measured."""
    ratio: float
    domains: tuple[Domain, ...]

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What there is one entry for."""
        return self.family, self.kv_dtype, self.profile, self.artifact, self.context

    @property
    def kl(self) -> float:
        """Mean KL in nats per token: the upper end, in the worst domain."""
        return max(max(one.kl_hi, one.kl_mean) for one in self.domains)


class _Head(msgspec.Struct, frozen=True):
    """What is read of any version."""

    format: str
    version: int


class Verdict(NamedTuple):
    """What a profile may promise: None for nothing. `why` says what stands against more."""

    fidelity: Fidelity | None
    kl: float
    why: str


class Gate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A gate file's content. Pure data; two gates of equal entries decide alike."""

    format: str = FORMAT
    version: int = VERSION
    thresholds: Thresholds = Thresholds()
    entries: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be. Raises: TierKVError (invalid) naming the entry."""
        _check_thresholds(self.thresholds)
        if len(self.entries) > MAX_ENTRIES:
            raise invalid(f"{len(self.entries)} entries are more than {MAX_ENTRIES}")
        seen: dict[tuple[str, str, str, str, int], int] = {}
        for number, entry in enumerate(self.entries):
            try:
                _check_entry(entry)
            except TierKVError as error:
                raise invalid(f"entries[{number}] ({entry.profile}): {error}") from None
            if entry.key in seen:
                raise invalid(
                    f"entries[{number}] ({entry.profile}) measures what entries"
                    f"[{seen[entry.key]}] does: remove one"
                )
            seen[entry.key] = number

    def look(self, family: bytes, profile: str, artifact: bytes, context: int) -> Verdict:
        """Return what a profile may promise for a context of so many tokens.

        The entry of the shortest measured context that is no shorter speaks for it; beyond the
        longest one that entry does, up to twice its length.

        Args:
            family: `Identity.family`, which names the KV dtype too.
            profile: a lossy one.
            artifact: its digest, 32 bytes; all zero for a profile that needs none.
            context: tokens of the sequence that the block is part of, as far as it goes.
        """
        digest = artifact.hex() if any(artifact) else ""
        known = self._entries.get((family.hex(), profile))
        if not known:
            return Verdict(None, math.inf, "not measured for this model: run `tierkv eval`")
        entries = known.get(digest)
        if not entries:
            return Verdict(None, math.inf, "measured with another artifact only")
        longest = entries[-1]
        if context > REACH * longest.context:
            why = f"contexts above {REACH} x {longest.context} tokens were not measured"
            return Verdict(None, math.inf, why)
        entry = next((one for one in entries if one.context >= context), longest)
        return self.verdict(entry)

    def verdict(self, entry: Entry) -> Verdict:
        """Return the class of an entry by this gate's thresholds."""
        why = ""
        for fidelity, limit in self.thresholds.classes():
            missed = next(filter(None, (one.misses(limit) for one in entry.domains)), "")
            if not missed:
                return Verdict(fidelity, entry.kl, why)
            why = missed
        return Verdict(None, entry.kl, why)

    def passing(self) -> frozenset[str]:
        """Return the profiles that some model may use."""
        return frozenset(
            entry.profile for entry in self.entries if self.verdict(entry).fidelity is not None
        )

    @cached_property
    def _entries(self) -> Mapping[tuple[str, str], dict[str, list[Entry]]]:
        """Entries by (family, profile) and artifact, the shortest context first."""
        found: dict[tuple[str, str], dict[str, list[Entry]]] = {}
        for entry in sorted(self.entries, key=lambda one: one.context):
            one = found.setdefault((entry.family, entry.profile), {})
            one.setdefault(entry.artifact, []).append(entry)
        return found


def load(path: str | Path) -> Gate:
    """Read a gate file. Raises: TierKVError: it cannot be read, or says what cannot be."""
    fix = "make it with `tierkv eval --out` a new folder; without [store] gate all is lossless"
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise unavailable(f"cannot read the gate file {path}: {error.strerror}: {fix}") from error
    if len(data) > MAX_FILE_BYTES:
        raise invalid(f"{path} has more than {MAX_FILE_BYTES} bytes: is it a gate file? {fix}")
    try:
        return parse(data)
    except TierKVError as error:
        raise invalid(f"{path}: {error}: {fix}") from error


def named(path: str) -> Gate | None:
    """Read the gate file that settings name, none where they name none. Raises: as `load`."""
    return load(path) if path else None


def parse(data: bytes) -> Gate:
    """Read the bytes of a gate file. Raises: TierKVError (invalid): with where and what."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT or head.version != VERSION:
            raise invalid(
                f"format {head.format[:80]!r} version {head.version} is not {FORMAT!r} version"
                f" {VERSION}: write it again with this release's `tierkv eval`"
            )
        return msgspec.json.decode(data, type=Gate)
    except msgspec.MsgspecError as error:
        cause = error.__cause__
        raise invalid(str(cause if isinstance(cause, TierKVError) else error)) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"it is not JSON: {error}") from error


def dump(gate: Gate) -> bytes:
    """Return a gate as the text of its file."""
    return msgspec.json.format(msgspec.json.encode(gate), indent=2) + b"\n"


def merge(old: Gate, entries: Iterable[Entry]) -> Gate:
    """Return a gate with further entries; one that was measured again replaces the old one."""
    found = {entry.key: entry for entry in (*old.entries, *entries)}
    return msgspec.structs.replace(old, entries=tuple(found.values()))


def _check_thresholds(thresholds: Thresholds) -> None:
    better: Limit | None = None
    for fidelity, limit in thresholds.classes():
        name = fidelity.label
        _check_numbers(limit, ("kl_mean", "kl_p99"), f"thresholds.{name}.")
        _check_share(limit.top1, f"thresholds.{name}.top1")
        if better is not None and (
            limit.kl_mean < better.kl_mean
            or limit.kl_p99 < better.kl_p99
            or limit.top1 > better.top1
        ):
            raise invalid(f"thresholds.{name} asks for more than the class above it")
        better = limit


def _check_entry(entry: Entry) -> None:
    for name, digest in {"family": entry.family, "artifact": entry.artifact}.items():
        sound = len(digest) == HEX_DIGEST and not digest.strip("0123456789abcdef")
        if not sound and (digest or name == "family"):
            raise invalid(f"{name} is {digest[:80]!r}: it is {HEX_DIGEST} hex digits")
    if entry.kv_dtype not in DTYPE_BYTES:
        known = ", ".join(sorted(DTYPE_BYTES))
        raise invalid(f"kv_dtype {entry.kv_dtype[:80]!r} is not known; use one of {known}")
    if not entry.profile:
        raise invalid("profile is empty")
    if not 0 < entry.context <= MAX_CONTEXT:
        raise invalid(f"context is {entry.context} tokens: it is 1 to {MAX_CONTEXT}")
    _check_numbers(entry, ("ratio",))
    names = [domain.domain for domain in entry.domains]
    if not names or len(set(names)) < len(names) or "" in names:
        raise invalid(f"domains are {names}: there is at least one, and each has its own name")
    for domain in entry.domains:
        _check_domain(domain)


def _check_domain(domain: Domain) -> None:
    where = f"domain {domain.domain!r}: "
    _check_numbers(domain, ("kl_mean", "kl_lo", "kl_hi", "kl_p99", "kl_p99_hi"), where)
    _check_share(domain.top1, f"{where}top1")
    _check_share(domain.top1_lo, f"{where}top1_lo")
    if not math.isfinite(domain.dnll):
        raise invalid(f"{where}dnll is {domain.dnll}")
    if domain.sequences < 1 or domain.tokens < 1:
        raise invalid(f"{where}{domain.sequences} sequences of {domain.tokens} tokens show nothing")
    if not 0 <= domain.needle_ok <= domain.needle_n:
        raise invalid(f"{where}{domain.needle_ok} of {domain.needle_n} needles cannot be")


def _check_numbers(of: msgspec.Struct, names: Iterable[str], where: str = "") -> None:
    for name in names:
        value = getattr(of, name)
        if not 0 <= value < math.inf:
            raise invalid(f"{where}{name} is {value}: it is 0 or more")


def _check_share(value: float, name: str) -> None:
    if not 0 <= value <= 1:
        raise invalid(f"{name} is {value}: it is a share from 0 to 1")
