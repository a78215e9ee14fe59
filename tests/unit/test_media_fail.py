"""A real sidecar over a real disk and Redis that fail, or are of no use (R23, R25, R28)."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.redis_server import RedisFactory
from tests.sidecars import (
    Process,
    channel_of,
    connect,
    content,
    key,
    load,
    match_call,
    put_call,
    sidecar,
    store,
    until,
)
from tests.volumes import Volume, mounted
from tierkv import calls
from tierkv.client import Client
from tierkv.settings import HttpSettings
from tierkv_service import http

MIB = 1 << 20
Get = Callable[[str], dict[str, Any]]


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    with mounted(tmp_path) as one:
        yield one


@contextlib.contextmanager
def serving(real: Process) -> Iterator[tuple[Client, Get]]:
    """A client of a sidecar, and what its HTTP process answers to a route."""
    pages = http.spawn(HttpSettings(port=0), real.path)
    client = connect(real.path, timeout_s=15.0)

    def get(route: str) -> dict[str, Any]:
        answer = httpx.get(f"{pages.url}{route}", timeout=30)
        return {"code": answer.status_code, **answer.json()}

    def serves() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return bool(get("/healthz")["code"] == 200)
        return False

    try:
        assert until(serves)
        yield client, get
    finally:
        client.close()
        pages.stop()


def flush(client: Client, numbers: range, deadline_s: float) -> bytes:
    keys = b"".join(map(key, numbers))
    call = calls.FlushCall(namespace="n", keys=keys, parts=bytes(10), deadline_s=deadline_s)
    return client.flush(call)


def store_large(client: Client, number: int) -> int:
    reservation = client.put(put_call(key(number), raw_bytes=MIB))
    return 0 if reservation is None else reservation.commit([MIB])


def load_below(client: Client, number: int) -> tuple[bytes | None, int]:
    """Return a block that may have to be staged, and how many blocks came from below RAM."""
    found = client.match(match_call(key(number), deadline_s=10.0))
    if found.pending:
        found = client.wait(found.match, 15.0)
    below = sum(found.sources.values()) - found.sources.get("host", 0)
    client.release(found.match)
    return load(client, number), below


def test_r28_a_disk_that_turns_read_only_is_named_and_goes_on_reading(
    volume: Volume, tmp_path: Path
) -> None:
    nvme = f'sync = "power"\n[nvme]\npath = "{volume.path}/nvme"\nsize = "40MiB"\nregion = "4MiB"\n'
    nvme += 'free_floor = "1MiB"\n'
    early, late = range(1, 41), range(1000, 1150)
    with sidecar(tmp_path, nvme) as real:
        with serving(real) as (client, get):
            assert get("/readyz")["status"] == "ok"
            assert [store(client, number) for number in early] == [1] * len(early)
            assert flush(client, early, 10.0) == b"\1" * len(early)
            volume.fail()
            answer = get("/readyz")
            assert (answer["code"], answer["status"]) == (200, "degraded")
            assert answer["failing"] == ["nvme"]
            assert "takes no writes" in answer["tiers"]["nvme"]["problem"]
            assert get("/healthz")["code"] == 200
            for number in late:  # many times what RAM and the log hold
                store_large(client, number)
            assert flush(client, late[-4:], 5.0) == bytes(4)
            for number in early:
                assert load_below(client, number) == (content(number), 1)
            assert (stat := client.stat()) is not None
            assert stat["counters"]["nvme_write_failed"] >= len(late) // 2
            assert stat["tiers"][1]["placements"] >= len(early)
        assert real.stop() == 0
        volume.mend()
        real.start()
        with serving(real) as (client, get):
            assert get("/readyz")["status"] == "ok"
            for number in early:
                assert load_below(client, number) == (content(number), 1)
            assert store_large(client, 1) in {0, 1}
            assert store(client, 77) == 1
            assert flush(client, range(77, 78), 10.0) == b"\1"


def test_r25_a_prompt_that_nobody_stored_costs_one_answer(tmp_path: Path) -> None:
    """Nothing is ever found and all is stored: no question waits for the disk."""
    nvme = f'[nvme]\npath = "{tmp_path}/nvme"\nsize = "192MiB"\nregion = "4MiB"\nfree_floor = 0\n'
    with sidecar(tmp_path, nvme) as real, contextlib.closing(connect(real.path)) as client:
        for prompt in range(50):
            keys = [key(prompt * 1000 + block) for block in range(64)]
            found = client.match(match_call(b"".join(keys)))
            assert (found.match, found.blocks, found.pending) == (0, 0, False)
            for block in range(8):
                store_large(client, prompt * 1000 + block)
        assert until(lambda: (client.stat() or {})["tiers"][1]["written_bytes"] > 0)
        assert (stat := client.stat()) is not None
        assert stat["tiers"][1]["read_bytes"] == 0
        assert channel_of(client).counters.timeouts == 0


def test_r28_a_redis_that_stops_is_named_and_costs_the_others_nothing(
    redis_factory: RedisFactory, tmp_path: Path
) -> None:
    """Its time-out is longer than any call of this client, so who waited for it would fail."""
    server = redis_factory()
    redis = f'[redis]\nurl = "{server.url}"\ntimeout = "60s"\nconnect_timeout = "60s"\n'
    known, more = range(1, 21), range(100, 120)
    with sidecar(tmp_path, redis) as real:
        with serving(real) as (client, get):
            assert [store(client, number) for number in known] == [1] * len(known)
            assert flush(client, known, 30.0) == b"\1" * len(known)
            server.freeze()
            assert until(lambda: get("/readyz")["failing"] == ["redis"])
            answer = get("/readyz")
            assert (answer["code"], answer["status"]) == (200, "degraded")
            assert "no answer within" in answer["tiers"]["redis"]["problem"]
            assert get("/healthz")["code"] == 200
            unknown = client.match(match_call(key(999), deadline_s=0.5))
            assert unknown.pending
            assert client.wait(unknown.match, 15.0).blocks == 0
            assert all(load(client, number) == content(number) for number in known)
            assert [store(client, number) for number in more] == [1] * len(more)
            assert flush(client, more, 1.0) == bytes(len(more))
            for number in more:
                assert load(client, number) == content(number)
            assert channel_of(client).last_error == ""
            server.thaw()
            assert until(lambda: get("/readyz")["status"] == "ok")
            assert flush(client, more, 30.0) == b"\1" * len(more)
            server.freeze()
            assert [store(client, number) for number in range(200, 220)] == [1] * 20
        assert real.stop() == 0, "a write that hangs does not keep the sidecar from its end"
    server.stop()
