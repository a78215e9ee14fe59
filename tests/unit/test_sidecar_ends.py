"""How sidecars and clients end: signals, kills, restarts, and who holds the arena meanwhile."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sidecars import (
    Process,
    channel_of,
    connect,
    content,
    end,
    holds,
    key,
    line,
    load,
    match_call,
    put_call,
    python,
    sidecar,
    store,
    until,
)
from tierkv import calls
from tierkv.errors import TierKVError
from tierkv.settings import Settings
from tierkv.tiers.host import HostSettings
from tierkv_connectors.private import PrivateSidecar


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Process]:
    with sidecar(tmp_path) as running:
        yield running


def test_killed_in_the_middle_of_a_put_leaves_nothing(real: Process) -> None:
    program = """
client = connect(sys.argv[1])
reservation = client.put(put_call(key(1) + key(2)))
reservation.payload(0)[0][:100] = bytes(100)
print(len(reservation.units), flush=True)
sys.stdin.read()
"""
    client = connect(real.path)
    store(client, 9)
    before = holds(client)
    writer = python(program, str(real.path))
    assert line(writer) == "2"
    assert holds(client)["reservations"] == 1
    end(writer)
    assert until(lambda: holds(client) == before)
    assert load(client, 1) is None
    assert store(client, 1) == 1
    assert load(client, 1) == content(1)
    client.close()


def test_killed_reader_lets_go(real: Process) -> None:
    program = """
client = connect(sys.argv[1])
found = client.match(match_call(key(1)))
transfer = client.get(found.match, 1)
client.match(match_call(key(1)))
print(transfer.units, flush=True)
sys.stdin.read()
"""
    client = connect(real.path)
    store(client, 1)
    reader = python(program, str(real.path))
    assert line(reader) == "1"
    assert holds(client) == {"matches": 1, "transfers": 1, "reservations": 0}
    end(reader)
    assert until(lambda: not any(holds(client).values()))
    client.close()


def test_matched_and_never_fetched(real: Process) -> None:
    """R14: leases end by their deadline, or with the connection; releasing twice does no harm."""
    client, other = connect(real.path), connect(real.path)
    store(client, 1)
    for _ in range(8):
        assert client.match(match_call(key(1), deadline_s=0.2)).blocks == 1
    kept = other.match(match_call(key(1), deadline_s=600.0))
    assert until(lambda: holds(client)["matches"] == 1)
    stat = client.stat()
    assert stat is not None
    assert stat["counters"]["lease_expired"] == 8
    channel = channel_of(other)
    for _ in range(3):
        channel.post(calls.ReleaseCall(match=kept.match))
    other.match(match_call(key(1), deadline_s=600.0))
    other.close()
    assert until(lambda: holds(client)["matches"] == 0)
    assert load(client, 1) == content(1)
    client.close()


def test_sidecar_killed_while_a_client_works(real: Process) -> None:
    client = connect(real.path, timeout_s=10.0)
    assert store(client, 1) == 1
    hits, misses, stop = 0, 0, threading.Event()

    def work() -> None:
        nonlocal hits, misses
        while not stop.is_set():
            found = load(client, 1)
            if found is None:
                misses += 1
            else:
                assert found == content(1)
                hits += 1

    worker = threading.Thread(target=work)
    worker.start()
    assert until(lambda: hits > 100)
    real.kill()
    assert until(lambda: misses > 100), "each waits for its timeout"
    real.start()
    assert until(lambda: channel_of(client).counters.reconnects == 2)
    hits = 0
    assert until(lambda: store(client, 1) == 1)
    assert until(lambda: hits > 100)
    stop.set()
    worker.join(30)
    client.close()


def test_borrowed_arena_outlives_the_sidecar_and_blocks_the_next(real: Process) -> None:
    client = connect(real.path)
    store(client, 1)
    found = client.match(match_call(key(1)))
    transfer = client.get(found.match, 1)
    assert transfer is not None
    real.kill()
    assert until(lambda: client.match(match_call(key(1))).blocks == 0)
    header = transfer.header(0)
    assert header is not None
    assert b"".join(transfer.payload(0, header)) == content(1)
    real.start(wait=False)
    assert until(lambda: f"pid {os.getpid()} to let go" in real.said())
    assert not real.listens()
    assert client.match(match_call(key(1))).blocks == 0
    transfer.close()
    assert until(real.listens)
    assert until(lambda: store(client, 2) == 1)
    client.close()


def test_r15_the_memory_of_a_killed_sidecar_is_nobodys(real: Process) -> None:
    """An idle client lets go of it by itself, so that the next sidecar starts at once."""
    client = connect(real.path)
    assert store(client, 1) == 1
    for _ in range(2):
        real.kill()
        real.start()
        assert "to let go" not in real.said()
    client.close()


def test_arena_wait_ends_with_the_pids(tmp_path: Path) -> None:
    with sidecar(tmp_path, arena_wait_s=0.3) as one:
        client = connect(one.path)
        reservation = client.put(put_call(key(1)))
        assert reservation is not None
        one.kill()
        one.start(wait=False)
        assert one.process.wait(30) != 0
        assert f"still mapped by pid {os.getpid()}" in one.said()
        reservation.abort()
        client.close()


def test_second_sidecar_names_the_first(real: Process, tmp_path: Path) -> None:
    second = Process(tmp_path)
    second.start(wait=False)
    assert second.process.wait(30) != 0
    assert f"another sidecar (pid {real.process.pid})" in second.said()
    assert real.listens()


def test_sigterm_is_a_clean_end(real: Process) -> None:
    client = connect(real.path)
    store(client, 1)
    assert real.stop() == 0
    assert not real.path.exists()
    assert load(client, 1) is None
    real.start()
    assert until(lambda: store(client, 1) == 1)
    client.close()


def test_private_sidecar_ends_with_its_process(tmp_path: Path) -> None:
    program = """
