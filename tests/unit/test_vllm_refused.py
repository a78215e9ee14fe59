"""vLLM engines and models that the connector refuses, each with the reason."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.vllm_configs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    Mode,
    cache_of,
    engine_of,
    identity,
    refused,
    save,
    spec_of,
)
from tierkv.errors import TierKVError
from tierkv_connectors.vllm.groups import layer_numbers
from tierkv_connectors.vllm.identity import kept_of
from tierkv_connectors.vllm.kept import Options


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def engine(saved: Path) -> SimpleNamespace:
    return engine_of(saved, AutoConfig.from_pretrained(saved))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_quant_mode": Mode.NVFP4, "dtype": torch.uint8}, "NVFP4"),
        ({"dtype": torch.uint8}, "uint8"),
        ({"dtype": torch.float64}, "float64"),
        ({"sliding_window": 64}, "windows {None} in their config, and 64"),
        ({"attention_chunk_size": 64}, "chunked"),
        ({"non_causal": True}, "later tokens"),
        ({"tokens_per_state": 4}, "one state"),
        ({"num_kv_heads": 1}, "2 KV heads"),
        ({"head_size": 32}, "KV heads of 16"),
        ({"head_size_v": 8}, "KV heads of 16"),
    ],
)
def test_other_shapes_are_refused(
    engine: SimpleNamespace, changes: dict[str, Any], says: str
) -> None:
    assert says in refused(engine, **changes)


def test_drafts_that_have_no_kv_do_not_matter(engine: SimpleNamespace) -> None:
    plain = identity(engine)
    engine.speculative_config = SimpleNamespace(method="ngram")
    assert identity(engine) == plain
    engine.speculative_config = SimpleNamespace(method="ngram_gpu")
    assert "by ngram_gpu: only drafts by ngram" in refused(engine)


@pytest.mark.parametrize(
    "specs",
    [(), (MLAAttentionSpec(),), (MambaSpec(), FullAttentionSpec()), (ChunkedLocalAttentionSpec(),)],
    ids=["none", "mla", "mamba", "chunked"],
)
def test_other_groups_are_refused_by_name(engine: SimpleNamespace, specs: Any) -> None:
    said = refused(engine, cache_of(*specs))
    assert all(type(spec).__name__ in said for spec in specs)
    assert f"{len(specs)} groups" in said


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("parallel_config", "tensor_parallel_size", 2, "1 KV heads of 16"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode_context"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill_context"),
        ("model_config", "runner_type", "pooling", "pooling"),
        ("model_config", "is_encoder_decoder", True, "encoder-decoder"),
        ("model_config", "hf_overrides", lambda config: config, "function"),
        ("model_config", "hf_config_path", "elsewhere", "hf_config_path"),
        ("load_config", "load_format", "dummy", "dummy"),
        ("", "speculative_config", SimpleNamespace(method="eagle"), "speculative"),
        ("", "weight_transfer_config", SimpleNamespace(), "weight_transfer_config"),
    ],
)
def test_other_engines_are_refused(
    engine: SimpleNamespace, part: str, name: str, value: object, says: str
) -> None:
    setattr(getattr(engine, part) if part else engine, name, value)
    assert says in refused(engine)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("use_bidirectional_attention", True, "later tokens"),
        ("dual_chunk_attention_config", {"chunk_size": 64}, "dual chunk"),
        ("kv_lora_rank", 64, "MLA"),
        ("num_kv_shared_layers", 1, "shares KV"),
        ("layer_types", ["full_attention", "linear_attention"], "linear_attention"),
        ("sliding_window", 64, "windows {64} in their config, and None"),
        ("num_hidden_layers", 3, "3 layers, the KV cache 2"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
    ],
)
def test_other_models_are_refused(
    engine: SimpleNamespace, name: str, value: object, says: str
) -> None:
    setattr(engine.model_config.hf_config, name, value)
    assert says in refused(engine)


def test_layers_are_taken_by_number() -> None:
    assert layer_numbers(["m.h.1.attn", "m.h.0.attn"]) == {"m.h.1.attn": 1, "m.h.0.attn": 0}
    for wrong in (
        ["m.h.0.attn", "m.h.0.cross"],
        ["m.h.1.attn"],
        ["m.attn"],
        ["a.0.h.0.attn"],
        ["m.h.0.attn", "draft.h.0.attn"],
    ):
        with pytest.raises(TierKVError, match="numbered"):
            layer_numbers(wrong)


def test_media_that_come_from_elsewhere_are_refused(engine: SimpleNamespace) -> None:
    """What every engine with a connector of both roles says of itself since 0.32 is not that."""
    engine.model_config.multimodal_config = SimpleNamespace(allow_missing_mm_embeddings=True)
    kept_of(engine, cache_of(spec_of(engine.model_config.hf_config)), Options())
    engine.ec_transfer_config = SimpleNamespace(is_ec_consumer=True)
    assert "from elsewhere" in refused(engine)
