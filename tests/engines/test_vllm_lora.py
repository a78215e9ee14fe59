"""A real vLLM with LoRA adapters and with n-gram drafts: one small random Llama does both.

Its sidecar is a private one, which it starts and ends by itself.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engines.tiny_models import llama, lora_of
from tests.engines.vllm_engine import Answer, Engine
from tests.engines.vllm_rig import (
    BLOCK,
    Listens,
    config,
    lose,
    prompt,
    stored,
    wait_for_memory,
)
from tests.sidecars import until
from tierkv_connectors.private import private_socket

pytestmark = pytest.mark.timeout(600)

LENGTH, NEW = 400, 6
STORED = LENGTH // BLOCK * BLOCK
RAM_BYTES = 256 << 20
NAME = f"lora-{os.getpid()}"
"""Of the engine, by which its sidecar is found."""
VOCABULARY = 49152
DRAFTS = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def sidecar() -> Listens:
    return SimpleNamespace(path=private_socket(NAME))


@pytest.fixture(scope="module")
def engine(sidecar: Listens, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder, model = tmp_path_factory.mktemp("lora"), llama(tmp_path_factory.mktemp("llama"))
    settings = folder / "tierkv.toml"
    settings.write_text(f"[host]\nsize = {RAM_BYTES}\n")
    transfer = config(sidecar, private=True, settings=str(settings)) | {"engine_id": NAME}
    del transfer["kv_load_failure_policy"]  # a warning is all that comes of it here
    options: dict[str, Any] = {
        "max_model_len": 1024, "enable_lora": True, "max_lora_rank": 8, "max_loras": 2,
        "speculative_config": DRAFTS, "max_logprobs": -1,
    }  # fmt: skip
    with Engine(model, folder / "engine.log", transfer, **options) as engine:
        wait_for_memory(sidecar, RAM_BYTES)
        yield engine


def ask(engine: Engine, lora: tuple[str, int, Path] | None = None) -> Answer:
    named = (lora[0], lora[1], str(lora[2])) if lora else None
    return engine.generate([prompt(LENGTH)], NEW, lora=named)[0]


def test_r04_adapters_share_nothing_but_what_is_the_same(
    engine: Engine, sidecar: Listens, tmp_path: Path
) -> None:
    """Neither in the sidecar nor, where we store what was computed on it, in vLLM's own cache."""
    one, two = lora_of(tmp_path / "one", 1), lora_of(tmp_path / "two", 2)
    copy = shutil.copytree(one, tmp_path / "copy")
    asked = [None, ("law", 1, one), ("law", 2, two)]
    cold = [ask(engine, lora) for lora in asked]
    assert [answer.cached for answer in cold] == [0, 0, 0], "one name, two adapters"
    answers = [answer.tokens for answer in cold]
    assert len({tuple(tokens) for tokens in answers}) == 3, "adapters change the answer"
    assert until(lambda: stored(sidecar) == 3 * STORED // BLOCK)
    assert engine.reset_prefix_cache()
    for lora, tokens in zip([*asked, ("law", 3, copy)], [*answers, answers[1]], strict=True):
        warm = ask(engine, lora)
        assert (warm.cached, warm.tokens) == (STORED, tokens), lora
    # Another content at the same path: vLLM's own cache knows name and path only.
    lora_of(one, 4)
    other = ask(engine, ("law", 4, one))
    assert other.cached == 0
    assert other.tokens not in answers
    assert until(lambda: stored(sidecar) == 4 * STORED // BLOCK)
    assert engine.reset_prefix_cache()
    again = ask(engine, ("law", 4, one))
    assert (again.cached, again.tokens) == (STORED, other.tokens)
    # The engine may hold either content under the first number: nothing is loaded or stored.
    assert ask(engine, ("law", 1, one)).told is None
    assert stored(sidecar) == 4 * STORED // BLOCK
    assert engine.metrics("vllm:tierkv")["vllm:tierkv_errors"] == 0


def test_of_drafts_only_what_was_accepted_is_stored(
    engine: Engine, sidecar: Listens, tmp_path: Path
) -> None:
    """Blocks of an answer that was computed three tokens ahead are what computing them gives."""
    start = prompt(100, 3)
    few = {"allowed_token_ids": list(range(200, 206))}  # so that it repeats itself, now and then
    answer = engine.generate([start], 2 * BLOCK, sampling=few)[0].tokens
    counted = engine.metrics("vllm:spec_decode_num")
    accepted = counted["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < accepted < counted["vllm:spec_decode_num_draft_tokens"]
    text = start + answer[: 2 * BLOCK - 20]

    def follows(name: str) -> Any:
        path = str(tmp_path / name)
        asked = [{"prompt_token_ids": text}]
        engine.call("log_probabilities", prompts=asked, vocabulary=VOCABULARY, path=path)
        return np.load(path)

    def warm() -> Answer:
        assert engine.reset_prefix_cache()
        return engine.generate([text], NEW)[0]

    assert until(lambda: warm().cached == 2 * BLOCK)
    loaded = warm()
    assert loaded.told is not None
    assert engine.reset_prefix_cache()
    found = follows("loaded.npy")
    lose(sidecar)
    cold = warm()
    assert (cold.cached, cold.tokens) == (0, loaded.tokens)
    lose(sidecar)
    assert engine.reset_prefix_cache()
    assert np.abs(found - follows("computed.npy")).max() < 1e-3


def test_it_warns_of_the_policy_that_fails_requests(engine: Engine) -> None:
    assert "kv_load_failure_policy is 'fail'" in engine.log.read_text()


def test_its_sidecar_ends_with_it(engine: Engine, sidecar: Listens) -> None:
    """The last test: the engine is gone after it."""
    assert sidecar.path.exists()
    engine.stop()
    assert until(lambda: not sidecar.path.parent.exists())
