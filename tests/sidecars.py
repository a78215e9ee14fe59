"""Sidecars for tests: one in a thread over a fake store, and processes of the real one."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.fake_store import FakeStore
from tierkv import calls
from tierkv.settings import SocketSettings
from tierkv_service.locks import Locks
from tierkv_service.loop import Loop
from tierkv_service.server import Server


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
        self.thread.join(10)
        self.loop.close()
        self.locks.close()


@contextlib.contextmanager
def served(path: Path, uids: set[int] | None = None, group: str = "") -> Iterator[Served]:
    one = Served(path, SocketSettings(uids=tuple(uids or ()), group=group), uids)
    try:
        yield one
    finally:
        one.stop()


def match_call(keys: bytes, namespace: str = "n", deadline_s: float = 1.0) -> calls.MatchCall:
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
