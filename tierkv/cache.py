"""TierKV: the store's face, `control.Control` over puts, matches, stages and write-behind.

    match -> Matches -> (Stages -> read lanes) -> get -> the client copies out -> release
    put   -> Puts -> the client copies in -> commit -> WriteBehind -> write lanes

Every method takes the lock for microseconds; I/O happens on the executor's lanes.
"""

import itertools
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import numpy as np

from tierkv import calls, explain, heap
from tierkv.answers import Answers
from tierkv.catalog import LEAVING, NONE, READY, WRITING
from tierkv.clock import Clock
from tierkv.demotions import LANE, Demotions
from tierkv.encoder import Encoder
from tierkv.executor import Executor, Threads
from tierkv.frame import NO_ARTIFACT
from tierkv.gate import Gate, named
from tierkv.health import Health, lane
from tierkv.identity import from_wire
from tierkv.key import KEY_BYTES
from tierkv.matches import Matches
from tierkv.moves import Moves
from tierkv.namespace import digest_of
from tierkv.part import PACKED_BYTES
from tierkv.policies.choice import resolve
from tierkv.puts import Puts
from tierkv.record import Recorder
from tierkv.recovery import recover
from tierkv.report import report
from tierkv.settings import Settings, StoreSettings
from tierkv.stages import Stages
from tierkv.stat import to_wire
from tierkv.store import Store
from tierkv.tier import RAM, DurableTier
from tierkv.tiers.host import HostTier
from tierkv.tiers.nvme import NvmeTier
from tierkv.tiers.redis import RedisTier
from tierkv.write_behind import WriteBehind


