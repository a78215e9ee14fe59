"""Sidecars for tests: one in a thread over a fake store, and processes of the real one."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.fake_store import FakeStore
from tierkv import calls
from tierkv.client import Client
from tierkv.settings import SocketSettings
from tierkv_connectors import sidecar as sidecar_module
from tierkv_connectors.sidecar import SidecarChannel
from tierkv_service.locks import Locks
from tierkv_service.loop import Loop
from tierkv_service.server import Server

ROOT = str(Path(__file__).parents[1])
SIZE = 4096


class Served:
    """A server in a thread of this process."""

    def __init__(self, path: Path, settings: SocketSettings, uids: set[int] | None) -> None:
        self.path = path
        self.store = FakeStore()
        self.loop = Loop()
        self.locks = Locks(path, settings)
        self.locks.take_arena(1.0)
        self.locks.share_arena()
        listener = self.locks.listen()
        self.server = Server(self.loop, self.store, self.store.arena, listener, uids)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def stop(self) -> None:
        self.loop.post(self.server.close)
        self.loop.post(self.loop.stop)
        self.thread.join(60)
        self.loop.close()
        self.locks.close()


@contextlib.contextmanager
def served(path: Path, uids: set[int] | None = None, group: str = "") -> Iterator[Served]:
    one = Served(path, SocketSettings(uids=tuple(uids or ()), group=group), uids)
    try:
        yield one
    finally:
        one.stop()


def match_call(
    keys: bytes, namespace: str = "n", deadline_s: float = 1.0, **hints: Any
) -> calls.MatchCall:
    return calls.MatchCall(
        namespace=namespace,
        fingerprint=bytes(32),
        keys=keys,
        parts=bytes(10),
        fidelity=1,
        position=0,
        tokens_per_block=16,
        raw_bytes=4096,
        deadline_s=deadline_s,
        **hints,
    )


def put_call(keys: bytes, namespace: str = "n", raw_bytes: int = 4096) -> calls.PutCall:
    return calls.PutCall(
        namespace=namespace,
        fingerprint=bytes(32),
        keys=keys,
        parts=bytes(10),
        raw_bytes=raw_bytes.to_bytes(8, "little"),
        fidelity=1,
        position=0,
        tokens_per_block=16,
    )


PROGRAM = """
import sys
from tierkv.settings import load
from tierkv_service.sidecar import run
sys.exit(run(load(sys.argv[1])))
"""


class Process:
    """A sidecar process over an arena; `start` again after `kill` or `stop`."""

    def __init__(
        self, folder: Path, more: str = "", arena_wait_s: float = 10.0, host_bytes: int = 32 << 20,
        http: str = "enabled = false",
    ) -> None:  # fmt: skip
        self.path = folder / "tierkv.sock"
        self.log = folder / "log"
        self._file = folder / "tierkv.toml"
        self._file.write_text(
            f'[socket]\npath = "{self.path}"\narena_wait = {arena_wait_s}\n'
            f"[host]\nsize = {host_bytes}\n[http]\n{http}\n"
            f'[store]\ngrace = "10s"\n{more}'
        )

    def start(self, *, wait: bool = True, before: str = "") -> None:
        program = f"import time\n{before}\n{PROGRAM}"
        command = [sys.executable, "-c", program, str(self._file)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        if wait:
            assert until(lambda: self.listens() or self.process.poll() is not None, 60)
            assert self.process.poll() is None, self.said()

    def listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.path)) == 0

    def said(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


@contextlib.contextmanager
def sidecar(
    folder: Path, more: str = "", arena_wait_s: float = 10.0, before: str = ""
) -> Iterator[Process]:
    one = Process(folder, more, arena_wait_s)
    try:
        one.start(before=before)
        yield one
    finally:
        one.kill()


def until(true: Callable[[], object], timeout_s: float = 30.0) -> bool:
    """Wait for a condition; returns whether it came true."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(SIZE)


def store(client: Client, number: int) -> int:
    reservation = client.put(put_call(key(number)))
    if reservation is None:
        return 0
    data, at = memoryview(content(number)), 0
    for piece in reservation.payload(0):
        count = min(len(piece), SIZE - at)
        piece[:count] = data[at : at + count]
        at += count
    return reservation.commit([SIZE])


def load(client: Client, number: int) -> bytes | None:
    found = client.match(match_call(key(number)))
    transfer = client.get(found.match, found.blocks) if found.blocks else None
    if transfer is None:
        return None
    with transfer:
        header = transfer.header(0)
        assert header is not None
        data = b"".join(transfer.payload(0, header))
        return data if transfer.unchanged(0) else None


def connect(path: Path | str, timeout_s: float = 30.0) -> Client:
    """Return a client that waits out a machine that is busy elsewhere."""
    return sidecar_module.connect(path, timeout_s=timeout_s)


def channel_of(client: Client) -> SidecarChannel:
    channel = client._channel
    assert isinstance(channel, SidecarChannel)
    return channel


def python(program: str, *args: str) -> "subprocess.Popen[bytes]":
    """Start a program over the names of this module and `connect`."""
    head = f"import sys; sys.path.insert(0, {ROOT!r})\n"
    head += "from tests.sidecars import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + program, *args], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )


def line(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def holds(client: Client) -> dict[str, int]:
    found = client.stat()
    assert found is not None
    return {name: found["holds"][name] for name in ("matches", "transfers", "reservations")}
