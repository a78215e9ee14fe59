"""Matches: the longest usable run of a chain, leased in RAM.

What lies below RAM is staged while the client waits.

A match goes through: held in RAM -> (probe of a shared tier) -> (stage: RAM reserved whole, reads
on the tiers' lanes) -> final -> lease -> transfer -> closed. Several matches may wait for one read:
units on their way are noted in `_arriving` with the matches that want them. Called under the
store's lock.
"""

import secrets
from array import array
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from tierkv import windows
from tierkv.calls import ClaimCall, GetCall, GetReply, MatchCall, MatchReply
from tierkv.catalog import NONE, READY
from tierkv.cost import load_seconds
from tierkv.errors import invalid
from tierkv.limits import check_hints, count_keys, seconds_of
from tierkv.match import Done, Match
from tierkv.namespace import digest_of
from tierkv.store import Numbers, Store
from tierkv.tier import RAM
from tierkv.use import use_of


class Matches:
    """Open matches and transfers."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.open: dict[int, Match] = {}
        self.transfers: dict[int, tuple[int, array[int]]] = {}
        self.arriving: dict[int, list[int]] = {}
        """RAM row on its way -> numbers of the matches that want it."""
        self._next = secrets.randbits(48)
        self._due = 0.0
        """Clock before which nothing is past its deadline."""
        self.on_pending: Callable[[Match, Numbers], None] = lambda _match, _heads: None
        """Told of each match that RAM did not answer whole; may stage for it."""

    def match(self, owner: int, call: MatchCall) -> MatchReply:
        """Answer from RAM; pending when more may come. Raises: TierKVError (invalid)."""
        store = self._store
        parts = store.parts_of(call.parts)
        check_hints(call)
        asked = count_keys(call.keys, len(parts))
        namespace = store.namespaces.number(digest_of(call.namespace))
        deadline = store.clock() + seconds_of(call.deadline_s)
        match = Match(
            self._next, owner, call, namespace, asked, parts, deadline, store.clock(),
            store.namespaces.minimum[namespace],
        )  # fmt: skip
        self._next += 1
        use = use_of(call, parts, call.raw_bytes, match.asked_at)
        store.policy.used(store.catalog, use)
        heads = store.heads(call.keys, parts)
        store.totals["matches"] += 1
        store.totals["asked_blocks"] += asked
        match.windows = windows.unpack(call.windows, len(parts))
        if not 0 <= call.held <= (0 if match.windows else asked):
            raise invalid("a client holds some of the blocks it asks for, and none with windows")
        match.ahead = call.held
        held = self._look_windows(match, heads) if match.windows else self._look(match, heads)
        store.catalog.hold(held)
        match.sources["host"] = len(held)
        self.open[match.number] = match
        self._due = min(self._due, deadline)
        if match.blocks < asked and store.lower:
            self.on_pending(match, heads)
        if not match.pending:
            self.finish(match)
        reply = match.answer or self._answer(match)
        if not call.fetch or match.answer is None or not match.rows or not match.whole:
            return reply
        got = self.get(owner, GetCall(match=match.number, blocks=match.blocks))
        return msgspec.structs.replace(reply, got=got)

    def _look(self, match: Match, heads: Numbers) -> "array[int]":
        """Note a use of the chain and return the rows to hold: up to the first gap."""
        start = match.ahead * len(match.parts)
        rows = self._store.look(heads, match.call.fidelity, match.namespace, start)
        del rows[len(rows) // len(match.parts) * len(match.parts) :]
        match.rows = array("i", [NONE]) * start + rows if start else rows
        return rows

    def _look_windows(self, match: Match, heads: Numbers) -> "array[int]":
        """Return the rows of the longest hit that RAM has.

        Used are these and the rest of the chain in parts without a window: windows of other ends
        may grow old.
        """
        store, fidelity = self._store, match.call.fidelity
        rows = match.grid([
            store.ready_in(RAM, head, fidelity, match.namespace) for head in heads.tolist()
        ])  # fmt: skip
        there = rows != NONE
        match.reach = windows.reach(there, match.windows)
        needed = windows.needed(there.shape, windows.longest(there, match.windows), match.windows)
        used = needed | (np.array(match.windows) == 0)
        store.look(heads[used.reshape(-1)], fidelity, match.namespace)
        match.rows = array("i", np.where(needed, rows, np.int32(NONE)).tobytes())
        return array("i", rows[needed].tobytes())

    def wait(self, owner: int, number: int, done: Done) -> None:
        """Call `done` when the match is final."""
        match = self._mine(owner, number)
        if match is None:
            done(MatchReply(match=0, blocks=0))
        elif match.answer is None:
            match.waiters.append(done)
        else:
            done(match.answer)

    def settle(self, owner: int, number: int) -> MatchReply:
        """Make a match final with what has arrived."""
        match = self._mine(owner, number)
        if match is None:
            return MatchReply(match=0, blocks=0)
        return self.finish(match)

    def arrived(self, row: int, *, source: str, usable: bool) -> None:
        """A row that matches may wait for is ready (or is not: then it is no row any more)."""
        for number in self.arriving.pop(row, []):
            match = self.open.get(number)
            if match is None or row not in match.awaited:
                continue
            unit = match.awaited.pop(row)
            if usable and self._store.answers(row, match.call.fidelity, match.namespace):
                self._store.catalog.hold([row])
                match.rows[unit] = row
                match.sources[source] = match.sources.get(source, 0) + 1
            if not match.awaited:
                self.finish(match)

    def finish(self, match: Match) -> MatchReply:
        """Make a match final: what is behind a gap is let go, and everybody who waits is told."""
        if match.answer is not None:
            return match.answer
        if match.awaited:
            self._store.counters["stage_late"] += len(match.awaited)
        match.awaited.clear()
        blocks = match.blocks
        if match.pending and match.windows:
            self._keep_windows(match, blocks)
        elif match.pending:
            keep = blocks * len(match.parts)
            behind = match.rows[keep:]
            self._store.unhold([row for row in behind if row != NONE])
            match.rows = match.rows[:keep]
        match.pending = False
        now = self._store.clock()
        match.waited_s = now - match.asked_at
        match.deadline = now + match.call.deadline_s
        self._due = min(self._due, match.deadline)
        self._count(match)
        waiters, match.waiters = match.waiters, []
        if not blocks:
            del self.open[match.number]
        match.answer = answer = self._answer(match)
        for done in waiters:
            done(answer)
        return answer

    def _keep_windows(self, match: Match, blocks: int) -> None:
        """Let go what the longest hit that is held does not need."""
        rows = match.grid(match.rows)
        needed = windows.needed(rows.shape, blocks, match.windows)
        self._store.unhold(rows[~needed & (rows != NONE)].tolist())
        match.rows = array("i", np.where(needed, rows, np.int32(NONE)).tobytes())

    def finish_all(self) -> None:
        """Make every match final."""
        for match in [match for match in self.open.values() if match.pending]:
            self.finish(match)

    def _answer(self, match: Match) -> MatchReply:
        """Return the answer as it stands."""
        store, blocks = self._store, match.blocks
        held = match.whole and not match.pending
        rows = match.rows if held else [row for row in match.rows if row != NONE]
        raw = match.behind(blocks) * match.call.raw_bytes
        load = load_seconds(store.nbytes(rows), raw, store.host_rates, store.decode_bps(rows))
        return MatchReply(
            match=match.number if blocks or match.pending else 0,
            blocks=blocks,
            pending=match.pending,
            eta_s=match.eta_s if match.pending else 0.0,
            load_s=load,
            recompute_s=match.recompute_s(match.behind(blocks)),
            sources=match.by_tier(blocks),
            reach=max(match.reach, blocks) if match.windows else 0,
        )

    def get(self, owner: int, call: GetCall) -> GetReply:
        """Turn a final match into a transfer; the rest of its lease ends."""
        match = self._mine(owner, call.match)
        if match is None or match.answer is None or not 0 < call.blocks <= match.blocks:
            return GetReply(transfer=0)
        if not match.whole:
            raise invalid(
                "a match with windows or held blocks is claimed part by part, not fetched"
            )
        store = self._store
        keep = call.blocks * len(match.parts)
        rows = match.rows[:keep]
        if store.namespaces.minimum[match.namespace] > match.minimum and not all(
            store.answers(row, match.call.fidelity, match.namespace) for row in rows
        ):
            self._end(match)  # cleared since it was matched
            return GetReply(transfer=0)
        store.unhold(match.rows[keep:])
        del self.open[match.number]
        self._enter(match, match.answer, call.blocks)
        return self._hand_out(owner, match.number, rows)

    def claim(self, owner: int, call: ClaimCall) -> GetReply:
        """Give a transfer of units of a final match that any owner asked for; its lease goes on.

        Raises: TierKVError (invalid).
        """
        store, match = self._store, self.open.get(call.match)
        wanted = store.parts_of(call.parts)
        if match is None or match.answer is None or not set(wanted) <= set(match.parts):
            return GetReply(transfer=0)
        if call.blocks < 1 or not 0 <= call.start <= match.blocks - call.blocks:
            return GetReply(transfer=0)
        width = len(match.parts)
        columns = [match.parts.index(part) for part in wanted]
        span = range(call.start, call.start + call.blocks)
        rows = array("i", [match.rows[b * width + column] for b in span for column in columns])
        if not all(
            row != NONE
            and store.catalog.state[row] == READY
            and store.answers(row, match.call.fidelity, match.namespace)
            for row in rows
        ):
            return GetReply(transfer=0)
        store.catalog.hold(rows)
        number, self._next = self._next, self._next + 1
        self._enter(match, match.answer, call.blocks)
        return self._hand_out(owner, number, rows)

    def _hand_out(self, owner: int, number: int, rows: "array[int]") -> GetReply:
        """Make rows that are held a transfer."""
        store = self._store
        self.transfers[number] = (owner, rows)
        store.totals["served_bytes"] += store.nbytes(rows)
        counts, runs = store.runs_of(rows)
        return GetReply(
            transfer=number,
            run_counts=counts,
            runs=runs,
            verify=store.settings.verify == "always",
        )

    def release(self, owner: int, match: int, transfer: int, damaged: Sequence[int] = ()) -> None:
        """End a match or a transfer; what its reader found `damaged` goes, and a put heals it."""
        found = self._mine(owner, match)
        if found is not None:
            self._end(found)
        held = self.transfers.get(transfer)
        if held is not None and held[0] == owner:
            del self.transfers[transfer]
            state, rows = self._store.catalog.state, held[1]
            bad = {rows[unit] for unit in damaged if 0 <= unit < len(rows)}
            if gone := [row for row in bad if state[row] == READY]:
                self._store.counters["corrupt"] += len(gone)
                self._store.drop(gone)
            self._store.unhold(rows)

    def expire(self) -> float:
        """End what is past its deadline; returns the seconds to the next one, at most 1."""
        now = self._store.clock()
        if now < self._due:
            return self._due - now
        for match in [match for match in self.open.values() if match.deadline <= now]:
            if match.pending:
                self.finish(match)
            else:
                self._store.counters["lease_expired"] += 1
                self._end(match)
        self._due = min([now + 1.0, *(match.deadline for match in self.open.values())])
        return self._due - now

    def end_leases(self, owner: int) -> None:
        """End an owner's matches."""
        for match in [match for match in self.open.values() if match.owner == owner]:
            self._end(match)

    def holds(self, owner: int) -> bool:
        """Return whether an owner has a match or a transfer."""
        return any(match.owner == owner for match in self.open.values()) or any(
            who == owner for who, _ in self.transfers.values()
        )

    def disown(self, owner: int) -> None:
        """End everything of an owner that is gone."""
        self.end_leases(owner)
        for number in [n for n, (held, _) in self.transfers.items() if held == owner]:
            self.release(owner, 0, number)

    def _end(self, match: Match) -> None:
        match.awaited.clear()
        self._store.unhold([row for row in match.rows if row != NONE])
        match.rows = array("i")
        del self.open[match.number]
        for done in match.waiters:
            done(MatchReply(match=0, blocks=0))

    def _mine(self, owner: int, number: int) -> Match | None:
        match = self.open.get(number)
        return match if match is not None and match.owner == owner else None

    def _enter(self, match: Match, answer: MatchReply, blocks: int) -> None:
        """Write into the ledger what this load saves or loses, the wait for its stage included."""
        call, first = match.call, not match.entered
        match.entered = True
        blocks = answer.blocks if match.windows else blocks
        if first and (call.linear or call.quadratic):
            saved = match.recompute_s(blocks) - match.waited_s
            saved -= answer.load_s * blocks / match.behind(answer.blocks)
            self._store.seconds["saved" if saved > 0 else "lost"] += abs(saved)

    def _count(self, match: Match) -> None:
        store, blocks = self._store, match.blocks
        for name, found in match.by_tier(blocks).items():
            store.hits[name] += found
        if match.ahead:
            store.hits["hbm"] += match.ahead
        store.totals["miss_blocks"] += match.asked - max(blocks, match.ahead)
