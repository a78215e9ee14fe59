"""Worker side: copies blocks between the engine's memory and the sidecar's arena.

Loads and saves run in lanes of their own, each in order. A load is reported exactly once, whatever
becomes of it, and never before its last copy has ended; neither frames nor a reservation are given
back before that. A save never holds an engine block: before a step writes to a block that a save
still has to read, the save gives it up.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from tierkv.client import Client, Transfer
from tierkv.executor import Executor
from tierkv.key import KEY_BYTES
from tierkv.reservation import GIVEN_UP, Reservation, Written
from tierkv_codecs import CODECS, CodecRegistry
from tierkv_connectors.device import Device, Mark
from tierkv_connectors.edge import Edge
from tierkv_connectors.vllm.cores import leave_computing_cores
from tierkv_connectors.vllm.group_layout import GroupLayout
from tierkv_connectors.vllm.groups import Span
from tierkv_connectors.vllm.kept import Kept
from tierkv_connectors.vllm.pace import Pace
from tierkv_connectors.vllm.plan import Load, Save, StepPlan
from tierkv_connectors.vllm.reports import Ended, Reports, Saved
from tierkv_connectors.vllm.shelves import Shelf, Shelves


class _Saving:
    """A save, the mark behind what computed it, and the engine blocks that it has still to read."""

    def __init__(self, save: Save, mark: Mark) -> None:
        self.save = save
        self.mark = mark
        self.guard = threading.Lock()
        """Held while the copy of a block is begun."""
        self.left = {block for span in save.spans for block in span.ids}
        self.lost: set[int] = set()

    def give_up(self, blocks: AbstractSet[int] | None) -> bool:
        """Read these blocks no more from now on; returns whether any was still to be read."""
        with self.guard:
            hit = self.left if blocks is None else self.left & blocks
            self.lost |= hit
            return bool(hit)

    def need(self, number: int, blocks: set[int]) -> None:
        """Note that of a span, the spans before which have been read, only these are to be read."""
        with self.guard:
            later = self.save.spans[number + 1 :]
            self.left = blocks.union(*(span.ids for span in later))


class NoWorker(Reports):
    """What a worker does whose KV cannot be kept: every load of the scheduler's is unfilled."""

    def fence(self, plan: StepPlan) -> None:
        """Do nothing: nothing is read."""

    def begin_loads(self, loads: Sequence[Load]) -> None:
        """Let the loads be over."""
        self._over.extend(Ended(load.request, load.blocks, {}) for load in loads)

    def begin_saves(self, saves: Sequence[Save]) -> None:
        """Do nothing."""

    def flush(self, deadline_s: float) -> None:
        """Do nothing."""


