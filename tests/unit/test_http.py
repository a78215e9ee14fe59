"""The HTTP process: who may ask (report R27), honest health (report R28), metrics."""

import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from tierkv.calls import Call, ClearCall, ClearReply, StatCall
from tierkv.errors import ErrorKind, TierKVError
from tierkv.settings import HttpSettings
from tierkv.stat import COUNTERS, HoldStat, StoreStat, TierStat, to_wire
from tierkv_service import http, metrics
from tierkv_service.routes import build, readiness

EVERYWHERE = "0.0.0.0"  # noqa: S104 - what must be refused
TOKEN = "correct-horse-battery"
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
        self.probe_delay_s = 0.0
        self.failed: dict[str, str] = {}
        self.cleared: list[str] = []

    def call(self, call: Call, timeout_s: float | None = None) -> Any | None:
        probing = isinstance(call, StatCall) and call.probe
        time.sleep(self.probe_delay_s if probing else self.delay_s)
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
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            with contextlib.suppress(ConnectionError):  # it may answer and close before the end
                connection.sendall(request)
            with contextlib.suppress(ConnectionError):
                return connection.recv(4096).split(b"\r\n")[0]
        return b"closed"


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
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
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)
            stack.enter_context(client)
            return Served(channel, client, port)

        yield start


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return str(path)


# Who may ask.


def test_other_machines_need_a_token() -> None:
    for address in (EVERYWHERE, "::", "10.1.2.3"):
        with pytest.raises(TierKVError, match="token_file") as caught:
            HttpSettings(address=address)
        assert caught.value.kind is ErrorKind.INVALID


@pytest.mark.parametrize("content", ["", "short", "two words of it all", "ä" * 20])
def test_a_token_must_be_one(content: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(TierKVError, match="openssl rand"):
        http.read_token(HttpSettings(token_file=str(path)))
    with pytest.raises(TierKVError, match="cannot read"):
        http.read_token(HttpSettings(token_file=str(tmp_path / "none")))


def test_without_the_token_nothing_but_health_answers(serve: Serve) -> None:
    served = serve(token=TOKEN)
    wrong = ("", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN)
    for given in wrong:
        headers = {"Authorization": given}
        for path in ("/metrics", "/v1/tiers", "/v1/stat", "/openapi.json", "/nowhere", "/docs"):
            answer = served.get(path, **headers)
            assert answer.status_code == 401, path
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert served.clear(**headers).status_code == 401
        assert served.get("/healthz", **headers).status_code == 200
    assert served.clear().status_code == 401
    assert not served.channel.cleared
    assert "problem" not in served.get("/readyz").text
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert served.get("/v1/tiers", **headers).status_code == 200
    assert served.clear(**headers).status_code == 200
    assert "problem" in served.get("/readyz", **headers).text


def test_a_token_of_any_bytes_is_only_wrong(serve: Serve) -> None:
    served = serve(token=TOKEN)
    line = served.raw(
        b"GET /v1/stat HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
    )
    assert b"401" in line


def test_other_hosts_and_origins_are_refused(serve: Serve) -> None:
    served = serve(HttpSettings(port=0, hosts=("node7.example",)))
    own = f"127.0.0.1:{served.port}"
    for host in (
        "evil.example",
        f"evil.example:{served.port}",
        "127.0.0.1.evil.example",
        "",
        "[::",
    ):
        assert served.get("/healthz", Host=host).status_code == 421, host
    for host in (own, "localhost", "LOCALHOST:1", "[::1]:80", "node7.example:9464"):
        assert served.get("/healthz", Host=host).status_code == 200, host
    for origin in ("http://evil.example", "null", "http://localhost:3000", ""):
        assert served.clear(Origin=origin).status_code == 403, origin
    assert not served.channel.cleared
    assert served.clear(Origin=f"http://{own}").status_code == 200


def test_beyond_loopback_any_name_will_do(serve: Serve, token_file: str) -> None:
    served = serve(HttpSettings(port=0, address=EVERYWHERE, token_file=token_file), TOKEN)
    assert served.get("/healthz", Host="10.9.8.7:9464").status_code == 200
    assert served.get("/v1/stat", Host="10.9.8.7:9464").status_code == 401


# The attack list.


@pytest.mark.parametrize(
    "name",
    ["..%2f..%2fx", "%2e%2e%2fx", "..%5cx", "a%00", "%00", "a%0ab", "%20", "a b", "a%25", "%ff",
     "%c3%a9", "a" * 129, "a'--", "{{7*7}}", "$(id)", "*", "%2e%2e%2f%2e%2e%2fetc%2fpasswd"],
)  # fmt: skip
def test_names_out_of_the_alphabet_are_refused(name: str, serve: Serve) -> None:
    served = serve()
    request = f"POST /v1/namespaces/{name}/clear HTTP/1.1\r\nHost: localhost\r\n\r\n"
    status = served.raw(request.encode()).split(b" ")[1]
    assert status in {b"400", b"404"}, status
    assert not served.channel.cleared
    assert served.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /v1/namespaces/../../x/clear HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/namespaces//clear HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/namespaces/a\0b/clear HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /redoc HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /run_script HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n1 + 1",
        b"GET /v1/namespaces/a/clear HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\nx",
        b"\0\1\2\3\r\n\r\n",
    ],
)
def test_odd_requests_are_refused(request_bytes: bytes, serve: Serve) -> None:
    served = serve()
    assert served.raw(request_bytes).split(b" ")[1][:1] == b"4"
    assert not served.channel.cleared
    assert served.get("/healthz").status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_ten_megabytes_go_nowhere(declared: bool, serve: Serve) -> None:
    served = serve()
    text = b"a" * 10_000_000
    heads = {
        True: b"POST /v1/namespaces/a/clear HTTP/1.1\r\nContent-Length: 10000000\r\n"
        b"Host: localhost\r\n\r\n" + text,
        False: b"POST /v1/namespaces/" + text + b"/clear HTTP/1.1\r\nHost: localhost\r\n\r\n",
    }
    first = served.raw(heads[declared])
    assert first == b"closed" or first.split(b" ")[1] in {b"400", b"413"}
    assert not served.channel.cleared
    assert served.get("/healthz").status_code == 200


