"""Stages: bringing blocks up from below while a match waits.

A stage reserves RAM whole or is cut to what fits; it never waits for RAM that another stage holds.
The length is the one that minimises load plus recompute of the rest. Reads run on the tiers' read
lanes; each unit is read once, however many matches want it. A late or failed read touches nobody's
buffers: its pages stay reserved until the read has returned.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from tierkv import lineage, pairs, planner
from tierkv.catalog import NONE, READY, Unit
from tierkv.codec import RAW
from tierkv.cost import Recompute
from tierkv.fidelity import Fidelity
from tierkv.lower import Lower
from tierkv.match import Match
from tierkv.matches import Matches
from tierkv.moves import Moves
from tierkv.plan import Kind, Move
from tierkv.store import Numbers, Store
from tierkv.tier import RAM, Batch, FrameId, Item, Outcome, SharedTier, Status
from tierkv.window_stages import WindowStages

T = TypeVar("T")
Found = tuple[FrameId, int]
"""A frame of a shared tier and its bytes."""
Probe = Callable[[Match, Lower, int], None]
NEGATIVE_S = 2.0
LEARN_S = 1.0
"""How often at least a shared tier is asked for what other sidecars cleared."""
FIRST_PROBE = 64
PROBE_GROWTH = 8
NEGATIVE_LIMIT = 65536


def read_jobs(items: Sequence[T], sizes: Sequence[int], batch: Batch) -> Iterator[Sequence[T]]:
    """Cut what is to be read, of `sizes` bytes each, into jobs of one thread."""
    start = nbytes = 0
    for index, size in enumerate(sizes, 1):
        nbytes += size
        if index - start == batch.frames or nbytes >= batch.nbytes or index == len(sizes):
            yield items[start:index]
            start, nbytes = index, 0


def _first_missing(match: Match, block: int) -> bytes:
    return match.keys(block, block + 1)[0] + match.call.parts + match.call.windows


class Stages:
    """Plans stages for pending matches and takes in what was read.

    Called under the store's lock.
    """

    def __init__(
        self, store: Store, moves: Moves, matches: Matches, on_read: Callable[[Lower], None]
    ) -> None:
        """Take what a stage works on; `on_read` is told when a tier has finished a read."""
        self.store, self._moves = store, moves
        self._matches = matches
        self._on_read = on_read
        self._absent: dict[bytes, float] = {}
        """What a probed chain lacked (`_first_missing`) -> until when not to ask again."""
        self._origins: dict[int, tuple[Lower, float]] = {}
        """RAM row on its way -> the tier it is read from, and since when."""
        self._learn_at = 0.0
        self._windowed = WindowStages(self)
        matches.on_pending = self.consider

    def consider(self, match: Match, found: Numbers) -> None:
        """Stage what lies below for a match, or ask a shared tier first."""
        heads = found.tolist()
        if match.windows:
            self._windowed.consider(match, heads)
            return
        reach = self._reach(match, heads)
        if not self.ask(match, reach, self._probe):
            self._stage(match, heads, reach)

    def ask(self, match: Match, reach: int, probe: Probe) -> bool:
        """Let a shared tier be asked for what a match lacks from `reach` on, if one may know.

        Returns: whether it is; the match is pending then.
        """
        store = self.store
        shared = next((low for low in store.lower if low.shared is not None), None)
        if shared is None or reach >= match.asked or not store.usable(shared):
            return False
        if store.clock() < self._absent.get(_first_missing(match, reach), 0.0):
            return False
        match.pending = True
        match.eta_s = shared.io.rates.latency_s
        store.executor.submit(shared.reads, partial(probe, match, shared, reach))
        return True

    def _reach(self, match: Match, heads: list[int]) -> int:
        """Return the blocks from the head that are in RAM, on their way there, or below."""
        for unit in range(len(match.rows), len(heads)):
            if self.source(match, heads[unit]) == NONE:
                return unit // len(match.parts)
        return match.asked

    def source(self, match: Match, head: int) -> int:
        """Return the copy a unit comes from: in RAM or on its way there, else the fastest below.

        NONE where there is none, or where one in RAM that cannot answer is in its place, and in
        use. One that nobody uses makes way in `_begin`.
        """
        store, catalog = self.store, self.store.catalog
        fidelity, namespace = match.call.fidelity, match.namespace
        row = store.ready_in(RAM, head, fidelity, namespace)
        if row != NONE:
            return row
        for row in catalog.copies(head):
            origin, since = self._origins.get(row, (None, 0.0))
            coming = origin is not None and store.usable(origin, since)
            if coming and store.answers(row, fidelity, namespace):
                return row
        for low in store.lower:
            if store.usable(low):
                row = store.ready_in(low.number, head, fidelity, namespace)
                if row != NONE:
                    move = Move(Kind.PROMOTE, row, RAM, catalog.profile[row])
                    return row if lineage.lawful(catalog, move) else NONE
        return NONE

    def _probe(self, match: Match, lower: Lower, start: int) -> None:
        """Ask a shared tier for a chain, galloping; a job of its read lane."""
        generation = self.generation(match, lower)
        found, at = self.gallop(match, lower, match.parts, start, generation)
        with self.store.lock:
            self.remember_absent(match, at)
        self.answered(match, lower, found, self._stage_found)

    def generation(self, match: Match, lower: Lower) -> int:
        """Return the generation that frames of a match's namespace have in a shared tier."""
        assert lower.shared is not None
        self._learn_generations(lower.shared)
        with self.store.lock:
            return self.store.namespaces.minimum[match.namespace]

    def gallop(
        self, match: Match, lower: Lower, parts: Sequence[int], at: int, generation: int
    ) -> tuple[list[Found], int]:
        """Ask a shared tier for all these parts of a chain's blocks from `at` on.

        Returns: what is there, and the first block that is not there whole.
        """
        tier, catalog, found, step = lower.shared, self.store.catalog, list[Found](), FIRST_PROBE
        assert tier is not None
        while at < match.asked:
            ids = [
                FrameId(key, catalog.part_at(part), generation)
                for key in match.keys(at, at + step)
                for part in parts
            ]
            sizes = tier.find(ids)
            known = next((n for n, size in enumerate(sizes) if size <= 0), len(sizes))
            whole = known // len(parts) * len(parts)
            found += zip(ids[:whole], sizes[:whole], strict=True)
            at += whole // len(parts)
            if whole < len(ids):
                break
            step *= PROBE_GROWTH
        return found, at

    def answered(
        self,
        match: Match,
        lower: Lower,
        found: Sequence[Found],
        stage: Callable[[Match, list[int]], None],
    ) -> None:
        """Take in what a shared tier has of a match, and stage it if it is still wanted."""
        store = self.store
        with store.lock:
            self._adopt(match, lower, found)
            if match.number in self._matches.open and match.answer is None:
                stage(match, store.heads(match.call.keys, match.parts).tolist())
                if not match.awaited:
                    self._matches.finish(match)

    def _stage_found(self, match: Match, heads: list[int]) -> None:
        self._stage(match, heads, self._reach(match, heads))

    def tick(self) -> None:
        """Hear of other sidecars' clears in time, even when RAM answers everything."""
        store = self.store
        for low in store.lower:
            if low.shared is not None and store.clock() >= self._learn_at:
                self._learn_at = float("inf")  # until this one has been answered
                store.executor.submit("control", partial(self._learn, low.shared))

    def _learn(self, tier: SharedTier) -> None:
        self._learn_generations(tier)
        self._learn_at = self.store.clock() + LEARN_S

    def _learn_generations(self, tier: SharedTier) -> None:
        store, news = self.store, False
        minima = tier.generations()
        with store.lock:
            for digest, generation in minima.items():
                if generation > store.namespaces.generation(digest):
                    store.clear_below(digest, generation)
                    news = True
        for low in store.lower:
            if news and low.shared is None:
                store.persist(low, low.tier.generations())

    def remember_absent(self, match: Match, block: int) -> None:
        """Note the first block of a match that a shared tier does not have as it was asked for."""
        if block >= match.asked:
            return
        if len(self._absent) >= NEGATIVE_LIMIT:
            self._absent.clear()
        self._absent[_first_missing(match, block)] = self.store.clock() + NEGATIVE_S

    def _adopt(self, match: Match, lower: Lower, found: Sequence[Found]) -> None:
        """Note frames that a shared tier has; what they hold is known when they were read."""
        store, catalog = self.store, self.store.catalog
        for frame_id, size in found:
            part = catalog.part_number(frame_id.part)
            head = catalog.head(frame_id.key, part)
            if catalog.in_tier(head, lower.number) != NONE:
                continue
            locator = lower.tier.reserve(size)
            if locator is None:
                return
            unit = Unit(
                frame_id.key, part, RAW.number, Fidelity.EXACT, 0, size, size, locator,
                match.namespace, frame_id.generation, 0,
            )  # fmt: skip
            rows = catalog.begin(lower.number, [unit])
            catalog.commit(rows)
            store.policy.touched(catalog, rows)

    def _stage(self, match: Match, heads: list[int], reach: int) -> None:
        """Plan the length, reserve RAM for it whole, and start the reads."""
        store, catalog, parts = self.store, self.store.catalog, len(match.parts)
        first = len(match.rows)
        sources = [self.source(match, head) for head in heads[first : reach * parts]]
        if not sources or NONE in sources:
            return
        call = match.call
        sizes = [catalog.nbytes[row] if catalog.tier[row] else 0 for row in sources]
        tiers = [catalog.tier[row] for row in sources]
        plan = planner.plan_stage(
            [sum(sizes[at : at + parts]) for at in range(0, len(sizes), parts)],
            [max(tiers[at : at + parts]) for at in range(0, len(sizes), parts)],
            store.rates(),
            store.decode_bps(sources),
            call.raw_bytes,
            call.tokens_per_block,
            call.position + first // parts * call.tokens_per_block,
            Recompute(call.linear, call.quadratic),
        )
        sources = self.fit(sources[: plan.blocks * parts], parts)
        if sources:
            match.rows.extend([NONE] * len(sources))
            self.want(match, list(enumerate(sources, first)), plan.load_s)

    def fit(self, sources: list[int], parts: int) -> list[int]:
        """Make room and return the units of the chain that can be staged, in whole blocks."""
        store, catalog = self.store, self.store.catalog
        page = store.host.page_bytes
        sizes = [
            -(-catalog.nbytes[row] // page) * page if catalog.tier[row] else 0 for row in sources
        ]
        in_ram = [row for row in sources if not catalog.tier[row] and catalog.state[row] == READY]
        self._moves.make_room(sum(sizes) - store.host.space().free, beside=in_ram)
        free, fit = store.host.space().free, 0
        while fit < len(sources) and sizes[fit] <= free:
            free -= sizes[fit]
            fit += 1
        if fit < len(sources):
            fit -= fit % parts
            store.counters["stage_refused_full"] += len(sources) - fit
        return sources[:fit]

    def want(self, match: Match, wanted: Sequence[tuple[int, int]], eta_s: float) -> None:
        """Wait for units on their way, start reads of the others, hold what is in RAM already.

        Args:
            match: whose rows have a place for them.
            wanted: units and their sources, in order; what is in front of them is held.
            eta_s: when all will be there.
        """
        store, catalog, arriving = self.store, self.store.catalog, self._matches.arriving
        match.pending, match.eta_s = True, eta_s
        chain = [row for row in match.rows if row != NONE]
        reads: dict[int, list[tuple[int, int]]] = {}
        context = match.call.position + match.asked * match.call.tokens_per_block
        for unit, source in wanted:
            target = source
            if catalog.tier[source] != RAM:
                target = self._begin(source)
                arriving[target] = []
                self._origins[target] = store.lower[catalog.tier[source] - 1], store.clock()
                reads.setdefault(catalog.tier[source], []).append((target, source))
            elif catalog.state[source] == READY:
                catalog.hold([source])
                match.rows[unit] = source
                match.sources["host"] = match.sources.get("host", 0) + 1
                chain.append(source)
                continue
            chain.append(target)
            arriving[target].append(match.number)
            match.awaited[target] = unit
        # Stamped as one chain before anything arrives: what arrives first is the head.
        store.policy.touched(catalog, chain)
        for tier, mine in reads.items():
            low = store.lower[tier - 1]
            sizes = [catalog.nbytes[target] for target, _ in mine]
            for job in read_jobs(mine, sizes, low.tier.batch):
                self._submit(low, job, context)
        if not match.awaited:
            self._matches.finish(match)

    def _begin(self, source: int) -> int:
        """Reserve RAM for a unit and hold the copy it is read from."""
        store, catalog = self.store, self.store.catalog
        move = Move(Kind.PROMOTE, source, RAM, catalog.profile[source])
        assert lineage.lawful(catalog, move), "RAM has a copy that is as good, or in use"
        locator = store.host.reserve(catalog.nbytes[source])
        assert locator is not None, "the stage was cut to what fits"
        head = catalog.head(catalog.key(source), catalog.part[source])
        poor = pairs.place(catalog, head, catalog.profile[source])
        if poor != NONE:
            store.drop([poor])
        catalog.hold([source])
        return store.copy_of(source, RAM, locator)

    def _submit(self, low: Lower, job: Sequence[tuple[int, int]], context: int) -> None:
        store, catalog = self.store, self.store.catalog
        items = [
            Item(
                store.frame_id(source),
                catalog.locator[source],
                catalog.nbytes[source],
                store.host.pieces(catalog.locator[target]),
            )
            for target, source in job
        ]

        def read() -> None:
            outcomes = low.io.read(items)
            with store.lock:
                low.reading -= 1
                for (target, source), item, found in zip(job, items, outcomes, strict=True):
                    done = found.status is Status.DONE
                    low.failures = 0 if done else low.failures
                    outcome = self._moves.describe(target, source, item, context) if done else found
                    self._arrived(low, target, source, outcome)
                store.check()
                self._on_read(low)

        low.reading += 1
        store.executor.submit(low.reads, read)

    def _arrived(self, low: Lower, target: int, source: int, outcome: Outcome) -> None:
        store, catalog = self.store, self.store.catalog
        del self._origins[target]
        store.unhold([source])
        minimum = store.namespaces.minimum[catalog.namespace[target]]
        if outcome.status is Status.DONE and catalog.generation[target] >= minimum:
            catalog.commit([target])
            store.counters["promoted"] += 1
            store.totals["promoted_bytes"] += catalog.nbytes[target]
            self._matches.arrived(target, source=low.name, usable=True)
            return
        store.abort([target])
        if outcome.status is Status.FAILED:
            store.counters["stage_failed"] += 1
            store.failed(low)
        elif outcome.status is Status.UNKNOWN:
            store.counters["unknown_format"] += 1
            catalog.restate(source, profile=0)
        elif outcome.status in (Status.CORRUPT, Status.MISSING):
            store.counters[outcome.status.value] += 1
            if catalog.state[source] == READY:
                store.drop([source])
        self._matches.arrived(target, source=low.name, usable=False)
