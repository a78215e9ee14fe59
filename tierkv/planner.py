"""Planner.

Pure decisions over plain data. No I/O, no clock, no lock; the simulator runs the same code.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv import windows
from tierkv.calls import MatchCall
from tierkv.catalog import READY, Catalog
from tierkv.codec import Profile
from tierkv.cost import Rates, Recompute, load_seconds, pick_profile
from tierkv.key import KEY_BYTES
from tierkv.lineage import freed, lawful
from tierkv.plan import Kind, Move, PutPlan, ReclaimPlan, RegionPlan, StagePlan
from tierkv.policy import Reclaimer, ServicePolicy
from tierkv.tier import RAM, Region

Numbers = npt.NDArray[np.signedinteger[Any]]

CARRY_SHARE = 0.5
"""The most of a region's bytes that a reclaim carries on.

Each reclaim frees at least half a region.
"""
CANDIDATES = 8
"""Sealed regions looked at per reclaim, oldest first."""


def plan_reclaim(
    policy: Reclaimer, view: Catalog, tier: int, need: int, granule: int, *, at_once: bool
) -> ReclaimPlan:
    """Choose Moves that free `need` bytes of a tier, or as many as can be.

    What may not be is left out: a policy cannot make a copy that `lineage` forbids.

    Args:
        policy: says what costs least.
        view: the catalog.
        tier: where room is wanted.
        need: bytes; none for 0 and less.
        granule: of the tier's allocations, in bytes.
        at_once: only what frees without I/O.
    """
    moves: list[Move] = []
    sum_freed = refused = 0
    for move in policy.reclaim(view, tier, need, at_once=at_once) if need > 0 else ():
        if sum_freed >= need:
            break
        quick = move.kind in (Kind.DROP, Kind.DOWNGRADE) or not at_once
        if view.tier[move.row] != tier or not quick or not lawful(view, move):
            refused += 1
            continue
        moves.append(move)
        sum_freed += freed(view, move, granule)
    return ReclaimPlan(moves, sum_freed, refused)


def plan_put(
    policy: Reclaimer,
    view: Catalog,
    keys: bytes,
    known: Sequence[bool],
    sizes: Sequence[int],
    profile: Profile,
    free: int,
    granule: int,
) -> PutPlan:
    """Decide which units of a put are written and what makes room for them.

    Units are taken head first; where the policy declines a block or room ends, the rest of the
    chain is refused, in whole blocks: a block behind a gap could never be hit.

    Args:
        policy: says what may enter RAM and what it gives up first.
        view: the catalog.
        keys: of the chain's blocks.
        known: per unit (block-major): needs no copy.
        sizes: per part: RAM bytes to allocate, the profile's upper bound.
        profile: of the new frames.
        free: free bytes of RAM.
        granule: of RAM's allocations, in bytes.
    """
    parts = len(sizes)
    missing = [unit for unit, has in enumerate(known) if not has]
    wanted = _worth(policy, view, keys, missing, parts)
    total = sum(sizes[unit % parts] for unit in wanted)
    reclaim = plan_reclaim(policy, view, RAM, total - free, granule, at_once=True)
    free += reclaim.freed
    fit = len(wanted)
    if total > free:
        fit = 0
        while fit < len(wanted) and free >= sizes[wanted[fit] % parts]:
            free -= sizes[wanted[fit] % parts]
            fit += 1
        while fit and fit < len(wanted) and wanted[fit - 1] // parts == wanted[fit] // parts:
            fit -= 1
    return PutPlan(
        units=wanted[:fit],
        known=len(known) - len(missing),
        refused=len(missing) - fit,
        declined=len(missing) - len(wanted),
        profile=profile,
        moves=reclaim.moves if fit else [],
    )


def _worth(
    policy: Reclaimer, view: Catalog, keys: bytes, missing: list[int], parts: int
) -> list[int]:
    """Return the missing units of those blocks that the policy lets into RAM."""
    blocks = missing if parts == 1 else list(dict.fromkeys(unit // parts for unit in missing))
    worth = policy.offered(
        view, RAM, [keys[block * KEY_BYTES : (block + 1) * KEY_BYTES] for block in blocks]
    )
    if worth == len(blocks):
        return missing
    return [unit for unit in missing if unit // parts < blocks[worth]]


def plan_profile(profiles: Sequence[Profile], lower: Sequence[Rates]) -> Profile:
    """Choose the profile of new blocks: the one that loads fastest from the slowest tier in use.

    A block is encoded once and lives longest in the tier that keeps most; RAM alone keeps raw.
    """
    if not lower:
        return profiles[0]
    return pick_profile(profiles, min(rates.read_bps for rates in lower))


def plan_stage(
    stored: Sequence[int],
    source: Sequence[int],
    rates: Sequence[Rates],
    decode_bps: float,
    raw_bytes: int,
    tokens: int,
    position: int,
    recompute: Recompute,
) -> StagePlan:
    """Choose the length that minimises loading it plus recomputing the rest of the chain.

    Args:
        stored: per block behind what RAM has: bytes to bring up, 0 when in RAM.
        source: per block: number of the tier it comes from.
        rates: by tier number.
        decode_bps: raw bytes per second of the slowest profile in the run.
        raw_bytes: raw bytes of one block.
        tokens: tokens per block.
        position: of the first token behind what RAM has.
        recompute: seconds of prefill; unknown loads everything.

    Returns: a plan whose `blocks` counts those behind what RAM has.
    """
    sums = [0] * len(rates)
    raws = [0] * len(rates)
    best = StagePlan(0, 0.0, 0.0)
    for blocks, (size, tier) in enumerate(zip(stored, source, strict=True), 1):
        sums[tier] += size
        raws[tier] += raw_bytes if size else 0
        load = sum(
            load_seconds(mine, raw, rate, decode_bps)
            for mine, raw, rate in zip(sums, raws, rates, strict=True)
        )
        saved = recompute.seconds(blocks * tokens, position)
        if not recompute.known or saved - load > best.recompute_s - best.load_s:
            best = StagePlan(blocks, load, saved)
    return best


def plan_window_stage(
    stored: Numbers,
    source: Numbers,
    ends: Numbers,
    have: int,
    sizes: windows.Windows,
    rates: Sequence[Rates],
    decode_bps: float,
    call: MatchCall,
) -> StagePlan:
    """Choose where a hit with windows ends, as `plan_stage` chooses a length.

    Args:
        stored: (blocks, parts) bytes to bring up, 0 when in RAM.
        source: (blocks, parts) number of the tier each comes from.
        ends: blocks where a hit may end, ascending, all behind `have`.
        have: blocks of the hit that RAM has.
        sizes: windows by part.
        rates: by tier number.
        decode_bps: raw bytes per second of the slowest profile in the run.
        call: says what computing costs; where that is not known everything is loaded.

    Returns: a plan whose `blocks` counts from the chain's head; 0 where no stage pays.
    """
    recompute = Recompute(call.linear, call.quadratic)
    tokens, position = call.tokens_per_block, call.position
    by_tier = [
        windows.sums(np.where(source == tier, stored, 0), sizes) for tier in range(len(rates))
    ]
    best = StagePlan(0, 0.0, 0.0)
    for end in ends.tolist():
        load = sum(
            load_seconds(int(nbytes[end]), (end - have) * call.raw_bytes, rate, decode_bps)
            for nbytes, rate in zip(by_tier, rates, strict=True)
        )
        saved = recompute.seconds((end - have) * tokens, position + have * tokens)
        if not recompute.known or saved - load > best.recompute_s - best.load_s:
            best = StagePlan(end, load, saved)
    return best


def plan_region(
    policy: ServicePolicy, view: Catalog, tier: int, regions: Sequence[Region]
) -> RegionPlan | None:
    """Choose the region that costs least to free and name what survives it.

    Args:
        policy: says what is worth keeping.
        view: the catalog.
        tier: the regions' tier.
        regions: sealed regions, oldest first.

    Returns: None when every region looked at holds something held or unfinished. What is dropped
        takes the tails of its chains with it, which may lie in other regions and tiers.
    """
    best: RegionPlan | None = None
    least = float("inf")
    for region in regions[:CANDIDATES]:
        mine = view.within(tier, region.start, region.stop)
        if any(view.state[row] != READY or view.holds[row] for row in mine):
            continue
        kept = policy.keeps(view, tier, mine)
        hot = policy.oldest([row for row, keep in zip(mine, kept, strict=True) if keep])
        limit = CARRY_SHARE * (region.stop - region.start)
        carry: list[int] = []
        carried = 0
        for row in reversed(hot):
            if carried + view.allocated[row] <= limit:
                carried += view.allocated[row]
                carry.append(row)
        if carried < least:
            least = carried
            staying = set(carry)
            best = RegionPlan(region.number, carry, [row for row in mine if row not in staying])
        if not least:
            break
    return None if best is None else _whole_chains(policy, view, best)


def _whole_chains(policy: ServicePolicy, view: Catalog, plan: RegionPlan) -> RegionPlan:
    """Let what nobody could reach any more go too, wherever it lies."""
    stranded = set(policy.stranded(view, plan.drops))
    carry = [row for row in plan.carry if row not in stranded]
    return RegionPlan(plan.number, carry, [*plan.drops, *sorted(stranded)])
