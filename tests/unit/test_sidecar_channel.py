"""The engine's side of the socket: timeouts, threads, forks, reconnecting."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sidecars import (
    SIZE,
    Process,
    Served,
    channel_of,
    connect,
    content,
    key,
    line,
    load,
    match_call,
    put_call,
    python,
    served,
    sidecar,
    store,
    until,
)
from tierkv import calls
from tierkv.channel import EmbeddedChannel
from tierkv.client import Client, Transfer
from tierkv_connectors import sidecar as sidecar_module
from tierkv_connectors import wire
from tierkv_connectors.link import Link
from tierkv_connectors.sidecar import SidecarChannel


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Process]:
    with sidecar(tmp_path) as running:
        yield running


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "s.sock") as running:
        yield running


def test_two_engines_at_once_share_blocks(real: Process) -> None:
    program = """
client = connect(sys.argv[1])
print(sum(store(client, number) for number in range(100, 200)), flush=True)
sys.stdin.read(1)
print(all(load(client, number) == content(number) for number in range(200)), flush=True)
client.close()
"""
    other = python(program, str(real.path))
    client = connect(real.path)
    assert sum(store(client, number) for number in range(100)) == 100
    assert line(other) == "100"
    assert other.stdin is not None
    other.stdin.write(b"x")
    other.stdin.flush()
    assert all(load(client, number) == content(number) for number in range(200))
    assert line(other) == "True"
    client.close()
    other.communicate(timeout=60)


def test_many_threads_of_one_engine(real: Process) -> None:
    client = connect(real.path)
    wrong: list[int] = []
    store(client, 0)

    def work(start: int) -> None:
        for number in range(start, start + 60):
            store(client, number)
            if load(client, number) != content(number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(start * 1000,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    counters = channel_of(client).counters
    assert (counters.timeouts, counters.refused, counters.unreachable) == (0, 0, 0)
    client.close()


def test_no_sidecar_is_a_miss_at_once(tmp_path: Path) -> None:
    client = connect(tmp_path / "none.sock")
    for number in range(200):  # a timeout each would be longer than a test may take
        assert client.match(match_call(key(number))).blocks == 0
        assert client.put(put_call(key(number))) is None
    assert "No such file" in channel_of(client).last_error
    client.close()


def test_silent_server_is_a_miss_within_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    hello = Link.hello

    def counted(link: Link, call: calls.Hello, timeout_s: float) -> tuple[calls.Welcome, int]:
        tries.append(timeout_s)
        return hello(link, call, timeout_s)

    monkeypatch.setattr(Link, "hello", counted)
    path = tmp_path / "s.sock"
    wire.arena_path(path).touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        client = connect(path, timeout_s=0.1)
        for _ in range(1000):
            assert client.match(match_call(key(1))).blocks == 0
        assert 1 <= len(tries) <= 100, "not a timeout each: it backs off"
        client.close()


def test_late_answers_are_dropped_and_what_they_hold_goes_back(fake: Served) -> None:
    fake.store.pause_s = 3.0
    patient, client = connect(fake.path), connect(fake.path, timeout_s=0.5)
    assert store(patient, 1) == 1
    assert until(lambda: client.stat() is not None)
    before = channel_of(client).counters.timeouts
    assert client.match(match_call(key(1), namespace="slow")).blocks == 0
    assert channel_of(client).counters.timeouts == before + 1
    assert until(lambda: patient.stat() is not None)
    assert client.match(match_call(key(2))).blocks == 0
    assert until(lambda: not fake.store.holds)

    assert channel_of(client).counters.disconnects == 0
    client.close()
    patient.close()


def test_hit_that_never_completes_is_a_miss(fake: Served) -> None:
    """R12: the answer is bounded, counted, and the connection stays good."""
    client = connect(fake.path)
    pending = client.match(match_call(key(1), namespace="hang"))
    assert pending.pending
    start = time.monotonic()
    assert client.wait(pending.match, 0.1).blocks == 0
    assert time.monotonic() - start > 0.09
    fake.store.waits[0](calls.MatchReply(match=pending.match, blocks=7))
    assert client.match(match_call(key(1))).blocks == 0
    assert channel_of(client).counters.timeouts == 1
    client.close()


def test_one_thread_waits_and_another_works(fake: Served) -> None:
    client = connect(fake.path)
    pending = client.match(match_call(key(1), namespace="hang"))
    found: list[calls.MatchReply] = []
    waiter = threading.Thread(target=lambda: found.append(client.wait(pending.match, 60.0)))
    waiter.start()
    assert until(lambda: fake.store.waits)
    for _ in range(200):
        assert client.match(match_call(key(1))).blocks == 0
    fake.store.waits[0](calls.MatchReply(match=pending.match, blocks=3))
    waiter.join(60)
    assert found[0].blocks == 3
    assert channel_of(client).counters.timeouts == 0
    client.close()


def test_views_kept_after_close_keep_the_lock(fake: Served) -> None:
    client = connect(fake.path)
    reservation = client.put(put_call(key(1)))
    assert reservation is not None
    kept = reservation.payload(0)[0]
    reservation.abort()
    client.close()
    fake.stop = lambda: None  # type: ignore[method-assign]
    arena = channel_of(client)._arena
    assert arena is not None
    assert until(lambda: arena._mapped is None)
    assert not arena.gone
    kept[0] = 1
    del kept
    assert arena.gone
    Served.stop(fake)


def test_reconnect_says_what_is_over(fake: Served) -> None:
    client = connect(fake.path)
    reservation = client.put(put_call(key(1)))
    assert reservation is not None
    first = channel_of(client)._session
    link = channel_of(client)._link
    assert link is not None
    link.lose()
    assert until(lambda: ("end_leases", first) in fake.store.log)
    assert client.match(match_call(key(1))).blocks == 0
    assert ("disown", first) not in fake.store.log
    assert reservation.commit([SIZE]) == 0
    assert until(lambda: store(client, 2) == 1)
    assert ("disown", first) in fake.store.log
    assert channel_of(client).counters.disconnects == 1
    client.close()


def test_child_after_fork_has_its_own_connection(fake: Served) -> None:
    client = connect(fake.path)
    reservation = client.put(put_call(key(1)))
    assert reservation is not None
    session = channel_of(client)._session
    pid = os.fork()
    if pid == 0:
        ok = reservation.commit([SIZE]) == 0 and store(client, 2) == 1
        ok = ok and channel_of(client)._session != session
        os._exit(0 if ok else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert reservation.commit([SIZE]) == 1
    assert channel_of(client)._session == session
    assert channel_of(client).counters.disconnects == 0
    client.close()


def test_hooks_bracket_the_mapping(fake: Served) -> None:
    seen: list[object] = []
    channel = SidecarChannel(
        fake.path,
        on_map=lambda view: seen.append(len(view)),
        on_unmap=lambda: seen.append("unmap"),
    )
    channel.call(match_call(key(1)))
    assert seen == [fake.store.arena.nbytes]
    channel.close()
    assert until(lambda: seen[-1] == "unmap")
    assert channel.call(match_call(key(1))) is None
    channel.close()


def test_without_arena_nothing_is_mapped(fake: Served) -> None:
    channel = SidecarChannel(fake.path, arena=False)
    assert channel.call(calls.StatCall()) is not None
    assert channel.borrow() is None
    channel.close()


def test_refused_call_is_a_miss_with_a_reason(fake: Served) -> None:
    client = connect(fake.path)
    assert client.match(match_call(key(1), namespace="bug")).blocks == 0
    assert "on purpose" in channel_of(client).last_error
    assert channel_of(client).counters.refused == 1
    client.close()


def test_backoff_grows_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tierkv_connectors.sidecar.time.monotonic", lambda: now[0])
    channel = SidecarChannel(tmp_path / "none.sock")
    waits = []
    for _ in range(12):
        assert channel.call(match_call(key(1))) is None
        waits.append(channel._next_try - now[0])
        now[0] = channel._next_try
    assert 0.025 <= waits[0] <= 0.05
    assert all(wait <= sidecar_module.MAX_BACKOFF_S for wait in waits)
    assert min(waits[7:]) >= 1.0


def test_embedded_channel_answers_the_same(fake: Served) -> None:
    one = fake.store
    client = Client(EmbeddedChannel(one, one.arena.view, timeout_s=0.1))
    assert store(client, 1) == 1
    found = client.match(match_call(key(1)))
    transfer = client.get(found.match, 1)
    assert isinstance(transfer, Transfer)
    pending = client.match(match_call(key(1), namespace="hang"))
    assert client.wait(pending.match, 0.05).blocks == 0
    assert client.stat() is not None
    assert client.flush(calls.FlushCall(namespace="n", keys=key(1), parts=bytes(10), deadline_s=1))
    client.close()
    assert ("end_leases", 1) in one.log
    assert ("disown", 1) not in one.log
    transfer.close()
    assert one.log[-1] == ("disown", 1)
    assert client.match(match_call(key(1))).blocks == 0
