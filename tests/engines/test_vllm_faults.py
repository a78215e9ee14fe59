"""Everything goes wrong at once in one real vLLM: 200 requests, and every answer is the right one.

Little KV space, so that requests are preempted and their blocks go to others; copies into the arena
are slow, so that they are still to be made when that happens. The model is a small random Llama:
what takes time is what goes wrong.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from tests.engines.tiny_models import llama
from tests.engines.vllm_engine import Engine, needs_vllm
from tests.engines.vllm_rig import BLOCK, NVME, REDIS, begin, find_again, lose, prompt, stat
from tests.redis_server import RedisServer
from tests.sidecars import Process, until

pytestmark = pytest.mark.timeout(900)

WAVE, NEW = 10, 12
SHARED, OWN = BLOCK, BLOCK + 28
"""Tokens; each answer needs a block of the engine's more than its prompt."""
GROUPS = 4
"""Kinds of waves; each kind has prompts of its own."""
KV_BLOCKS = 44
"""Of 32 tokens: seven prompts of a wave fit, and only while none of them has an answer."""
RAM_BYTES = 17 << 20
"""16 blocks; two waves store 42."""
DEADLINE_S = 2.0
LONGEST_S = 60.0
"""A wave takes a second or two; what hangs takes for ever."""


def wave(group: int) -> list[list[int]]:
    shared = prompt(SHARED, 100 + group)
    return [shared + prompt(OWN, 1000 * group + number) for number in range(WAVE)]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[Process]:
    needs_vllm()
    folder = tmp_path_factory.mktemp("faults")
    below = NVME.format(folder=folder) + REDIS.format(url=redis.url)
    one = Process(folder, below, host_bytes=RAM_BYTES)
    yield one
    one.kill()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def engine(sidecar: Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = llama(tmp_path_factory.mktemp("llama"))
    extra = {"socket": str(sidecar.path), "deadline_s": DEADLINE_S, "timeout_s": 1.0}
    transfer = {
        "kv_connector": "SlowConnector",
        "kv_connector_module_path": "tests.engines.slow_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    sidecar.start()
    options: dict[str, Any] = {"num_gpu_blocks_override": KV_BLOCKS, "max_model_len": 1024}
    with Engine(model, sidecar.log.with_name("engine.log"), transfer, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def right(engine: Engine, sidecar: Process) -> list[list[list[int]]]:
    """Return the answers of every group of prompts, computed with nothing to load from."""
    sidecar.kill()
    return [
        [answer.tokens for answer in engine.generate(wave(group), NEW)] for group in range(GROUPS)
    ]


def corrupt(sidecar: Process, random: Random) -> None:
    """Flip bytes all over the log."""
    log = sidecar.path.parent / "nvme" / "tierkv.log"
    with log.open("r+b") as file:
        for at in range(1 << 20, log.stat().st_size, 1 << 20):
            file.seek(at + random.randrange(1 << 19))
            file.write(random.randbytes(4))


def stall(sidecar: Process) -> None:
    """Let the sidecar answer nothing for longer than a load may take."""
    os.kill(sidecar.process.pid, signal.SIGSTOP)
    time.sleep(DEADLINE_S + 1)
    os.kill(sidecar.process.pid, signal.SIGCONT)


def after(random: Random, fault: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(random.uniform(0.0, 0.5), fault)
    timer.start()
    return timer


FAULTS = ["none", "lose", "corrupt", "kill", "stall", "redis", "abort"]
ROUNDS = 3


def test_every_fault_at_once_costs_no_token(
    engine: Engine, sidecar: Process, redis: RedisServer, right: list[list[list[int]]]
) -> None:
    """R7, R11, R12, R14 at the engine: nothing hangs, nothing is wrong, the engine lives on."""
    random, loaded, asked = Random(5), 0, GROUPS * WAVE
    begin(sidecar, RAM_BYTES)
    find_again(engine)
    for number in range(ROUNDS * len(FAULTS)):
        fault, group = FAULTS[number % len(FAULTS)], random.randrange(GROUPS)
        assert engine.reset_prefix_cache()
        faults: dict[str, Callable[[], None]] = {
            "lose": lambda: lose(sidecar),
            "corrupt": lambda: corrupt(sidecar, random),
            "kill": sidecar.kill,
            "stall": lambda: stall(sidecar),
            "redis": redis.kill,
        }
        timer = after(random, faults[fault]) if fault in faults else None
        started = time.monotonic()
        if fault == "abort":
            aborted = random.sample(range(WAVE), 4)
            answers = aborting(engine, wave(group), aborted, random.uniform(0.0, 0.4))
        else:
            aborted = []
            found = engine.generate(wave(group), NEW)
            answers = [answer.tokens for answer in found]
            loaded += sum(answer.cached > 0 for answer in found)
        assert time.monotonic() - started < LONGEST_S, fault
        wanted = [None if at in aborted else one for at, one in enumerate(right[group])]
        assert answers == wanted, fault
        asked += WAVE
        if timer is not None:
            timer.join()
        if fault == "kill":
            begin(sidecar, RAM_BYTES)
            find_again(engine)
        if fault == "redis":
            redis.start()
    assert asked >= 200
    assert loaded > 20, "most of these waves had something to load"
    assert engine.metrics("vllm:num_preemptions")["vllm:num_preemptions"] > 0
    counted = engine.metrics("vllm:tierkv")
    assert counted["vllm:tierkv_saves_cut_short"] > 0, "blocks went to others before their copy"
    assert counted["vllm:tierkv_loads_failed"] > 0
    # Saves are paced: the last ones may still be under way.
    assert until(lambda: not any(held(sidecar))), held(sidecar)


def held(sidecar: Process) -> tuple[int, int, int]:
    """Return what engines hold: matches, transfers, reservations."""
    holds = stat(sidecar)["holds"]
    return holds["matches"], holds["transfers"], holds["reservations"]


def aborting(
    engine: Engine, prompts: list[list[int]], aborted: list[int], after_s: float
) -> list[list[int] | None]:
    asked = [{"prompt_token_ids": one} for one in prompts]
    answers = engine.call(
        "generate_with_aborts",
        prompts=asked, sampling={"max_tokens": NEW}, aborted=aborted, after_s=after_s,
    )  # fmt: skip
    return [answer and answer["tokens"] for answer in answers]
