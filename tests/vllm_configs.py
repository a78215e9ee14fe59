"""Plain stand-ins of vLLM's configs, around small Llamas that transformers saved."""

import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tierkv.errors import TierKVError
from tierkv.identity import Identity
from tierkv_connectors.vllm.identity import identity_of, kept_of
from tierkv_connectors.vllm.kept import Options

BLOCK = 128
LAYERS = 2


class Mode(enum.Enum):
    NONE = 0
    FP8_PER_TENSOR = 1
    NVFP4 = 5


class FullAttentionSpec(SimpleNamespace):
    pass


class ChunkedLocalAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def spec_of(config: Any, **changes: Any) -> FullAttentionSpec:
    fields = {
        "block_size": 32,
        "num_kv_heads": config.num_key_value_heads,
        "head_size": config.head_dim,
        "head_size_v": config.head_dim,
        "dtype": torch.float32,
        "kv_quant_mode": Mode.NONE,
        "sliding_window": None,
        "attention_chunk_size": None,
        "non_causal": False,
    }
    return FullAttentionSpec(**fields | changes)


def names(count: int) -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in range(count)]


def cache_of(*specs: Any, count: int = LAYERS) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=names(count)) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def engine_of(path: Path | str, config: Any, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    extra: dict[str, object] = {}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(path),
            revision=None,
            dtype=dtype,
            hf_config=config,
            hf_text_config=config,
            hf_overrides={},
            quantization=None,
            runner_type="generate",
            is_encoder_decoder=False,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, rank=0),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(extra=extra, get_from_extra_config=extra.get),
    )


def save(directory: Path) -> Path:
    """Save a model of LAYERS layers in a directory; returns it."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def identity(engine: SimpleNamespace, **changes: Any) -> Identity:
    spec = spec_of(engine.model_config.hf_config, **changes)
    return identity_of(engine, cache_of(spec), BLOCK)


def refused(engine: SimpleNamespace, cache: SimpleNamespace | None = None, **changes: Any) -> str:
    spec = spec_of(engine.model_config.hf_config, **changes)
    with pytest.raises(TierKVError) as caught:
        kept_of(engine, cache or cache_of(spec), Options())
    return str(caught.value)