class Worker(Reports):
    """The worker's part.

    Args:
        kept: the engine's KV.
        client: of the sidecar, with its arena.
        executor: has lanes "load" and "save" of one thread each.
        layouts: of the engine's registered tensors, by KV group.
        device: where they are.
        edge: counts what goes wrong.
        codecs: that have the engine's profiles, and all others that may be read.
    """

    def __init__(
        self,
        kept: Kept,
        client: Client,
        executor: Executor,
        layouts: Sequence[GroupLayout],
        device: Device,
        edge: Edge,
        codecs: CodecRegistry = CODECS,
    ) -> None:
        super().__init__()
        self._kept = kept
        self._client = client
        client.introduce(kept.identity)
        self._executor = executor
        self._edge = edge
        self._device = device
        self._in, self._out = device.lane(kept.raw_bytes), device.lane(kept.raw_bytes)
        self._shelves = Shelves(kept, layouts, self._in, self._out, codecs)
        self._artifacts = codecs.artifacts(kept.options.profiles)
        self._saving: list[_Saving] = []
        self._met: Counter[int] = Counter()
        """Store blocks that the lane of loads has read for its load, by their class."""
        self._pace = Pace(kept.options.save_share, kept.options.save_queue_bytes)
        for lane in ("load", "save"):
            executor.submit(lane, leave_computing_cores)

    def fence(self, plan: StepPlan) -> None:
        """Let no save read a block that the step writes, and the step wait for what reads it now.

        Idempotent; called before anything of the step is written or queued.
        """
        self._pace.step_begins()
        self._saving = [saving for saving in self._saving if saving.left]
        for saving in self._saving:
            if saving.give_up(plan.overwritten):
                self.counters["saves_cut_short"] += 1
        if plan.overwritten is None or plan.overwritten:
            self._edge.shield("fence", self._out.hold, None)

    def ended(self) -> set[str]:
        """Return the requests whose loads are over since the last call; a step is over too."""
        self._pace.step_ends()
        return super().ended()

    def begin_loads(self, loads: Sequence[Load]) -> None:
        """Queue loads, behind all that the engine has queued; each will be among `ended` once."""
        if loads and not self._edge.shield("load", lambda: self._queue_loads(loads), 0):
            self._over.extend(Ended(load.request, load.blocks, {}) for load in loads)

    def begin_saves(self, saves: Sequence[Save]) -> None:
        """Queue saves of what the engine's last step has written, or has queued to be written."""
        self._pace.step_ends()
        if saves and self._kept.ranks.writes:
            self._edge.shield("save", lambda: self._queue_saves(saves), None)

    def flush(self, deadline_s: float) -> None:
        """Go on saving what waits, at most so long: the engine ends."""
        until = time.monotonic() + deadline_s
        self._pace.hurry()
        while self._executor.waiting("save") and time.monotonic() < until:
            time.sleep(0.002)

    def _queue_loads(self, loads: Sequence[Load]) -> int:
        mark = self._device.mark()
        for load in loads:
            self._executor.submit("load", partial(self._load, load, mark))
        return len(loads)

    def _queue_saves(self, saves: Sequence[Save]) -> None:
        mark = self._device.mark()
        for save in saves:
            if not self._pace.admit(save.fresh * self._kept.own_bytes):
                self.counters["saves_dropped"] += 1
                self._saves.append(Saved(save.fresh_keys, b"", save.fidelity))
                continue
            saving = _Saving(save, mark)
            self._saving.append(saving)
            self._executor.submit("save", partial(self._save, saving))

    def _load(self, load: Load, mark: Mark) -> None:
        blocks, filled, self._met = load.blocks, 0, Counter()
        try:
            filled = self._edge.shield("load", lambda: self._fill(load, mark), 0)
        finally:
            self.counters["loads_failed"] += filled < len(blocks)
            self._over.append(Ended(load.request, blocks[filled:], self._met))

    def _fill(self, load: Load, mark: Mark) -> int:
        """Return how many engine blocks of a load hold what they should, from the first on."""
        if time.monotonic() > load.deadline:
            self.counters["loads_late"] += 1
            return 0
        filled = 0
        for span in load.spans:
            more = self._fill_span(load, span, mark)
            filled += more
            if more < sum(map(len, span.blocks)):
                break
        return filled

    def _fill_span(self, load: Load, span: Span, mark: Mark) -> int:
        """Return how many engine blocks of a span are filled.

        It is all of them or, where a span has one share, some of the first.
        """
        shelves = self._shelves.over(span.group, load.shards)
        keys = load.keys[span.start * KEY_BYTES :]
        parts = [shelf.part for shelf in shelves]
        call = self._kept.claim_call(load.fingerprint, keys, load.fidelity, parts)
        transfer = self._client.claim(load.match, span.start, call)
        if transfer is None:
            return 0
        with transfer:
            try:
                self._in.after(mark)
                read = self._read(transfer, load, span, shelves)
            finally:
                self._in.wait()  # what was begun still reads the arena, and writes to pages
            sound = transfer.intact(read) // len(shelves)
            assert sound <= len(keys) // KEY_BYTES
            done = max(sound * self._kept.ratio(span.group) - span.skip, 0)
            return sum(min(done, len(ids)) for ids in span.blocks)

    def _read(self, transfer: Transfer, load: Load, span: Span, shelves: Sequence[Shelf]) -> int:
        """Begin to copy units, up to one that cannot be; returns how many."""
        ratio, read = self._kept.ratio(span.group), 0
        for unit, header in enumerate(transfer.headers()):
            number, shelf = unit // len(shelves), shelves[unit % len(shelves)]
            first, last = max(number * ratio - span.skip, 0), (number + 1) * ratio - span.skip
            blocks = [ids[first:last] for ids in span.blocks]
            late = time.monotonic() > load.deadline
            self.counters["loads_late"] += late
            views = shelf.views(blocks, span.skip if number == 0 else 0)
            if late or not shelf.reader.read(transfer, unit, header, views):
                break
            read = unit + 1
            if span is load.spans[0] and unit % len(shelves) == 0:
                self._met[int(header.fidelity)] += 1
        return read

    def _save(self, saving: _Saving) -> None:
        stored = self._edge.shield("save", lambda: self._offer(saving), b"")
        saving.left = set()
        self._saves.append(Saved(saving.save.fresh_keys, stored, saving.save.fidelity))
        self._pace.left(saving.save.fresh * self._kept.own_bytes)

    def _offer(self, saving: _Saving) -> bytes:
        """Save what the sidecar wants; returns the keys of what it made visible of the first group.

        What the sidecar has already, or of other groups, is not among them.
        """
        save, stored = saving.save, b""
        for number, span in enumerate(save.spans):
            stop = span.start + len(span.blocks[0]) // self._kept.ratio(span.group)
            keys = save.keys[span.start * KEY_BYTES : stop * KEY_BYTES]
            call = self._kept.put_call(
                save.fingerprint, keys, save.fidelity, self._artifacts, span.group, span.start
            )
            reservation = self._client.put(save.hints.on(call))
            if reservation is None:
                saving.need(number, set())
                continue
            try:
                self._out.after(saving.mark)
                units, beside, copied_s = self._write(saving, number, reservation)
                visible = reservation.commit_written(units, copied_s, beside)
                self.counters["saved_blocks"] += visible
                if number == 0 and visible == sum(bool(unit.length) for unit in units):
                    stored = b"".join(
                        keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
                        for at, unit in zip(reservation.units, units, strict=True)
                        if unit.length
                    )
            finally:
                self._out.wait()  # what was begun still writes to the reservation
                reservation.abort()
        return stored

    def _write(
        self, saving: _Saving, number: int, reservation: Reservation
    ) -> tuple[list[Written], list[Written], float]:
        """Write a reservation's units, nothing from the first lost one on.

        Returns: what was written, what beside that, and the seconds that the first took without
        the pauses between.
        """
        span = saving.save.spans[number]
        profiles, ratio = reservation.profiles, self._kept.ratio(span.group)
        shelf, tokens = self._shelves.own(span.group), self._kept.tokens
        units, copied_s = [GIVEN_UP] * len(reservation.units), 0.0
        beside = [GIVEN_UP] * len(reservation.units) if reservation.beside else []
        wanted = [
            [ids[unit * ratio :][:ratio] for ids in span.blocks] for unit in reservation.units
        ]
        saving.need(number, {block for ids in wanted for one in ids for block in one})
        for index, blocks in enumerate(wanted):
            started = time.monotonic()
            mine = {block for ids in blocks for block in ids}
            with saving.guard:
                if not saving.lost.isdisjoint(mine):
                    break
                pieces = reservation.payload(index)
                block = shelf.writer.take(shelf.views(blocks), profiles, pieces)
                saving.left -= mine
            position = (span.start + reservation.units[index]) * tokens
            units[index] = shelf.writer.encode(block, profiles, pieces, position)
            took = time.monotonic() - started
            copied_s += took
            if reservation.beside:
                pieces = reservation.payload_beside(index)
                small = shelf.writer.encode_beside(block, reservation.beside, pieces, position)
                beside[index] = small
            self._pace.copied(time.monotonic() - started)
        return units, beside, copied_s
