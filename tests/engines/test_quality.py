"""The lab on a real model: what it calls a loss is one, and exact KV has none."""

from pathlib import Path

import pytest
import torch

from tierkv.gate import Thresholds
from tierkv_codecs import CODECS
from tierkv_codecs.lab import measures, results
from tierkv_codecs.lab.evaluate import Results, Suite, evaluate
from tierkv_codecs.lab.passages import NEEDLE
from tierkv_codecs.lab.subject import LayerKv
from tierkv_codecs.lab.texts import PROSE, evaluation_texts
from tierkv_codecs.lab.yardsticks import registry_with
from tierkv_connectors.subject import TransformersSubject

SUITE = Suite("least", sequences=4, context=256, continuation=32, tail=128)
PROFILES = ("lossless", "nvfp4")

pytestmark = pytest.mark.timeout(300)  # 15 s of one core; this much where ten others want it


@pytest.fixture(scope="module")
def subject(model_dir: Path) -> TransformersSubject:
    torch.set_num_threads(1)
    return TransformersSubject(model_dir)


@pytest.fixture(scope="module")
def measured(subject: TransformersSubject) -> Results:
    registry = registry_with(CODECS)
    documents = [one for one in evaluation_texts() if one.domain == PROSE][:2]
    codecs = [registry.named(name) for name in PROFILES]
    return evaluate(subject, codecs, registry, documents, SUITE)


def test_a_prefix_and_its_continuation_are_the_models_own(subject: TransformersSubject) -> None:
    ids = torch.tensor([subject.tokens(evaluation_texts()[0].text)[:96]])
    kv = subject.prefill(ids[:, :64])
    logits = subject.proceed(kv, ids[:, 64:])
    watched, attention = subject.watch(kv, ids[:, 64:])
    with torch.inference_mode():
        whole = subject._model(input_ids=ids).logits[:, 64:]
    assert torch.equal(logits, watched)
    assert (logits - whole).abs().max() < 1e-3
    assert logits.argmax(-1).equal(whole.argmax(-1))
    again = list(attention.outputs(kv))
    assert len(again) == len(kv)
    assert again[0].shape == (1, 32, 9, 64)
    other = list(attention.outputs([LayerKv(k, 2 * v) for k, v in kv]))
    assert not any(torch.equal(*pair) for pair in zip(again, other, strict=True))


def test_exact_kv_has_no_loss_and_finds_needles(measured: Results) -> None:
    for domain in (PROSE, NEEDLE):
        tally = measured.tallies["lossless", domain]
        assert measures.mean([one.kl for one in tally.predictions]).hi == 0.0
        assert tally.weight.ratio_payload > 1.3
    assert measured.tallies["lossless", NEEDLE].needle_n >= 3


def test_four_bits_lose_what_is_known_of_them(
    subject: TransformersSubject, measured: Results
) -> None:
    given = results.verdicts(measured, results.entries(measured, subject.identity), Thresholds())
    for row in results.rows(measured, given):
        if row.profile == "lossless":
            assert row.fidelity_class == "exact"
            continue
        assert 3.4 < row.ratio_payload < 3.56
        assert 1e-4 < row.kl_mean < 0.05
        assert row.top1 > 0.85
        assert row.needle_ok == row.needle_n
        assert row.fidelity_class != "exact"
    for layer in results.layers(measured):
        if layer.profile != "lossless":
            assert 0.05 < layer.key_error < 0.15
            assert 0.05 < layer.value_error < 0.15
            assert 0 < layer.attention_error < 0.15
