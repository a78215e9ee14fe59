"""The redis fixture itself: reachable both ways, passwords, restarts, and nothing left behind."""

import os

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.redis_server import RedisFactory, RedisServer


def test_answers_on_both_addresses(redis_server: RedisServer) -> None:
    for url in (redis_server.url, redis_server.unix_url):
        with redis.Redis.from_url(url) as client:
            assert client.ping()


def test_settings_reach_the_server(redis_factory: RedisFactory) -> None:
    server = redis_factory(requirepass="secret", maxmemory="8mb")
    with redis.Redis.from_url(server.url) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(8 << 20)}
    at_once = Retry(NoBackoff(), 0)
    with (
        redis.Redis(port=server.port, retry=at_once) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()


def test_restart_keeps_the_address_and_nothing_else(redis_factory: RedisFactory) -> None:
    server = redis_factory()
    with redis.Redis.from_url(server.url) as client:
        client.set("k", "v")
        pid, url = server.pid, server.url
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.get("k")
        server.start()
        assert (server.url, client.get("k")) == (url, None)
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
