"""Rounds of a crash test, in children of one warm process that has a single thread.

`python -c "from tests.crash.rounds import serve; serve()"` reads one JSON request a line and
answers each with one line. It forks a writer or a reader for each, which is ten times quicker than
an interpreter.
"""

import hashlib
import json
import os
import random
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tierkv import calls, frame
from tierkv.cache import TierKV
from tierkv.channel import EmbeddedChannel
from tierkv.client import Client, Transfer
from tierkv.part import Part
from tierkv.reservation import Reservation
from tierkv.settings import Settings, StoreSettings
from tierkv.simulation.engine import content
from tierkv.tier import DONE, Item, Outcome
from tierkv.tiers.host import HostSettings
from tierkv.tiers.nvme import NvmeSettings, NvmeTier

MIB = 1 << 20
FINGERPRINT = hashlib.sha256(b"tests.crash").digest()
WHOLE = Part(0, 0, 2, 0, 2).pack()
NAMESPACE = "crash"
SMALLEST, LARGEST = 16 << 10, 256 << 10
ROUND_S = 20.0
TOGETHER = 8
"""Blocks that one match asks for."""
WRITE = os.write
"""Taken before `kill_at` counts calls: the ledger is not the disk."""


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"tests.crash %d" % number).digest()


def size_of(number: int) -> int:
    """Return the payload bytes of a block: spread over the range, the same in every process."""
    spread = int.from_bytes(key_of(number)[:4], "little") % (LARGEST - SMALLEST)
    return SMALLEST + spread


def settings(folder: str, size: int, region: int) -> Settings:
    return Settings(
        host=HostSettings(size_bytes=16 * MIB),
        nvme=NvmeSettings(path=folder, size_bytes=size, region_bytes=region, free_floor_bytes=0),
        store=StoreSettings(grace_s=0.0),
    )


def client_of(store: TierKV) -> Client:
    return Client(EmbeddedChannel(store, store.host.view, timeout_s=5.0))


def put(client: Client, numbers: Sequence[int]) -> list[int]:
    """Write blocks, each a chain of its own size; return those that became visible."""
    done = []
    for number in numbers:
        held = client.put(
            calls.PutCall(
                namespace=NAMESPACE, fingerprint=FINGERPRINT, keys=key_of(number), parts=WHOLE,
                raw_bytes=struct.pack("<q", size_of(number)), fidelity=4, position=0,
                tokens_per_block=64,
            )
        )  # fmt: skip
        if held is None:
            continue
        fill(held, content(key_of(number) + WHOLE, 1, size_of(number)))
        if held.commit([size_of(number)]):
            done.append(number)
    return done


def fill(held: Reservation, data: bytes) -> None:
    at = 0
    for view in frame.cut(held.payload(0), 0, len(data)):
        view[:] = data[at : at + len(view)]
        at += len(view)


def flush(client: Client, numbers: Sequence[int]) -> list[int]:
    """Return the numbers that are durable."""
    keys = b"".join(key_of(number) for number in numbers)
    durable = client.flush(
        calls.FlushCall(namespace=NAMESPACE, keys=keys, parts=WHOLE, deadline_s=5.0)
    )
    return [number for number, there in zip(numbers, durable, strict=True) if there]


