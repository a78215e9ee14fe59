"""A real vLLM and a real sidecar: what one engine computed another loads, whatever ends between.

Engines take most of a minute to start, so a few do everything here.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.engines.vllm_engine import Answer, Engine, version
from tests.engines.vllm_rig import (
    BLOCK,
    NVME,
    REDIS,
    begin,
    config,
    find_again,
    hits,
    prompt,
    serving,
    stored,
)
from tests.redis_server import RedisServer
from tests.sidecars import Process, until

pytestmark = pytest.mark.timeout(900)

LONG, NEW = 3000, 8
STORED = LONG // BLOCK * BLOCK
"""Tokens of the long prompt in whole blocks."""
HITS = "vllm:external_prefix_cache_hits"
SOURCES = "vllm:prompt_tokens_cached_by_source"
RAM_BYTES = 768 << 20


@pytest.fixture(scope="module")
def sidecar(
    tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("sidecar")
    below = NVME.format(folder=folder) + REDIS.format(url=redis_server.url)
    with serving(folder, RAM_BYTES, below) as one:
        yield one


class First(NamedTuple):
    """What the first engine said of the long prompt: computed, and loaded; and our counters."""

    cold: Answer
    again: Answer
    counted: dict[str, float]


@pytest.fixture(scope="module")
def first(sidecar: Process, model_dir: Path) -> First:
    """Let an engine that has another connector too compute the long prompt, load it, and end."""
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(sidecar.path.parent / "files")},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [config(sidecar), other]},
    }
    with Engine(model_dir, sidecar.log.with_name("first.log"), both) as engine:
        cold = engine.generate([prompt(LONG)], NEW)[0]
        assert until(lambda: stored(sidecar) == STORED // BLOCK)
        assert engine.reset_prefix_cache()
        again = engine.generate([prompt(LONG)], NEW)[0]
        return First(cold, again, engine.metrics("vllm:tierkv"))


@pytest.fixture(scope="module")
def cold(first: First) -> list[int]:
    """Return the answer to the long prompt."""
    return first.cold.tokens


@pytest.fixture(scope="module")
def engine(sidecar: Process, cold: list[int], model_dir: Path) -> Iterator[Engine]:
    """Start a second engine, which computes in pieces and keeps no prefixes of its own."""
    log = sidecar.log.with_name("second.log")
    options: dict[str, Any] = {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
    with Engine(model_dir, log, config(sidecar), **options) as engine:
        yield engine


def drops_counts() -> bool:
    """Whether this version's metrics lose what is counted in steps that give no token.

    Loads end in such steps.
    """
    return version() < (0, 28)


def assert_loads(engine: Engine, sidecar: Process, tier: str, cold: list[int]) -> None:
    """Assert that the long prompt comes from a tier and is answered as it was without a cache."""
    before = hits(sidecar).get(tier, 0)
    answer = engine.generate([prompt(LONG)], NEW)[0]
    assert (answer.cached, answer.tokens) == (STORED, cold)
    assert hits(sidecar)[tier] - before == STORED


def test_as_one_of_several_connectors(first: First) -> None:
    """The child sees its own options only; the other one has the prompt as well."""
    assert (first.cold.cached, first.again.cached) == (0, STORED)
    assert first.again.tokens == first.cold.tokens
    if not drops_counts():
        assert first.counted["vllm:tierkv_loaded_tokens{tier=host}"] == STORED


def test_another_engine_loads_from_ram(engine: Engine, sidecar: Process, cold: list[int]) -> None:
    before = engine.metrics().get(HITS, 0)
    assert_loads(engine, sidecar, "host", cold)
    if not drops_counts():
        assert engine.metrics()[HITS] - before == STORED
    if version() >= (0, 32):  # that can be told where its hits come from
        assert engine.metrics(SOURCES)[f"{SOURCES}{{source=host}}"] == STORED
    assert hits(sidecar).keys() == {"host"}


def test_from_nvme_after_the_sidecar_started_again(
    engine: Engine, sidecar: Process, cold: list[int]
) -> None:
    assert sidecar.stop() == 0
    assert engine.generate([prompt(2 * BLOCK + 1, 77)], 1)[0].cached == 0, "no sidecar is no hit"
    begin(sidecar, RAM_BYTES)
    find_again(engine)
    assert_loads(engine, sidecar, "nvme", cold)


def test_from_redis_through_another_sidecar(
    engine: Engine, sidecar: Process, cold: list[int], redis_server: RedisServer
) -> None:
    assert sidecar.stop() == 0
    other = Process(sidecar.path.parent, REDIS.format(url=redis_server.url), host_bytes=RAM_BYTES)
    try:
        begin(other, RAM_BYTES)
        find_again(engine)
        assert_loads(engine, other, "redis", cold)
    finally:
        other.kill()


def test_a_sidecar_killed_at_any_time_costs_no_token(engine: Engine, sidecar: Process) -> None:
    """R12: eight requests at once that share a prefix; some load, some store, some do neither."""
    shared = prompt(200, 5)
    asked = [shared + prompt(100, 6 + number) for number in range(8)]
    right = [answer.tokens for answer in engine.generate(asked, NEW)]  # no sidecar runs
    random = Random(1)
    for _ in range(6):
        begin(sidecar, RAM_BYTES)
        find_again(engine)
        killer = threading.Timer(random.uniform(0.0, 0.5), sidecar.kill)
        killer.start()
        answers = engine.generate(asked, NEW)
        killer.join()
        assert [answer.tokens for answer in answers] == right
    begin(sidecar, RAM_BYTES)
    find_again(engine)
    engine.generate(asked, NEW)
    answers = engine.generate(asked, NEW)
    assert [answer.tokens for answer in answers] == right
    assert [answer.cached for answer in answers] == [2 * BLOCK] * 8