# Administration.


def test_clear_is_done_and_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve()
    with caplog.at_level(logging.INFO, "tierkv.http"):
        answer = served.clear("Team_a.b-2")
    assert answer.json() == {
        "namespace": "Team_a.b-2", "generation": 3, "removed": {"host": 2}, "failed": {},
    }  # fmt: skip
    assert served.channel.cleared == ["Team_a.b-2"]
    assert "clear of namespace Team_a.b-2 for 127.0.0.1" in caplog.text
    served.channel.failed = {"redis": "timed out"}
    assert served.clear().status_code == 502
    served.channel.stat = None
    assert served.clear().status_code == 503


def test_stat_and_tiers_are_json(serve: Serve) -> None:
    served = serve()
    assert served.get("/v1/stat").json() == json.loads(json.dumps(to_wire(STAT)))
    assert [tier["name"] for tier in served.get("/v1/tiers").json()["tiers"]] == [
        "host", "nvme", "redis",
    ]  # fmt: skip
    served.channel.stat = None
    assert served.get("/v1/stat").status_code == 503
    assert "did not answer" in served.get("/v1/tiers").json()["error"]


# Health.


def test_a_blocked_loop_is_not_alive(serve: Serve) -> None:
    served = serve()
    assert served.get("/healthz").json() == {"status": "ok"}
    served.channel.delay_s = 3.0
    started = time.monotonic()
    assert served.get("/healthz").status_code == 503
    assert time.monotonic() - started < 1.5


def test_a_slow_probe_does_not_delay_health(serve: Serve) -> None:
    served = serve()
    served.channel.probe_delay_s = 2.0
    slow = threading.Thread(target=served.get, args=("/readyz",))
    slow.start()
    started = time.monotonic()
    assert served.get("/healthz").status_code == 200
    assert served.get("/v1/stat").status_code == 200
    assert time.monotonic() - started < 1.0
    slow.join()


def test_readiness_names_the_failing_tier(serve: Serve) -> None:
    served = serve()
    assert served.get("/readyz").json()["status"] == "ok"
    lost = TierStat(name="nvme", state="lost", problem="read-only file system")
    served.channel.stat = StoreStat(tiers=(HOST, lost))
    answer = served.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["status"] == "degraded"
    assert answer.json()["failing"] == ["nvme"]
    assert answer.json()["tiers"]["nvme"]["problem"] == "read-only file system"