class TierKV:
    """A store over host RAM and the lower tiers given, fastest first."""

    def __init__(
        self,
        host: HostTier,
        lower: Sequence[DurableTier],
        *,
        executor: Executor,
        settings: StoreSettings,
        gate: Gate | None = None,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
        recorder: Recorder | None = None,
    ) -> None:
        self._store = Store(host, lower, executor, clock, settings, gate, recorder)
        self._moves = Moves(self._store)
        self._write_behind = WriteBehind(self._store, self._moves)
        self._demotions = Demotions(self._store, self._moves, self._write_behind)
        self._matches = Matches(self._store)
        self._stages = Stages(self._store, self._moves, self._matches, self._write_behind.resume)
        self._puts = Puts(self._store, self._moves, self._write_behind)
        self._health = Health(self._store)
        self._answers = Answers()
        self._wall = wall
        self._started = clock()
        self._closed = False
        known = [low.tier.generations() for low in self._store.lower]
        for digest, generation in itertools.chain(*(tier.items() for tier in known)):
            self._store.namespaces.raise_to(digest, generation)
        for low, there in zip(self._store.lower, known, strict=True):
            self._store.persist(low, there)
            recover(self._store, low)
        heap.trim()
        self._store.executor.submit("touch", self._touch)

    @classmethod
    def open(
        cls, settings: Settings, gate: Gate | None = None, recorder: Recorder | None = None
    ) -> Self:
        """Build the tiers of the settings and the store over them. Raises: TierKVError.

        Args:
            settings: of all.
            gate: that they name, where it was read before.
            recorder: of what the policy is told and asked.
        """
        gate = gate or named(settings.store.gate)
        lower: list[DurableTier] = []
        lanes = {"control": 2, "touch": 1, "host-probe": 1, LANE: 1}
        with ExitStack() as undo:  # what was opened must not keep its files from the next try
            if settings.nvme is not None:
                lower.append(NvmeTier(settings.nvme))
                undo.callback(lower[-1].close)
            if settings.redis is not None:
                lower.append(RedisTier(settings.redis))
                undo.callback(lower[-1].close)
            for tier in lower:
                lanes |= {f"{tier.name}-read": tier.batch.threads, lane(tier): 1}
                lanes |= {f"{tier.name}-seal": 1, f"{tier.name}-write": 1}
            host = HostTier(settings.host)
            undo.callback(host.close)
            executor = Threads(lanes)
            undo.callback(executor.close, 1.0)
            store = cls(
                host, lower, executor=executor, settings=settings.store, gate=gate,
                recorder=recorder,
            )  # fmt: skip
            undo.pop_all()
        executor.on_bug = store.break_down
        return store

    def encode_with(self, encoder: Encoder) -> None:
        """Let demotions have other profiles of exact copies, on a lane of their own."""
        with self._store.lock:
            self._store.encoder = encoder
            self._store.catalog.let_encode(encoder.artifacts)
            for artifact in {*encoder.artifacts} - {NO_ARTIFACT}:
                self._store.offers.note_levels(artifact)

    @property
    def host(self) -> HostTier:
        """The arena that clients map."""
        return self._store.host

    def match(self, owner: int, call: calls.MatchCall) -> calls.MatchReply:
        """Answer from RAM and start a stage for what lies below."""
        with self._store.lock:
            if self._refusing():
                return calls.MatchReply(match=0, blocks=0)
            self._matches.expire()
            reply = self._matches.match(owner, call)
            match = self._matches.open.get(reply.match)
            if match is not None and self._store.settings.second_sight:
                self._demotions.seen([row for row in match.rows if row != NONE])
            return reply

    def wait(
        self, owner: int, call: calls.WaitCall, done: Callable[[calls.MatchReply], None]
    ) -> None:
        """Answer when the match is final."""
        miss = calls.MatchReply(match=0, blocks=0)
        with self._answers.owe(done, lambda: miss) as answer, self._store.lock:
            self._matches.wait(owner, call.match, answer)

    def settle(self, owner: int, call: calls.SettleCall) -> calls.MatchReply:
        """Make the match final now."""
        with self._store.lock:
            return self._matches.settle(owner, call.match)

    def release(self, owner: int, call: calls.ReleaseCall) -> None:
        """End a match or a transfer."""
        with self._store.lock:
            self._matches.release(owner, call.match, call.transfer, call.damaged)
            rates = self._store.host_rates
            self._store.host_rates = rates.with_told("read", call.copied_bytes, call.copied_s)

    def get(self, owner: int, call: calls.GetCall) -> calls.GetReply:
        """Turn a lease into a transfer."""
        with self._store.lock:
            if self._store.broken:
                return calls.GetReply(transfer=0)
            return self._matches.get(owner, call)

    def claim(self, owner: int, call: calls.ClaimCall) -> calls.GetReply:
        """Give a transfer of units of a match, which stays open."""
        with self._store.lock:
            if self._store.broken:
                return calls.GetReply(transfer=0)
            return self._matches.claim(owner, call)

    def put(self, owner: int, call: calls.PutCall) -> calls.PutReply:
        """Reserve space for what is worth storing."""
        with self._store.lock:
            if self._refusing():
                return calls.PutReply(reservation=0)
            self._matches.expire()
            return self._puts.put(owner, call)

    def commit(self, owner: int, call: calls.CommitCall) -> calls.Done:
        """Make written units visible."""
        with self._store.lock:
            if self._store.broken:
                return calls.Done()
            done = self._puts.commit(owner, call)
            self._demotions.relieve()
            return done

    def abort(self, owner: int, call: calls.AbortCall) -> calls.Done:
        """Give a reservation up."""
        with self._store.lock:
            return self._puts.abort(owner, call)

    def introduce(self, owner: int, call: calls.IdentityCall) -> calls.Done:
        """Learn of a model. Raises: TierKVError (invalid)."""
        del owner
        identity = from_wire(call.identity)
        with self._store.lock:
            self._store.offers.introduce(identity)
        return calls.Done()

    def flush(self, call: calls.FlushCall, done: Callable[[calls.FlushReply], None]) -> None:
        """Answer when everything asked for is durable, failed, or the deadline passed."""
        units = len(call.keys) // KEY_BYTES * (len(call.parts) // PACKED_BYTES)
        nothing = calls.FlushReply(durable=bytes(units))
        with self._answers.owe(done, lambda: nothing) as answer, self._store.lock:
            self._write_behind.flush(call, answer)

    def clear(self, call: calls.ClearCall, done: Callable[[calls.ClearReply], None]) -> None:
        """Raise the namespace's generation everywhere, then drop what is below it.

        The new generation is the time of day where that is higher: sidecars that cannot reach the
        tier they share come to different ones, and the later clear to the higher.
        """
        store, digest = self._store, digest_of(call.namespace)
        with store.lock:
            first = max(store.namespaces.generation(digest) + 1, int(self._wall() * 1e6))
            removed = Counter(store.clear_below(digest, first))

        def unfinished() -> calls.ClearReply:
            failed = {low.name: "the store was closed meanwhile" for low in store.lower}
            return calls.ClearReply(generation=first, removed=dict(removed), failed=failed)

        def persist(answer: Callable[[calls.ClearReply], None]) -> None:
            generation, failed = first, {}
            for low in store.lower:  # above every clear that others made before this one
                if low.shared is not None:
                    generation = max(generation, low.tier.generations().get(digest, 0) + 1)
            with store.lock:
                removed.update(store.clear_below(digest, generation))
            for low in store.lower:
                try:
                    low.tier.raise_generation(digest, generation)
                except OSError as error:
                    failed[low.name] = str(error)
            answer(calls.ClearReply(generation=generation, removed=dict(removed), failed=failed))

        with self._answers.owe(done, unfinished) as answer:
            store.executor.submit("control", partial(persist, answer))

    def stat(self, call: calls.StatCall, done: Callable[[dict[str, Any]], None]) -> None:
        """Answer with counters and tiers, after trying each medium when asked to."""

        def found(problems: dict[str, str]) -> dict[str, Any]:
            parts = self._store, self._matches, self._puts, self._write_behind
            with self._store.lock:
                return to_wire(report(*parts, self._started, problems))

        with self._answers.owe(done, lambda: found({})) as answer, self._store.lock:
            if call.probe and not self._closed:
                self._health.probe(lambda problems: answer(found(problems)))
            else:
                answer(found({}))

    def policy(self, owner: int, call: calls.PolicyCall) -> calls.PolicyReply:
        """Change the policy, or only say which one decides. Raises: TierKVError (invalid).

        Another policy learns of what is there as at a start: not who used it, heads before tails.
        """
        del owner
        store = self._store
        with store.lock:
            if call.name and resolve(call.name, store.offers.gate) != store.policy.name:
                policy = store.new_policy(call.name)
                for tier in range(len(store.catalog.tiers)):
                    rows = store.catalog.select(tier, WRITING, READY, LEAVING)
                    order = np.argsort(store.catalog.column("position")[rows], kind="stable")
                    policy.found(store.catalog, array("i", rows[order].tobytes()))
                store.policy = policy
            return calls.PolicyReply(name=store.policy.name)

    def explain(self, owner: int, call: calls.ExplainCall) -> dict[str, Any]:
        """Say why a block is where it is. Raises: TierKVError (invalid): the key is none."""
        del owner
        store = self._store
        with store.lock:
            told = (
                explain.explain(store.catalog, store.policy, call.key)
                if call.key
                else explain.explain_last_drop(store.policy)
            )
            return explain.to_wire(told)

    def tick(self) -> float:
        """End what is past its deadline."""
        with self._store.lock:
            self._demotions.relieve()
            self._write_behind.tick()
            self._health.tick()
            self._stages.tick()
            self._store.policy.measured(self._store.catalog, self._store.rates())
            self._store.check()
            return max(self._matches.expire(), 0.001)

    def end_leases(self, owner: int) -> bool:
        """End an owner's matches; returns whether it still holds anything else."""
        with self._store.lock:
            self._matches.end_leases(owner)
            return self._matches.holds(owner) or self._puts.holds(owner)

    def disown(self, owner: int) -> None:
        """End everything an owner held."""
        with self._store.lock:
            self._store.counters["owner_died"] += self._matches.holds(owner)
            self._matches.disown(owner)
            self._puts.disown(owner)
            self._store.check()

    def close(self, grace_s: float) -> None:
        """Write down what is worth most within `grace_s` seconds and stop. Idempotent.

        Calls that wait are answered: as usual within the grace, else with what is certain.
        """
        if self._closed:
            return
        store, end = self._store, time.monotonic() + grace_s
        with store.lock:
            self._closed = True
            self._matches.finish_all()
            if store.lower:
                rows = store.policy.oldest(store.catalog.select(RAM, READY).tolist())[::-1]
                self._write_behind.clear()
                self._write_behind.offer(rows, bounded=False)
        while time.monotonic() < end and not (self._write_behind.idle() and not self._answers):
            time.sleep(0.005)
            with store.lock:
                self._write_behind.tick()
                self._health.tick()
        with store.lock:
            self._write_behind.clear()
        store.executor.close(max(end - time.monotonic(), 1.0))
        self._answers.end()
        for low in store.lower:
            low.tier.close()
        store.host.close()
        if store.recorder is not None:
            store.recorder.close()

    def break_down(self, error: BaseException) -> None:
        """Answer only misses from now on: a job raised, so the bookkeeping may not hold."""
        with self._store.lock:
            self._store.broken = f"a bug: {error!r}, see the log"
            self._store.counters["invariant_broken"] += 1

    def _refusing(self) -> bool:
        return bool(self._closed or self._store.broken)

    def _touch(self) -> None:
        """Touch the arena's memory, step by step, beside everything else."""
        if self._store.host.touch() and not self._closed:
            self._store.executor.submit("touch", self._touch)
