"""What users reported of Redis as a tier that loses or keeps too much (R20, R22)."""

import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import redis

from tests.frames import NAMESPACE, content, empty_item, make_frame
from tests.redis_server import RedisFactory, RedisServer
from tests.redis_tiers import MIB, Clock, get, open_tier, put
from tests.sidecars import until
from tierkv.tier import DONE, Status
from tierkv.tiers.redis_hash import EVICTED, UNPUBLISHED_S
from tierkv.tiers.resp import Buffer, Connection, LostError

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
        names = set(client.scan_iter(f"{prefix}:*", count=1000))
        left = [name for name in names if b"{" in name]
        assert len(names) - len(left) == count
        # Of the writer that was killed.
        assert len(left) <= 7
        assert all(0 < client.ttl(name) <= UNPUBLISHED_S for name in left)
    tier.close()


# --- R22 ---


class Interrupted:
    """Counts what a tier sends once it is connected, and does something before one of the sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], None]) -> None:
        self.sends = 0
        send = Connection.send

        def counted(link: Connection, buffers: Sequence[Buffer]) -> None:
            self.sends += bool(buffers)
            if buffers and self.sends == at:
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
        assert len(set(client.scan_iter(f"{prefix}:*", count=1000))) == 1
    for each in slow, quick:
        each.close()


def test_a_read_does_not_wait_for_write_behind(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(redis_server.unix_url, str(tmp_path))
    stored, frame = make_frame(1), make_frame(2, nbytes=4 * MIB)
    assert put(tier, stored) == DONE
    seen: list[Status] = []
    with monkeypatch.context() as patch:
        Interrupted(patch, 4, lambda: seen.append(get(tier, stored).status))
        assert put(tier, frame) == DONE
    assert seen == [Status.DONE]
    tier.close()


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
