"""Fallbacks: what takes the blocks that a profile cannot, chosen as a store would choose it.

A store gives such a block to the smallest profile that needs no calibration and has at least the
class that is asked for (`tierkv.offers.fallback_of`). Here that is the class which the profile has
when those blocks go losslessly, so that what other codecs lose never makes it better or worse than
what it is used for.
"""

from collections.abc import Mapping, Sequence

from tierkv.codec import PROFILES
from tierkv.fidelity import Fidelity
from tierkv.gate import Gate, merge
from tierkv.identity import Identity
from tierkv_codecs.codec import Codec
from tierkv_codecs.lab.evaluate import Results, Tally
from tierkv_codecs.lab.results import entries, entry_of, storable


def candidates(codecs: Sequence[Codec], measured: Sequence[Codec], old: Gate) -> list[Codec]:
    """Return the codecs that blocks may fall back to: of a fixed rate, and measured.

    Args:
        codecs: all there are.
        measured: those of this evaluation.
        old: the gate of earlier ones.
    """
    known = {codec.name for codec in measured} | old.passing()
    return [
        codec
        for codec in codecs
        if codec.lossy and not any(codec.artifact) and codec.name in known & PROFILES.keys()
    ]


def settle(results: Results, identity: Identity, old: Gate) -> Results:
    """Return results in which every profile has the fallback that a store would take.

    Args:
        results: with tallies of each fallback that was tried.
        identity: of the model.
        old: what was measured of it before.
    """
    gate = merge(old, storable(entries(results, identity)))
    tallies = dict(results.tallies)
    for profile in results.profiles:
        own = {domain: results.tallies[profile, domain] for domain in results.domains}
        if any(tally.weight.fallbacks for tally in own.values()):
            chosen = _chosen(results, own, profile, identity, gate)
            tallies |= {(profile, domain): tally for domain, tally in chosen.items()}
    return results._replace(tallies=tallies, others={})


def _chosen(
    results: Results, own: Mapping[str, Tally], profile: str, identity: Identity, gate: Gate
) -> Mapping[str, Tally]:
    least = _class_of(own, results, identity, gate)
    if least is None:
        return own
    names = {fallback for name, _, fallback in results.others if name == profile}
    for name in sorted(names, key=lambda name: -PROFILES[name].ratio):
        fixed = gate.look(identity.family, name, b"", results.suite.context).fidelity
        found = {domain: results.others[profile, domain, name] for domain in results.domains}
        if fixed is None or fixed < least:
            continue
        if (_class_of(found, results, identity, gate) or 0) >= least:
            return found
    return own


def _class_of(
    tallies: Mapping[str, Tally], results: Results, identity: Identity, gate: Gate
) -> Fidelity | None:
    return gate.verdict(entry_of(list(tallies.values()), results.suite, identity)).fidelity
