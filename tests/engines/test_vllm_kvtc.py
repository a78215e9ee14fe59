"""kvtc through a real vLLM: calibrated, gated, stored, and read from disk by way of a new sidecar.

The artifact and the gate are made as the demo makes them, of less text; they are kept beside the
model, so that only the first run pays for them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.engines.vllm_engine import Engine, needs_vllm
from tests.engines.vllm_rig import BLOCK, NVME, begin, config, find_again, serving, stat
from tests.sidecars import Process, until
from tierkv_codecs.lab.evaluate import Suite
from tierkv_codecs.lab.texts import PROSE, evaluation_texts
from tierkv_service.demo_profile import Amount, Lossy, prepare

pytestmark = pytest.mark.timeout(1800)  # 4 minutes on two cores of its own

PROFILE = "kvtc@8x"
STORED, LENGTH, FOLLOWS = 6 * BLOCK, 6 * BLOCK + 20, 24
LEAST = Amount(9216, Suite("least", 2, context=768, continuation=32, tail=0))
RAM_BYTES = 128 << 20
RAW_BYTES = 30 * 2 * 3 * 64 * 4 * BLOCK
"""Of a block of SmolLM2-135M in float32."""


@pytest.fixture(scope="module")
def lossy(model_dir: Path) -> Lossy:
    needs_vllm()
    return prepare(model_dir, PROFILE, print, LEAST)


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, lossy: Lossy) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("kvtc")
    more = f'gate = "{lossy.gate}"\n' + NVME.format(folder=folder)
    with serving(folder, RAM_BYTES, more) as one:
        yield one


@pytest.fixture(scope="module")
def text(model_dir: Path) -> list[int]:
    """Return what no calibration has seen."""
    (prose, *_) = (one.text for one in evaluation_texts() if one.domain == PROSE)
    return list(AutoTokenizer.from_pretrained(model_dir)(prose)["input_ids"])


def said(engine: Engine, model_dir: Path, text: list[int], path: Path) -> Any:
    """Return log probabilities [token, vocabulary] in float64 of what follows the prompt."""
    prompts = [{"prompt_token_ids": text[: LENGTH + more]} for more in range(FOLLOWS)]
    size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    engine.call("log_probabilities", prompts=prompts, vocabulary=size, path=str(path))
    return np.load(path).astype(np.float64)


def tier(sidecar: Process, name: str) -> dict[str, Any]:
    (found,) = (one for one in stat(sidecar)["tiers"] if one["name"] == name)
    return dict(found)


def test_a_prefix_comes_back_from_disk_within_its_class_in_a_ninth_of_the_bytes(
    sidecar: Process, lossy: Lossy, model_dir: Path, text: list[int], tmp_path: Path
) -> None:
    """The engine lives on while the sidecar starts again; its own cache is emptied."""
    transfer = config(
        sidecar, profiles=[PROFILE], artifact=lossy.artifact, fidelity=lossy.fidelity.label
    )
    options: dict[str, Any] = {"max_logprobs": -1}
    with Engine(model_dir, tmp_path / "engine.log", transfer, **options) as engine:
        assert engine.generate([text[:LENGTH]], 1)[0].cached == 0
        exact = said(engine, model_dir, text, tmp_path / "exact.npy")
        blocks = STORED // BLOCK
        assert until(lambda: tier(sidecar, "nvme")["placements"] == blocks)
        assert stat(sidecar)["counters"].get("put_fallback", 0) == 0
        rows = json.loads(Path(lossy.gate).with_name("rows.json").read_bytes())
        (ratio,) = (one["ratio_payload"] for one in rows if one["domain"] == PROSE)
        shrunk = blocks * RAW_BYTES / tier(sidecar, "nvme")["used_bytes"]
        assert ratio > 8.5
        assert shrunk > 1.5 * ratio, "float32 has twice the bytes that the lab counts against"
        sidecar.stop()
        begin(sidecar, RAM_BYTES)
        find_again(engine)
        assert engine.reset_prefix_cache()
        warm = engine.generate([text[:LENGTH]], 1)[0]
        assert warm.cached == STORED
        label = lossy.fidelity.label
        told = {"loaded_tokens": {"nvme": STORED}, "loaded_classes": {label: STORED}}
        assert warm.told == {**told, "fidelity": label}
        found = said(engine, model_dir, text, tmp_path / "found.npy")
    kl = (np.exp(exact) * (exact - found)).sum(-1)
    assert 1e-6 < kl.mean() <= lossy.limit, "it has lost something, and no more than its class"
