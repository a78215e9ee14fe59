"""A real store against a plain dict, by every order of calls, jobs, deadlines, faults and crashes.

What is served is what was put under that key, in that namespace, at no less than the fidelity
asked, and never what was cleared; frames that somebody holds never change; the bookkeeping adds up
after every step; when all let go, nothing is held.
"""

from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.memory_tier import Medium, MemoryTier
from tests.property.store_model import Model, OpenMatch, OpenPut, OpenTransfer, Unit
from tests.stores import BLOCK, ONE, PAGE, TWO, Rig, chain, fill, packed, pattern
from tierkv import calls
from tierkv.client import Transfer
from tierkv.fidelity import Fidelity
from tierkv.key import KEY_BYTES
from tierkv.part import PACKED_BYTES, Part
from tierkv.tier import DurableTier, Item, Outcome, Status

PAGES = 12
SPACES = st.sampled_from(["one", "one", "one", "two"])
FIDELITIES = st.sampled_from([4, 4, 2])
OWNERS = st.integers(1, 3)
PARTS = st.sampled_from([ONE, ONE, TWO])
SESSIONS = st.sampled_from([1, 1, 2, 3])
LENGTHS = st.integers(1, 5)
PICKS = st.integers(0, 99)
SIZES = st.sampled_from([BLOCK, 100, BLOCK + PAGE])
Parts = tuple[Part, ...]


