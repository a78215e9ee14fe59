"""Results: from what was measured to rows, pairs, layers and the gate's entries."""

from collections.abc import Iterator, Sequence
from itertools import permutations

import msgspec

from tierkv.fidelity import Fidelity
from tierkv.gate import Domain, Entry, Gate, Thresholds
from tierkv.identity import Identity
from tierkv_codecs.lab import measures
from tierkv_codecs.lab.evaluate import ATTENTION, KEYS, VALUES, Results, Suite, Tally
from tierkv_codecs.lab.yardsticks import REFERENCES, YARDSTICKS

REJECTED = "rejected"
GIGA = 1e9


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One profile in one domain. KL and `dnll` in nats per token, speeds in GB of KV a second.

    `ratio_payload` counts the coded tokens and everything of their frames, `ratio_total` all tokens
    and frames, both against 16-bit values. `fidelity_class` is the profile's, so the same in every
    domain: the worst one decides. `fallback_share` of the coded blocks went to `fallback`.
    """

    profile: str
    domain: str
    ratio_payload: float
    ratio_total: float
    kl_mean: float
    kl_lo: float
    kl_hi: float
    kl_p99: float
    top1: float
    dnll: float
    needle_ok: int
    needle_n: int
    encode_gbps: float
    decode_gbps: float
    fidelity_class: str
    fallback: str
    fallback_share: float


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """KL of a profile over that of another on the same sequences, with its paired interval."""

    profile: str
    reference: str
    domain: str
    ratio_payload: float
    """Of the profile."""
    kl_ratio: float
    kl_ratio_lo: float
    kl_ratio_hi: float


class SequenceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One profile on one sequence, for whoever wants to compute an interval of another kind."""

    profile: str
    domain: str
    sequence: int
    document: str
    tokens: int
    kl_mean: float
    kl_max: float
    top1: float
    dnll: float


class LayerRow(msgspec.Struct, frozen=True, kw_only=True):
    """Relative error ||x' - x|| / ||x|| of one layer: keys with RoPE and values of coded tokens.

    Attention's output is that of the continuation's reference queries.
    """

    profile: str
    domain: str
    layer: int
    key_error: float
    value_error: float
    attention_error: float


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """Coded blocks that a profile could not take, and what took them, as in a store.

    `share` is of all coded blocks of the profile and domain.
    """

    profile: str
    domain: str
    fallback: str
    reason: str
    blocks: int
    share: float


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """A profile's class, by the worst domain, and what stands against a better one."""

    fidelity_class: str
    why: str


def domain_of(tally: Tally) -> Domain:
    """Return a tally as the gate takes it."""
    kl = [one.kl for one in tally.predictions]
    mean, p99 = measures.mean(kl), measures.p99(kl)
    agree = measures.mean([one.agree for one in tally.predictions])
    return Domain(
        domain=tally.domain,
        sequences=len(kl),
        tokens=sum(map(len, kl)),
        kl_mean=mean.value,
        kl_lo=mean.lo,
        kl_hi=mean.hi,
        kl_p99=p99.value,
        kl_p99_hi=p99.hi,
        top1=agree.value,
        top1_lo=agree.lo,
        dnll=measures.mean([one.dnll for one in tally.predictions]).value,
        needle_ok=tally.needle_ok,
        needle_n=tally.needle_n,
    )


def entries(results: Results, identity: Identity) -> list[Entry]:
    """Return an entry for each lossy profile measured, yardsticks too."""
    of_profile = {
        profile: [results.tallies[profile, domain] for domain in results.domains]
        for profile in results.profiles
    }
    return [
        entry_of(tallies, results.suite, identity)
        for tallies in of_profile.values()
        if tallies[0].lossy
    ]


def entry_of(tallies: Sequence[Tally], suite: Suite, identity: Identity) -> Entry:
    """Return the entry of a profile from its tally of each domain."""
    artifact = tallies[0].artifact
    return Entry(
        model=identity.model,
        family=identity.family.hex(),
        kv_dtype=identity.kv_dtype,
        profile=tallies[0].profile,
        artifact=artifact.hex() if any(artifact) else "",
        context=suite.context,
        ratio=sum(one.weight.coded_raw for one in tallies)
        / sum(one.weight.coded for one in tallies),
        domains=tuple(map(domain_of, tallies)),
    )


def storable(found: list[Entry]) -> list[Entry]:
    """Return the entries of profiles that can be stored: of all but yardsticks."""
    yardsticks = {codec.name for codec in YARDSTICKS}
    return [entry for entry in found if entry.profile not in yardsticks]


