"""One real vLLM: what requests may wish, what their answers and the events say, when it forgets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    published = {
        "enable_kv_cache_events": True, "publisher": "zmq",
        "endpoint": f"ipc://{sidecar.path.with_name('events')}",
    }  # fmt: skip
    options: dict[str, Any] = {"max_model_len": 1024, "kv_events_config": published}
    with Engine(model_dir, log, config(sidecar), **options) as engine:
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


def said(engine: Engine, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind of the sidecar's blocks since the last call."""
    events: list[dict[str, Any]] = engine.call("events")
    return [one for one in events if one["type"] == kind and one.get("medium") != "GPU"]


def test_events_say_what_the_sidecar_has(engine: Engine, sidecar: Process) -> None:
    """In the hashes that vLLM's own events have for the same tokens, so that routers match them."""
    kept(engine, sidecar, 11)
    ask(engine, 11)  # a step, with which the last save is reported
    everything: list[dict[str, Any]] = engine.call("events")
    gpu = [one for one in everything if one["type"] == "BlockStored" and one["medium"] == "GPU"]
    ours = [one for one in everything if one["type"] == "BlockStored" and one["medium"] == "CPU"]
    assert [len(one["token_ids"]) for one in ours] == [BLOCK, BLOCK]
    older = "tierkv/exact"  # versions that have no such field
    assert {one.get("ownership", older) for one in ours} == {"tierkv/exact"}
    tokens = [token for one in ours for token in one["token_ids"]]
    assert tokens == prompt(STORED, 11)
    hashes = [name for one in gpu for name in one["block_hashes"].strip("[]").split(", ")]
    assert set(ours[0]["block_hashes"].strip("[]").split(", ")) <= set(hashes)
    assert ours[0]["parent_block_hash"] == "None"
    assert ours[1]["parent_block_hash"] == ours[0]["block_hashes"].strip("[]").split(", ")[-1]
    assert engine.reset_prefix_cache(connector=True)
    ask(engine, 12)
    gone = said(engine, "BlockRemoved")
    assert [one["block_hashes"] for one in gone] == [one["block_hashes"] for one in ours]


def test_answers_say_what_was_loaded_and_wishes_are_heard(engine: Engine, sidecar: Process) -> None:
    kept(engine, sidecar, 13, session="chat", ttl_s=60, pin=True)
    answer = ask(engine, 13, session="chat", closed=True)
    assert answer.told == {
        "loaded_tokens": {"host": STORED}, "loaded_classes": {"exact": STORED},
        "fidelity": "exact",
    }  # fmt: skip
    before = stored(sidecar)
    assert ask(engine, 14, store=False).cached == 0
    wrong = ask(engine, 13, ttl=60)
    assert wrong.told is not None
    assert "unknown field `ttl`" in wrong.told["problem"]
    assert stored(sidecar) == before


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


def test_what_waits_is_saved_when_the_engine_ends(engine: Engine, sidecar: Process) -> None:
    """The last test: the engine is gone after it."""
    before = stored(sidecar)
    engine.generate([prompt(LENGTH, seed) for seed in range(21, 27)], 1)
    engine.stop()
    assert stored(sidecar) == before + 6 * (STORED // BLOCK)
