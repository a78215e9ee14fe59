"""The server's side of the socket, over a fake store: framing, owners, late answers, admission."""

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.sidecars import Served, match_call, put_call, served, until
from tierkv import calls
from tierkv_connectors import wire
from tierkv_connectors.sidecar import SidecarChannel
from tierkv_service import server as server_module

KEY = b"k" * 32


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "s.sock") as running:
        yield running


class Peer:
    """A client that may send anything."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(5)
        self.sock.connect(str(path))
        self.sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, call: calls.Call, sequence: int | None = None) -> None:
        self.sequence += 1
        out = bytearray()
        wire.append(out, self.sequence if sequence is None else sequence, wire.REPLY, call)
        self.sock.sendall(out)

    def receive(self) -> tuple[int, int, bytes]:
        size, sequence, kind = wire.HEADER.unpack(self.exactly(wire.HEADER.size))
        return sequence, kind, self.exactly(size)

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def hello(self, protocol: int = calls.PROTOCOL, closed: tuple[int, ...] = ()) -> Any:
        self.send(calls.Hello(protocol=protocol, client="peer", closed=closed))
        _sequence, kind, body = self.receive()
        return (wire.PROBLEMS if kind else wire.REPLIES[calls.Hello]).decode(body)

    def is_closed(self) -> bool:
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True


def ask(path: Path) -> Any:
    channel = SidecarChannel(path)
    try:
        return channel.call(match_call(KEY))
    finally:
        channel.close()


def header(size: int, kind: int = 0) -> bytes:
    return wire.HEADER.pack(size, 1, kind)


HOSTILE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "text": b"x" * 10_000_000,
    "too long": header(calls.MAX_MESSAGE_BYTES + 1),
    "unknown kind": header(10, kind=7),
    "not msgpack": header(4) + b"\xc1\xc1\xc1\xc1",
    "unknown call": header(6) + b"\x91\xa4evil",
    "wrong type": header(7) + b"\x93\xa3get\xa1x\x01",
    "half a call": header(5) + b"\x93\xa3get",
    "deep": header(100_007) + b"\x94\xa3get\x01\x01" + b"\x91" * 100_000,
    "bad text": header(9) + b"\x92\xa5clear\xa1\xff",
    "hello again": header(12) + b"\x93\xa5hello\x01\xa2me\x90",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_message_ends_only_its_connection(one: Served, name: str) -> None:
    with Peer(one.path) as good, Peer(one.path) as bad:
        good.hello()
        bad.hello()
        with contextlib.suppress(ConnectionError):
            bad.sock.sendall(HOSTILE[name])
        assert bad.is_closed()
        assert one.server.counters["server_closed_malformed"] == 1
        good.send(match_call(KEY))
        assert good.receive()[:2] == (2, wire.REPLY)


def test_nobody_sends_much_before_hello(one: Served) -> None:
    with Peer(one.path) as bad:
        bad.sock.sendall(header(wire.MAX_FIRST_BYTES + 1))
        assert bad.is_closed()
    with Peer(one.path) as bad:
        bad.send(match_call(KEY))
        assert bad.is_closed()


@pytest.mark.parametrize("cut", [1, 11, 12, 40])
def test_truncated_message_is_no_call(one: Served, cut: int) -> None:
    out = bytearray()
    wire.append(out, 2, wire.REPLY, put_call(KEY))
    with Peer(one.path) as peer:
        peer.hello()
        peer.sock.sendall(out[:cut])
        time.sleep(0.02)
    assert until(lambda: ("end_leases", one.server._next_number) in one.store.log)
    assert len(one.store.free) == 64
    assert one.server.counters["server_bugs"] == 0


def test_messages_may_come_byte_by_byte_and_many_at_once(one: Served) -> None:
    out = bytearray()
    wire.append(out, 2, wire.REPLY, match_call(KEY))
    with Peer(one.path) as peer:
        peer.hello()
        for byte in out:
            peer.sock.sendall(bytes([byte]))
        assert peer.receive()[0] == 2
        many = bytearray()
        for sequence in range(3, 1003):
            wire.append(many, sequence, wire.REPLY, match_call(KEY))
        peer.sock.sendall(many)
        assert [peer.receive()[0] for _ in range(1000)] == list(range(3, 1003))


def test_other_protocol_is_refused_with_both_numbers(one: Served) -> None:
    with Peer(one.path) as peer:
        problem = peer.hello(protocol=99)
        assert problem.kind == "incompatible"
        assert "99" in problem.message
        assert peer.is_closed()


@pytest.mark.parametrize(
    "call",
    [
        match_call(KEY * 70_000),
        match_call(KEY[:31]),
        match_call(KEY, namespace="n" * 1000),
        match_call(KEY, deadline_s=float("nan")),
        match_call(KEY, deadline_s=-1.0),
        match_call(KEY, session="s" * 257),
        match_call(KEY, ttl_s=0.0),
        calls.GetCall(match=1, blocks=-1),
        calls.CommitCall(reservation=1, lengths=b"123"),
        calls.PutCall(
            namespace="n", fingerprint=b"", keys=KEY, parts=bytes(10), raw_bytes=b"",
            fidelity=1, position=0, tokens_per_block=1,
        ),
    ],
    ids=[
        "units", "keys", "namespace", "nan", "negative", "session", "life", "blocks", "lengths",
        "sizes",
    ],
)  # fmt: skip
def test_argument_out_of_bounds_is_answered_and_counted(one: Served, call: calls.Call) -> None:
    with Peer(one.path) as peer:
        peer.hello()
        peer.send(call)
        _, kind, body = peer.receive()
        assert kind == wire.PROBLEM
        assert wire.PROBLEMS.decode(body).kind == "invalid"
        peer.send(match_call(KEY))
        assert peer.receive()[1] == wire.REPLY
    assert one.server.counters["call_refused"] == 1


def test_bug_in_the_store_is_an_answer(one: Served) -> None:
    with Peer(one.path) as peer:
        peer.hello()
        peer.send(match_call(KEY, namespace="bug"))
        _, kind, body = peer.receive()
        assert kind == wire.PROBLEM
        assert wire.PROBLEMS.decode(body).kind == "bug"
        peer.send(match_call(KEY))
        assert peer.receive()[1] == wire.REPLY
    assert one.server.counters["server_bugs"] == 1


def test_sequence_0_is_not_answered(one: Served) -> None:
    with Peer(one.path) as peer:
        peer.hello()
        peer.send(calls.ReleaseCall(match=5), sequence=0)
        peer.send(calls.AbortCall(reservation=5), sequence=0)
        peer.send(match_call(KEY))
        assert peer.receive()[0] == 4


def test_late_answers_let_others_pass_and_are_bounded(
    one: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_DEFERRED", 3)
    with Peer(one.path) as peer:
        peer.hello()
        for _ in range(4):
            peer.send(calls.WaitCall(match=1))
        sequence, kind, _ = peer.receive()
        assert (sequence, kind) == (5, wire.PROBLEM)
        one.store.waits[1](calls.MatchReply(match=1, blocks=0))
        assert peer.receive()[:2] == (3, wire.REPLY)
        peer.send(calls.WaitCall(match=1))
        peer.send(match_call(KEY))
        assert peer.receive()[:2] == (7, wire.REPLY)
    assert until(lambda: ("end_leases", one.server._next_number) in one.store.log)
    one.store.waits[0](calls.MatchReply(match=1, blocks=0))
    assert ask(one.path) is not None


def test_slow_reader_is_disconnected(one: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_S", 2.0)
    monkeypatch.setattr(server_module, "LOOK_S", 0.1)
    with Peer(one.path) as peer:
        peer.hello()
        many = bytearray()
        for sequence in range(2, 50_000):
            wire.append(many, sequence, wire.REPLY, match_call(KEY))
        peer.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            peer.sock.sendall(many)
        assert ask(one.path) is not None
        assert until(lambda: one.server.counters["server_closed_slow_reader"] == 1)
    assert ask(one.path) is not None


def test_a_process_may_connect_as_often_as_it_likes(one: Served) -> None:
    for _ in range(2 * server_module.MAX_SESSIONS_OF_PROCESS):
        with Peer(one.path) as peer:
            peer.hello()
    assert until(lambda: not one.server._sessions)
    assert one.server.counters["server_refused_connections"] == 0


def test_closed_socket_ends_leases_and_the_next_hello_the_rest(one: Served) -> None:
    with Peer(one.path) as peer:
        session = peer.hello().session
        peer.send(put_call(KEY))
        peer.receive()
    assert until(lambda: ("end_leases", session) in one.store.log)
    assert len(one.store.free) == 63
    with Peer(one.path) as peer:
        peer.hello(closed=(session, 12345))
        assert ("disown", session) in one.store.log
        assert len(one.store.free) == 64


def test_other_process_cannot_end_a_session(one: Served) -> None:
    program = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tests.unit.test_server import Peer
with Peer(Path(sys.argv[1])) as peer:
    peer.hello(closed=(int(sys.argv[2]),))
"""
    root = str(Path(__file__).parents[2])
    with Peer(one.path) as peer:
        session = peer.hello().session
        command = [sys.executable, "-c", program, str(one.path), str(session), root]
        subprocess.run(command, check=True, timeout=30)
        assert ("disown", session) not in one.store.log
        peer.send(match_call(KEY))
        assert peer.receive()[1] == wire.REPLY


