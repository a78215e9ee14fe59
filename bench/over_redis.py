"""Redis: the tier with its checksums, beside a bare RESP loop and redis-py, over loopback TCP.

The tier writes as write-behind does, a batch at a time while a second thread seals the next one,
and reads as stages do, on its connection for reads. The bare loop is the least a client can
do in Python: SET with sendmsg from the block's memory, GET with recv_into it, on one connection,
two requests in flight. Larger blocks are cut into values of VALUE_BYTES: the server allocates
replies of 8 MiB and more anew, and pays a page fault for every 4 KiB of them. Nothing keeps a
block's values together: the tier's hashes do, and cost the server a copy of each value on its way
in. What that alone costs is the peer "bare hashes": the same loop, with HSET of pieces as the
tier's, nothing verified and nothing published.

redis-py is used as most do: set and get, one by one, with hiredis. What it gets is copied into the
block's memory, where all contenders must bring it. Puts go to database 0, which is emptied before
each one; gets read what lies in database 1.
"""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import redis

from bench.engine import MIB, RING_BYTES, free_port
from bench.nvme import Frames, write_behind
from bench.rows import Row, rows_of
from bench.timing import Run, take_turns
from tierkv.stages import read_jobs
from tierkv.tier import Item, Status
from tierkv.tiers.redis import RedisSettings, RedisTier
from tierkv.tiers.redis_hash import PIECE_BYTES
from tierkv.wrap import Sealed
from tierkv.write_behind import SHARED_BATCH_BYTES

SET = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n"
HSET = b"*4\r\n$4\r\nHSET\r\n$%d\r\n%b\r\n$2\r\np0\r\n$%d\r\n"
OK = {SET: b"+OK\r\n", HSET: b":1\r\n"}
IN_FLIGHT = 2
VALUE_BYTES = 2 * MIB
START_S = 10.0


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def redis_server() -> Iterator[int]:
    """Run a server that keeps nothing on disk; yields its loopback port."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        words = {
            "port": str(port), "bind": "127.0.0.1", "dir": folder, "save": "",
            "appendonly": "no", "maxmemory": "4gb", "logfile": f"{folder}/log",
        }  # fmt: skip
        options = [word for name, value in words.items() for word in (f"--{name}", value)]
        server = subprocess.Popen(["redis-server", *options])
        try:
            until = time.monotonic() + START_S
            while not _answers(port):
                assert server.poll() is None, "redis-server did not start"
                assert time.monotonic() < until, "redis-server does not answer"
                time.sleep(0.02)
            yield port
        finally:
            server.terminate()
            server.wait(30)


class Bare:
    """A connection that sends and receives whole values, and nothing else."""

    def __init__(self, port: int, database: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(b"SELECT %d\r\n" % database)
        self._expect(b"+OK\r\n")

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview], head: bytes = SET) -> float:
        """Store all values, each by a command that `head` begins, and return the seconds."""
        start, ok = time.perf_counter(), OK[head]
        waiting = 0
        for key, value in zip(keys, values, strict=True):
            command = head % (len(key), key, len(value))
            views = [memoryview(command), value, memoryview(b"\r\n")]
            while views:
                sent = self._socket.sendmsg(views)
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]
            waiting += 1
            if waiting == IN_FLIGHT:
                self._expect(ok)
                waiting -= 1
        self._expect(ok * waiting)
        return time.perf_counter() - start

    def get(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> float:
        """GET all values into memory and return the seconds."""
        start = time.perf_counter()
        asks = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]
        self._socket.sendall(b"".join(asks[:IN_FLIGHT]))
        for number, value in enumerate(values):
            self._expect(b"$%d\r\n" % len(value))
            at = 0
            while at < len(value):
                at += self._socket.recv_into(value[at:])
            self._expect(b"\r\n")
            if number + IN_FLIGHT < len(asks):
                self._socket.sendall(asks[number + IN_FLIGHT])
        return time.perf_counter() - start

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _expect(self, text: bytes) -> None:
        got = b""
        while len(got) < len(text):
            got += self._socket.recv(len(text) - len(got))
        assert got == text, got


class Tier:
    """The tier under its checksums, over the frames of a ring."""

    def __init__(self, port: int, database: int, frames: Frames, back: Frames) -> None:
        url = f"redis://127.0.0.1:{port}/{database}"
        self._tier = RedisTier(RedisSettings(url=url, timeout_s=10.0))
        self._sealed = Sealed(self._tier)
        self._frames, self._back = frames, back
        self._seed = 0
        self._written: list[Item] = []
        self._pool = ThreadPoolExecutor(self._tier.batch.threads)
        self._seals = ThreadPoolExecutor(1)

    def put(self) -> float:
        """Write the ring under new keys and return the seconds."""
        for item in self._written:
            self._tier.free(item.locator, item.nbytes)
        self._seed += 1
        ids = self._frames.name(self._seed)
        places = [self._tier.reserve(self._frames.nbytes) for _ in ids]
        self._written = self._frames.items(ids, [place for place in places if place is not None])
        start = time.perf_counter()
        write_behind(self._sealed, self._seals, self._written, SHARED_BATCH_BYTES)
        return time.perf_counter() - start

    def get(self) -> float:
        """Read the ring back, verified, and return the seconds."""
        ids = [item.id for item in self._written]
        items = self._back.items(ids, [item.locator for item in self._written])
        jobs = list(read_jobs(items, [item.nbytes for item in items], self._tier.batch))
        start = time.perf_counter()
        for outcomes in self._pool.map(self._sealed.read, jobs):
            assert all(outcome.status is Status.DONE for outcome in outcomes), outcomes
        return time.perf_counter() - start

    def close(self) -> None:
        """Close the tier."""
        self._pool.shutdown()
        self._seals.shutdown()
        self._tier.close()


def cut(values: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return values in pieces of so many bytes."""
    return [value[at : at + nbytes] for value in values for at in range(0, len(value), nbytes)]


