"""One real vLLM: what requests may wish, what their answers and the events say, when it forgets.

It keeps its own prefix cache, and what is stored below the class `exact` has a loss.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.vllm_engine import BLOCK as ENGINE_BLOCK
from tests.engines.vllm_engine import Answer, Engine, EngineError
from tests.engines.vllm_rig import BLOCK, config, lose, prompt, serving, stored
from tests.sidecars import Process, until
from tests.unit.test_gate import domain, entry
from tierkv import gate
from tierkv_connectors.transformers_identity import identity_of

pytestmark = pytest.mark.timeout(600)

LENGTH, NEW = 300, 4
STORED = LENGTH // BLOCK * BLOCK
RAM_BYTES = 256 << 20


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Process]:
    """Start a sidecar whose gate allows int8 to the class `safe` for this model."""
    folder = tmp_path_factory.mktemp("wishes")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    family = identity_of(model).family.hex()
    measured = entry(domain(), profile="int8", family=family, kv_dtype="fp32", artifact="")
    (folder / "gate.json").write_bytes(gate.dump(gate.Gate(entries=(measured,))))
    with serving(folder, RAM_BYTES, f'gate = "{folder}/gate.json"\n') as one:
        yield one


@pytest.fixture(scope="module")
def engine(sidecar: Process, model_dir: Path) -> Iterator[Engine]:
    log = sidecar.log.with_name("engine.log")
    published = {
        "enable_kv_cache_events": True, "publisher": "zmq",
        "endpoint": f"ipc://{sidecar.path.with_name('events')}",
    }  # fmt: skip
    options: dict[str, Any] = {"max_model_len": 1024, "kv_events_config": published}
    # Exact requests are stored losslessly, others as int8, which loads faster.
    transfer = config(sidecar, profiles=["int8", "lossless"])
    with Engine(model_dir, log, transfer, **options) as engine:
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
    names = [one["block_hashes"] for one in ours]
    lose(sidecar)
    assert engine.reset_prefix_cache()
    kept(engine, sidecar, 12)
    assert said(engine, "BlockRemoved") == [], "nobody has missed them yet"
    kept(engine, sidecar, 11)
    ask(engine, 11)
    events = engine.call("events")
    heard = [(one["type"], one["block_hashes"]) for one in events if one.get("medium") != "GPU"]
    for name in names:
        assert heard.index(("BlockRemoved", name)) < heard.index(("BlockStored", name))
    assert engine.reset_prefix_cache(connector=True)
    ask(engine, 13)
    gone = [one["block_hashes"] for one in said(engine, "BlockRemoved")]
    assert set(names) < set(gone), "all that was said is taken back"


def test_answers_say_what_was_loaded_and_wishes_are_heard(engine: Engine, sidecar: Process) -> None:
    kept(engine, sidecar, 14, session="chat", ttl_s=60, pin=True)
    answer = ask(engine, 14, session="chat", closed=True)
    assert answer.told == {
        "loaded_tokens": {"host": STORED}, "loaded_classes": {"exact": STORED},
        "fidelity": "exact",
    }  # fmt: skip
    before = stored(sidecar)
    assert ask(engine, 15, store=False).cached == 0
    wrong = ask(engine, 14, ttl=60)
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


def test_an_exact_request_reuses_no_lossy_block(engine: Engine, sidecar: Process) -> None:
    """In neither cache."""
    exact = ask(engine, 31, store=False)
    assert engine.reset_prefix_cache()
    assert kept(engine, sidecar, 31, fidelity="safe").cached == 0
    lossy = ask(engine, 31, fidelity="safe")
    assert lossy.told == {
        "loaded_tokens": {"host": STORED}, "loaded_classes": {"safe": STORED}, "fidelity": "safe",
    }  # fmt: skip
    assert ask(engine, 31, fidelity="safe").cached > STORED, "it has blocks in the engine's cache"
    again = ask(engine, 31)
    assert (again.cached, again.tokens, again.told) == (0, exact.tokens, None)
    assert ask(engine, 31, fidelity="safe").cached > STORED
    assert ask(engine, 31).cached > STORED, "its own, computed blocks"


def test_its_own_prefix_cache_is_left_to_itself(engine: Engine) -> None:
    """And the rig says what it should: several prompts at once, salts, hits, emptied caches."""
    prompts = [prompt(4 * ENGINE_BLOCK + 5, seed) for seed in (41, 42)]
    alone: dict[str, Any] = {"extra_args": {"kv_transfer_params": {"tierkv": {"store": False}}}}
    cold = engine.generate(prompts, NEW, sampling=alone)
    assert [answer.cached for answer in cold] == [0, 0]
    assert [len(answer.tokens) for answer in cold] == [NEW, NEW]
    (warm,) = engine.generate(prompts[:1], NEW, sampling=alone)
    assert (warm.cached, warm.tokens) == (4 * ENGINE_BLOCK, cold[0].tokens)
    (salted,) = engine.generate(prompts[:1], NEW, [{"cache_salt": "other"}], alone)
    assert (salted.cached, salted.tokens) == (0, cold[0].tokens)
    assert engine.reset_prefix_cache()
    assert engine.generate(prompts[:1], 1, sampling=alone)[0].cached == 0
    assert all(answer.ttft_s > 0 for answer in cold)


def test_what_the_engine_refuses_is_an_error_here_and_it_lives_on(engine: Engine) -> None:
    with pytest.raises(EngineError, match="1024 tokens"):
        engine.generate([prompt(1200)])
    assert engine.generate([prompt(8)], 1)[0].finish == "length"


def test_what_waits_is_saved_when_the_engine_ends(engine: Engine, sidecar: Process) -> None:
    """The last test: the engine is gone after it."""
    before = stored(sidecar)
    engine.generate([prompt(LENGTH, seed) for seed in range(21, 27)], 1)
    engine.stop()
    assert stored(sidecar) == before + 6 * (STORED // BLOCK)
    with pytest.raises(AssertionError, match="not started"):
        engine.generate([prompt(8)])
