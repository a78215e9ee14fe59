"""A real vLLM of a model with sliding windows, on one worker and on two, over a real sidecar.

The model is Gemma 3 in small with random weights: six cache groups share one memory, and only one
keeps all blocks. Three engines do everything here: what the first computes the second loads on two
workers, what these compute the third loads on one, in so little memory that requests are preempted.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.engines.tiny_models import gemma
from tests.engines.vllm_engine import Engine, needs_vllm
from tests.engines.vllm_rig import BLOCK, begin, config, find_again, lose, prompt, serving, stat
from tests.sidecars import Process

pytestmark = pytest.mark.timeout(900)

RAM_BYTES = 256 << 20
NEW = 8
LONG, MIDDLE, SHORT = 3000, 700, 200
"""Tokens: far longer than the window, longer, and shorter."""
PROMPTS = [prompt(LONG, 1), prompt(MIDDLE, 2), prompt(SHORT, 3)]
OTHERS = prompt(MIDDLE, 4)
"""Computed on two workers only."""
WAVE, ASKED, TOLD = 10, 284, 16
"""Each answer needs a block of the full layers more than its prompt; windows only move on."""
KV_BLOCKS = 382
"""Seven prompts of a wave, of nine blocks in each of six groups, and three blocks more."""
TWO_WORKERS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    # By itself vLLM asks for a NUMA node for each worker.
    "more_environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
}
STEPS: dict[str, Any] = {"max_num_batched_tokens": 512}
"""A long prompt takes several steps, between which its windows move on."""


def wave() -> list[list[int]]:
    return [prompt(ASKED, 100 + number) for number in range(WAVE)]


def whole(tokens: int) -> int:
    """Return the tokens that a hit of a prompt may have: whole blocks, and one left to compute."""
    return (tokens - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    needs_vllm((0, 30), "it cannot be told that a load of windows failed, so it is refused")
    with serving(tmp_path_factory.mktemp("hybrid"), RAM_BYTES) as one:
        yield one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def right(sidecar: Process, model: Path) -> list[list[int]]:
    """Let a first engine compute all prompts; returns its answers."""
    log = sidecar.log.with_name("first.log")
    with Engine(model, log, config(sidecar), **STEPS) as engine:
        answers = [engine.generate([one], NEW)[0] for one in [*PROMPTS, OTHERS]]
        answers += [engine.generate([one], TOLD)[0] for one in wave()]
        assert engine.metrics("vllm:tierkv")["vllm:tierkv_errors"] == 0
    assert [answer.cached for answer in answers] == [0] * len(answers)
    full = sum(whole(len(one)) // BLOCK for one in [*PROMPTS, OTHERS, *wave()])
    windows = stat(sidecar)["tiers"][0]["placements"] - full
    assert 0 < windows < full, "of sliding layers only windows are stored"
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def two(sidecar: Process, model: Path, right: list[list[int]]) -> Iterator[Engine]:
    """Start an engine of two workers, which knows that there is one with one."""
    log = sidecar.log.with_name("second.log")
    with Engine(model, log, config(sidecar, parallel_sizes=[1]), **TWO_WORKERS) as engine:
        yield engine


def test_two_workers_load_what_one_has_stored(two: Engine, right: list[list[int]]) -> None:
    for one, tokens in zip(PROMPTS, right, strict=False):
        for _ in range(3):  # workers that starve each other may miss the time of a call
            (answer,) = two.generate([one], NEW)
            assert answer.tokens == tokens
            if answer.cached:
                break
            assert two.reset_prefix_cache()
        assert answer.cached == whole(len(one))
    counted = two.metrics("vllm:tierkv")
    assert counted["vllm:tierkv_errors"] == 0
    loaded = sum(whole(len(one)) for one in PROMPTS)
    assert counted["vllm:tierkv_loaded_tokens{tier=host}"] == loaded, "counted once for all workers"


def test_one_worker_loads_what_two_have_stored(
    two: Engine, sidecar: Process, model: Path, right: list[list[int]]
) -> None:
    """And then all goes wrong in little memory: preempted, lost while it is loaded, killed."""
    lose(sidecar)
    (answer,) = two.generate([OTHERS], NEW)
    assert (answer.cached, answer.tokens) == (0, right[len(PROMPTS)])
    two.stop()
    log = sidecar.log.with_name("third.log")
    little: dict[str, Any] = {"num_gpu_blocks_override": KV_BLOCKS}
    with Engine(model, log, config(sidecar, parallel_sizes=[2]), **STEPS, **little) as engine:
        (answer,) = engine.generate([OTHERS], NEW)
        assert (answer.cached, answer.tokens) == (whole(MIDDLE), right[len(PROMPTS)])
        wanted, random = right[len(PROMPTS) + 1 :], Random(3)
        for fault in ("none", "none", "lose", "lose", "kill", "none"):
            assert engine.reset_prefix_cache()
            faults = {"lose": lambda: lose(sidecar), "kill": sidecar.kill}
            timer = threading.Timer(random.uniform(0.0, 0.3), faults.get(fault, lambda: None))
            timer.start()
            answers = engine.generate(wave(), TOLD)
            timer.join()
            assert [answer.tokens for answer in answers] == wanted, fault
            if fault == "kill":
                begin(sidecar, RAM_BYTES)
                find_again(engine)
        assert engine.reset_prefix_cache()
        answers = engine.generate(wave(), TOLD)
        assert [answer.cached for answer in answers] == [whole(ASKED)] * WAVE
        assert [answer.tokens for answer in answers] == wanted
        assert engine.metrics("vllm:num_preemptions")["vllm:num_preemptions"] > 0
        assert engine.metrics("vllm:tierkv")["vllm:tierkv_errors"] == 0
        held = stat(sidecar)["holds"]
        assert (held["matches"], held["transfers"], held["reservations"]) == (0, 0, 0)
