"""Write-behind: RAM copies on their way to the lower tiers, at lowest priority.

Each lower tier has a queue of placements, bounded in bytes; what does not fit is dropped and
counted. Batches are taken off the queue's head and go through two lanes of one thread each: one
makes the checksums of a batch while the other writes the batch before, so writes reach the medium
in order. Nothing is written twice: a unit that has a copy there, or is on its way, is passed over.
Nothing polls: a job runs because something was offered, or because the reads that it made way for
are done.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tierkv import planner
from tierkv.calls import FlushCall, FlushReply
from tierkv.catalog import NONE, READY, Rows
from tierkv.limits import count_keys, seconds_of
from tierkv.namespace import digest_of
from tierkv.plan import RegionPlan
from tierkv.store import Lower, Store
from tierkv.tier import RAM, Item, Outcome, RegionTier, Status
from tierkv.tiers.host import aligned

BATCH_BYTES = 16 << 20
"""Between two batches a disk idles for about 0.1 ms: 7 % of 8 MiB."""
SHARED_BATCH_BYTES = 32 << 20
"""A shared tier is asked before each batch what it has, over a pipe that is empty meanwhile."""
BATCH_FRAMES = 32
FIRST_BATCH_BYTES = 4 << 20
"""While the first batch is sealed the medium idles."""
STARVED_S = 0.25
_REASONS = {Status.FULL: "demote_failed", Status.FAILED: "demote_failed"}


class _Batch(NamedTuple):
    """RAM copies, the placements they become, and what a tier needs to know to write them."""

    sources: list[int]
    copies: list[int]
    items: list[Item]


@dataclass(slots=True)
class _Queue:
    lower: Lower
    waiting: deque[tuple[int, int, int, float]] = field(default_factory=deque)
    """(row, serial, bytes, time offered)"""
    nbytes: int = 0
    running: bool = False
    """Whether a job is in the write lane."""
    sealing: bool = False
    """Whether a job is in the seal lane."""
    sealed: _Batch | None = None
    """The next batch to write."""
    written_at: float = float("-inf")
    """Clock when the last batch began to be written."""
    batch: int = 0
    """Frames that were taken off and are not written yet."""

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not (self.waiting or self.running or self.sealing or self.sealed)


@dataclass(slots=True)
class _Flush:
    heads: Callable[[], list[int]]
    """First placements of what was asked for, as they are now."""
    namespace: int
    deadline: float
    done: Callable[[FlushReply], None]


class WriteBehind:
    """Queues, the batches they become, and the flushes that wait for them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.queues = [_Queue(lower) for lower in store.lower]
        self._flushes: list[_Flush] = []

    @property
    def nbytes(self) -> int:
        """Bytes waiting in all queues."""
        return sum(queue.nbytes for queue in self.queues)

    def offer(self, rows: Rows, *, bounded: bool = True) -> None:
        """Queue RAM placements for every lower tier that lacks them. Under the store's lock.

        Within bounds: of bytes, and to what the policy expects to earn its place there.
        """
        store, catalog = self._store, self._store.catalog
        for queue in self.queues:
            worth = [True] * len(rows)
            if bounded:
                worth = store.policy.admits(catalog, queue.lower.number, rows)
                store.counters["demote_declined"] += worth.count(False)
            for row in itertools.compress(rows, worth):
                size = catalog.nbytes[row]
                if bounded and queue.nbytes + size > store.settings.write_behind_bytes:
                    store.counters["demote_dropped"] += 1
                    continue
                queue.waiting.append((row, catalog.serial[row], size, store.clock()))
                queue.nbytes += size
            self._start(queue)

    def flush(self, call: FlushCall, done: Callable[[FlushReply], None]) -> None:
        """Queue what is not durable yet and answer when it is, or at the deadline.

        Raises: TierKVError (invalid): nothing was done.
        """
        store, catalog = self._store, self._store.catalog
        parts = store.parts_of(call.parts)
        count_keys(call.keys, len(parts))

        def heads() -> list[int]:
            found: list[int] = store.heads(call.keys, parts).tolist()
            return found

        namespace = store.namespaces.number(digest_of(call.namespace))
        flush = _Flush(heads, namespace, store.clock() + seconds_of(call.deadline_s), done)
        queued = {entry[:2] for queue in self.queues for entry in queue.waiting}
        rows = [catalog.in_tier(head, RAM) for head in heads()]
        missing = [row for row in rows if row != NONE and (row, catalog.serial[row]) not in queued]
        self._flushes.append(flush)
        self.offer([row for row in missing if catalog.state[row] == READY], bounded=False)
        self._settle_flushes()

    def tick(self) -> None:
        """Answer flushes past their deadline; go on with a tier whose read never ends."""
        self._settle_flushes()
        for queue in self.queues:
            self._start(queue)

    def idle(self) -> bool:
        """Return whether nothing waits and nothing is being written."""
        return all(queue.idle for queue in self.queues)

    def clear(self) -> None:
        """Forget everything that waits."""
        for queue in self.queues:
            queue.waiting.clear()
            queue.nbytes = 0

    def resume(self, lower: Lower) -> None:
        """Go on with a tier that has finished a read."""
        self._start(self.queues[lower.number - 1])

    def _start(self, queue: _Queue) -> None:
        """Write the next batch, unless somebody waits for a read: then at most every STARVED_S."""
        now = self._store.clock()
        turn = not queue.lower.reading or now - queue.written_at >= STARVED_S
        work = queue.sealed or (queue.waiting and not queue.sealing)
        if work and not queue.running and turn:
            queue.running = True
            self._store.executor.submit(queue.lower.writes, partial(self._run, queue))

    def _run(self, queue: _Queue) -> None:
        """Let the next batch be sealed and write the one that is; a job of the write lane."""
        store, lower = self._store, queue.lower
        if lower.regions is not None:
            self._reclaim(queue, lower.regions)
        with store.lock:
            batch, queue.sealed = queue.sealed, None
            if queue.waiting and not queue.sealing:
                ahead = self._begin(queue, first=batch is None)
                queue.sealing = True
                queue.batch += len(ahead.items)
                store.executor.submit(lower.seals, partial(self._seal, queue, ahead))
            if batch is not None:
                queue.written_at = store.clock()
        outcomes = lower.io.write(batch.items) if batch is not None and batch.items else []
        with store.lock:
            if batch is not None:
                self._finish(batch.sources, batch.copies, outcomes)
                queue.batch -= len(batch.items)
            queue.running = False
            self._start(queue)
            self._settle_flushes()
            store.check()

    def _seal(self, queue: _Queue, batch: _Batch) -> None:
        """Make a batch's checksums; a job of the seal lane."""
        queue.lower.io.seal(batch.items)
        with self._store.lock:
            queue.sealing = False
            queue.sealed = batch
            self._start(queue)

    def _begin(self, queue: _Queue, *, first: bool) -> _Batch:
        """Take a batch off the queue, hold its RAM copies and mark the new ones `writing`."""
        store, catalog = self._store, self._store.catalog
        sources: list[int] = []
        copies: list[int] = []
        size, shared = 0, queue.lower.shared is not None
        most = SHARED_BATCH_BYTES if shared else BATCH_BYTES
        most = FIRST_BATCH_BYTES if first else most
        while queue.waiting and len(copies) < BATCH_FRAMES and size < most:
            row, serial, nbytes, _ = queue.waiting.popleft()
            queue.nbytes -= nbytes
            current = catalog.serial[row] == serial and catalog.state[row] == READY
            if not current:
                store.counters["demote_dropped"] += 1
                continue
            if self._there(row, queue.lower.number):
                continue
            copy = self._copy(row, queue.lower)
            if copy is None:
                store.counters["demote_failed"] += 1
                continue
            catalog.hold([row])
            sources.append(row)
            copies.append(copy)
            size += nbytes
        items = [self._item(row, source) for row, source in zip(copies, sources, strict=True)]
        return _Batch(sources, copies, items)

    def _there(self, row: int, tier: int) -> bool:
        """Return whether a copy like the one in `row` is in a tier; a poorer one makes way."""
        store, catalog = self._store, self._store.catalog
        head = catalog.head(catalog.key(row), catalog.part[row])
        copy = catalog.in_tier(head, tier)
        if copy == NONE:
            return False
        busy = catalog.state[copy] != READY or catalog.holds[copy] or not catalog.profile[copy]
        if busy or store.answers(copy, catalog.fidelity[row], catalog.namespace[row]):
            return True
        store.drop([copy])
        return False

    def _copy(self, row: int, lower: Lower) -> int | None:
        """Begin a placement in a lower tier like the one in `row`; None when it does not fit."""
        locator = lower.tier.reserve(self._store.catalog.nbytes[row])
        return None if locator is None else self._store.copy_of(row, lower.number, locator)

    def _item(self, copy: int, source: int) -> Item:
        store, catalog = self._store, self._store.catalog
        pieces = store.host.pieces(catalog.locator[source])
        return Item(store.frame_id(copy), catalog.locator[copy], catalog.nbytes[copy], pieces)

    def _finish(self, sources: list[int], copies: list[int], outcomes: list[Outcome]) -> None:
        store, catalog = self._store, self._store.catalog
        written: list[int] = []
        refused: list[int] = []
        for copy, outcome in zip(copies, outcomes, strict=True):
            if outcome.status is not Status.DONE:
                refused.append(copy)
                store.counters[_REASONS.get(outcome.status, "demote_throttled")] += 1
                continue
            catalog.commit([copy])
            if catalog.generation[copy] < store.namespaces.minimum[catalog.namespace[copy]]:
                store.drop([copy])
            else:
                written.append(copy)
        store.abort(refused[::-1])  # what was reserved last goes first: a log can take it back
        store.policy.touched(catalog, written)
        store.unhold(sources)

    def _reclaim(self, queue: _Queue, tier: RegionTier) -> None:
        """Free regions until the next batch fits beside one spare region for survivors.

        Not on a medium that takes no writes: nothing would come in place of what goes.
        """
        store, lower = self._store, queue.lower
        while True:
            with store.lock:
                regions = tier.regions()
                spare = max((region.stop - region.start for region in regions), default=0)
                batch = min(queue.nbytes + BATCH_FRAMES * tier.granule, BATCH_BYTES)
                if not regions or tier.space().free >= spare + batch:
                    return
            if tier.probe():
                return
            with store.lock:
                plan = planner.plan_region(store.policy, store.catalog, lower.number, regions)
                if plan is None:
                    return
                store.drop(plan.drops)
                store.catalog.hold(plan.carry)
            if not self._carry(lower, tier, plan):
                return

    def _carry(self, lower: Lower, tier: RegionTier, plan: RegionPlan) -> bool:
        """Write a region's survivors again and release it; returns False when a write failed."""
        store = self._store
        for index, row in enumerate(plan.carry):
            if not self._carry_one(lower, tier, row):
                with store.lock:
                    store.unhold(plan.carry[index + 1 :])
                return False
        with store.lock:
            region = next((r for r in tier.regions() if r.number == plan.number), None)
            if region is not None and region.live == 0:
                tier.release(plan.number)
                store.totals["regions_reclaimed"] += 1
        return True

    def _carry_one(self, lower: Lower, tier: RegionTier, row: int) -> bool:
        """Move a held survivor: without a place it goes, when the write fails it stays."""
        store, catalog = self._store, self._store.catalog
        with store.lock:
            nbytes, old = catalog.nbytes[row], catalog.locator[row]
            item = Item(store.frame_id(row), old, nbytes, [aligned(nbytes)])
        sound = lower.io.read([item])[0].status is Status.DONE
        with store.lock:
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
                store.drop([row])
        return written or locator is None

    def _settle_flushes(self) -> None:
        store = self._store
        for flush in list(self._flushes):
            durable = self._durable(flush)
            late = store.clock() >= flush.deadline
            if late or all(durable) or self.idle():
                self._flushes.remove(flush)
                self._answer(flush, bytes(durable))

    def _durable(self, flush: _Flush) -> list[bool]:
        store, catalog = self._store, self._store.catalog
        return [
            any(
                catalog.tier[row] != RAM
                and catalog.state[row] == READY
                and store.answers(row, 0, flush.namespace)
                for row in catalog.copies(head)
            )
            for head in flush.heads()
        ]

    def _answer(self, flush: _Flush, durable: bytes) -> None:
        """Sync every lower tier as the settings say, then answer.

        On the last tier's write thread.
        """
        store = self._store
        power = store.settings.sync == "power"

        def sync() -> None:
            answer = durable
            for lower in store.lower:
                try:
                    lower.tier.sync(power=power)
                except OSError:
                    store.counters["sync_failed"] += 1
                    answer = bytes(len(durable))
            flush.done(FlushReply(durable=answer))

        if store.lower:
            store.executor.submit("control", sync)
        else:
            flush.done(FlushReply(durable=durable))