def test_too_many_connections_of_one_process(one: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_SESSIONS_OF_PROCESS", 2)
    with Peer(one.path) as first, Peer(one.path) as second, Peer(one.path) as third:
        first.hello()
        second.hello()
        _, kind, body = third.receive()
        assert kind == wire.PROBLEM
        assert "too many" in wire.PROBLEMS.decode(body).message


def test_posted_work_from_many_threads_runs_once_each(one: Served) -> None:
    done: list[int] = []

    def post(start: int) -> None:
        for number in range(start, start + 500):
            one.loop.post(lambda number=number: done.append(number))  # type: ignore[misc]

    threads = [threading.Thread(target=post, args=(start,)) for start in (0, 500, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert until(lambda: len(done) == 1500)
    assert sorted(done) == list(range(1500))
    assert [number for number in done if number < 500] == list(range(500))


def test_stat_carries_the_servers_counters(one: Served) -> None:
    channel = SidecarChannel(one.path)
    found = channel.call(calls.StatCall())
    channel.close()
    assert found is not None
    assert found["counters"]["own"] == 1
    assert found["counters"]["server_connections"] == 1
    assert found["holds"]["clients"] == 1


def test_header_is_three_words() -> None:
    out = bytearray()
    wire.append(out, 7, wire.REPLY, calls.ReleaseCall(match=3))
    assert struct.unpack_from("<III", out) == (len(out) - 12, 7, 0)


def test_who_never_says_hello_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STALL_S", 0.1)
    monkeypatch.setattr(server_module, "LOOK_S", 0.05)
    with served(tmp_path / "s.sock") as one, Peer(one.path) as peer, Peer(one.path) as good:
        good.hello()
        assert peer.is_closed()
        assert one.server.counters["server_closed_silent"] == 1
        good.send(match_call(KEY))
        assert good.receive()[1] == wire.REPLY


def test_without_descriptors_the_listener_rests(
    one: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LOOK_S", 0.1)
    fails = [OSError(24, "Too many open files")] * 2
    accept = one.server._listener.accept

    class Listener:
        def accept(self) -> Any:
            if fails:
                raise fails.pop()
            return accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    listener = one.server._listener
    one.server._listener = Listener()  # type: ignore[assignment]
    turns = one.loop.turns
    with Peer(one.path) as peer:
        assert peer.hello().session
    assert one.server.counters["server_accept_failed"] == 2
    assert one.loop.turns - turns < 200
