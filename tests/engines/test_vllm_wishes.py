"""One real vLLM: what requests may wish, what their answers and the events say, when it forgets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.test_vllm import BLOCK, begin, config, prompt, stored
from tests.engines.vllm_engine import Answer, Engine, needs_vllm
from tests.sidecars import Process, until

pytestmark = pytest.mark.timeout(600)

LENGTH, NEW = 300, 4
STORED = LENGTH // BLOCK * BLOCK
RAM_BYTES = 256 << 20


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    needs_vllm()
    one = Process(tmp_path_factory.mktemp("wishes"), host_bytes=RAM_BYTES)
    begin(one, RAM_BYTES)
    yield one
    one.kill()


@pytest.fixture(scope="module")
def engine(sidecar: Process, model_dir: Path) -> Iterator[Engine]:
    log = sidecar.log.with_name("engine.log")
    with Engine(model_dir, log, config(sidecar), max_model_len=1024) as engine:
        yield engine


def ask(engine: Engine, seed: int, **wishes: object) -> Answer:
    sampling = {"extra_args": {"kv_transfer_params": {"tierkv": wishes}}} if wishes else {}
    return engine.generate([prompt(LENGTH, seed)], NEW, sampling=sampling)[0]


def kept(engine: Engine, sidecar: Process, seed: int, **wishes: object) -> Answer:
    """Ask, and wait until what was computed lies in the sidecar."""
    before = stored(sidecar)
    answer = ask(engine, seed, **wishes)
    assert until(lambda: stored(sidecar) == before + STORED // BLOCK)
    assert engine.reset_prefix_cache()
    return answer


def test_other_weights_find_nothing_of_the_old_ones(engine: Engine, sidecar: Process) -> None:
    """Of whatever call of the engine's may have changed them; those here only say that they do."""
    first = kept(engine, sidecar, 1)
    assert ask(engine, 1).cached == STORED
    engine.call("reload_weights")
    for change in ("reload_weights", "sleep", "connector"):
        assert engine.reset_prefix_cache(connector=change == "connector")
        again = kept(engine, sidecar, 1)
        assert (again.cached, again.tokens) == (0, first.tokens)
        assert ask(engine, 1).cached == STORED, "what was computed since is found"
        if change == "reload_weights":
            engine.call("sleep", level=1)
            engine.call("wake_up")