def verdicts(results: Results, found: list[Entry], thresholds: Thresholds) -> dict[str, Verdicts]:
    """Return each profile's class; one that is not lossy is exact, as the lab has checked."""
    gate = Gate(thresholds=thresholds)
    given = {
        profile: Verdicts(fidelity_class=Fidelity.EXACT.label, why="")
        for profile in results.profiles
    }
    for entry in found:
        fidelity, _, why = gate.verdict(entry)
        name = REJECTED if fidelity is None else fidelity.label
        given[entry.profile] = Verdicts(fidelity_class=name, why=why)
    return given


def rows(results: Results, given: dict[str, Verdicts]) -> list[Row]:
    """Return a row for each profile and domain."""
    found = []
    for (profile, name), tally in sorted_tallies(results):
        domain, weight = domain_of(tally), tally.weight
        found.append(
            Row(
                profile=profile,
                domain=name,
                ratio_payload=weight.ratio_payload,
                ratio_total=weight.ratio_total,
                kl_mean=domain.kl_mean,
                kl_lo=domain.kl_lo,
                kl_hi=domain.kl_hi,
                kl_p99=domain.kl_p99,
                top1=domain.top1,
                dnll=domain.dnll,
                needle_ok=domain.needle_ok,
                needle_n=domain.needle_n,
                encode_gbps=weight.encode_bytes / weight.encode_s / GIGA,
                decode_gbps=weight.encode_bytes / weight.decode_s / GIGA,
                fidelity_class=given[profile].fidelity_class,
                fallback=tally.fallback if weight.fallbacks else "",
                fallback_share=sum(weight.fallbacks.values()) / weight.blocks,
            )
        )
    return found


def pairs(results: Results) -> list[Pair]:
    """Return the KL of every lossy profile over every other's, in each domain."""
    found = []
    for domain in results.domains:
        tallies = {
            profile: results.tallies[profile, domain]
            for profile in results.profiles
            if results.tallies[profile, domain].lossy
        }
        found += [
            Pair(
                profile=one,
                reference=other,
                domain=domain,
                ratio_payload=tallies[one].weight.ratio_payload,
                kl_ratio=ratio.value,
                kl_ratio_lo=ratio.lo,
                kl_ratio_hi=ratio.hi,
            )
            for one, other in permutations(tallies, 2)
            for ratio in [measures.ratio(_kl(tallies[one]), _kl(tallies[other]))]
        ]
    return found


def matches(found: Sequence[Pair]) -> list[Pair]:
    """Return the pairs of a calibrated profile and the format whose loss it must not exceed."""
    return [pair for pair in found if REFERENCES.get(pair.profile) == pair.reference]


def _kl(tally: Tally) -> list[measures.Doubles]:
    return [one.kl for one in tally.predictions]


def sequences(results: Results) -> list[SequenceRow]:
    """Return a row for each profile and sequence."""
    return [
        SequenceRow(
            profile=profile,
            domain=domain,
            sequence=number,
            document=document,
            tokens=len(one.kl),
            kl_mean=float(one.kl.mean()),
            kl_max=float(one.kl.max()),
            top1=float(one.agree.mean()),
            dnll=float(one.dnll.mean()),
        )
        for (profile, domain), tally in sorted_tallies(results)
        for number, (document, one) in enumerate(
            zip(tally.documents, tally.predictions, strict=True)
        )
    ]


def fallbacks(results: Results) -> list[Fallback]:
    """Return a row for each profile, domain and reason."""
    return [
        Fallback(
            profile=profile,
            domain=domain,
            fallback=fallback,
            reason=reason,
            blocks=blocks,
            share=blocks / tally.weight.blocks,
        )
        for (profile, domain), tally in sorted_tallies(results)
        for (reason, fallback), blocks in tally.weight.fallbacks.items()
    ]


def layers(results: Results) -> list[LayerRow]:
    """Return a row for each profile, domain and layer."""
    return [
        LayerRow(
            profile=profile,
            domain=domain,
            layer=number,
            key_error=key,
            value_error=value,
            attention_error=attention,
        )
        for (profile, domain), tally in sorted_tallies(results)
        for number, (key, value, attention) in enumerate(
            zip(*(tally.relative(kind) for kind in (KEYS, VALUES, ATTENTION)), strict=True)
        )
    ]


def sorted_tallies(results: Results) -> Iterator[tuple[tuple[str, str], Tally]]:
    """Yield tallies profile by profile, in the order of domains."""
    for profile in results.profiles:
        for domain in results.domains:
            yield (profile, domain), results.tallies[profile, domain]
