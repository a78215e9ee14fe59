"""Reclaim of a log by the region: what survives is written again, the rest goes with its region.

Jobs of the tier's write lane, between two batches; I/O happens outside the store's lock.
"""

from tierkv import planner
from tierkv.catalog import READY
from tierkv.lower import Lower
from tierkv.moves import Moves, stamp_down
from tierkv.plan import RegionPlan
from tierkv.store import Store
from tierkv.tier import Item, RegionTier, Status
from tierkv.tiers.host import aligned


class RegionReclaim:
    """Makes room in one tier."""

    def __init__(self, store: Store, moves: Moves, lower: Lower, tier: RegionTier) -> None:
        self._store = store
        self._moves = moves
        self._lower = lower
        self._tier = tier

    def make_room(self, waiting: int) -> None:
        """Free regions until `waiting` bytes fit beside one spare region for survivors.

        Not on a medium that takes no writes: nothing would come in place of what goes.
        """
        store, lower, tier = self._store, self._lower, self._tier
        while True:
            with store.lock:
                regions = tier.regions()
                spare = max((region.stop - region.start for region in regions), default=0)
                need = spare + waiting - tier.space().free
                if not regions or need <= 0:
                    return
            if tier.probe():
                return
            with store.lock:
                self._moves.relieve(lower.number, need)
                plan = planner.plan_region(store.policy, store.catalog, lower.number, regions)
                if plan is None:
                    return
                store.drop(plan.drops)
                store.catalog.hold(plan.carry)
            if not self._carry(plan):
                return

    def _carry(self, plan: RegionPlan) -> bool:
        """Write a region's survivors again and release it; returns False when a write failed."""
        store, tier = self._store, self._tier
        for index, row in enumerate(plan.carry):
            if not self._carry_one(row):
                with store.lock:
                    store.unhold(plan.carry[index + 1 :])
                return False
        with store.lock:
            region = next((r for r in tier.regions() if r.number == plan.number), None)
            if region is not None and region.live == 0:
                tier.release(plan.number)
                store.totals["regions_reclaimed"] += 1
        return True

    def _carry_one(self, row: int) -> bool:
        """Move a held survivor: without a place it goes, when the write fails it stays."""
        store, catalog, lower, tier = self._store, self._store.catalog, self._lower, self._tier
        with store.lock:
            nbytes, old = catalog.nbytes[row], catalog.locator[row]
            item = Item(store.frame_id(row), old, nbytes, [aligned(nbytes)])
        sound = lower.io.read([item])[0].status is Status.DONE
        with store.lock:
            if sound:
                stamp_down(item, catalog.fidelity[row])
            locator = tier.reserve(nbytes) if sound else None
            lower.carrying = 0 if locator is None else catalog.allocated[row]
        written = locator is not None and (
            lower.io.write([item._replace(locator=locator)])[0].status is Status.DONE
        )
        with store.lock:
            allocated, lower.carrying = catalog.allocated[row], 0
            store.unhold([row])
            free = catalog.state[row] == READY and not catalog.holds[row]
            if locator is not None and not (free and written):
                tier.free(locator, allocated)
            elif free and locator is not None:
                tier.free(old, allocated)
                catalog.resize(row, nbytes, allocated, locator)
            elif free:
                store.drop([row, *store.policy.stranded(catalog, [row])])
        return written or locator is None
