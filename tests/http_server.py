"""The HTTP application for tests, served by uvicorn in a thread over a fake sidecar."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import uvicorn

from tierkv.calls import Call, ClearCall, ClearReply, StatCall
from tierkv.settings import HttpSettings
from tierkv.stat import HoldStat, StoreStat, TierStat, to_wire
from tierkv_service import http
from tierkv_service.routes import build

HOST = TierStat(name="host", capacity_bytes=4096, used_bytes=1024, free_bytes=3072)
NVME = TierStat(name="nvme", durable=True, capacity_bytes=8192, read_bps=2e9)
STAT = StoreStat(
    version="0.1.0",
    epoch=7,
    uptime_s=12.5,
    tiers=(HOST, NVME, TierStat(name="redis", state="off")),
    asked_blocks=10,
    hits_by_tier_blocks={"host": 5, "nvme": 2},
    miss_blocks=3,
    holds=HoldStat(clients=2),
    counters={"put_refused_full": 4},
)


class FakeChannel:
    """A sidecar that answers as it is told to, from any thread."""

    def __init__(self) -> None:
        self.stat: StoreStat | None = STAT
        self.delay_s = 0.0
        self.probed: threading.Event | None = None
        """What a probe waits for."""
        self.failed: dict[str, str] = {}
        self.cleared: list[str] = []

    def call(self, call: Call, timeout_s: float | None = None) -> Any | None:
        if self.probed is not None and isinstance(call, StatCall) and call.probe:
            assert self.probed.wait(60)
        time.sleep(self.delay_s)
        if self.stat is None:
            return None
        if isinstance(call, ClearCall):
            self.cleared.append(call.namespace)
            return ClearReply(generation=3, removed={"host": 2}, failed=self.failed)
        return to_wire(self.stat)

    def post(self, call: Call) -> None:
        raise NotImplementedError

    def borrow(self) -> memoryview | None:
        raise NotImplementedError

    def give_back(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Served(NamedTuple):
    """A server under test: its fake sidecar and a client."""

    channel: FakeChannel
    client: httpx.Client
    port: int

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=headers)

    def clear(self, name: str = "team-a", **headers: str) -> httpx.Response:
        return self.client.post(f"/v1/namespaces/{name}/clear", headers=headers)

    def raw(self, request: bytes) -> bytes:
        """Send bytes as they are, which no client library would, and return the first line."""
        with socket.create_connection(("127.0.0.1", self.port), 60) as connection:
            with contextlib.suppress(ConnectionError):  # it may answer and close before the end
                connection.sendall(request)
            with contextlib.suppress(ConnectionError):
                return connection.recv(4096).split(b"\r\n")[0]
        return b"closed"


Serve = Callable[..., Served]


@contextlib.contextmanager
def serving() -> Iterator[Serve]:
    """Return what starts servers; they end with the block."""
    with contextlib.ExitStack() as stack:

        def start(settings: HttpSettings | None = None, token: str = "") -> Served:
            channel = FakeChannel()
            settings = settings or HttpSettings(port=0)
            listener = http.listen(HttpSettings(port=0))
            app = build(settings, token.encode(), channel)
            config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None)
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            stack.callback(thread.join)
            stack.callback(setattr, server, "should_exit", True)
            port = listener.getsockname()[1]
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
            stack.enter_context(client)
            return Served(channel, client, port)

        yield start
