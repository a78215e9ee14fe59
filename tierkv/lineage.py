"""Lineage: which copies may be made of which, and what a Move frees. Pure.

A copy is made as it is, or by cutting a progressive frame short, or by encoding an exact copy
again, to something smaller, by a calibration that who encodes has. A lossy copy is never encoded
from a lossy one. What results must be a profile that the gate allows for the block's model,
artifact, context and readers: the *allowance* that was noted when the block was put, so that a Move
makes nothing that a put could not have made.
"""

from collections.abc import Sequence
from itertools import accumulate

from tierkv import pairs
from tierkv.catalog import NONE, READY, Catalog
from tierkv.codec import BY_NUMBER, Profile
from tierkv.frame import NO_ARTIFACT
from tierkv.plan import Kind, Move
from tierkv.tier import RAM

NO_CALIBRATED, NOTHING = 1, 2
"""Of a block that could not be encoded: what can not be made of it any more."""


def lawful(view: Catalog, move: Move) -> bool:
    """Return whether a Move may be carried out on what is there now."""
    kind, row, tier, profile = move
    if view.state[row] != READY:
        return False
    here = view.tier[row]
    match kind:
        case Kind.DROP:
            return tier == here
        case Kind.DOWNGRADE:
            free = tier == here and here in view.cuts and not view.holds[row]
            return free and cut(view, row, profile) > 0
        case Kind.DEMOTE:
            return here == RAM < tier < len(view.tiers) and makes(view, row, profile)
        case Kind.PROMOTE:
            return tier == RAM < here and profile == view.profile[row] and _betters(view, row)
    return False


def makes(view: Catalog, row: int, profile: int) -> bool:
    """Return whether a copy of a profile may be made of a placement."""
    mine = BY_NUMBER.get(view.profile[row])
    new = BY_NUMBER.get(profile)
    if mine is None or new is None:
        return False
    if new == mine or cut(view, row, profile):
        return True
    return new.ratio > mine.ratio and not mine.lossy and encodable(view, row, new)


def encodable(view: Catalog, row: int, profile: Profile) -> bool:
    """Return whether a profile may be encoded of a placement's block, if that is exact."""
    allowed = view.allowed(row).get(profile.number)
    if profile.lossy and allowed is None:
        return False
    artifact = allowed.artifact if allowed else NO_ARTIFACT
    most = NO_CALIBRATED if artifact == NO_ARTIFACT else 0
    return artifact in view.encodes and view.fixed[row] <= most


def cut(view: Catalog, row: int, profile: int) -> int:
    """Return the bytes of a frame cut short to a coarser profile, 0 where that may not be."""
    mine = BY_NUMBER.get(view.profile[row])
    new = BY_NUMBER.get(profile)
    if mine is None or new is None or mine.codec_id != new.codec_id:
        return 0
    if not 0 < new.levels < mine.levels or profile not in view.allowed(row):
        return 0
    return end(view, row, new.levels)


def end(view: Catalog, row: int, segments: int) -> int:
    """Return the bytes of a row's frame cut short behind 1 to 3 segments; 0: not known."""
    columns = view.end1, view.end2, view.end3
    return columns[segments - 1][row]


def note_ends(view: Catalog, row: int, known: tuple[int, int, int]) -> None:
    """Note what `ends` says of a row's frame."""
    first, second, third = known
    view.restate(row, end1=first, end2=second, end3=third)


def size(view: Catalog, row: int, profile: int) -> int:
    """Return the bytes of a copy that takes no encoding, 0 where it takes some or may not be."""
    return view.nbytes[row] if profile == view.profile[row] else cut(view, row, profile)


def fidelity(view: Catalog, row: int, profile: int) -> int:
    """Return what a copy that may be made of a placement promises."""
    allowed = view.allowed(row).get(profile)
    mine = view.fidelity[row]
    return mine if allowed is None or profile == view.profile[row] else min(mine, allowed.fidelity)


def freed(view: Catalog, move: Move, granule: int) -> int:
    """Return the bytes that a Move frees, in the end, in the tier of its placement."""
    match move.kind:
        case Kind.DROP | Kind.DEMOTE:
            return view.allocated[move.row]
        case Kind.DOWNGRADE:
            kept = cut(view, move.row, move.profile)
            return view.allocated[move.row] - -(-kept // granule) * granule
    return 0


def ends(profile: Profile, header_bytes: int, segments: Sequence[int]) -> tuple[int, int, int]:
    """Return the columns of a frame: its bytes when it is cut short behind 1, 2, 3 segments.

    Zeros where it is not the whole of a progressive profile: nobody could say what a prefix is.
    """
    levels = profile.levels
    whole = levels > 1 and all(segments[:levels]) and not any(segments[levels:])
    sums = [header_bytes + end for end in accumulate(segments[: levels - 1])] if whole else []
    first, second, third = (*sums, 0, 0, 0)[:3]
    return first, second, third


def _betters(view: Catalog, row: int) -> bool:
    """Return whether RAM has no such copy, or a lower, cleared or foreign one that nobody uses."""
    there = pairs.place(view, view.head(view.key(row), view.part[row]), view.profile[row])
    if there == NONE:
        return True
    free = view.state[there] == READY and not view.holds[there]
    lower = view.fidelity[there] < view.fidelity[row]
    foreign = view.namespace[there] != view.namespace[row]
    return free and (lower or foreign or view.generation[there] < view.generation[row])
