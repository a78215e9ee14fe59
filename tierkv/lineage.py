"""Lineage: which copies may be made of which, and what a Move frees. Pure.

A copy is made as it is, or by cutting a progressive frame short, or by encoding an exact copy
again, to something smaller that needs no calibration. A lossy copy is never encoded from a lossy
one. What results must be a profile that the gate allows for the block's model, artifact, context
and readers: the *allowance* that was noted when the block was put, so that a Move makes nothing
that a put could not have made.
"""

from tierkv.catalog import NONE, READY, Catalog
from tierkv.codec import BY_NUMBER
from tierkv.plan import Kind, Move
from tierkv.tier import RAM


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
            return tier == here and not view.holds[row] and cut(view, row, profile) > 0
        case Kind.DEMOTE:
            return here < tier < len(view.tiers) and makes(view, row, profile)
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
    smaller = new.segments == 1 and new.ratio > mine.ratio
    return smaller and not mine.lossy and (not new.lossy or profile in view.allowed(row))


def cut(view: Catalog, row: int, profile: int) -> int:
    """Return the bytes of a frame cut short to a coarser profile, 0 where that may not be."""
    mine = BY_NUMBER.get(view.profile[row])
    new = BY_NUMBER.get(profile)
    if mine is None or new is None or mine.codec_id != new.codec_id:
        return 0
    if not 0 < new.levels < mine.levels or profile not in view.allowed(row):
        return 0
    return view.end(row, new.levels)


def freed(view: Catalog, move: Move, granule: int) -> int:
    """Return the bytes that a Move frees, in the end, in the tier of its placement."""
    match move.kind:
        case Kind.DROP | Kind.DEMOTE:
            return view.allocated[move.row]
        case Kind.DOWNGRADE:
            kept = cut(view, move.row, move.profile)
            return view.allocated[move.row] - -(-kept // granule) * granule
    return 0


def _betters(view: Catalog, row: int) -> bool:
    """Return whether RAM has no copy, or one of a lower fidelity that nobody uses."""
    there = view.in_tier(view.head(view.key(row), view.part[row]), RAM)
    if there == NONE:
        return True
    free = view.state[there] == READY and not view.holds[there]
    return free and view.fidelity[there] < view.fidelity[row]
