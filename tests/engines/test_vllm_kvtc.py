"""kvtc through a real vLLM: calibrated, stored, and read from disk by way of a new sidecar.

The gate is written by hand: `tierkv eval` would take another minute, and what the class promises is
measured here on the engine itself.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import tierkv_codecs
import tierkv_connectors
from tests.engines.vllm_engine import Engine, needs_vllm
from tests.engines.vllm_rig import BLOCK, NVME, begin, config, find_again, serving, stat
from tests.sidecars import Process, until
from tests.unit.test_gate import domain, entry
from tierkv import gate
from tierkv.codec import profile_of
from tierkv_codecs import kvtc_artifact
from tierkv_codecs.lab.texts import PROSE, evaluation_texts
from tierkv_service import calibrate
from tierkv_service.demo_profile import KV_DTYPE, identity_of

pytestmark = pytest.mark.timeout(1800)  # a minute or two on two cores of its own

PROFILE, FIDELITY = "kvtc@8x", "economy"
STORED, LENGTH, FOLLOWS = 6 * BLOCK, 6 * BLOCK + 20, 24
TOKENS = 4096
"""Of the calibration: far fewer than are good for the codec."""
MOST_KL = gate.Thresholds().economy.kl_mean
RAM_BYTES = 128 << 20
RAW_BYTES = 30 * 2 * 3 * 64 * 4 * BLOCK
"""Of a block of SmolLM2-135M in float32."""


@pytest.fixture(scope="module")
def artifact(model_dir: Path) -> Path:
    """Calibrate, unless it was done before with the same code; kept beside the model."""
    needs_vllm()
    codecs, connectors = (Path(one.__path__[0]) for one in (tierkv_codecs, tierkv_connectors))
    sources = [*codecs.glob("kvtc*.py"), codecs / "lab" / "texts.py", connectors / "calibration.py"]
    made_by = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources)))
    made_by.update(identity_of(model_dir).fingerprint + TOKENS.to_bytes(8, "little"))
    folder = model_dir.with_name(f"{model_dir.name}-kvtc-{made_by.hexdigest()[:16]}")
    path = folder / "artifact.kvtc"
    if not path.exists():
        for older in model_dir.parent.glob(f"{model_dir.name}-kvtc-*"):
            shutil.rmtree(older)
        folder.mkdir()
        calibrate.make(calibrate.Order(model_dir, path, tokens=TOKENS), calibrate.in_lines(print))
    return path


@pytest.fixture(scope="module")
def sidecar(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, artifact: Path
) -> Iterator[Process]:
    """Start a sidecar whose gate allows the profile to the class `economy`."""
    folder = tmp_path_factory.mktemp("kvtc")
    limit: dict[str, Any] = {"kl_mean": MOST_KL, "kl_lo": MOST_KL, "kl_hi": MOST_KL}
    measured = entry(
        domain(**limit), profile=PROFILE, family=identity_of(model_dir).family.hex(),
        kv_dtype=KV_DTYPE, artifact=kvtc_artifact.read(artifact).digest.hex(),
    )  # fmt: skip
    (folder / "gate.json").write_bytes(gate.dump(gate.Gate(entries=(measured,))))
    more = f'gate = "{folder}/gate.json"\n' + NVME.format(folder=folder)
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


def test_a_prefix_comes_back_from_disk_within_its_class_in_an_eighth_of_the_bytes(
    sidecar: Process, artifact: Path, model_dir: Path, text: list[int], tmp_path: Path
) -> None:
    """The engine lives on while the sidecar starts again; its own cache is emptied."""
    transfer = config(sidecar, profiles=[PROFILE], artifact=str(artifact), fidelity=FIDELITY)
    options: dict[str, Any] = {"max_logprobs": -1}
    with Engine(model_dir, tmp_path / "engine.log", transfer, **options) as engine:
        assert engine.generate([text[:LENGTH]], 1)[0].cached == 0
        exact = said(engine, model_dir, text, tmp_path / "exact.npy")
        blocks = STORED // BLOCK
        assert until(lambda: tier(sidecar, "nvme")["placements"] == blocks)
        assert stat(sidecar)["counters"].get("put_fallback", 0) == 0
        shrunk = blocks * RAW_BYTES / tier(sidecar, "nvme")["used_bytes"]
        assert shrunk > 2 * profile_of(PROFILE).ratio, "float32 has twice the bytes it is named for"
        sidecar.stop()
        begin(sidecar, RAM_BYTES)
        find_again(engine)
        assert engine.reset_prefix_cache()
        warm = engine.generate([text[:LENGTH]], 1)[0]
        assert warm.cached == STORED
        assert warm.told == {
            "loaded_tokens": {"nvme": STORED}, "loaded_classes": {FIDELITY: STORED},
            "fidelity": FIDELITY,
        }  # fmt: skip
        found = said(engine, model_dir, text, tmp_path / "found.npy")
    kl = (np.exp(exact) * (exact - found)).sum(-1)
    assert 1e-6 < kl.mean() <= MOST_KL, "it has lost something, and no more than its class"
