"""A real vLLM and a real sidecar: what one engine computed another loads, whatever ends between.

Engines take most of a minute to start, so a few do everything here.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.engines.vllm_engine import Engine, needs_vllm
from tests.redis_server import RedisServer
from tests.sidecars import Process, until
from tierkv_connectors.sidecar import connect

pytestmark = pytest.mark.timeout(900)

LONG, NEW = 3000, 8
BLOCK = 128
STORED = LONG // BLOCK * BLOCK
"""Tokens of the long prompt in whole blocks."""
HITS = "vllm:external_prefix_cache_hits"
NVME = '[nvme]\npath = "{folder}/nvme"\nsize = "1GiB"\n'
REDIS = '[redis]\nurl = "{url}"\nprefix = "vllm-engines"\n'
RAM_BYTES = 768 << 20


def prompt(count: int, seed: int = 1, start: int = 0) -> list[int]:
    return [100 + (seed * 7919 + number * 104729) % 40000 for number in range(start, count)]


WAITS = {"deadline_s": 60.0, "timeout_s": 10.0}
"""Longer than any machine that is busy with other things may need."""


def config(sidecar: Process, **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv_connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(sidecar.path), **WAITS, **options},
    }


def stat(sidecar: Process) -> dict[str, Any]:
    client = connect(sidecar.path)
    found = client.stat()
    client.close()
    assert found is not None
    return found


def begin(sidecar: Process, ram_bytes: int = RAM_BYTES) -> None:
    """Start a sidecar and wait until all of its memory is there."""
    sidecar.start()
    assert until(lambda: stat(sidecar)["tiers"][0]["capacity_bytes"] == ram_bytes)


def hits(sidecar: Process) -> dict[str, int]:
    """Return tokens of answered blocks by tier."""
    by_tier: dict[str, int] = stat(sidecar)["hits_by_tier_blocks"]
    return {tier: count * BLOCK for tier, count in by_tier.items() if count}


def stored(sidecar: Process) -> int:
    """Return blocks in RAM."""
    count: int = stat(sidecar)["tiers"][0]["placements"]
    return count


@pytest.fixture(scope="module")
def sidecar(
    tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> Iterator[Process]:
    needs_vllm()
    folder = tmp_path_factory.mktemp("sidecar")
    below = NVME.format(folder=folder) + REDIS.format(url=redis_server.url)
    one = Process(folder, below, host_bytes=RAM_BYTES)
    try:
        begin(one)
        yield one
    finally:
        one.kill()


@pytest.fixture(scope="module")
def cold(sidecar: Process, model_dir: Path) -> list[int]:
    """Let a first engine compute the long prompt, and end; returns its answer."""
    log = sidecar.log.with_name("first.log")
    with Engine(model_dir, log, config(sidecar)) as engine:
        answer = engine.generate([prompt(LONG)], NEW)[0]
    assert answer.cached == 0
    assert stored(sidecar) == STORED // BLOCK, "an engine that ends has stored what it computed"
    return answer.tokens


@pytest.fixture(scope="module")
def engine(sidecar: Process, cold: list[int], model_dir: Path) -> Iterator[Engine]:
    """Start a second engine, which computes in pieces and keeps no prefixes of its own."""
    log = sidecar.log.with_name("second.log")
    options: dict[str, Any] = {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
    with Engine(model_dir, log, config(sidecar), **options) as engine:
        yield engine


def drops_counts(engine: Engine) -> bool:
    """Whether this version's metrics lose what is counted in steps that give no token.

    Loads end in such steps.
    """
    return engine.version.startswith("0.27.")


def find_again(engine: Engine) -> None:
    """Wait until an engine's connections to a new sidecar are up, both of them."""
    assert until(lambda: engine.generate([prompt(2 * BLOCK + 1, 77)], 1)[0].cached == 2 * BLOCK)


def assert_loads(engine: Engine, sidecar: Process, tier: str, cold: list[int]) -> None:
    """Assert that the long prompt comes from a tier and is answered as it was without a cache."""
    before = hits(sidecar).get(tier, 0)
    answer = engine.generate([prompt(LONG)], NEW)[0]
    assert (answer.cached, answer.tokens) == (STORED, cold)
    assert hits(sidecar)[tier] - before == STORED


def test_another_engine_loads_from_ram(engine: Engine, sidecar: Process, cold: list[int]) -> None:
    before = engine.metrics().get(HITS, 0)
    answer = engine.generate([prompt(LONG)], NEW)[0]
    assert (answer.cached, answer.tokens) == (STORED, cold)
    if not drops_counts(engine):
        assert engine.metrics()[HITS] - before == STORED
    assert hits(sidecar) == {"host": STORED}


def test_as_one_of_several_connectors(
    sidecar: Process, cold: list[int], model_dir: Path, tmp_path: Path
) -> None:
    """The child sees its own options only; the other one has nothing."""
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "files")},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [config(sidecar), other]},
    }
    with Engine(model_dir, sidecar.log.with_name("both.log"), both) as engine:
        answer = engine.generate([prompt(LONG)], NEW)[0]
        assert (answer.cached, answer.tokens) == (STORED, cold)
        if not drops_counts(engine):
            counted = engine.metrics("vllm:tierkv")
            assert counted["vllm:tierkv_loaded_tokens{tier=host}"] == STORED


def test_from_nvme_after_the_sidecar_started_again(
    engine: Engine, sidecar: Process, cold: list[int]
) -> None:
    assert sidecar.stop() == 0
    assert engine.generate([prompt(2 * BLOCK + 1, 77)], 1)[0].cached == 0, "no sidecar is no hit"
    begin(sidecar)
    find_again(engine)
    assert_loads(engine, sidecar, "nvme", cold)


def test_from_redis_through_another_sidecar(
    engine: Engine, sidecar: Process, cold: list[int], redis_server: RedisServer
) -> None:
    assert sidecar.stop() == 0
    other = Process(sidecar.path.parent, REDIS.format(url=redis_server.url), host_bytes=RAM_BYTES)
    try:
        begin(other)
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
        begin(sidecar)
        find_again(engine)
        killer = threading.Timer(random.uniform(0.0, 0.5), sidecar.kill)
        killer.start()
        answers = engine.generate(asked, NEW)
        killer.join()
        assert [answer.tokens for answer in answers] == right
    begin(sidecar)
    find_again(engine)
    engine.generate(asked, NEW)
    answers = engine.generate(asked, NEW)
    assert [answer.tokens for answer in answers] == right
    assert [answer.cached for answer in answers] == [2 * BLOCK] * 8
