"""Classes of fidelity in a real vLLM: an exact request meets no lossy block, in no cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.test_vllm import BLOCK, HITS, begin, config, prompt, stat
from tests.engines.vllm_engine import Answer, Engine, needs_vllm
from tests.sidecars import Process, until
from tests.unit.test_gate import domain, entry
from tierkv import gate
from tierkv_connectors.transformers_identity import identity_of

pytestmark = pytest.mark.timeout(600)

LENGTH, NEW = 600, 8
STORED = LENGTH // BLOCK * BLOCK
RAM_BYTES = 128 << 20


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Process]:
    """Start a sidecar whose gate allows int8 to the class `safe` for this model."""
    needs_vllm()
    folder = tmp_path_factory.mktemp("fidelity")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    family = identity_of(model).family.hex()
    measured = entry(domain(), profile="int8", family=family, kv_dtype="fp32", artifact="")
    (folder / "gate.json").write_bytes(gate.dump(gate.Gate(entries=(measured,))))
    one = Process(folder, f'gate = "{folder}/gate.json"\n', host_bytes=RAM_BYTES)
    begin(one, RAM_BYTES)
    yield one
    one.kill()


@pytest.fixture
def engine(sidecar: Process, model_dir: Path) -> Iterator[Engine]:
    transfer = config(sidecar, profiles=["int8"])
    with Engine(model_dir, sidecar.log.with_name("engine.log"), transfer) as engine:
        yield engine


def ask(engine: Engine, fidelity: str) -> Answer:
    wishes: dict[str, Any] = {"tierkv": {"fidelity": fidelity}}
    sampling = {"extra_args": {"kv_transfer_params": wishes}}
    return engine.generate([prompt(LENGTH)], NEW, sampling=sampling)[0]


def blocks(sidecar: Process) -> int:
    count: int = stat(sidecar)["tiers"][0]["placements"]
    return count


def test_an_exact_request_reuses_no_lossy_block(engine: Engine, sidecar: Process) -> None:
    exact = ask(engine, "exact")
    assert exact.cached == 0
    assert engine.reset_prefix_cache()
    assert ask(engine, "safe").cached == 0
    assert until(lambda: blocks(sidecar) == STORED // BLOCK), "stored with loss"
    assert ask(engine, "safe").cached > STORED, "a class has its blocks in the engine's own cache"
    assert engine.reset_prefix_cache()
    before = engine.metrics()[HITS]
    lossy = ask(engine, "safe")
    assert lossy.cached == engine.metrics()[HITS] - before == STORED
    assert lossy.told == {
        "loaded_tokens": {"host": STORED}, "loaded_classes": {"safe": STORED}, "fidelity": "safe",
    }  # fmt: skip
    again = ask(engine, "exact")
    assert (again.cached, again.tokens, again.told) == (0, exact.tokens, None)
    assert ask(engine, "safe").cached > STORED
    assert ask(engine, "exact").cached > STORED, "its own, computed blocks"
