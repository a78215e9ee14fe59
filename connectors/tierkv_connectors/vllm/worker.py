"""Worker side: copies blocks between the engine's memory and the sidecar's arena.

Loads and saves run in lanes of their own, each in order. A load is reported exactly once, whatever
becomes of it, and never before its last copy has ended; neither frames nor a reservation are given
back before that. A save never holds an engine block: before a step writes to a block that a save
still has to read, the save gives it up.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from tierkv.client import GIVEN_UP, Client, Reservation, Transfer, Written
from tierkv.executor import Executor
from tierkv.key import KEY_BYTES
from tierkv_codecs import CODECS, CodecRegistry
from tierkv_connectors.device import Device, Mark
from tierkv_connectors.edge import Edge
from tierkv_connectors.pages import UnitCopier
from tierkv_connectors.prefill import PrefillCost
from tierkv_connectors.vllm.cores import leave_computing_cores
from tierkv_connectors.vllm.kept import Kept
from tierkv_connectors.vllm.layout import Layout
from tierkv_connectors.vllm.pace import Pace
from tierkv_connectors.vllm.plan import Load, Save, StepPlan


class _Saving:
    """A save, the mark behind what computed it, and the engine blocks that it has still to read."""

    def __init__(self, save: Save, mark: Mark) -> None:
        self.save = save
        self.mark = mark
        self.guard = threading.Lock()
        """Held while the copy of a block is begun."""
        self.left = set(save.blocks)
        self.lost: set[int] = set()

    def give_up(self, blocks: AbstractSet[int] | None) -> bool:
        """Read these blocks no more from now on; returns whether any was still to be read."""
        with self.guard:
            hit = self.left if blocks is None else self.left & blocks
            self.lost |= hit
            return bool(hit)


class _Reports:
    """What became of loads, until vLLM asks. A lane may add to it at any time."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._over: deque[tuple[str, Sequence[int]]] = deque()
        """Loads that are over, by any outcome, with the engine blocks that were not filled."""
        self._unfilled: set[int] = set()

    def ended(self) -> set[str]:
        """Return the requests whose loads are over since the last call."""
        names: set[str] = set()
        while self._over:
            name, unfilled = self._over.popleft()
            names.add(name)
            self._unfilled.update(unfilled)
        return names

    def unfilled(self) -> set[int]:
        """Return the engine blocks that loads were to fill and did not, since the last call."""
        blocks, self._unfilled = self._unfilled, set()
        return blocks


class NoWorker(_Reports):
    """What a worker does whose KV cannot be kept: every load of the scheduler's is unfilled."""

    def fence(self, plan: StepPlan) -> None:
        """Do nothing: nothing is read."""

    def begin_loads(self, loads: Sequence[Load]) -> None:
        """Let the loads be over."""
        self._over.extend((load.request, load.blocks) for load in loads)

    def begin_saves(self, saves: Sequence[Save]) -> None:
        """Do nothing."""

    def flush(self, deadline_s: float) -> None:
        """Do nothing."""


