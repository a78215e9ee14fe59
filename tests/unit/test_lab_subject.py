"""Models as subjects: what the lab computes on them is what transformers computes without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.lab_models import WINDOW, tiny_gemma, tiny_llama
from tierkv.errors import TierKVError
from tierkv_codecs import CODECS
from tierkv_codecs.lab.evaluate import Suite, evaluate
from tierkv_codecs.lab.subject import LayerKv
from tierkv_codecs.lab.texts import evaluation_texts
from tierkv_codecs.lab.yardsticks import registry_with
from tierkv_connectors.subject import TransformersSubject


@pytest.fixture(params=["llama", "gemma"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_llama(tmp_path) if request.param == "llama" else tiny_gemma(tmp_path)


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def test_a_continuation_over_kept_kv_is_the_models_own(model: Path) -> None:
    subject = TransformersSubject(model)
    ids = torch.randint(3, 256, (2, 160), generator=torch.Generator().manual_seed(1))
    kv = subject.prefill(ids[:, :128])
    assert all(layer.keys.shape[2] == 128 for layer in kv), "sliding layers keep all tokens too"
    logits = subject.proceed(kv, ids[:, 128:])
    whole = plain(model)(input_ids=ids).logits[:, 128:]
    assert (logits - whole).abs().max() < 1e-3 * whole.abs().max()
    watched, attention = subject.watch(kv, ids[:, 128:])
    assert torch.equal(watched, logits)
    for _ in range(2):
        outputs = list(attention.outputs(kv))
    assert len(outputs) == len(kv) == 3
    assert outputs[0].shape[:2] == (2, 32)


@torch.inference_mode()
def test_attention_does_not_see_beyond_a_window(tmp_path: Path) -> None:
    subject = TransformersSubject(tiny_gemma(tmp_path))
    ids = torch.randint(3, 256, (1, 160), generator=torch.Generator().manual_seed(1))
    kv = subject.prefill(ids[:, :128])
    _, attention = subject.watch(kv, ids[:, 128:])
    old = [LayerKv(layer.keys, layer.values.clone()) for layer in kv]
    for layer in old:
        layer.values[:, :, : 128 - WINDOW] += 1.0
    same = [
        torch.equal(*pair)
        for pair in zip(attention.outputs(kv), attention.outputs(old), strict=True)
    ]
    assert same == [True, False, True]


def test_groups_of_layers_are_evaluated_apart(tmp_path: Path) -> None:
    subject = TransformersSubject(tiny_gemma(tmp_path), tokens_per_block=64)
    assert len(subject.identity.groups) == 2
    registry = registry_with(CODECS)
    codecs = [registry.named(name) for name in ("lossless", "int4-token-g64")]
    documents = evaluation_texts()[:1]
    found = evaluate(subject, codecs, registry, documents, Suite("own", 4, 256, 16))
    exact, lossy = (found.tallies[name, "prose"] for name in ("lossless", "int4-token-g64"))
    assert sum(one.kl.sum() for one in exact.predictions) == 0.0
    assert sum(one.kl.sum() for one in lossy.predictions) > 0.0
    assert lossy.weight.blocks == 4 * 4 * 2
    assert len(lossy.relative("keys")) == 3


def test_the_identity_is_that_of_the_engine_measured_for(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    one, other = TransformersSubject(folder), TransformersSubject(folder, "fp16", 64)
    assert (one.identity.kv_dtype, one.identity.tokens_per_block) == ("bf16", 128)
    assert one.identity.family != other.identity.family
    with pytest.raises(TierKVError, match="no model directory"):
        TransformersSubject(tmp_path / "none")
    (folder / "config.json").write_text("{}")
    with pytest.raises(TierKVError, match="cannot load"):
        TransformersSubject(folder)