from tierkv.settings import Settings
from tierkv.tiers.host import HostSettings
from tierkv_connectors.private import PrivateSidecar
one = PrivateSidecar(Settings(host=HostSettings(size_bytes=32 << 20)))
print(one.pid, one.path, flush=True)
sys.stdin.read()
"""
    engine = python(program)
    pid, path = line(engine).split()
    client = connect(path)
    assert store(client, 1) == 1
    end(engine)
    assert until(lambda: not Path(path).parent.exists())
    assert until(lambda: not Path(f"/proc/{pid}").exists())
    client.close()


def test_private_sidecar_is_closed_and_refuses_what_cannot_be() -> None:
    one = PrivateSidecar(Settings(host=HostSettings(size_bytes=32 << 20)))
    client = connect(one.path)
    assert store(client, 1) == 1
    client.close()
    one.close()
    one.close()
    assert not one.path.parent.exists()
    with pytest.raises(TierKVError, match="did not start"):
        PrivateSidecar(Settings(host=HostSettings(size_bytes=1 << 50)))


def test_sigterm_as_soon_as_it_listens_is_a_clean_end(tmp_path: Path) -> None:
    """Whoever saw the socket may end the sidecar, however far its start has come."""
    slow = (
        "from tierkv_service.locks import Locks; listen = Locks.listen\n"
        "Locks.listen = lambda self: (listen(self), time.sleep(0.5))[0]"
    )
    with sidecar(tmp_path, before=slow) as one:
        assert one.stop() == 0
        assert not one.path.exists()


def test_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    slow = "from tierkv.cache import TierKV; TierKV.close = lambda *_: time.sleep(60)"
    with sidecar(tmp_path, before=slow) as one:
        one.process.send_signal(signal.SIGTERM)
        assert until(lambda: "stopping" in one.said())
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(30) == 128 + signal.SIGTERM
