"""Stages: bringing blocks up from below while a match waits.

A stage reserves RAM whole or is cut to what fits; it never waits for RAM that another stage holds.
The length is the one that minimises load plus recompute of the rest. Reads run on the tiers' read
lanes; each unit is read once, however many matches want it. A late or failed read touches nobody's
buffers: its pages stay reserved until the read has returned.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from tierkv import frame, planner
from tierkv.catalog import NONE, READY, Unit
from tierkv.codec import RAW
from tierkv.cost import Recompute
from tierkv.fidelity import Fidelity
from tierkv.matches import Match, Matches
from tierkv.store import RAM, Lower, Numbers, Store
from tierkv.tier import DONE, FrameId, Item, Outcome, SharedTier, Status

T = TypeVar("T")
READS_PER_JOB = 4
READ_JOB_BYTES = 8 << 20
"""A job takes no frame more from here on: the next thread reads while this one verifies."""
NEGATIVE_S = 2.0
LEARN_S = 1.0
"""How often at least a shared tier is asked for what other sidecars cleared."""
FIRST_PROBE = 64
PROBE_GROWTH = 8
NEGATIVE_LIMIT = 65536


def read_jobs(items: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    """Cut what is to be read, of `sizes` bytes each, into jobs of one thread."""
    start = nbytes = 0
    for index, size in enumerate(sizes, 1):
        nbytes += size
        if index - start == READS_PER_JOB or nbytes >= READ_JOB_BYTES or index == len(sizes):
            yield items[start:index]
            start, nbytes = index, 0


class Stages:
    """Plans stages for pending matches and takes in what was read.

    Called under the store's lock.
    """

    def __init__(self, store: Store, matches: Matches, on_read: Callable[[Lower], None]) -> None:
        """Take what a stage works on; `on_read` is told when a tier has finished a read."""
        self._store = store
        self._matches = matches
        self._on_read = on_read
        self._absent: dict[bytes, float] = {}
        """First missing key of a probed chain -> until when not to ask again."""
        self._origins: dict[int, Lower] = {}
        """RAM row on its way -> the tier it is read from."""
        self._learn_at = 0.0
        matches.on_pending = self.consider

    def consider(self, match: Match, found: Numbers) -> None:
        """Stage what lies below for a match, or ask a shared tier first."""
        store, heads = self._store, found.tolist()
        reach = self._reach(match, heads)
        shared = next((low for low in store.lower if low.shared is not None), None)
        ask = shared is not None and reach < match.asked and store.usable(shared)
        if ask and shared and not self._known_absent(match.keys(reach, reach + 1)[0]):
            match.pending = True
            match.eta_s = shared.io.rates.latency_s
            store.executor.submit(shared.reads, partial(self._probe, match, shared, reach))
            return
        self._stage(match, heads, reach)

    def _reach(self, match: Match, heads: list[int]) -> int:
        """Return the blocks from the head that are in RAM, on their way there, or below."""
        for unit in range(len(match.rows), len(heads)):
            if self._source(match, heads[unit]) == NONE:
                return unit // len(match.parts)
        return match.asked

    def _source(self, match: Match, head: int) -> int:
        """Return the copy a unit comes from: in RAM or on its way there, else the fastest below.

        NONE where there is none, or where RAM holds one that cannot answer and is in use. One that
        nobody uses makes way in `_begin`.
        """
        store, catalog = self._store, self._store.catalog
        fidelity, namespace = match.call.fidelity, match.namespace
        row = catalog.in_tier(head, RAM)
        if row != NONE:
            origin = self._origins.get(row)
            coming = origin is not None and store.usable(origin)
            there = catalog.state[row] == READY or coming
            if there and store.answers(row, fidelity, namespace):
                return row
            if catalog.state[row] != READY or catalog.holds[row]:
                return NONE
        for low in store.lower:
            if store.usable(low):
                row = store.ready_in(low.number, head, fidelity, namespace)
                if row != NONE:
                    return row
        return NONE

    def _probe(self, match: Match, lower: Lower, start: int) -> None:
        """Ask a shared tier for a chain, galloping; a job of its read lane."""
        tier = lower.shared
        assert tier is not None
        store = self._store
        self._learn_generations(tier)
        with store.lock:
            generation = store.namespaces.minimum[match.namespace]
        found: list[tuple[FrameId, int]] = []
        at, step = start, FIRST_PROBE
        while at < match.asked:
            ids = [
                FrameId(key, store.catalog.part_at(part), generation)
                for key in match.keys(at, at + step)
                for part in match.parts
            ]
            sizes = tier.find(ids)
            known = next((n for n, size in enumerate(sizes) if size <= 0), len(sizes))
            whole = known // len(match.parts) * len(match.parts)
            found += zip(ids[:whole], sizes[:whole], strict=True)
            at += whole // len(match.parts)
            if whole < len(ids):
                break
            step *= PROBE_GROWTH
        with store.lock:
            self._adopt(match, lower, found)
            if at < match.asked:
                self._remember_absent(match.keys(at, at + 1)[0])
            if match.number in self._matches.open and match.answer is None:
                heads = store.heads(match.call.keys, match.parts).tolist()
                self._stage(match, heads, self._reach(match, heads))
                if not match.awaited:
                    self._matches.finish(match)

    def tick(self) -> None:
        """Hear of other sidecars' clears in time, even when RAM answers everything."""
        store = self._store
        for low in store.lower:
            if low.shared is not None and store.clock() >= self._learn_at:
                self._learn_at = float("inf")  # until this one has been answered
                store.executor.submit("control", partial(self._learn, low.shared))

    def _learn(self, tier: SharedTier) -> None:
        self._learn_generations(tier)
        self._learn_at = self._store.clock() + LEARN_S

    def _learn_generations(self, tier: SharedTier) -> None:
        store, news = self._store, False
        minima = tier.generations()
        with store.lock:
            for digest, generation in minima.items():
                if generation > store.namespaces.generation(digest):
                    store.clear_below(digest, generation)
                    news = True
        for low in store.lower:
            if news and low.shared is None:
                store.persist(low, low.tier.generations())

    def _known_absent(self, key: bytes) -> bool:
        return self._store.clock() < self._absent.get(key, 0.0)

    def _remember_absent(self, key: bytes) -> None:
        if len(self._absent) >= NEGATIVE_LIMIT:
            self._absent.clear()
        self._absent[key] = self._store.clock() + NEGATIVE_S

    def _adopt(self, match: Match, lower: Lower, found: Sequence[tuple[FrameId, int]]) -> None:
        """Note frames that a shared tier has; what they hold is known when they were read."""
        store, catalog = self._store, self._store.catalog
        for index, (frame_id, size) in enumerate(found):
            part = match.parts[index % len(match.parts)]
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
        store, catalog, parts = self._store, self._store.catalog, len(match.parts)
        first = len(match.rows)
        sources = [self._source(match, head) for head in heads[first : reach * parts]]
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
        sources = self._fit(sources[: plan.blocks * parts], parts)
        if sources:
            match.eta_s = plan.load_s
            match.pending = True
            self._want(match, sources)

    def _fit(self, sources: list[int], parts: int) -> list[int]:
        """Make room and return the units of the chain that can be staged, in whole blocks."""
        store, catalog = self._store, self._store.catalog
        page = store.host.page_bytes
        sizes = [
            -(-catalog.nbytes[row] // page) * page if catalog.tier[row] else 0 for row in sources
        ]
        in_ram = [row for row in sources if not catalog.tier[row] and catalog.state[row] == READY]
        need = sum(sizes) - store.host.space().free
        if need > 0:
            catalog.hold(in_ram)
            store.drop(store.policy.victims(catalog, RAM, need))
            store.unhold(in_ram)
        free, fit = store.host.space().free, 0
        while fit < len(sources) and sizes[fit] <= free:
            free -= sizes[fit]
            fit += 1
        if fit < len(sources):
            fit -= fit % parts
            store.counters["stage_refused_full"] += len(sources) - fit
        return sources[:fit]

    def _want(self, match: Match, sources: list[int]) -> None:
        """Wait for units on their way, start reads of the others, hold what is in RAM already."""
        store, catalog, arriving = self._store, self._store.catalog, self._matches.arriving
        first = len(match.rows)
        match.rows.extend([NONE] * len(sources))
        chain = match.rows[:first].tolist()
        reads: dict[int, list[tuple[int, int]]] = {}
        for unit, source in enumerate(sources, first):
            target = source
            if catalog.tier[source] != RAM:
                target = self._begin(source)
                arriving[target] = []
                self._origins[target] = store.lower[catalog.tier[source] - 1]
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
        for tier, pairs in reads.items():
            low = store.lower[tier - 1]
            for job in read_jobs(pairs, [catalog.nbytes[target] for target, _ in pairs]):
                self._submit(low, job)
        if not match.awaited:
            self._matches.finish(match)

    def _begin(self, source: int) -> int:
        """Reserve RAM for a unit and hold the copy it is read from."""
        store, catalog = self._store, self._store.catalog
        locator = store.host.reserve(catalog.nbytes[source])
        assert locator is not None, "the stage was cut to what fits"
        head = catalog.head(catalog.key(source), catalog.part[source])
        poor = catalog.in_tier(head, RAM)
        if poor != NONE:
            store.drop([poor])
        catalog.hold([source])
        return store.copy_of(source, RAM, locator)

    def _submit(self, low: Lower, pairs: Sequence[tuple[int, int]]) -> None:
        store, catalog = self._store, self._store.catalog
        items = [
            Item(
                store.frame_id(source),
                catalog.locator[source],
                catalog.nbytes[source],
                store.host.pieces(catalog.locator[target]),
            )
            for target, source in pairs
        ]

        def read() -> None:
            outcomes = low.io.read(items)
            with store.lock:
                low.reading -= 1
                for (target, source), item, outcome in zip(pairs, items, outcomes, strict=True):
                    self._arrived(low, target, source, item, outcome)
                store.check()
                self._on_read(low)

        low.reading += 1
        store.executor.submit(low.reads, read)

    def _arrived(self, low: Lower, target: int, source: int, item: Item, outcome: Outcome) -> None:
        store, catalog = self._store, self._store.catalog
        del self._origins[target]
        store.unhold([source])
        minimum = store.namespaces.minimum[catalog.namespace[target]]
        if outcome.status is Status.DONE:
            low.failures = 0
            outcome = self._describe(target, source, item)
        if outcome.status is Status.DONE and catalog.generation[target] >= minimum:
            catalog.commit([target])
            self._matches.arrived(target, source=low.name, usable=True)
            return
        store.abort([target])
        if outcome.status is Status.FAILED:
            store.counters["stage_failed"] += 1
            store.failed(low)
        elif outcome.status is Status.UNKNOWN:
            store.counters["unknown_format"] += 1
            catalog.profile[source] = 0
        elif outcome.status in (Status.CORRUPT, Status.MISSING):
            store.counters[outcome.status.value] += 1
            if catalog.state[source] == READY:
                store.drop([source])
        self._matches.arrived(target, source=low.name, usable=False)

    def _describe(self, target: int, source: int, item: Item) -> Outcome:
        """Take over from the header what a probe could not know."""
        catalog = self._store.catalog
        readable = self._store.offers.readable
        header = frame.parse(item.pieces[0][: frame.MAX_HEADER_BYTES])
        if isinstance(header, frame.Refusal) or header.codec_id not in readable:
            return Outcome(Status.UNKNOWN, "a codec this release does not know")
        namespace = self._store.namespaces.digest(catalog.namespace[target])
        if (header.generation, header.namespace) != (catalog.generation[target], namespace):
            return Outcome(Status.CORRUPT, "another namespace or generation")
        for row in (target, source):
            catalog.profile[row] = readable[header.codec_id].number
            catalog.fidelity[row] = header.fidelity
            catalog.flags[row] = header.flags
            catalog.position[row] = header.position
        return DONE
