"""What users reported of Redis as a tier (R20, R22, R23), as the smallest thing that shows it."""

import logging
import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

from tests.frames import NAMESPACE, Sample, content, empty_item, make_frame
from tests.redis_server import RedisFactory, RedisServer
from tests.sidecars import until
from tierkv.tier import DONE, Outcome, Status
from tierkv.tiers.redis import RedisSettings, RedisTier
from tierkv.tiers.redis_hash import EVICTED, UNPUBLISHED_S
from tierkv.tiers.resp import Buffer, Connection, LostError

MIB = 1 << 20


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def open_tier(
    url: str, prefix: str = "reports", timeout_s: float = 30.0, clock: Clock | None = None
) -> RedisTier:
    settings = RedisSettings(
        url=url, prefix=prefix, max_bytes=64 * MIB, ttl_s=600, timeout_s=timeout_s,
        connect_timeout_s=timeout_s,
    )  # fmt: skip
    return RedisTier(settings, clock=clock or Clock(), draw=lambda: 1.0)


def get(tier: RedisTier, frame: Sample) -> Outcome:
    """Read a frame and check its bytes."""
    item = empty_item(frame.id, 0, frame.nbytes)
    outcome = tier.read([item])[0]
    assert outcome != DONE or content(item) == frame.data
    return outcome


def put(tier: RedisTier, frame: Sample) -> Outcome:
    return tier.write([frame.item(0)])[0]


# --- R20 ---


def write_all(url: str, prefix: str, version: int, count: int) -> None:
    """Write frames in an order of this process's own, as one of several sidecars does."""
    tier = open_tier(url, prefix)
    frames = [make_frame(n, nbytes=200_000, version=version) for n in range(count)]
    random.Random(version).shuffle(frames)
    for start in range(0, count, 7):
        outcomes = tier.write([frame.item(0) for frame in frames[start : start + 7]])
        assert outcomes == [DONE] * len(outcomes)
    tier.close()


@pytest.mark.parametrize("turn", range(4))
def test_r20_four_processes_write_the_same_keys(
    redis_server: RedisServer, tmp_path: Path, turn: int
) -> None:
    url, prefix, count = redis_server.unix_url, str(tmp_path), 40
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=write_all, args=(url, prefix, version, count)) for version in range(4)
    ]
    for process in processes:
        process.start()
    time.sleep(random.Random(turn).uniform(0.0, 0.1))
    processes[turn].kill()
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes if p is not processes[turn]] == [0] * 3
    tier = open_tier(url, prefix)
    frames = [make_frame(n, nbytes=200_000) for n in range(count)]
    assert tier.find([frame.id for frame in frames]) == [200_000] * count
    for number, frame in enumerate(frames):
        item = empty_item(frame.id, 0, frame.nbytes)
        assert tier.read([item]) == [DONE]
        written = {make_frame(number, nbytes=200_000, version=v).data for v in range(4)}
        assert content(item) in written
    with redis.Redis(unix_socket_path=str(redis_server.socket)) as client:
        names = list(client.scan_iter(f"{prefix}:*", count=1000))
        left = [name for name in names if b"{" in name]
        assert len(names) - len(left) == count
        # Of the writer that was killed.
        assert len(left) <= 7
        assert all(0 < client.ttl(name) <= UNPUBLISHED_S for name in left)
    tier.close()


# --- R22 ---


