"""A real store that a test turns by hand: its clock, its jobs, its clients.

rig = Rig(pages=16)
rig.put(chain(1, 4), b"text")      # offer, write and commit a chain
rig.read(chain(1, 4))              # what a reader gets, block by block
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.memory_tier import MemoryTier
from tierkv import calls, frame
from tierkv.cache import TierKV
from tierkv.catalog import ABSENT
from tierkv.client import Transfer
from tierkv.executor import Executor, Inline
from tierkv.gate import Gate
from tierkv.key import KEY_BYTES
from tierkv.pairs import PROGRESSIVE
from tierkv.part import Part
from tierkv.record import Recorder
from tierkv.reservation import Reservation
from tierkv.settings import StoreSettings
from tierkv.tier import RAM, DurableTier
from tierkv.tiers.host import HostSettings, HostTier

PAGE = 16 << 10
BLOCK = PAGE - frame.header_bytes(1)
"""Raw bytes of a block whose frame takes one page."""
FINGERPRINT = hashlib.sha256(b"tests.stores").digest()
ONE = (Part(0, 0, 2, 0, 2),)
TWO = (Part(0, 0, 2, 0, 1), Part(0, 0, 2, 1, 2))


OPEN: list["Rig"] = []
"""What the running test has opened."""


class Clock:
    """Seconds that a test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def chain(session: int, blocks: int) -> list[bytes]:
    """Return a session's keys, head first; a longer chain starts with the shorter."""
    return [hashlib.sha256(b"%d.%d" % (session, block)).digest() for block in range(blocks)]