class StoreMachine(RuleBasedStateMachine):
    """Over a dict that survives crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.puts: list[OpenPut] = []
        self.matches: list[OpenMatch] = []
        self.transfers: list[OpenTransfer] = []
        self.flushes: list[tuple[calls.FlushCall, int, list[calls.FlushReply]]] = []
        self.clears: list[tuple[str, list[calls.ClearReply]]] = []
        self.medium = Medium()
        self.fault = ""
        self.written: list[tuple[str, int, int, Parts, int]] = []
        """Namespace, session, blocks, parts and fidelity of puts, to ask for them again."""
        self.calm = 0
        """Steps since the last upheaval: those are kept rare, or nothing would ever be there."""

    put_fields: ClassVar[dict[str, Any]] = {}
    """What puts say beside what their rule says."""

    @initialize()
    def start(self) -> None:
        self.rig = self.open_rig()

    def open_rig(self, **fields: Any) -> Rig:
        return Rig(PAGES, [self.open_tier()], **fields)

    def open_tier(self) -> DurableTier:
        tier = MemoryTier(self.medium)
        tier.fault = self.maybe_fail
        return tier

    def maybe_fail(self, op: str, _item: Item) -> Outcome | None:
        fault, self.fault = self.fault, ""
        return Outcome(Status(fault)) if fault else None

    # --- writers ---

    @rule(
        owner=OWNERS, space=SPACES, session=SESSIONS, blocks=LENGTHS, parts=PARTS,
        fidelity=FIDELITIES, raw=SIZES, start=st.sampled_from([0, 0, 0, 1, 3]),
    )  # fmt: skip
    def put(
        self, owner: int, space: str, session: int, blocks: int, parts: Parts, fidelity: int,
        raw: int, start: int,
    ) -> None:  # fmt: skip
        keys = chain(session, blocks)
        derived = fidelity < Fidelity.EXACT  # what is not derived is exact
        fields: dict[str, Any] = {
            "parts": parts, "fidelity": fidelity, "raw": raw, "derived": derived,
        } | self.put_fields  # fmt: skip
        held = self.rig.offer(
            keys, owner=owner, namespace=space, start=min(start, blocks), **fields
        )
        if held is not None:
            units = [unit_of(keys, parts, unit) for unit in held.units]
            generation = self.model.generation(space)
            self.puts.append(OpenPut(owner, held, space, fidelity, units, raw, generation))

    @precondition(lambda self: self.puts)
    @rule(pick=PICKS, give_up=st.integers(0, 9))
    def commit(self, pick: int, give_up: int) -> None:
        put = take(self.puts, pick)
        written = []
        for index, (key, part) in enumerate(put.units):
            text = b"%d" % next(self.model.serial)
            data = b"" if index == give_up else pattern(text + key + part, put.raw)
            fill(put.held.payload(index), data)
            written.append(data)
        visible = put.held.commit([len(data) for data in written])
        current = put.generation == self.model.generation(put.namespace)
        assert visible == (min(give_up, len(written)) if current else 0)
        for unit, data in zip(put.units[:visible], written, strict=False):
            self.committed(put.namespace, unit, put.fidelity, data)

    def committed(self, space: str, unit: Unit, fidelity: int, data: bytes) -> None:
        self.model.add(space, unit, (fidelity, data))

    @precondition(lambda self: self.puts)
    @rule(pick=PICKS)
    def abort(self, pick: int) -> None:
        take(self.puts, pick).held.abort()

    @rule(space=SPACES, session=SESSIONS, blocks=LENGTHS, parts=PARTS, fidelity=FIDELITIES)
    def put_and_commit(
        self, space: str, session: int, blocks: int, parts: Parts, fidelity: int
    ) -> None:
        before = len(self.puts)
        self.put(1, space, session, blocks, parts, fidelity, BLOCK, 0)
        if len(self.puts) > before:
            self.commit(before, give_up=99)
        self.written.append((space, session, blocks, parts, fidelity))

    @precondition(lambda self: self.written)
    @rule(pick=PICKS, blocks=st.integers(4, 8))
    def put_more(self, pick: int, blocks: int) -> None:
        space, session, _, parts, fidelity = self.written[pick % len(self.written)]
        self.put_and_commit(space, session, blocks, parts, fidelity)

    @rule(session=st.integers(10, 12), blocks=st.integers(4, PAGES))
    def press(self, session: int, blocks: int) -> None:
        """Take RAM with a session that nobody asks for."""
        self.put_and_commit("two", session, blocks, ONE, 4)
        self.written.pop()

    # --- readers ---

    @rule(
        owner=OWNERS, space=SPACES, session=SESSIONS, blocks=LENGTHS, parts=PARTS,
        fidelity=FIDELITIES, linear=st.sampled_from([0.0, 0.0, 1e-6]),
        held=st.sampled_from([0, 0, 1, 2]),
    )  # fmt: skip
    def match(
        self, owner: int, space: str, session: int, blocks: int, parts: Parts, fidelity: int,
        linear: float, held: int = 0,
    ) -> None:  # fmt: skip
        call = self.rig.match_call(
            chain(session, blocks), parts=parts, namespace=space, fidelity=fidelity, linear=linear,
            held=min(held, blocks),
        )  # fmt: skip
        reply = self.rig.store.match(owner, call)
        assert 0 <= reply.blocks <= blocks
        if reply.match:
            self.matches.append(OpenMatch(owner, call, reply))

    @precondition(lambda self: self.matches)
    @rule(pick=PICKS)
    def settle(self, pick: int) -> None:
        found = self.matches[pick % len(self.matches)]
        reply = self.rig.store.settle(found.owner, calls.SettleCall(match=found.reply.match))
        assert not reply.pending
        found.reply = reply

    @precondition(lambda self: self.matches)
    @rule(pick=PICKS, fewer=st.integers(0, 2))
    def get(self, pick: int, fewer: int) -> None:
        found = take(self.matches, pick)
        blocks, held = max(found.reply.blocks - fewer, 1), found.call.held
        if held:  # what follows it is claimed
            keys = found.call.keys[held * KEY_BYTES : blocks * KEY_BYTES]
            behind = msgspec.structs.replace(found.call, keys=keys, held=0)
            transfer = self.rig.claim(found.reply.match, held, behind, owner=found.owner)
            self.rig.store.release(found.owner, calls.ReleaseCall(match=found.reply.match))
        else:
            transfer = self.rig.transfer(found.reply, found.call, owner=found.owner, blocks=blocks)
        if transfer is not None:
            assert transfer.units == (blocks - held) * len(found.call.parts) // PACKED_BYTES
            self.keep(found, found.owner, transfer)

    @precondition(lambda self: self.matches)
    @rule(pick=PICKS, owner=OWNERS, start=st.integers(0, 2))
    def claim(self, pick: int, owner: int, start: int) -> None:
        found = self.matches[pick % len(self.matches)]
        keys = found.call.keys[start * KEY_BYTES : found.reply.blocks * KEY_BYTES]
        last_part = found.call.parts[-PACKED_BYTES:]
        call = msgspec.structs.replace(found.call, keys=keys, parts=last_part)
        transfer = self.rig.claim(found.reply.match, start, call, owner=owner)
        if transfer is not None:
            assert transfer.units == found.reply.blocks - start
            self.keep(found, owner, transfer)

    def keep(self, found: OpenMatch, owner: int, transfer: Transfer) -> None:
        seen = []
        for unit in range(transfer.units):
            header = transfer.header(unit)
            assert header is not None
            assert header.fidelity >= found.call.fidelity
            pieces = transfer.payload(unit, header)
            data = b"".join(pieces)
            name = (header.key, header.part.pack())
            assert data in self.model.allowed(found.call.namespace, name, found.call.fidelity)
            seen.append((pieces, data))
        self.transfers.append(OpenTransfer(owner, transfer, seen))

    @rule(space=SPACES, session=SESSIONS, blocks=LENGTHS, parts=PARTS, fidelity=FIDELITIES)
    def read(self, space: str, session: int, blocks: int, parts: Parts, fidelity: int) -> None:
        before = len(self.matches)
        self.match(1, space, session, blocks, parts, fidelity, 0.0)
        if len(self.matches) > before:
            self.run_jobs()
            self.settle(before)
            self.get(before, 0)

    @precondition(lambda self: self.written)
    @rule(pick=PICKS, owner=OWNERS)
    def match_again(self, pick: int, owner: int) -> None:
        space, session, blocks, parts, fidelity = self.written[pick % len(self.written)]
        self.match(owner, space, session, blocks, parts, fidelity, 0.0)

    @precondition(lambda self: self.written)
    @rule(pick=PICKS)
    def read_again(self, pick: int) -> None:
        self.read(*self.written[pick % len(self.written)])

    @precondition(lambda self: self.transfers)
    @rule(pick=PICKS)
    def close(self, pick: int) -> None:
        done = take(self.transfers, pick)
        done.seen.clear()
        done.transfer.close()
        done.transfer.close()

    @precondition(lambda self: self.matches)
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        found = take(self.matches, pick)
        for _ in range(2):
            self.rig.store.release(found.owner, calls.ReleaseCall(match=found.reply.match))

    @precondition(lambda self: self.is_calm())
    @rule(owner=OWNERS)
    def owner_dies(self, owner: int) -> None:
        self.calm = 0
        self.rig.store.disown(owner)
        self.puts = [put for put in self.puts if put.owner != owner]
        self.matches = [found for found in self.matches if found.owner != owner]
        self.transfers = [held for held in self.transfers if held.owner != owner]

    # --- time, jobs, faults ---

    @rule(pick=PICKS)
    def run_job(self, pick: int) -> None:
        """Jobs of one lane run in order, lanes in any."""
        lanes = list(dict.fromkeys(lane for lane, _ in self.rig.inline.jobs))
        if lanes:
            lane = lanes[pick % len(lanes)]
            self.rig.inline.step([name for name, _ in self.rig.inline.jobs].index(lane))
            self.take_answers()

    @rule()
    def run_jobs(self) -> None:
        self.rig.inline.drain()
        self.take_answers()

    @rule(seconds=st.sampled_from([0.1, 3.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        assert 0 < self.rig.store.tick() < 1.001
        self.take_answers()

    @rule(fault=st.sampled_from([Status.FAILED, Status.THROTTLED, Status.FULL, Status.CORRUPT]))
    def next_one_fails(self, fault: Status) -> None:
        self.fault = fault.value
        if fault is Status.CORRUPT:
            self.model.durable.clear()

    # --- administration ---

    @rule(space=SPACES, session=SESSIONS, blocks=LENGTHS, parts=PARTS)
    def flush(self, space: str, session: int, blocks: int, parts: Parts) -> None:
        call = calls.FlushCall(
            namespace=space, keys=b"".join(chain(session, blocks)), parts=packed(parts),
            deadline_s=5.0,
        )  # fmt: skip
        answers: list[calls.FlushReply] = []
        self.rig.store.flush(call, answers.append)
        self.flushes.append((call, self.model.generation(space), answers))

    @precondition(lambda self: self.written)
    @rule(pick=PICKS)
    def flush_again(self, pick: int) -> None:
        space, session, blocks, parts, _ = self.written[pick % len(self.written)]
        self.flush(space, session, blocks, parts)
        self.run_jobs()

    @precondition(lambda self: self.is_calm())
    @rule(space=SPACES)
    def clear(self, space: str) -> None:
        answers: list[calls.ClearReply] = []
        self.rig.store.clear(calls.ClearCall(namespace=space), answers.append)
        self.calm = 0
        self.model.clear(space)
        self.clears.append((space, answers))

    @precondition(lambda self: self.is_calm())
    @rule(space=SPACES)
    def clear_at_once(self, space: str) -> None:
        self.clear(space)
        self.run_jobs()

    def take_answers(self) -> None:
        for space, answers in [pair for pair in self.clears if pair[1]]:
            self.clears.remove((space, answers))
            if space not in [other for other, _ in self.clears]:
                self.model.unanswered.pop(space, None)
        for entry in [entry for entry in self.flushes if entry[2]]:
            self.flushes.remove(entry)
            call, generation, (answer,) = entry
            if generation == self.model.generation(call.namespace) and self.keeps_all():
                self.note_durable(call, answer.durable)

    def note_durable(self, call: calls.FlushCall, durable: bytes) -> None:
        parts = [call.parts[at : at + 10] for at in range(0, len(call.parts), 10)]
        for unit, found in enumerate(durable):
            key = call.keys[unit // len(parts) * 32 :][:32]
            if found:
                name = (key, parts[unit % len(parts)])
                assert self.model.allowed(call.namespace, name, 0), "durable but never put"
                if self.model.is_alone(call.namespace, name):
                    self.model.durable.add((call.namespace, name))

    def keeps_all(self) -> bool:
        """Whether nothing was ever given up below RAM."""
        return True

    @precondition(lambda self: self.is_calm())
    @rule()
    def crash(self) -> None:
        self.calm = 0
        self.rig.close()
        self.model.crash()
        self.puts, self.matches, self.transfers = [], [], []
        self.flushes, self.clears, self.fault = [], [], ""
        self.rig = self.open_rig(clock=self.rig.clock)
        for space, (key, part) in self.model.durable:
            unit = Part.unpack(part)
            reply = self.rig.match([key], parts=(unit,), namespace=space, fidelity=1)
            assert reply.blocks == 1, "durable, but not found again"
            self.rig.store.release(1, calls.ReleaseCall(match=reply.match))

    # --- what always holds ---

    def is_calm(self) -> bool:
        return self.calm > 15

    @invariant()
    def adds_up(self) -> None:
        self.calm += 1
        if hasattr(self, "rig"):
            self.rig.sound()

    @invariant()
    def held_frames_never_change(self) -> None:
        assert all(held.unchanged() for held in self.transfers)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for owner in 1, 2, 3:
            self.rig.store.disown(owner)
        self.rig.inline.drain()
        self.rig.idle()
        self.rig.close()


def take(held: list[Any], pick: int) -> Any:
    return held.pop(pick % len(held))


def unit_of(keys: list[bytes], parts: Parts, unit: int) -> Unit:
    return keys[unit // len(parts)], parts[unit % len(parts)].pack()
