"""A store of a few lines for tests of what lies before it: frames of one part, one page each."""

import mmap
import os
import struct
import time
from collections.abc import Callable
from typing import Any

from tierkv import calls

PAGE_BYTES = 1 << 16
PAGES = 64


class FakeArena:
    def __init__(self) -> None:
        self.fd = os.memfd_create("tierkv-test", os.MFD_CLOEXEC)
        self.nbytes = PAGES * PAGE_BYTES
        self.page_bytes = PAGE_BYTES
        self.epoch = time.time_ns()
        os.ftruncate(self.fd, self.nbytes)
        self.map = mmap.mmap(self.fd, self.nbytes)
        self.view = memoryview(self.map)


class FakeStore:
    """Implements `control.Control`. A namespace named "bug" raises, "hang" is never final."""

    def __init__(self) -> None:
        self.arena = FakeArena()
        self.free = list(range(PAGES))
        self.ready: dict[bytes, int] = {}
        self.holds: dict[int, tuple[int, str, Any]] = {}
        self.next = time.time_ns()
        self.log: list[tuple[str, int]] = []
        self.waits: list[Callable[[Any], None]] = []
        self.pause_s = 0.0

    def hold(self, owner: int, kind: str, what: object) -> int:
        self.next += 1
        self.holds[self.next] = owner, kind, what
        return self.next

    def take(self, owner: int, kind: str, number: int) -> Any | None:
        found = self.holds.get(number)
        if found is None or found[:2] != (owner, kind):
            return None
        return self.holds.pop(number)[2]

    def keys(self, call: Any) -> list[bytes]:
        return [call.keys[at : at + 32] for at in range(0, len(call.keys), 32)]

    def match(self, owner: int, call: calls.MatchCall) -> calls.MatchReply:
        if call.namespace == "bug":
            raise ZeroDivisionError("on purpose")
        if call.namespace == "slow":
            time.sleep(self.pause_s)
        found = []
        for key in self.keys(call):
            if key not in self.ready:
                break
            found.append(self.ready[key])
        pending = call.namespace == "hang"
        number = self.hold(owner, "match", found) if found or pending else 0
        return calls.MatchReply(match=number, blocks=len(found), pending=pending)

    def wait(self, owner: int, call: calls.WaitCall, done: Callable[[Any], None]) -> None:
        self.waits.append(done)

    def settle(self, owner: int, call: calls.SettleCall) -> calls.MatchReply:
        return calls.MatchReply(match=call.match, blocks=0)

    def release(self, owner: int, call: calls.ReleaseCall) -> None:
        self.take(owner, "match", call.match)
        self.take(owner, "transfer", call.transfer)

    def claim(self, owner: int, call: calls.ClaimCall) -> calls.GetReply:
        return calls.GetReply(transfer=0)

    def get(self, owner: int, call: calls.GetCall) -> calls.GetReply:
        pages = self.take(owner, "match", call.match)
        if pages is None:
            return calls.GetReply(transfer=0)
        runs = b"".join(struct.pack("<2q", page * PAGE_BYTES, PAGE_BYTES) for page in pages)
        counts = struct.pack("<H", 1) * len(pages)
        number = self.hold(owner, "transfer", pages)
        return calls.GetReply(transfer=number, run_counts=counts, runs=runs)

    def put(self, owner: int, call: calls.PutCall) -> calls.PutReply:
        keys = self.keys(call)
        if len(keys) > len(self.free):
            return calls.PutReply(reservation=0, refused=len(keys))
        pages = [self.free.pop() for _ in keys]
        runs = b"".join(struct.pack("<2q", page * PAGE_BYTES, PAGE_BYTES) for page in pages)
        return calls.PutReply(
            reservation=self.hold(owner, "put", list(zip(keys, pages, strict=True))),
            units=struct.pack(f"<{len(keys)}I", *range(len(keys))),
            run_counts=struct.pack("<H", 1) * len(keys),
            runs=runs,
        )

    def commit(self, owner: int, call: calls.CommitCall) -> calls.Done:
        found = self.take(owner, "put", call.reservation) or []
        self.ready.update(found)
        return calls.Done(units=len(found))

    def introduce(self, owner: int, call: calls.IdentityCall) -> calls.Done:
        self.log.append(("introduce", owner))
        return calls.Done()

    def abort(self, owner: int, call: calls.AbortCall) -> calls.Done:
        self.free += [page for _, page in self.take(owner, "put", call.reservation) or []]
        return calls.Done()

    def flush(self, call: calls.FlushCall, done: Callable[[calls.FlushReply], None]) -> None:
        done(calls.FlushReply(durable=bytes(len(call.keys) // 32)))

    def clear(self, call: calls.ClearCall, done: Callable[[calls.ClearReply], None]) -> None:
        self.ready.clear()
        done(calls.ClearReply(generation=1, removed={}, failed={}))

    def stat(self, call: calls.StatCall, done: Callable[[dict[str, Any]], None]) -> None:
        done({"holds": {"matches": len(self.holds)}, "counters": {"own": 1}})

    def policy(self, owner: int, call: calls.PolicyCall) -> calls.PolicyReply:
        return calls.PolicyReply(name=call.name or "lru")

    def explain(self, owner: int, call: calls.ExplainCall) -> dict[str, Any]:
        return {"key": call.key.hex(), "policy": "lru", "because": "it is a fake"}

    def tick(self) -> float:
        return 0.05

    def end_leases(self, owner: int) -> bool:
        self.log.append(("end_leases", owner))
        for number, (of, kind, _) in list(self.holds.items()):
            if of == owner and kind == "match":
                del self.holds[number]
        return any(of == owner for of, _, _ in self.holds.values())

    def disown(self, owner: int) -> None:
        self.log.append(("disown", owner))
        for number, (of, kind, what) in list(self.holds.items()):
            if of == owner:
                del self.holds[number]
                self.free += [page for _, page in what] if kind == "put" else []

    def close(self, grace_s: float) -> None:
        self.log.append(("close", 0))
