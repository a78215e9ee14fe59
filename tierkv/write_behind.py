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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tierkv import lineage, pairs
from tierkv.calls import FlushCall, FlushReply
from tierkv.catalog import NONE, READY, Rows
from tierkv.codec import BY_NUMBER
from tierkv.encoder import Encoded
from tierkv.limits import count_keys, seconds_of
from tierkv.lower import Lower
from tierkv.moves import Moves, prefix
from tierkv.namespace import digest_of
from tierkv.plan import Move
from tierkv.region_reclaim import RegionReclaim
from tierkv.store import Store
from tierkv.tier import RAM, Item, Outcome, Status

BATCH_BYTES = 16 << 20
"""Between two batches a disk idles for about 0.1 ms: 7 % of 8 MiB."""
SHARED_BATCH_BYTES = 32 << 20
"""A shared tier is asked before each batch what it has, over a pipe that is empty meanwhile."""
BATCH_FRAMES = 32
FIRST_BATCH_BYTES = 4 << 20
"""While the first batch is sealed the medium idles."""
STARVED_S = 0.25
_REASONS = {Status.FULL: "demote_failed", Status.FAILED: "demote_failed"}


class _Entry(NamedTuple):
    """A RAM placement to copy; the bytes are those that it counts for in the queue.

    Of a demotion: the Move, for which the placement is held, and the frame where it is another.
    """

    row: int
    serial: int
    nbytes: int
    at: float
    """Clock when it was queued."""
    move: Move | None = None
    frame: Encoded | None = None


class _Batch(NamedTuple):
    """RAM copies, the placements they become, and what a tier needs to know to write them."""

    sources: list[_Entry]
    copies: list[int]
    items: list[Item]