def look(client: Client, numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield what a reader gets of each block: "right", "wrong" or "" for a miss."""
    for at in range(0, len(numbers), TOGETHER):
        some = numbers[at : at + TOGETHER]
        states = look_at_chain(client, some)
        if len(states) < len(some):  # a gap: what lies behind it is asked for by itself
            states = [state for n in some for state in look_at_chain(client, [n]) or [""]]
        yield from zip(some, states, strict=True)


def look_at_chain(client: Client, numbers: Sequence[int]) -> list[str]:
    call = calls.MatchCall(
        namespace=NAMESPACE, fingerprint=FINGERPRINT, keys=b"".join(map(key_of, numbers)),
        parts=WHOLE, fidelity=4, position=0, tokens_per_block=64, raw_bytes=LARGEST, deadline_s=5.0,
    )  # fmt: skip
    reply = client.match(call)
    if reply.pending:
        reply = client.wait(reply.match, 5.0)
    transfer = client.get(reply.match, reply.blocks) if reply.blocks else None
    if transfer is None:
        return []
    with transfer:
        return [
            "right" if payload(transfer, unit) == expected(numbers[unit]) else "wrong"
            for unit in range(transfer.units)
        ]


def payload(transfer: Transfer, unit: int) -> bytes:
    header = transfer.header(unit)
    return b"" if header is None else b"".join(transfer.payload(unit, header))


def expected(number: int) -> bytes:
    return content(key_of(number) + WHOLE, 1, size_of(number))


class Ledger:
    """Lines that outlive the process: a pipe to the parent."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def say(self, word: str, *numbers: int) -> None:
        with self._lock:
            WRITE(self._fd, f"{word} {' '.join(map(str, numbers))}\n".encode())


def watch(tier: NvmeTier, ledger: Ledger) -> None:
    """Say which locator holds which key, and before a locator is given up."""
    write, free = tier.write, tier.free

    def writing(items: Sequence[Item]) -> list[Outcome]:
        outcomes = write(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome is DONE:
                ledger.say("wrote", int.from_bytes(item.id.key[:6], "little"), item.locator)
        return outcomes

    def freeing(locator: int, nbytes: int) -> None:
        ledger.say("freed", locator)
        free(locator, nbytes)

    tier.write, tier.free = writing, freeing  # type: ignore[method-assign]


def write_until_killed(request: dict[str, Any], ledger: Ledger) -> None:
    """Open the store and put and flush blocks for ever, from `first` on."""
    rng = random.Random(request["seed"])
    store = TierKV.open(settings(request["folder"], request["size"], request["region"]))
    watch(store._store.lower[0].tier, ledger)  # type: ignore[arg-type]
    client, number = client_of(store), request["first"]
    ledger.say("open")
    while True:
        numbers = list(range(number, number + rng.randint(1, 6)))
        number = numbers[-1] + 1
        ledger.say("tried", number)
        put(client, numbers)
        durable = flush(client, numbers)
        if durable:
            ledger.say("durable", *durable)


def write_script(request: dict[str, Any], ledger: Ledger) -> None:
    """Do a fixed little; be killed at the k-th call that touches the disk."""
    count = kill_at(request["at"], request["how"])
    store = TierKV.open(settings(request["folder"], request["size"], request["region"]))
    client = client_of(store)
    for numbers in ([1, 2], [3], [4, 5, 6]):
        put(client, numbers)
        ledger.say("durable", *flush(client, numbers))
    reply = client.clear("another")
    ledger.say("cleared", reply.generation if reply else -1)
    put(client, [7])
    ledger.say("durable", *flush(client, [7]))
    store.close(1.0)
    ledger.say("calls", count())


def kill_at(at: int, how: str) -> Callable[[], int]:
    """Wrap every call of `os` that changes the disk; returns how many were made."""
    made = 0
    lock = threading.Lock()

    def wrap(name: str) -> None:
        call = getattr(os, name)

        def counted(*args: Any, **fields: Any) -> Any:
            nonlocal made
            with lock:
                made += 1
                mine = made == at
            if mine and how == "torn" and name == "pwritev":
                fd, pieces, offset = args
                call(
                    fd, [memoryview(pieces[0])[: max(len(pieces[0]) // 8192 * 4096, 4096)]], offset
                )
            elif mine and how != "before":
                call(*args, **fields)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **fields)

        setattr(os, name, counted)

    for name in ("pwritev", "pwrite", "write", "fsync", "fdatasync", "ftruncate", "replace"):
        wrap(name)
    return lambda: made


def read_all(request: dict[str, Any], ledger: Ledger) -> None:
    """Open the store anew; say which blocks are right or wrong, and how much its files take."""
    store = TierKV.open(settings(request["folder"], request["size"], request["region"]))
    client = client_of(store)
    found: dict[str, list[int]] = {"right": [], "wrong": [], "": []}
    for number, state in look(client, request["numbers"]):
        found[state].append(number)
    ledger.say("right", *found["right"])
    ledger.say("wrong", *found["wrong"])
    files = list(Path(request["folder"]).iterdir())
    ledger.say("bytes", sum(path.stat().st_blocks * 512 for path in files), len(files))
    if request.get("more"):
        ledger.say("durable", *flush(client, put(client, [request["more"]])))
    ledger.say("broken", len(store._store.broken))
    ledger.say("end")


ACTS = {"write": write_until_killed, "script": write_script, "read": read_all}


def serve() -> None:
    """Answer requests until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.write(json.dumps(play(request)) + "\n")
        sys.stdout.flush()


def play(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a child for a request, kill it when asked to, and return what it said."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.close(out)
        try:
            ACTS[request["act"]](request, Ledger(into))
        finally:
            os._exit(3)  # `finally`: whatever was raised is on stderr, and nothing else runs
    os.close(into)
    lines = listen(child, out, request)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(out, "rb", closefd=True) as rest:
        lines += rest.read()
    text = [line.split() for line in lines.decode().splitlines(keepends=False)]
    return {"said": text, "status": status}


def listen(child: int, out: int, request: dict[str, Any]) -> bytes:
    """Collect a child's lines until it ends, or until it has said enough and its time has come."""
    del child
    lines, end = b"", time.monotonic() + ROUND_S
    kill = request.get("kill")
    while time.monotonic() < end:
        if kill and lines.count(b"\n") >= kill["lines"]:
            select.select([], [], [], kill["seconds"])
            return lines
        ready, _, _ = select.select([out], [], [], 1.0)
        data = os.read(out, 1 << 16) if ready else b""
        if ready and not data:
            return lines
        lines += data
    return lines + b"timeout\n"
