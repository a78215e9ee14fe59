"""The harness itself: a real vLLM answers, counts its own hits, and ends when told."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_engine import BLOCK, Engine, EngineError

pytestmark = pytest.mark.timeout(900)

NEW = 8


def prompt(count: int, seed: int = 1) -> list[int]:
    """Return token ids of nothing in particular; what they continue to is as good as any."""
    return [100 + (seed * 7919 + number * 104729) % 40000 for number in range(count)]


@pytest.fixture(scope="module")
def plain(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(model_dir, tmp_path_factory.mktemp("plain") / "log") as engine:
        yield engine


def test_prompts_run_at_once_and_its_own_prefix_cache_counts(plain: Engine) -> None:
    prompts = [prompt(4 * BLOCK + 5, seed) for seed in (1, 2)]
    cold = plain.generate(prompts, NEW)
    assert [answer.cached for answer in cold] == [0, 0]
    assert [len(answer.tokens) for answer in cold] == [NEW, NEW]
    warm = plain.generate(prompts[:1], NEW)
    assert (warm[0].cached, warm[0].tokens) == (4 * BLOCK, cold[0].tokens)
    salted = plain.generate(prompts[:1], NEW, extra=[{"cache_salt": "other"}])
    assert (salted[0].cached, salted[0].tokens) == (0, cold[0].tokens)
    assert plain.reset_prefix_cache()
    assert plain.generate(prompts[:1], 1)[0].cached == 0
    assert all(answer.ttft_s > 0 for answer in cold)


def test_what_the_engine_refuses_is_an_error_here_and_it_lives_on(plain: Engine) -> None:
    with pytest.raises(EngineError, match="4096 tokens"):
        plain.generate([prompt(5000)])
    assert plain.generate([prompt(8)], 1)[0].finish == "length"


def test_a_connector_of_two_engines_shares_a_prefix(model_dir: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "shared")},
    }
    tokens = prompt(4 * BLOCK + 5)
    with Engine(model_dir, tmp_path / "first.log", config) as first:
        cold = first.generate([tokens], NEW)[0]
        first.kill()
        with pytest.raises(AssertionError, match="not started"):
            first.generate([tokens])
    with Engine(model_dir, tmp_path / "second.log", config) as second:
        warm = second.generate([tokens], NEW)[0]
        counted = second.metrics()
    assert (cold.cached, warm.cached) == (0, 4 * BLOCK)
    assert warm.tokens == cold.tokens
    assert counted["vllm:external_prefix_cache_hits"] == 4 * BLOCK