class Interrupted:
    """Counts what a tier sends, and does something before one of the sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], None]) -> None:
        self.sends = 0
        send = Connection.send

        def counted(link: Connection, buffers: Sequence[Buffer]) -> None:
            self.sends += 1
            if self.sends == at:
                act()
            send(link, buffers)

        monkeypatch.setattr(Connection, "send", counted)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_r22_a_writer_that_dies_leaves_nothing_that_is_found(
    redis_factory: RedisFactory, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    server = redis_factory()
    tier, other = open_tier(server.unix_url), open_tier(server.unix_url)
    frame = make_frame(1, nbytes=4 * MIB)
    assert get(tier, frame).status is get(other, frame).status is Status.MISSING

    def die() -> None:
        raise LostError("the writer is dead")

    # After the lookup, `pieces` are sent; the frame has five.
    with monkeypatch.context() as patch:
        Interrupted(patch, pieces + 2, die)
        assert put(tier, frame).status is Status.FAILED
    assert other.find([frame.id]) == [-1]
    assert get(other, frame).status is Status.MISSING
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        assert until(lambda: client.dbsize() == 1)
        (left,) = client.keys()
        assert 0 < client.ttl(left) <= UNPUBLISHED_S
        assert put(other, frame) == get(tier, frame) == DONE
        assert client.dbsize() == 2
    for each in tier, other:
        each.close()
    server.stop()


@pytest.mark.parametrize("at", range(2, 7))
def test_r22_of_writers_that_race_one_writes_a_whole_frame(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    url, prefix = redis_server.unix_url, str(tmp_path)
    slow, quick = open_tier(url, prefix), open_tier(url, prefix)
    frames = [make_frame(1, nbytes=size * MIB, version=size, codec_id=size) for size in (4, 3)]
    assert [get(tier, frames[0]).status for tier in (slow, quick)] == [Status.MISSING] * 2
    seen: list[Status] = []

    def overtake() -> None:
        assert put(quick, frames[1]) == DONE
        seen.append(get(quick, frames[1]).status)

    with monkeypatch.context() as patch:
        Interrupted(patch, at, overtake)
        assert put(slow, frames[0]) == DONE
    assert seen == [Status.DONE]
    assert get(quick, frames[0]) == DONE
    assert get(quick, frames[1]).status is Status.MISSING
    with redis.Redis(unix_socket_path=str(redis_server.socket)) as client:
        assert sum(1 for _ in client.scan_iter(f"{prefix}:*", count=1000)) == 1
    for each in slow, quick:
        each.close()


@pytest.mark.parametrize("at", range(3, 7))
def test_r22_what_is_evicted_while_it_is_written_is_not_found(
    redis_factory: RedisFactory, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    server = redis_factory()
    tier = open_tier(server.unix_url)
    frame = make_frame(1, nbytes=4 * MIB)
    assert get(tier, frame).status is Status.MISSING
    with redis.Redis(unix_socket_path=str(server.socket)) as client:

        def evict() -> None:
            assert until(lambda: client.flushall() and client.dbsize() == 0)

        with monkeypatch.context() as patch:
            Interrupted(patch, at, evict)
            assert put(tier, frame).status is Status.FAILED
        assert tier.find([frame.id]) == [-1]
        assert get(tier, frame).status is Status.MISSING
        assert put(tier, frame) == get(tier, frame) == DONE
    tier.close()
    server.stop()


def test_r22_a_full_server_keeps_nothing_of_a_frame_that_did_not_fit(
    redis_factory: RedisFactory,
) -> None:
    server = redis_factory(maxmemory="6mb", maxmemory_policy="noeviction")
    tier = open_tier(server.unix_url)
    assert put(tier, make_frame(1, nbytes=12 * MIB)).status is Status.FULL
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        assert client.dbsize() == 0
    tier.close()
    server.stop()


def test_r22_frames_are_evicted_whole(redis_factory: RedisFactory) -> None:
    server = redis_factory(maxmemory="13mb", maxmemory_policy="allkeys-lru")
    tier = open_tier(server.unix_url)
    frames = [make_frame(n, nbytes=2 * MIB) for n in range(8)]
    # Eviction samples: it may choose what is being written, which is then no frame at all.
    assert {put(tier, frame) for frame in frames} <= {DONE, EVICTED}
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.config_set("maxmemory", "20mb")  # what is read counts too, and would evict more
    found = tier.find([frame.id for frame in frames])
    outcomes = [get(tier, frame).status for frame in frames]
    assert outcomes == [Status.DONE if n > 0 else Status.MISSING for n in found]
    assert 2 <= outcomes.count(Status.DONE) <= 6
    assert tier.find([frame.id for frame in frames]) == found
    tier.close()
    server.stop()


def test_r22_a_lost_hash_of_generations_is_written_again(redis_server: RedisServer) -> None:
    tier = open_tier(redis_server.unix_url, "r22gen")
    frame = make_frame(1, generation=1)
    assert put(tier, frame) == DONE
    tier.raise_generation(NAMESPACE, 2)
    with redis.Redis(unix_socket_path=str(redis_server.socket)) as client:
        assert client.delete("r22gen:1:generations") == 1
    assert tier.find([frame.id]) == [-1]
    other = open_tier(redis_server.unix_url, "r22gen")
    assert get(other, frame).status is Status.MISSING
    assert other.generations() == {NAMESPACE: 2}
    for each in tier, other:
        each.close()


def test_r22_a_full_server_refuses_writes_and_only_those(redis_factory: RedisFactory) -> None:
    server = redis_factory(maxmemory="13mb", maxmemory_policy="noeviction")
    clock = Clock()
    tier = open_tier(server.unix_url, clock=clock)
    frames = [make_frame(n, nbytes=2 * MIB) for n in range(8)]
    outcomes = tier.write([frame.item(0) for frame in frames])
    stored = [frame for frame, o in zip(frames, outcomes, strict=True) if o == DONE]
    assert 2 <= len(stored) <= 6
    assert {o.status for o in outcomes if o != DONE} == {Status.FULL}
    with redis.Redis(unix_socket_path=str(server.socket)) as client:

        def sets() -> int:
            return int(client.info("commandstats")["cmdstat_hset"]["calls"])

        before = sets()
        for _ in range(50):
            assert put(tier, frames[-1]).status is Status.FULL
            clock.now += 0.005
        assert sets() == before
        # A clear cannot be written down now, but holds here; reads go on.
        client.config_set("maxmemory", "1mb")
        with pytest.raises(OSError, match=r"OutOfMemory|ResponseError"):
            tier.raise_generation(bytes(16), 5)
        assert [get(tier, frame) for frame in stored] == [DONE] * len(stored)
        assert tier.find([frame.id for frame in stored]) == [2 * MIB] * len(stored)
        client.config_set("maxmemory", "13mb")
        clock.now += 1.0
        assert put(tier, frames[-1]).status is Status.FULL
        assert tier.drop([frame.id for frame in stored]) == [DONE] * len(stored)
        assert put(tier, frames[-1]).status is Status.FULL
        clock.now += 1.0
        assert put(tier, frames[-1]) == DONE
        assert put(tier, frames[-2]) == DONE
        assert int(client.hget("reports:1:generations", bytes(16)) or 0) == 5
    tier.close()
    server.stop()


def test_r22_frames_fit_the_lowest_limits_of_a_server(redis_factory: RedisFactory) -> None:
    server = redis_factory(proto_max_bulk_len="1mb", client_query_buffer_limit="1mb")
    tier = open_tier(server.url)
    frame = make_frame(1, nbytes=33 * MIB)
    assert put(tier, frame) == DONE
    assert get(tier, frame) == DONE
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        key = next(iter(client.scan_iter("reports:1:*")))
        assert 0 < client.ttl(key) <= 600
        # What "just under a power of two" is for.
        assert client.memory_usage(key, samples=0) < frame.nbytes * 1.02
    tier.close()
    server.stop()


# --- R23 ---


class Proxy:
    """Passes bytes between clients and a server, replies late when told to."""

    def __init__(self, server: RedisServer) -> None:
        self.delay_s = 0.0
        self.stopped = threading.Event()
        self._server = str(server.socket)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = [self._listener]
        self._start(self._accept)

    def close(self) -> None:
        self.stopped.set()
        for sock in list(self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for sock in self._sockets:
            sock.close()

    def _start(self, target: object, *args: socket.socket) -> None:
        assert callable(target)
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                server = socket.socket(socket.AF_UNIX)
                self._sockets += [client, server]
                server.connect(self._server)
                self._start(self._forward, client, server)
                self._start(self._back, server, client)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                self.stopped.wait(self.delay_s)
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    proxy = Proxy(redis_server)
    yield proxy
    proxy.close()


def test_r23_a_slow_server_costs_three_timeouts_then_nothing(proxy: Proxy) -> None:
    clock = Clock()
    tier = open_tier(
        f"redis://127.0.0.1:{proxy.port}", f"slow{proxy.port}", timeout_s=2.0, clock=clock
    )
    frame = make_frame(1, nbytes=100_000)
    assert put(tier, frame) == DONE
    assert get(tier, frame) == DONE
    proxy.delay_s = 60.0
    began = time.monotonic()
    outcomes = [get(tier, frame).status, put(tier, frame).status]
    assert outcomes == [Status.FAILED] * 2
    assert tier.find([frame.id]) == [-1]
    assert time.monotonic() - began < 3 * 2 * 2.0 + 30
    began = time.monotonic()
    for _ in range(100):
        assert tier.read([empty_item(frame.id, 0, 4096)])[0].status is Status.THROTTLED
        assert put(tier, frame).status is Status.THROTTLED
        assert tier.find([frame.id]) == [-1]
        assert tier.drop([frame.id])[0].status is Status.FAILED
        assert tier.generations() == {}
    with pytest.raises(OSError, match="left alone"):
        tier.raise_generation(NAMESPACE, 1)
    assert time.monotonic() - began < 60.0  # 500 calls of 2 s would be 1000
    assert "0.3 s" in tier.probe()
    proxy.delay_s = 0.0
    assert put(tier, frame).status is Status.THROTTLED
    clock.now += 0.5
    assert until(lambda: tier.probe() == "")
    # The frame of generation 0 was cleared while the link was open; the clear is made up for.
    assert get(tier, frame).status is Status.MISSING
    newer = make_frame(1, nbytes=100_000, generation=1)
    assert put(tier, newer) == DONE
    assert tier.drop([frame.id]) == [DONE]
    tier.close()


def test_r23_a_server_that_stops_and_comes_back(redis_factory: RedisFactory) -> None:
    server = redis_factory()
    clock = Clock()
    tier = open_tier(server.url, clock=clock)
    frame = make_frame(1, nbytes=MIB)
    assert put(tier, frame) == DONE
    # Connections that died while they lay idle cost nobody a failure.
    server.restart()
    assert tier.find([frame.id]) == [-1]
    assert put(tier, frame) == DONE
    assert tier.drop([frame.id]) == [DONE]
    server.kill()
    began = time.monotonic()
    assert [put(tier, frame).status for _ in range(3)] == [Status.FAILED] * 3
    assert get(tier, frame).status is Status.THROTTLED
    clock.now += 0.5
    assert get(tier, frame).status is Status.FAILED
    assert get(tier, frame).status is Status.THROTTLED
    assert tier.probe() != ""
    assert time.monotonic() - began < 60.0
    server.start()
    clock.now += 1.0
    assert put(tier, frame) == DONE
    assert get(tier, frame) == DONE
    tier.close()
    server.stop()


def test_r23_a_thousand_blocks_are_found_in_one_round_trip(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(redis_server.unix_url, "r23find")
    ids = [make_frame(n, nbytes=300).id for n in range(1000)]
    assert tier.write([make_frame(n, nbytes=300).item(0) for n in range(0, 1000, 2)])[0] == DONE
    sends = []
    send = Connection.send

    def counted(link: Connection, buffers: list[Buffer]) -> None:
        sends.append(len(buffers))
        send(link, buffers)

    monkeypatch.setattr(Connection, "send", counted)
    # The first send is the tier's second connection, logging in with nothing to say.
    assert tier.find(ids) == [300, -1] * 500
    assert tier.find(ids) == [300, -1] * 500
    assert [count for count in sends if count] == [1, 1]
    tier.close()


def test_r23_a_password_is_decoded_once_and_never_shown(
    redis_factory: RedisFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    password = "p@s:s/w%40rd?#"
    server = redis_factory(requirepass=password)
    wrong = "wr@ng:%2Fword"
    shown = []
    for login in password, wrong:
        for url in (
            f"redis://:{quote(login, safe='')}@127.0.0.1:{server.port}/1",
            f"unix://default:{quote(login, safe='')}@{server.socket}?db=1",
        ):
            tier = open_tier(url)
            frame = make_frame(1)
            outcomes = [put(tier, frame), get(tier, frame), *tier.drop([frame.id])]
            good = login == password
            assert [outcome.status for outcome in outcomes[:2]] == [
                Status.DONE if good else Status.FAILED
            ] * 2
            assert until(lambda: (tier.probe() == "") == good)  # noqa: B023, at once
            shown += [
                repr(outcomes),
                tier.probe(),
                repr(tier),
                repr(tier._settings),
                repr(vars(tier)),
            ]
            shown.append(repr(tier._settings.__rich_repr__()))
            with suppress(OSError):
                tier.raise_generation(NAMESPACE, 0)
            tier.close()
    server.stop()
    text = "\n".join([*shown, caplog.text])
    for secret in password, wrong, quote(password, safe=""), quote(wrong, safe=""):
        assert secret not in text
    assert "WRONGPASS" in text
