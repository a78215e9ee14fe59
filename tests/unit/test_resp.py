"""RESP connections against servers that send garbage, too little, too much or too slowly."""

import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.frames import aligned, empty_item, make_frame
from tierkv.tier import Status
from tierkv.tiers.endpoint import Endpoint
from tierkv.tiers.redis import RedisSettings, RedisTier
from tierkv.tiers.resp import WAKE_BYTES, Connection, LostError, Pool, Refused, request

TIMEOUT_S = 0.5
MIB = 1 << 20

Script = Callable[[socket.socket], object]


class Scripted:
    """A server that runs a script on every connection, then waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.script: Script = lambda sock: None
        self.connections = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def says(self, data: bytes, *, then_close: bool = False) -> None:
        """Answer the first request with data."""

        def script(sock: socket.socket) -> None:
            sock.recv(65_536)
            sock.sendall(data)
            if then_close:
                sock.shutdown(socket.SHUT_RDWR)

        self.script = script

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for sock in self._open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(60.0)
        with sock:
            try:
                sock.recv(1, socket.MSG_PEEK)  # a test sets its script after it connects
                self.script(sock)
                while sock.recv(65_536):
                    pass
            except OSError:
                pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Scripted]:
    server = Scripted(tmp_path / "scripted.sock")
    yield server
    server.close()


@pytest.fixture
def link(server: Scripted) -> Iterator[Connection]:
    link = connect(server)
    yield link
    link.close()


def connect(server: Scripted, **login: str) -> Connection:
    return Connection(
        Endpoint(path=server.path, **login),  # type: ignore[arg-type]
        timeout_s=TIMEOUT_S,
        connect_timeout_s=TIMEOUT_S,
    )


def ask(link: Connection, deadline_s: float = 60.0) -> None:
    link.begin(time.monotonic() + deadline_s)
    link.send([request(b"PING")])


GARBAGE = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\r\n",
    b"\r\n",
    b"$abc\r\n",
    b"$-2\r\n",
    b"$1_0\r\n0123456789\r\n",
    b"$+3\r\nabc\r\n",
    b"$ 3\r\nabc\r\n",
    b"$99999999999999999999999\r\n",
    b"$9223372036854775807\r\n",
    b"$1099511627776\r\n" + b"x" * 100_000,
    b"$3\r\nabcde",
    b":1x\r\n",
    b":\r\n",
    b"*1000000000\r\n",
    b"%2\r\n",
    b"+" + b"x" * 100_000,
    b"x" * 100_000,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda data: repr(data[:20]))
def test_garbage_ends_the_connection(server: Scripted, link: Connection, garbage: bytes) -> None:
    server.says(garbage)
    ask(link)
    tracemalloc.start()
    with pytest.raises(LostError):
        link.reply()
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda data: repr(data[:20]))
def test_garbage_instead_of_a_value(server: Scripted, link: Connection, garbage: bytes) -> None:
    server.says(garbage)
    ask(link)
    tracemalloc.start()
    with pytest.raises(LostError):
        link.fill([aligned(4096)])
    assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    tracemalloc.stop()


def test_small_replies(server: Scripted, link: Connection) -> None:
    server.says(
        b"+OK\r\n:-12\r\n$-1\r\n$0\r\n\r\n$5\r\na\r\nbc\r\n-OOM no memory\r\n*2\r\n-ERR\r\n"
    )
    ask(link)
    assert [link.reply() for _ in range(5)] == [b"OK", -12, None, b"", b"a\r\nbc"]
    assert link.reply() == Refused("OOM", "OOM no memory")
    assert link.array(2) is None
    assert link.array(2) == Refused("ERR", "ERR")
    assert link.quiet


@pytest.mark.parametrize("seed", range(8))
def test_values_arrive_however_the_stream_is_cut(
    server: Scripted, link: Connection, seed: int
) -> None:
    rng = random.Random(seed)
    sizes = [1, 2, 4095, 8190, 8191, 8192, 8193, 70_001, 0]
    rng.shuffle(sizes)
    values = [rng.randbytes(size) for size in sizes]
    stream = b"".join(b"*1\r\n$%d\r\n%b\r\n" % (len(value), value) for value in values)

    def script(sock: socket.socket) -> None:
        at = 0
        while at < len(stream):
            step = rng.choice([1, 2, 3, 7, 4096, 30_000])
            sock.sendall(stream[at : at + step])
            at += step

    server.script = script
    link = connect(server)
    ask(link)
    for value in values:
        assert link.array(1) is None
        if not value:
            assert link.reply() == b""
            continue
        cut = rng.randrange(len(value))
        out = memoryview(bytearray(len(value)))
        assert link.fill([view for view in (out[:cut], out[cut:]) if len(view)]) == len(value)
        assert out == value
    assert link.quiet
    link.close()


def test_the_last_bytes_of_a_value_arrive_over_tcp() -> None:
    """They are fewer than wake us in the middle of a value, and nothing comes behind them."""
    value = random.Random(1).randbytes(2 * WAKE_BYTES + 5)
    stream = b"$%d\r\n%b\r\n" % (len(value), value)

    def serve() -> None:
        with listener.accept()[0] as sock:
            at = 0
            while sock.recv(100):
                for stop in (1, 20, WAKE_BYTES - 7, WAKE_BYTES + 9, len(stream) - 3, len(stream)):
                    sock.sendall(stream[at:stop])
                    at = stop
                    time.sleep(0.01)
                at = 0

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1])
        link = Connection(endpoint, timeout_s=10, connect_timeout_s=10)
        for _ in range(2):
            ask(link, deadline_s=20)
            out = memoryview(bytearray(len(value)))
            assert link.fill([out[:7], out[7:]]) == len(value)
            assert out == value
        link.close()
        thread.join()


def test_a_value_of_another_length_is_dropped(server: Scripted, link: Connection) -> None:
    server.says(b"$3\r\nabc\r\n$-1\r\n$9000\r\n" + b"y" * 9000 + b"\r\n$4\r\nfour\r\n")
    ask(link)
    out = aligned(4)[:4]
    assert [link.fill([out]) for _ in range(3)] == [3, -1, 9000]
    assert link.fill([out]) == 4
    assert out.tobytes() == b"four"


@pytest.mark.parametrize("sent", [b"", b"$4", b"$4096\r\n", b"$4096\r\n" + b"x" * 4000])
def test_a_server_that_falls_silent_costs_one_timeout(
    server: Scripted, link: Connection, sent: bytes
) -> None:
    server.says(sent)
    ask(link)
    began = time.monotonic()
    with pytest.raises(LostError, match=r"0\.5 s") as caught:
        link.fill([aligned(4096)[:2000], aligned(4096)[:2096]])
    assert not caught.value.stale
    assert time.monotonic() - began > TIMEOUT_S * 0.9


@pytest.mark.parametrize("sent", [b"", b"$4", b"$4096\r\n" + b"x" * 4000])
def test_a_server_that_closes(server: Scripted, link: Connection, sent: bytes) -> None:
    server.says(sent, then_close=True)
    ask(link)
    with pytest.raises(LostError) as caught:
        link.fill([aligned(4096)])
    assert caught.value.stale == (not sent)


def test_a_server_that_dribbles_is_left_at_the_deadline(server: Scripted) -> None:
    over = threading.Event()

    def script(sock: socket.socket) -> None:
        sock.sendall(b"$1048576\r\n")
        while not over.wait(0.02):
            sock.sendall(b"x")

    server.script = script
    link = connect(server)
    ask(link, deadline_s=0.3)
    with pytest.raises(LostError, match="s"):
        link.fill([aligned(1 << 20)])
    over.set()
    link.close()


def test_a_server_that_reads_nothing(server: Scripted) -> None:
    over = threading.Event()
    server.script = lambda sock: over.wait(60)
    link = connect(server)
    link.begin(time.monotonic() + 60)
    with pytest.raises(LostError):
        link.send([aligned(16 * MIB)])
    over.set()
    link.close()


def test_many_buffers_are_sent_whole(server: Scripted) -> None:
    rng = random.Random(1)
    buffers = [rng.randbytes(rng.randint(1, 30_000)) for _ in range(500)]
    got = bytearray()
    total = sum(map(len, buffers))

    def script(sock: socket.socket) -> None:
        while len(got) < total:
            got.extend(sock.recv(rng.randint(1, 100_000)))
        sock.sendall(b"+OK\r\n")

    server.script = script
    link = connect(server)
    link.begin(time.monotonic() + 60)
    link.send(buffers)
    assert link.reply() == b"OK"
    assert got == b"".join(buffers)
    link.close()


def test_a_refused_login_does_not_repeat_the_password(server: Scripted) -> None:
    server.says(b"-ERR unknown command 'AUTH', with args beginning with: 'hunter2'\r\n")
    with pytest.raises(LostError, match="AUTH was refused with ERR") as caught:
        connect(server, password="hunter2")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__suppress_context__


# --- pool ---


def test_the_pool_bounds_connections_and_waits(server: Scripted) -> None:
    pool = Pool(lambda: connect(server), 2)
    first, second = pool.take(1.0), pool.take(1.0)
    assert first is not None
    assert second is not None
    assert pool.take(0.05) is None
    pool.lose(first)
    third = pool.take(0.05)
    assert third is not None
    assert not third.used
    pool.give(third)
    assert pool.take(0.05) is third
    assert third.used
    pool.close()
    pool.give(second)
    pool.give(third)
    assert not pool._idle


def test_a_failed_connect_gives_its_place_back(tmp_path: Path) -> None:
    def connect_to_nothing() -> Connection:
        endpoint = Endpoint(path=str(tmp_path / "nothing"))
        return Connection(endpoint, timeout_s=1, connect_timeout_s=1)

    pool = Pool(connect_to_nothing, 1)
    for _ in range(3):
        with pytest.raises(LostError, match="cannot connect"):
            pool.take(0.05)


def test_bytes_that_nobody_asked_for_end_a_connection(server: Scripted) -> None:
    server.says(b"+PONG\r\n+PONG\r\n")
    pool = Pool(lambda: connect(server), 1)
    link = pool.take(1.0)
    assert link is not None
    ask(link)
    assert link.reply() == b"PONG"
    pool.give(link)
    other = pool.take(1.0)
    assert other is not None
    assert other is not link
    other.close()


# --- the tier in front of such servers ---

HOSTILE: dict[str, Script] = {
    "silent": lambda sock: None,
    "closes": lambda sock: sock.shutdown(socket.SHUT_RDWR),
    "http": lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "error": lambda sock: sock.sendall(b"-LOADING Redis is loading the dataset in memory\r\n" * 9),
    "numbers": lambda sock: sock.sendall(b":1\r\n" * 1000),
    "bulk": lambda sock: sock.sendall(b"$-1\r\n" + b"$104857600\r\n" + b"x" * 9000),
    "arrays": lambda sock: sock.sendall(b"*2\r\n" * 1000),
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_server_makes_the_tier_hang_or_raise(server: Scripted, hostile: str) -> None:
    server.script = HOSTILE[hostile]
    tier = RedisTier(
        RedisSettings(url=f"unix://{server.path}", timeout_s=TIMEOUT_S, connect_timeout_s=0.5)
    )
    frame = make_frame(1, nbytes=2 * MIB)
    bad = {Status.FAILED, Status.THROTTLED}
    for _ in range(2):
        assert tier.read([empty_item(frame.id, 0, frame.nbytes)])[0].status in bad
        assert tier.write([frame.item(0)])[0].status in bad
        assert tier.find([frame.id]) == [-1]
        # This server says 1 to everything, so it says that it removed the frame.
        assert tier.drop([frame.id])[0].status in bad or hostile == "numbers"
        assert set(tier.generations()) <= {bytes(16)}
        if hostile != "numbers":
            with pytest.raises(OSError, match="Redis"):
                tier.raise_generation(bytes(16), 0)
    assert tier.probe() != ""
    tier.close()
