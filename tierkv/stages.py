"""Stages: bringing blocks up from below while a match waits.

A stage reserves RAM whole or is cut to what fits; it never waits for RAM that another stage holds. The
length is the one that minimises load plus recompute of the rest. Reads run on the tiers' read lanes; each
unit is read once, however many matches want it. A late or failed read touches nobody's buffers: its pages
stay reserved until the read has returned.
"""

from collections.abc import Sequence

import numpy as np

from tierkv import frame, planner
from tierkv.catalog import NONE, Bools, Rows, State
from tierkv.codec import BY_CODEC_ID
from tierkv.cost import Recompute
from tierkv.fidelity import Fidelity
from tierkv.matches import Match, Matches
from tierkv.store import RAM, Lower, Store, in_state, leading
from tierkv.tier import FrameId, Item, Outcome, SharedTier, Status

READS_PER_JOB = 4
NEGATIVE_S = 2.0
FIRST_PROBE = 64
PROBE_GROWTH = 8
NEGATIVE_LIMIT = 65536


class Stages:
    """Plans stages for pending matches and takes in what was read. Called under the store's lock."""

    def __init__(self, store: Store, matches: Matches) -> None:
        self._store = store
        self._matches = matches
        self._absent: dict[bytes, float] = {}
        """First missing key of a probed chain -> until when not to ask again."""
        matches.on_pending = self.consider

    def consider(self, match: Match) -> None:
        """Stage what lies below for a match, or ask a shared tier first."""
        heads = self._store.heads(match.keys, match.parts)
        reach = self._reach(match, heads)
        shared = next((low for low in self._store.lower if low.shared is not None), None)
        if shared is not None and reach < len(match.keys) and self._worth_asking(match, shared, reach):
            match.pending = True
            match.eta_s = shared.io.rates.latency_s
            self._store.executor.submit(shared.reads, lambda: self._probe(match, shared, reach))
            return
        self._stage(match, heads, reach)

    def _reach(self, match: Match, heads: Rows) -> int:
        """Return the blocks from the head that are in RAM, on their way there, or below."""
        store = self._store
        found = np.zeros(len(heads), np.bool_)
        usable = [RAM, *(low.number for low in store.lower if store.usable(low))]
        for rows in store.catalog.siblings(heads):
            copies = store.usable_copies(rows, match.call.fidelity, match.namespace)
            ready = in_state(store.catalog, rows, State.READY)
            ready &= np.isin(store.catalog.tier[rows], usable)
            found |= copies & (ready | self._on_their_way(rows))
        return leading(found, len(match.parts)) if len(found) else 0

    def _on_their_way(self, rows: Rows) -> Bools:
        arriving = self._matches.arriving
        return np.array([row in arriving for row in rows.tolist()], np.bool_)

    def _worth_asking(self, match: Match, shared: Lower, reach: int) -> bool:
        until = self._absent.get(match.keys[reach], 0.0)
        return self._store.usable(shared) and self._store.clock() >= until

    def _probe(self, match: Match, lower: Lower, start: int) -> None:
        """Ask a shared tier for a chain, galloping; a job of its read lane."""
        tier = lower.shared
        assert tier is not None
        store = self._store
        self._learn_generations(tier)
        with store.lock:
            generation = int(store.namespaces.minimum[match.namespace])
        found: list[tuple[FrameId, int]] = []
        at, step = start, FIRST_PROBE
        while at < len(match.keys):
            ids = [
                FrameId(key, store.catalog.part_at(part), generation)
                for key in match.keys[at : at + step]
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
            if at < len(match.keys):
                self._remember_absent(match.keys[at])
            if match.number in self._matches.open and not match.final:
                heads = store.heads(match.keys, match.parts)
                self._stage(match, heads, self._reach(match, heads))
                if not match.awaited:
                    self._matches.finish(match)

    def _learn_generations(self, tier: SharedTier) -> None:
        for digest, generation in tier.generations().items():
            with self._store.lock:
                self._store.namespaces.raise_to(digest, generation)

    def _remember_absent(self, key: bytes) -> None:
        if len(self._absent) >= NEGATIVE_LIMIT:
            self._absent.clear()
        self._absent[key] = self._store.clock() + NEGATIVE_S

    def _adopt(self, match: Match, lower: Lower, found: Sequence[tuple[FrameId, int]]) -> None:
        """Note frames that a shared tier has; what they hold is known when they were read."""
        store, catalog = self._store, self._store.catalog
        for index, (frame_id, size) in enumerate(found):
            part = match.parts[index % len(match.parts)]
            head = catalog.find([frame_id.key], part)
            if catalog.in_tier(head, lower.number)[0] != NONE:
                continue
            locator = lower.tier.reserve(size)
            if locator is None:
                return
            rows = catalog.begin(
                lower.number, [frame_id.key], part,
                profile=1, fidelity=Fidelity.EXACT, flags=0, nbytes=size, allocated=size,
                locator=locator, namespace=match.namespace, generation=frame_id.generation,
                position=0,
            )  # fmt: skip
            catalog.commit(rows)
            store.policy.touched(catalog, rows)

    def _stage(self, match: Match, heads: Rows, reach: int) -> None:
        """Plan the length, reserve RAM for it whole, and start the reads."""
        store, catalog, parts = self._store, self._store.catalog, len(match.parts)
        ready = match.blocks
        if reach <= ready:
            return
        units = reach * parts
        in_ram = catalog.in_tier(heads[:units], RAM)
        sources = self._sources(match, heads[:units], in_ram)
        per_block = np.where(sources == NONE, 0, catalog.nbytes[sources]).reshape(-1, parts)
        tiers = np.where(sources == NONE, RAM, catalog.tier[sources]).reshape(-1, parts)
        call = match.call
        plan = planner.plan_stage(
            ready,
            per_block.sum(axis=1),
            tiers.max(axis=1),
            store.rates(),
            store.decode_bps(sources[sources != NONE]),
            call.raw_bytes,
            call.tokens_per_block,
            call.position,
            Recompute(call.linear, call.quadratic),
        )
        units = self._fit(sources[: plan.blocks * parts]) // parts * parts
        if units <= ready * parts:
            return
        match.load_s = match.eta_s = plan.load_s
        match.pending = True
        self._want(match, in_ram[:units], sources[:units])

    def _sources(self, match: Match, heads: Rows, in_ram: Rows) -> Rows:
        """Return where each unit is read from, NONE for those in RAM or on their way."""
        store, catalog = self._store, self._store.catalog
        out = np.full(len(heads), NONE, np.int32)
        for low in reversed(store.lower):
            if store.usable(low):
                rows = catalog.in_tier(heads, low.number)
                fit = store.usable_copies(rows, match.call.fidelity, match.namespace)
                fit &= in_state(catalog, rows, State.READY)
                out[fit] = rows[fit]
        out[in_ram != NONE] = NONE
        return out

    def _fit(self, sources: Rows) -> int:
        """Make room and return how many units of the chain can be staged."""
        store, catalog = self._store, self._store.catalog
        page = store.host.page_bytes
        sizes = np.where(sources == NONE, 0, -(-catalog.nbytes[sources].astype(np.int64) // page) * page)
        free = store.host.space().free
        need = int(sizes.sum())
        if need > free:
            victims = store.policy.victims(catalog, RAM, need - free)
            store.drop(victims)
            free = store.host.space().free
        fit = int(np.searchsorted(np.cumsum(sizes), free, side="right"))
        if fit < len(sources):
            store.counters["stage_refused_full"] += len(sources) - fit
        return fit

    def _want(self, match: Match, in_ram: Rows, sources: Rows) -> None:
        """Wait for units on their way, start reads of the others."""
        store, catalog = self._store, self._store.catalog
        rows = np.full(len(in_ram), NONE, np.int32)
        rows[: len(match.rows)] = match.rows
        match.rows, held = rows, len(match.rows[match.rows != NONE])
        reads: dict[int, list[tuple[int, int]]] = {}
        for unit in range(held, len(in_ram)):
            target = int(in_ram[unit])
            if target == NONE:
                target = self._begin(int(sources[unit]))
                self._matches.arriving[target] = []
                reads.setdefault(int(catalog.tier[sources[unit]]), []).append(
                    (target, int(sources[unit]))
                )
            elif target not in self._matches.arriving:
                one = np.array([target], np.int32)
                catalog.hold(one)
                match.rows[unit] = target
                match.sources["host"] += 1
                continue
            self._matches.arriving[target].append(match.number)
            match.awaited[target] = unit
        for tier, pairs in reads.items():
            low = store.lower[tier - 1]
            for at in range(0, len(pairs), READS_PER_JOB):
                self._submit(low, pairs[at : at + READS_PER_JOB])
        if not match.awaited:
            self._matches.finish(match)

    def _begin(self, source: int) -> int:
        """Reserve RAM for a unit and hold the copy it is read from."""
        store, catalog = self._store, self._store.catalog
        nbytes, page = int(catalog.nbytes[source]), store.host.page_bytes
        locator = store.host.reserve(nbytes)
        assert locator is not None, "the stage was cut to what fits"
        names = ("profile", "fidelity", "flags", "nbytes", "namespace", "generation", "position")
        same = {name: getattr(catalog, name)[source] for name in names}
        key, part = catalog.keys[source], int(catalog.part[source])
        catalog.hold(np.array([source], np.int32))
        allocated = -(-nbytes // page) * page
        return int(catalog.begin(RAM, [key], part, allocated=allocated, locator=locator, **same)[0])

    def _submit(self, low: Lower, pairs: list[tuple[int, int]]) -> None:
        store, catalog = self._store, self._store.catalog
        items = [
            Item(
                store.frame_id(source),
                int(catalog.locator[source]),
                int(catalog.nbytes[source]),
                store.host.pieces(int(catalog.locator[target])),
            )
            for target, source in pairs
        ]

        def read() -> None:
            outcomes = low.io.read(items)
            with store.lock:
                for (target, source), item, outcome in zip(pairs, items, outcomes, strict=True):
                    self._arrived(low, target, source, item, outcome)
                store.check()

        store.executor.submit(low.reads, read)

    def _arrived(
        self, low: Lower, target: int, source: int, item: Item, outcome: Outcome
    ) -> None:
        store, catalog = self._store, self._store.catalog
        one, origin = np.array([target], np.int32), np.array([source], np.int32)
        store.unhold(origin)
        minimum = store.namespaces.minimum[catalog.namespace[target]]
        sound = outcome.status is Status.DONE and self._describe(target, item)
        if sound and catalog.generation[target] >= minimum:
            low.failures = 0
            catalog.commit(one)
            store.policy.touched(catalog, one)
            self._matches.arrived(target, source=low.name, usable=True)
            return
        store.abort(one)
        if outcome.status is Status.FAILED:
            store.counters["stage_failed"] += 1
            store.failed(low)
        elif outcome.status is Status.UNKNOWN:
            store.counters["unknown_format"] += 1
            catalog.profile[source] = 0
        elif outcome.status in (Status.CORRUPT, Status.MISSING):
            store.counters[outcome.status.value] += 1
            if catalog.state[source] == State.READY:
                store.drop(origin)
        self._matches.arrived(target, source=low.name, usable=False)

    def _describe(self, target: int, item: Item) -> bool:
        """Take over from the header what a probe could not know; False for a codec unknown here."""
        catalog = self._store.catalog
        header = frame.parse(item.pieces[0][: frame.MAX_HEADER_BYTES])
        if isinstance(header, frame.Refusal) or header.codec_id not in BY_CODEC_ID:
            return False
        if header.generation != catalog.generation[target] or header.namespace != (
            self._store.namespaces.digest(int(catalog.namespace[target]))
        ):
            return False
        catalog.profile[target] = BY_CODEC_ID[header.codec_id].number
        catalog.fidelity[target] = header.fidelity
        catalog.flags[target] = header.flags
        catalog.position[target] = header.position
        return True
