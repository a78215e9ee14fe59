"""Planner: pure decisions over plain data. No I/O, no clock, no lock; the simulator runs the same code."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierkv.catalog import Rows, State
from tierkv.codec import Profile
from tierkv.cost import Rates, Recompute, load_seconds, pick_profile
from tierkv.plan import PutPlan, RegionPlan, StagePlan
from tierkv.policy import Policy, View
from tierkv.tier import Region

CARRY_SHARE = 0.5
"""The most of a region's bytes that a reclaim carries on: each reclaim frees at least half a region."""
CANDIDATES = 8
"""Sealed regions looked at per reclaim, oldest first."""


def plan_put(
    policy: Policy,
    view: View,
    known: npt.NDArray[np.bool_],
    sizes: npt.NDArray[np.int64],
    profile: Profile,
    free: int,
    parts: int,
) -> PutPlan:
    """Decide which units of a put are written and what makes room for them.

    Units are taken head first; where room ends the rest of the chain is refused, in whole blocks:
    a block behind a gap could never be hit.

    Args:
        known: per unit (block-major): a copy of at least its fidelity exists.
        sizes: per unit: RAM bytes to allocate, the profile's upper bound.
        free: free bytes of RAM.
        parts: units per block.
    """
    wanted = np.flatnonzero(~known)
    total = int(sizes[wanted].sum())
    drops = np.empty(0, np.int32)
    if total > free:
        drops = policy.victims(view, 0, total - free)
        free += int(view.allocated[drops].sum())
    fit = int(np.searchsorted(np.cumsum(sizes[wanted]), free, side="right"))
    if fit < len(wanted):
        first_refused_block = wanted[fit] // parts
        fit = int(np.searchsorted(wanted, first_refused_block * parts))
        drops = drops if fit else np.empty(0, np.int32)
    return PutPlan(
        units=wanted[:fit],
        known=int(known.sum()),
        refused=len(wanted) - fit,
        profile=profile,
        drops=drops,
    )


def plan_profile(profiles: Sequence[Profile], lower: Sequence[Rates]) -> Profile:
    """Choose the profile of new blocks: the one that loads fastest from the slowest tier in use.

    A block is encoded once and lives longest in the tier that keeps most; RAM alone keeps raw.
    """
    if not lower:
        return profiles[0]
    return pick_profile(profiles, min(rates.read_bps for rates in lower))


def plan_stage(
    ready: int,
    stored: npt.NDArray[np.int64],
    source: npt.NDArray[np.int64],
    rates: Sequence[Rates],
    decode_bps: float,
    raw_bytes: int,
    tokens: int,
    position: int,
    recompute: Recompute,
) -> StagePlan:
    """Choose the length that minimises loading it plus recomputing the rest of the chain.

    Args:
        ready: blocks already in RAM at the head of the chain; they are never given back.
        stored: per block of the chain's available run: bytes to bring up, 0 when in RAM.
        source: per block: number of the tier it comes from.
        rates: by tier number.
        decode_bps: raw bytes per second of the slowest profile in the run.
        raw_bytes: raw bytes of one block.
        tokens: tokens per block.
        position: of the chain's first token.
        recompute: seconds of prefill; unknown loads everything.
    """
    count = len(stored) - ready
    load = np.zeros(count + 1)
    for tier, rate in enumerate(rates):
        mine = np.where(source[ready:] == tier, stored[ready:], 0)
        sums = np.concatenate([[0], np.cumsum(mine)])
        raw = np.concatenate([[0], np.cumsum(mine > 0)]) * raw_bytes
        load += (sums > 0) * rate.latency_s + sums / rate.read_bps + raw / decode_bps
    first = position + ready * tokens
    saved = np.array([recompute.seconds(n * tokens, first) for n in range(count + 1)])
    best = int(np.argmin(load - saved)) if recompute.known else count
    return StagePlan(ready + best, float(load[best]), float(saved[best]))


def plan_region(
    policy: Policy, view: View, tier: int, regions: Sequence[Region], rows: Rows
) -> RegionPlan | None:
    """Choose the region that costs least to free and name what survives it.

    Args:
        regions: sealed regions, oldest first.
        rows: all placements of the tier.

    Returns: None when every region holds something held or unfinished.
    """
    starts = np.array([region.start for region in regions], np.int64)
    order = np.argsort(starts)
    lies = np.searchsorted(starts[order], view.locator[rows], side="right") - 1
    inside = lies >= 0
    owner = np.where(inside, order[lies], -1)
    stops = np.array([region.stop for region in regions], np.int64)
    owner[inside & (view.locator[rows] >= stops[owner])] = -1
    busy = (view.state[rows] != State.READY) | (view.holds[rows] > 0)
    kept = policy.keeps(view, tier, rows)
    sizes = view.allocated[rows]
    best, least = -1, np.inf
    for number, region in enumerate(regions[:CANDIDATES]):
        mine = owner == number
        if (busy & mine).any():
            continue
        carried = min(int(sizes[mine & kept].sum()), CARRY_SHARE * (region.stop - region.start))
        if carried < least:
            best, least = number, carried
    if best < 0:
        return None
    mine = rows[owner == best]
    hot = policy.oldest(rows[(owner == best) & kept])[::-1]
    limit = CARRY_SHARE * (regions[best].stop - regions[best].start)
    carry = hot[np.cumsum(view.allocated[hot]) <= limit]
    return RegionPlan(regions[best].number, carry, np.setdiff1d(mine, carry).astype(np.int32))