@pytest.mark.parametrize(
    ("host", "nvme", "status", "word"),
    [
        ("ok", "ok", 200, "ok"),
        ("ok", "lost", 200, "degraded"),
        ("degraded", "ok", 200, "degraded"),
        ("degraded", "lost", 200, "degraded"),
        ("lost", "ok", 503, "unavailable"),
        ("lost", "lost", 503, "unavailable"),
        ("lost", "off", 503, "unavailable"),
        ("ok", "off", 200, "ok"),
    ],
)
def test_readiness(host: Any, nvme: Any, status: int, word: str) -> None:
    tiers = (TierStat(name="host", state=host), TierStat(name="nvme", state=nvme))
    code, body = readiness(StoreStat(tiers=tiers), details=True)
    assert (code, body["status"]) == (status, word)
    assert body["failing"] == [tier.name for tier in tiers if tier.state not in {"ok", "off"}]
    assert "off" not in {tier["state"] for tier in body["tiers"].values()}


def test_no_answer_is_not_ready() -> None:
    assert readiness(None, details=True)[0] == 503
    assert readiness(StoreStat(), details=True)[0] == 503


# Metrics.


def samples(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_have_what_stat_says(serve: Serve) -> None:
    served = serve()
    answer = served.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = samples(answer.text)
    assert found["tierkv_up", ""] == 1
    assert found["tierkv_info", "0.1.0"] == 1
    assert found["tierkv_uptime_seconds", ""] == 12.5
    assert found["tierkv_asked_blocks_total", ""] == 10
    assert found["tierkv_hit_blocks_total", "nvme"] == 2
    assert found["tierkv_events_total", "put_refused_full"] == 4
    assert found["tierkv_clients", ""] == 2
    assert found["tierkv_tier_free_bytes", "host"] == 3072
    assert found["tierkv_tier_read_bytes_per_second", "nvme"] == 2e9
    assert found["tierkv_tier_state", "ok,host"] == 1
    assert found["tierkv_tier_state", "lost,nvme"] == 0
    assert not [key for key in found if "redis" in key[1] or key[0].startswith("python_")]


def test_metrics_say_when_the_loop_is_gone(serve: Serve) -> None:
    served = serve()
    served.channel.stat = None
    answer = served.get("/metrics")
    assert answer.status_code == 200
    assert samples(answer.text) == {("tierkv_up", ""): 0}


def test_every_metric_and_event_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "OPERATIONS.md").read_text()
    columns = (*metrics.STORE, *metrics.TIER)
    names = {f"{column.name}_total" if column.total else column.name for column in columns}
    names |= {f"{name}_total" if name.endswith(("_blocks", "_events")) else name
              for name in metrics.OTHERS}  # fmt: skip
    names |= set(COUNTERS)
    assert not [name for name in names if f"`{name}`" not in text]


# The process.


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def status(url: str) -> int:
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.TransportError:
        return 0


def test_it_serves_before_the_sidecar_and_ends_with_its_owner(tmp_path: Path) -> None:
    served = http.spawn(HttpSettings(port=0), tmp_path / "none.sock")
    try:
        wait_until(lambda: status(f"{served.url}/healthz") == 503)
        assert status(f"{served.url}/readyz") == 503
        assert status(f"{served.url}/metrics") == 200
        served.process.stdin.close()  # type: ignore[union-attr]
        assert served.process.wait(5) == 0
    finally:
        served.stop()


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from tierkv.settings import HttpSettings\n"
        "from tierkv_service import http\n"
        "served = http.spawn(HttpSettings(port=0), sys.argv[1])\n"
        "print(served.process.pid, served.url, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "none.sock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().split()
        wait_until(lambda: status(f"{url}/healthz") == 503)
        parent.send_signal(signal.SIGKILL)
        wait_until(lambda: status(f"{url}/healthz") == 0, 5)
    wait_until(lambda: not alive(int(pid)), 5)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_taken_port_is_an_error_at_start(tmp_path: Path) -> None:
    with http.listen(HttpSettings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TierKVError, match=f"port {port}.*enabled = false"):
            http.spawn(HttpSettings(port=port), tmp_path / "none.sock")
