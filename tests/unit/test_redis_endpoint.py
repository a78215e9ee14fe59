"""URLs of Redis servers: what they may say, and that a wrong one is never quoted."""

import sys

import pytest

from tierkv.errors import ErrorKind, TierKVError
from tierkv.tiers.endpoint import Endpoint
from tierkv.tiers.redis import SLOWEST_BYTES_PER_S, RedisSettings, RedisTier


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("redis://cache", Endpoint(host="cache")),
        ("redis://cache:7000/3", Endpoint(host="cache", port=7000, database=3)),
        ("redis://[::1]:7000", Endpoint(host="::1", port=7000)),
        ("rediss://u:p@cache", Endpoint(host="cache", tls=True, user="u", password="p")),
        ("unix:///run/r.sock?db=2", Endpoint(path="/run/r.sock", database=2)),
        ("unix://:p%20w@/run/a%20b", Endpoint(path="/run/a b", password="p w")),
        ("redis://:%40%3A%2F%25@h", Endpoint(host="h", password="@:/%")),
        ("redis://%40u:%2540@h", Endpoint(host="h", user="@u", password="%40")),
    ],
)
def test_urls(url: str, wanted: Endpoint) -> None:
    assert Endpoint.parse(url) == wanted


@pytest.mark.parametrize(
    "url",
    ["", "cache:6379", "http://s3cret@h", "redis://", "redis:///0", "redis://h/s3cret",
     "redis://u:s3cret/x@h", "redis://h?s3cret=1", "unix://s3cret", "unix://h/s3cret",
     "redis://:s3cret:s3cret@h:s3cret", "redis://:s3cret#x@h", "redis://h:99999", "unix:///?db=x"],
)  # fmt: skip
def test_a_wrong_url_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(TierKVError) as caught:
        RedisSettings(url=url)
    assert caught.value.kind is ErrorKind.INVALID
    assert "s3cret" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_without_redis_py_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(TierKVError, match=r"pip install 'tierkv-sidecar\[redis\]'") as caught:
        RedisTier(RedisSettings(url="redis://127.0.0.1"))
    assert caught.value.kind is ErrorKind.UNAVAILABLE


def test_a_tls_file_that_is_not_there_is_named_by_its_setting() -> None:
    with pytest.raises(TierKVError, match="tls_ca"):
        RedisTier(RedisSettings(url="rediss://127.0.0.1", tls_ca="/nowhere/ca.pem"))


@pytest.mark.parametrize("name", ["max_bytes", "ttl_s", "timeout_s", "connections"])
def test_a_setting_that_cannot_work_is_refused(name: str) -> None:
    with pytest.raises(TierKVError, match=name):
        RedisSettings(url="redis://127.0.0.1", **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("connections", [1, 2, 8])
def test_no_call_waits_past_its_deadline_for_those_before_it(connections: int) -> None:
    """On a network of half a gigabit; all calls share what it carries."""
    settings = RedisSettings(url="redis://127.0.0.1:1", connections=connections)
    tier, carried = RedisTier(settings), 64 << 20
    threads, nbytes = tier.batch.threads, tier.batch.nbytes
    tier.close()
    assert threads == connections + 1, "the next call is at hand when one ends"
    assert threads * nbytes / carried <= settings.timeout_s + nbytes / SLOWEST_BYTES_PER_S
