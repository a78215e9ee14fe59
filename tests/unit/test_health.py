"""Honest health (report R28), metrics, and the HTTP process as a process."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http_server import HOST, Serve, serving
from tierkv.errors import TierKVError
from tierkv.settings import HttpSettings
from tierkv.stat import COUNTERS, StoreStat, TierStat
from tierkv_service import http, metrics
from tierkv_service.routes import readiness

REPOSITORY = Path(__file__).resolve().parents[2]
SIDECAR = """
import sys, time
from pathlib import Path
from tests.http_server import STAT
from tests.sidecars import Served
from tierkv.settings import HttpSettings, SocketSettings
from tierkv.stat import to_wire
from tierkv_service import http
one = Served(Path(sys.argv[1]), SocketSettings(), None)
one.store.stat = lambda call, done: done(to_wire(STAT))
print(http.spawn(HttpSettings(port=0), sys.argv[1]).url, flush=True)
time.sleep(600)
"""
"""A sidecar with its HTTP process, over a store that is fine."""


@pytest.fixture
def serve() -> Iterator[Serve]:
    with serving() as start:
        yield start


# Health.


def test_r28_a_blocked_loop_is_not_alive(serve: Serve) -> None:
    served = serve()
    assert served.get("/healthz").json() == {"status": "ok"}
    served.channel.delay_s = 10.0
    assert served.get("/healthz").status_code == 503


def test_r28_a_slow_probe_does_not_delay_health(serve: Serve) -> None:
    served = serve()
    served.channel.probed = threading.Event()
    slow = threading.Thread(target=served.get, args=("/readyz",))
    slow.start()
    try:
        assert served.get("/healthz").status_code == 200
        assert served.get("/v1/stat").status_code == 200
    finally:
        served.channel.probed.set()
        slow.join()


def test_r28_readiness_names_the_failing_tier(serve: Serve) -> None:
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
def test_r28_readiness(host: Any, nvme: Any, status: int, word: str) -> None:
    tiers = (TierStat(name="host", state=host), TierStat(name="nvme", state=nvme))
    code, body = readiness(StoreStat(tiers=tiers), details=True)
    assert (code, body["status"]) == (status, word)
    assert body["failing"] == [tier.name for tier in tiers if tier.state not in {"ok", "off"}]
    assert "off" not in {tier["state"] for tier in body["tiers"].values()}


def test_r28_no_answer_is_not_ready() -> None:
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
    text = (REPOSITORY / "docs" / "OPERATIONS.md").read_text()
    columns = (*metrics.STORE, *metrics.TIER)
    names = {f"{column.name}_total" if column.total else column.name for column in columns}
    names |= {f"{name}_total" if name.endswith(("_blocks", "_events")) else name
              for name in metrics.OTHERS}  # fmt: skip
    names |= set(COUNTERS)
    assert not [name for name in names if f"`{name}`" not in text]


def test_every_event_that_is_counted_has_a_meaning() -> None:
    pattern = re.compile(r"(?:counters\[|_count\()f?\"([a-z_]+)\"")
    files = [*REPOSITORY.glob("tierkv/*.py"), *REPOSITORY.glob("service/tierkv_service/*.py")]
    counted = {name for file in files for name in pattern.findall(file.read_text())}
    assert "call_refused" in counted
    assert not counted - set(COUNTERS)


# The process.


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def status(url: str) -> int:
    try:
        return httpx.get(url, timeout=20).status_code
    except httpx.TransportError:
        return 0


def test_it_serves_before_the_sidecar_and_ends_with_its_owner(tmp_path: Path) -> None:
    served = http.spawn(HttpSettings(port=0), tmp_path / "none.sock")
    try:
        wait_until(lambda: status(f"{served.url}/healthz") == 503)
        assert status(f"{served.url}/readyz") == 503
        assert status(f"{served.url}/metrics") == 200
        served.process.stdin.close()  # type: ignore[union-attr]
        assert served.process.wait(30) == 0
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
        wait_until(lambda: status(f"{url}/healthz") == 0)
    wait_until(lambda: not alive(int(pid)))


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


def test_r28_a_stopped_sidecar_is_not_alive_until_it_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIDECAR, str(tmp_path / "t.sock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as sidecar:
        try:
            assert sidecar.stdout is not None
            url = sidecar.stdout.readline().strip()
            wait_until(lambda: status(f"{url}/healthz") == 200)
            assert status(f"{url}/readyz") == 200
            sidecar.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            while time.monotonic() < stopped + 5.0:
                assert status(f"{url}/healthz") == 503, "and no later than `status` waits"
            sidecar.send_signal(signal.SIGCONT)
            wait_until(lambda: status(f"{url}/healthz") == 200)
            assert status(f"{url}/metrics") == 200
        finally:
            sidecar.kill()
        wait_until(lambda: status(f"{url}/healthz") == 0)