@dataclass(slots=True)
class _Queue:
    lower: Lower
    reclaim: RegionReclaim | None
    waiting: deque[_Entry] = field(default_factory=deque)
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

    def __init__(self, store: Store, moves: Moves) -> None:
        self._store = store
        self._moves = moves
        self.queues = [
            _Queue(low, RegionReclaim(store, moves, low, low.regions) if low.regions else None)
            for low in store.lower
        ]
        self._flushes: list[_Flush] = []

    @property
    def nbytes(self) -> int:
        """Bytes waiting in all queues."""
        return sum(queue.nbytes for queue in self.queues)

    @property
    def going(self) -> int:
        """Bytes of RAM that demotions under way will free."""
        return self._moves.going

    def offer(self, rows: Rows, *, bounded: bool = True) -> None:
        """Queue RAM placements for every lower tier that lacks them. Under the store's lock.

        Of a pair one is. Within bounds: of bytes, and to what the policy expects to earn there.
        """
        store, catalog = self._store, self._store.catalog
        rows = list(dict.fromkeys(pairs.down(catalog, row) for row in rows))
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
                self._add(queue, _Entry(row, catalog.serial[row], size, store.clock()))
            self._start(queue)

    def demote(self, move: Move, encoded: Encoded | None = None) -> None:
        """Copy a RAM placement, which is held for this, and give it up. Under the store's lock.

        Args:
            move: a lawful demotion.
            encoded: what is written where it is neither the frame in RAM nor a prefix of it.
        """
        store, catalog, queue = self._store, self._store.catalog, self.queues[move.tier - 1]
        size = encoded.nbytes if encoded else lineage.size(catalog, move.row, move.profile)
        entry = _Entry(move.row, catalog.serial[move.row], size, store.clock(), move, encoded)
        self._add(queue, entry)
        self._start(queue)

    @staticmethod
    def _add(queue: _Queue, entry: _Entry) -> None:
        queue.waiting.append(entry)
        queue.nbytes += entry.nbytes

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
        rows = [store.ready_in(RAM, head, 0, namespace) for head in heads()]
        rows = [pairs.down(catalog, row) for row in rows if row != NONE]
        self._flushes.append(flush)
        missing = [row for row in rows if (row, catalog.serial[row]) not in queued]
        self.offer(missing, bounded=False)
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
            self._let_go([entry for entry in queue.waiting if entry.move])
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
        if queue.reclaim is not None:
            with store.lock:
                waiting = queue.nbytes + BATCH_FRAMES * lower.tier.granule
            queue.reclaim.make_room(min(waiting, BATCH_BYTES))
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
        sources: list[_Entry] = []
        copies: list[int] = []
        size, shared = 0, queue.lower.shared is not None
        most = SHARED_BATCH_BYTES if shared else BATCH_BYTES
        most = FIRST_BATCH_BYTES if first else most
        while queue.waiting and len(copies) < BATCH_FRAMES and size < most:
            entry = queue.waiting.popleft()
            row = entry.row
            queue.nbytes -= entry.nbytes
            current = catalog.serial[row] == entry.serial and catalog.state[row] == READY
            if not current:
                store.counters["demote_dropped"] += 1
            elif not self._there(entry, queue.lower.number):
                copy = self._copy(entry, queue.lower)
                if copy is not None:
                    sources.append(entry)
                    copies.append(copy)
                    size += entry.nbytes
                    if not entry.move:
                        catalog.hold([row])
                    continue
                store.counters["demote_failed"] += 1
            self._let_go([entry])
        items = [self._item(row, source) for row, source in zip(copies, sources, strict=True)]
        return _Batch(sources, copies, items)

    def _let_go(self, entries: Sequence[_Entry]) -> None:
        """End the holds of demotions; what is below now, and used by nobody, is given up here."""
        store, catalog = self._store, self._store.catalog
        moved = [entry.row for entry in entries if entry.move]
        self._moves.going -= sum(catalog.allocated[row] for row in moved)
        store.unhold(moved)
        for entry in entries:
            row = entry.row
            if entry.move is None or catalog.serial[row] != entry.serial:
                continue
            head = catalog.head(catalog.key(row), catalog.part[row])
            below = store.ready_in(
                entry.move.tier, head, self._promises(entry), catalog.namespace[row]
            )
            if below != NONE and catalog.state[row] == READY and not catalog.holds[row]:
                store.drop([row])
                store.counters["demoted"] += 1

    def _there(self, entry: _Entry, tier: int) -> bool:
        """Return whether a tier has a copy like what an entry becomes; a poorer one makes way."""
        store, catalog, row = self._store, self._store.catalog, entry.row
        head = catalog.head(catalog.key(row), catalog.part[row])
        copy = catalog.in_tier(head, tier)
        if copy == NONE:
            return False
        busy = catalog.state[copy] != READY or catalog.holds[copy] or not catalog.profile[copy]
        if busy or store.answers(copy, self._promises(entry), catalog.namespace[row]):
            return True
        store.drop([copy])
        return False

    def _promises(self, entry: _Entry) -> int:
        """Return the class of what an entry becomes."""
        catalog, row = self._store.catalog, entry.row
        profile = entry.move.profile if entry.move else catalog.profile[row]
        return lineage.fidelity(catalog, row, profile)

    def _copy(self, entry: _Entry, lower: Lower) -> int | None:
        """Begin a placement in a lower tier of what an entry becomes; None: it does not fit."""
        store, row, made = self._store, entry.row, entry.frame
        profile = entry.move.profile if entry.move else store.catalog.profile[row]
        size = made.nbytes if made else lineage.size(store.catalog, row, profile)
        locator = lower.tier.reserve(size) if size else None
        if locator is None:
            return None
        copy = store.copy_of(row, lower.number, locator, profile=profile, nbytes=size)
        if made:
            header_bytes = made.nbytes - sum(made.segments)
            ends = lineage.ends(BY_NUMBER[profile], header_bytes, made.segments)
            lineage.note_ends(store.catalog, copy, ends)
        return copy

    def _item(self, copy: int, source: _Entry) -> Item:
        store, catalog = self._store, self._store.catalog
        nbytes = catalog.nbytes[copy]
        if source.frame is not None:
            pieces: Sequence[memoryview] = [source.frame.memory]
        else:
            pieces = store.host.pieces(catalog.locator[source.row])
            if nbytes < catalog.nbytes[source.row]:
                pieces = prefix(pieces, nbytes, catalog.fidelity[copy])
        return Item(store.frame_id(copy), catalog.locator[copy], nbytes, pieces)

    def _finish(self, sources: list[_Entry], copies: list[int], outcomes: list[Outcome]) -> None:
        store, catalog = self._store, self._store.catalog
        written: list[int] = []
        refused: list[int] = []
        for source, copy, outcome in zip(sources, copies, outcomes, strict=True):
            if outcome.status is not Status.DONE:
                refused.append(copy)
                store.counters[_REASONS.get(outcome.status, "demote_throttled")] += 1
                continue
            catalog.commit([copy])
            left = catalog.state[source.row] != READY  # nobody could reach it any more, or a better
            old = catalog.generation[copy] < store.namespaces.minimum[catalog.namespace[copy]]
            if left or old:
                store.drop([copy])
            else:
                written.append(copy)
        store.abort(refused[::-1])  # what was reserved last goes first: a log can take it back
        store.policy.touched(catalog, written)
        store.unhold([entry.row for entry in sources if not entry.move])
        self._let_go([entry for entry in sources if entry.move])

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
