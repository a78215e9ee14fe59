"""What users reported of a Redis that is slow, gone, asked too often or guarded (R23)."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import quote

import pytest

from tests.frames import NAMESPACE, empty_item, make_frame
from tests.redis_server import RedisFactory, RedisServer
from tests.redis_tiers import MIB, Clock, get, open_tier, put
from tests.sidecars import until
from tierkv.tier import DONE, Status
from tierkv.tiers.redis import PROBE_S
from tierkv.tiers.resp import Buffer, Connection


class Proxy:
    """Passes bytes between clients and a server, replies late when told to."""

    def __init__(self, server: RedisServer) -> None:
        self.delay_s = 0.0
        self.asked = 0
        """Requests that came in, and connections."""
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
                self.asked += 1
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                server = socket.socket(socket.AF_UNIX)
                self._sockets += [client, server]
                server.connect(self._server)
                self._start(self._forward, client, server)
                self._start(self._back, server, client)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                self.asked += 1
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
    outcomes = [get(tier, frame).status, put(tier, frame).status]
    assert outcomes == [Status.FAILED] * 2
    assert tier.find([frame.id]) == [-1]
    asked = proxy.asked
    for _ in range(100):
        assert tier.read([empty_item(frame.id, 0, 4096)])[0].status is Status.THROTTLED
        assert put(tier, frame).status is Status.THROTTLED
        assert tier.find([frame.id]) == [-1]
        assert tier.drop([frame.id])[0].status is Status.FAILED
        assert tier.generations() == {}
    with pytest.raises(OSError, match="left alone"):
        tier.raise_generation(NAMESPACE, 1)
    assert proxy.asked == asked, "nobody waits for a server that is left alone"
    assert f"{PROBE_S} s" in tier.probe()
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
    assert [put(tier, frame).status for _ in range(3)] == [Status.FAILED] * 3
    assert get(tier, frame).status is Status.THROTTLED
    clock.now += 0.5
    assert get(tier, frame).status is Status.FAILED
    assert get(tier, frame).status is Status.THROTTLED
    assert tier.probe() != ""
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