def set_all(client: "redis.Redis", keys: Sequence[bytes], values: Sequence[bytes]) -> float:
    """Set values by redis-py, one by one, and return the seconds."""
    start = time.perf_counter()
    for key, value in zip(keys, values, strict=True):
        client.set(key, value)
    return time.perf_counter() - start


def get_all(client: "redis.Redis", keys: Sequence[bytes], targets: Sequence[memoryview]) -> float:
    """Get values by redis-py, one by one, to where they belong, and return the seconds."""
    start = time.perf_counter()
    for key, target in zip(keys, targets, strict=True):
        value = client.get(key)
        assert isinstance(value, bytes)
        target[:] = value
    return time.perf_counter() - start


def measure(block_bytes: int, turns: int, seed: int, absent: dict[str, str]) -> list[Row]:
    """Measure writes and verified reads of one block size."""
    if shutil.which("redis-server") is None:
        absent["redis"] = "redis-server is not installed: make setup as root installs it"
        return []
    with contextlib.ExitStack() as ends:
        port = ends.enter_context(redis_server())
        frames, back = Frames(block_bytes, seed), Frames(block_bytes, seed + 1)
        values = [piece[:block_bytes] for piece in frames.pieces]
        targets = [piece[:block_bytes] for piece in back.pieces]
        pieces, places = cut(values, VALUE_BYTES), cut(targets, VALUE_BYTES)
        fields = cut(values, PIECE_BYTES)
        hashes = [b"hash%d" % number for number in range(len(fields))]
        names = [b"bare%d" % number for number in range(len(pieces))]
        keys = [b"py%d" % number for number in range(frames.count)]
        clients = [redis.Redis(port=port, db=database) for database in (0, 1)]
        tiers = [Tier(port, database, frames, back) for database in (0, 1)]
        bares = [Bare(port, database) for database in (0, 1)]
        for closes in zip(clients, tiers, bares, strict=True):
            for closing in closes:
                ends.callback(closing.close)
        whole = [bytes(value) for value in values]

        def emptied(run: Run) -> Run:
            def one() -> float:
                clients[0].flushdb()
                return run()

            return one

        puts = {
            "tierkv": emptied(tiers[0].put),
            "limit": emptied(lambda: bares[0].put(names, pieces)),
            "redis-py": emptied(lambda: set_all(clients[0], keys, whole)),
            "bare hashes": emptied(lambda: bares[0].put(hashes, fields, HSET)),
        }
        tiers[1].put()
        bares[1].put(names, pieces)
        set_all(clients[1], keys, whole)
        gets = {
            "tierkv": tiers[1].get,
            "limit": lambda: bares[1].get(names, places),
            "redis-py": lambda: get_all(clients[1], keys, targets),
        }
        blocks = RING_BYTES // block_bytes
        rows = rows_of("redis", "put", block_bytes, blocks, take_turns(puts, turns, 1, seed))
        return rows + rows_of("redis", "get", block_bytes, blocks, take_turns(gets, turns, 1, seed))