class Worker(_Reports):
    """The worker's part.

    Args:
        kept: the engine's KV.
        client: of the sidecar, with its arena.
        executor: has lanes "load" and "save" of one thread each.
        layout: of the engine's registered tensors.
        device: where they are.
        edge: counts what goes wrong.
        codecs: that have the engine's profiles, and all others that may be read.
    """

    def __init__(
        self,
        kept: Kept,
        client: Client,
        executor: Executor,
        layout: Layout,
        device: Device,
        edge: Edge,
        codecs: CodecRegistry = CODECS,
    ) -> None:
        super().__init__()
        self._kept = kept
        self._client = client
        self._executor = executor
        self._layout = layout
        self._edge = edge
        self._device = device
        self._in, self._out = device.lane(kept.raw_bytes), device.lane(kept.raw_bytes)
        self._reader = UnitCopier(kept.identity, kept.part, self._in, codecs)
        self._writer = UnitCopier(kept.identity, kept.part, self._out, codecs)
        self._artifacts = tuple(codecs.named(name).artifact for name in kept.options.profiles)
        self._saving: list[_Saving] = []
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
            self._over.extend((load.request, load.blocks) for load in loads)

    def begin_saves(self, saves: Sequence[Save]) -> None:
        """Queue saves of what the engine's last step has written, or has queued to be written."""
        self._pace.step_ends()
        if saves:
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
            if not self._pace.admit(save.fresh * self._kept.raw_bytes):
                self.counters["saves_dropped"] += 1
                continue
            saving = _Saving(save, mark)
            self._saving.append(saving)
            self._executor.submit("save", partial(self._save, saving))

    def _load(self, load: Load, mark: Mark) -> None:
        filled = 0
        try:
            filled = self._edge.shield("load", lambda: self._fill(load, mark), 0)
        finally:
            self.counters["loads_failed"] += filled < len(load.blocks)
            self._over.append((load.request, load.blocks[filled:]))

    def _fill(self, load: Load, mark: Mark) -> int:
        """Return how many engine blocks of a load hold what they should, from the first on."""
        call = self._kept.match_call(load.fingerprint, load.keys, load.fidelity, 0.0, PrefillCost())
        if time.monotonic() > load.deadline:
            self.counters["loads_late"] += 1
            return 0
        transfer = self._client.claim(load.match, load.start, call)
        if transfer is None:
            return 0
        with transfer:
            try:
                self._in.after(mark)
                read = self._read(transfer, load)
            finally:
                self._in.wait()  # what was begun still reads the arena, and writes to pages
            sound = transfer.intact(read)
            assert sound <= len(call.keys) // KEY_BYTES
            return min(max(sound * self._kept.ratio - load.skip, 0), len(load.blocks))

    def _read(self, transfer: Transfer, load: Load) -> int:
        """Begin to copy store blocks, up to one that cannot be; returns how many."""
        ratio, read = self._kept.ratio, 0
        for number, header in enumerate(transfer.headers()):
            first = max(number * ratio - load.skip, 0)
            blocks = load.blocks[first : (number + 1) * ratio - load.skip]
            views = self._layout.views(blocks, load.skip if number == 0 else 0)
            late = time.monotonic() > load.deadline
            self.counters["loads_late"] += late
            if late or not self._reader.read(transfer, number, header, views):
                break
            read = number + 1
        return read

    def _save(self, saving: _Saving) -> None:
        self._edge.shield("save", lambda: self._offer(saving), None)
        saving.left = set()
        self._pace.left(saving.save.fresh * self._kept.raw_bytes)

    def _offer(self, saving: _Saving) -> None:
        reservation = self._client.put(
            self._kept.put_call(
                saving.save.fingerprint, saving.save.keys, saving.save.fidelity, self._artifacts
            )
        )
        if reservation is None:
            return
        try:
            self._out.after(saving.mark)
            units = self._write(saving, reservation)
            self.counters["saved_blocks"] += reservation.commit_written(units)
        finally:
            self._out.wait()  # what was begun still writes to the reservation
            reservation.abort()

    def _write(self, saving: _Saving, reservation: Reservation) -> list[Written]:
        """Return what was written of a reservation's units, nothing from the first lost one on."""
        profiles, ratio = reservation.profiles, self._kept.ratio
        tokens = self._kept.identity.tokens_per_block
        units = [GIVEN_UP] * len(reservation.units)
        wanted = [saving.save.blocks[unit * ratio :][:ratio] for unit in reservation.units]
        with saving.guard:
            saving.left = set().union(*wanted)
        for index, blocks in enumerate(wanted):
            started = time.monotonic()
            with saving.guard:
                if saving.lost.intersection(blocks):
                    break
                pieces = reservation.payload(index)
                block = self._writer.take(self._layout.views(blocks), profiles, pieces)
                saving.left.difference_update(blocks)
            position = reservation.units[index] * tokens
            units[index] = self._writer.encode(block, profiles, pieces, position)
            self._pace.copied(time.monotonic() - started)
        return units