def pattern(text: bytes, nbytes: int) -> bytes:
    """Return `nbytes` bytes that only this text has."""
    return (hashlib.sha256(text).digest() * (nbytes // 32 + 1))[:nbytes]


def packed(parts: Sequence[Part]) -> bytes:
    return b"".join(part.pack() for part in parts)


class Rig:
    """One store and what a client does to it; `lower` are its lower tiers.

    It ends with its test, if not before (`close`).
    """

    def __init__(
        self,
        pages: int = 16,
        lower: Sequence[DurableTier] | None = None,
        *,
        executor: Executor | None = None,
        clock: Clock | None = None,
        wall: Callable[[], float] = lambda: 0.0,
        gate: Gate | None = None,
        recorder: Recorder | None = None,
        **settings: Any,
    ) -> None:
        self.inline = Inline()
        self.clock = clock or Clock()
        self.lower = [MemoryTier()] if lower is None else list(lower)
        self.host = HostTier(HostSettings(size_bytes=pages * PAGE, page_bytes=PAGE))
        self.store = TierKV(
            self.host,
            self.lower,
            executor=executor or self.inline,
            settings=StoreSettings(**{"policy": "lru"} | settings),
            gate=gate,
            recorder=recorder,
            clock=self.clock,
            wall=wall,
        )
        self.inline.drain()
        OPEN.append(self)

    def close(self) -> None:
        """Let memory, files and threads go; nothing more is written. Idempotent."""
        if self in OPEN:
            OPEN.remove(self)
        self.inline.jobs.clear()
        self.store.close(0.0)

    def put_call(self, keys: Sequence[bytes], **fields: Any) -> calls.PutCall:
        parts = fields.pop("parts", ONE)
        raw = fields.pop("raw", BLOCK)
        values: dict[str, Any] = {
            "namespace": "one", "fingerprint": FINGERPRINT, "keys": b"".join(keys),
            "parts": packed(parts), "raw_bytes": np.full(len(parts), raw, "<i8").tobytes(),
            "fidelity": 4, "position": 0, "tokens_per_block": 64,
        }  # fmt: skip
        return calls.PutCall(**(values | fields))

    def match_call(self, keys: Sequence[bytes], **fields: Any) -> calls.MatchCall:
        parts = fields.pop("parts", ONE)
        values: dict[str, Any] = {
            "namespace": "one", "fingerprint": FINGERPRINT, "keys": b"".join(keys),
            "parts": packed(parts), "fidelity": 4, "position": 0, "tokens_per_block": 64,
            "raw_bytes": BLOCK * len(parts),
        }  # fmt: skip
        return calls.MatchCall(**(values | fields))

    def offer(self, keys: Sequence[bytes], *, owner: int = 1, **fields: Any) -> Reservation | None:
        """Ask where to write; None when there is nothing to write."""
        reply = self.store.put(owner, self.put_call(keys, **fields))
        if not reply.reservation:
            return None
        return Reservation(Direct(self.store, owner), reply, self.host.view)

    def put(
        self, keys: Sequence[bytes], text: bytes = b"", *, owner: int = 1, **fields: Any
    ) -> int:
        """Write and commit what is wanted of a chain; returns units that became visible.

        The bytes of a unit are `pattern(text + key + number of its part)`.
        """
        held = self.offer(keys, owner=owner, **fields)
        if held is None:
            return 0
        parts, raw = len(fields.get("parts", ONE)), fields.get("raw", BLOCK)
        for index, unit in enumerate(held.units):
            data = pattern(text + keys[unit // parts] + bytes([unit % parts]), raw)
            fill(held.payload(index), data)
        return held.commit([raw] * len(held.units))

    def match(
        self, keys: Sequence[bytes], *, owner: int = 1, drain: bool = True, **fields: Any
    ) -> calls.MatchReply:
        """Return the final answer of a match, after all jobs have run."""
        reply = self.store.match(owner, self.match_call(keys, **fields))
        if reply.pending and drain:
            self.inline.drain()
            reply = self.store.settle(owner, calls.SettleCall(match=reply.match))
        return reply

    def transfer(
        self, reply: calls.MatchReply, call: calls.MatchCall, *, owner: int = 1, blocks: int = 0
    ) -> Transfer | None:
        """Open a transfer of a final match, None when it is a miss."""
        get = calls.GetCall(match=reply.match, blocks=blocks or reply.blocks)
        answer = self.store.get(owner, get)
        if not answer.transfer:
            return None
        frames = self.frames(answer.run_counts, answer.runs)
        return Transfer(Direct(self.store, owner), answer, call, frames)

    def claim(
        self, match: int, start: int, call: calls.MatchCall, *, owner: int
    ) -> Transfer | None:
        """Open a transfer of the call's units of somebody's final match, None when it is a miss."""
        blocks = len(call.keys) // KEY_BYTES
        wanted = calls.ClaimCall(match=match, start=start, blocks=blocks, parts=call.parts)
        answer = self.store.claim(owner, wanted)
        if not answer.transfer:
            return None
        frames = self.frames(answer.run_counts, answer.runs)
        return Transfer(Direct(self.store, owner), answer, call, frames)

    def read(self, keys: Sequence[bytes], *, owner: int = 1, **fields: Any) -> list[bytes]:
        """Return the payloads of every unit that a reader gets."""
        reply = self.match(keys, owner=owner, **dict(fields))
        transfer = self.transfer(reply, self.match_call(keys, **dict(fields)), owner=owner)
        if transfer is None:
            return []
        with transfer:
            return [payload_of(transfer, unit) for unit in range(transfer.units)]

    def frames(self, counts: bytes, runs: bytes) -> list[list[memoryview]]:
        pairs = np.frombuffer(runs, "<i8").reshape(-1, 2).tolist()
        out, at = [], 0
        for count in np.frombuffer(counts, "<u2").tolist():
            out.append([self.host.view[s : s + n] for s, n in pairs[at : at + count]])
            at += count
        return out

    def flush(self, keys: Sequence[bytes], **fields: Any) -> bytes:
        """Return one byte per unit, 1 where it is durable."""
        answers: list[calls.FlushReply] = []
        call = calls.FlushCall(
            namespace=fields.get("namespace", "one"), keys=b"".join(keys),
            parts=packed(fields.get("parts", ONE)), deadline_s=1.0,
        )  # fmt: skip
        self.store.flush(call, answers.append)
        self.inline.drain()
        self.store.tick()
        (answer,) = answers
        return answer.durable

    def clear(self, namespace: str = "one") -> calls.ClearReply:
        answers: list[calls.ClearReply] = []
        self.store.clear(calls.ClearCall(namespace=namespace), answers.append)
        self.inline.drain()
        (answer,) = answers
        return answer

    def stat(self) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []
        self.store.stat(calls.StatCall(), answers.append)
        return answers[0]

    def sound(self) -> None:
        """Assert that the bookkeeping adds up."""
        store = self.store._store
        store.check()
        assert store.broken == ""
        catalog, names = store.catalog, set()
        for row, state in enumerate(catalog.state):
            if state != ABSENT:
                small = catalog.tier[row] == RAM and catalog.profile[row] in PROGRESSIVE
                name = catalog.tier[row], small, catalog.key(row), catalog.part[row]
                assert name not in names, "one unit stands twice in a tier, or in one place of RAM"
                names.add(name)

    def idle(self) -> None:
        """Assert that nobody holds anything, and that the bookkeeping adds up."""
        self.sound()
        holds = self.stat()["holds"]
        assert (holds["matches"], holds["transfers"], holds["reservations"]) == (0, 0, 0)
        assert not any(self.store._store.catalog.holds)


def payload_of(transfer: Transfer, unit: int) -> bytes:
    header = transfer.header(unit)
    assert header is not None
    data = b"".join(transfer.payload(unit, header))
    assert transfer.unchanged(unit)
    return data


def fill(pieces: Sequence[memoryview], data: bytes) -> None:
    at = 0
    for view in frame.cut(pieces, 0, len(data)):
        view[:] = data[at : at + len(view)]
        at += len(view)
    assert at == len(data)


class Direct:
    """A `client.Channel` that ends transfers and reservations of a store in this thread."""

    def __init__(self, store: TierKV, owner: int) -> None:
        self._store = store
        self._owner = owner

    def call(self, call: calls.Call, timeout_s: float | None = None) -> Any | None:
        match call:
            case calls.CommitCall():
                return self._store.commit(self._owner, call)
            case calls.ReleaseCall():
                self._store.release(self._owner, call)
                return None
            case calls.AbortCall():
                return self._store.abort(self._owner, call)
        raise AssertionError(call)

    def post(self, call: calls.Call) -> None:
        self.call(call)

    def borrow(self) -> memoryview | None:
        raise AssertionError

    def give_back(self) -> None:
        """Nothing is counted."""

    def close(self) -> None:
        raise AssertionError
