"""RoPE against what transformers' own models make of their keys."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DynamicCache,
    Ernie4_5Config,
    Gemma3TextConfig,
    GlmConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    SmolLM3Config,
)

from tierkv.identity import LayerSpec, Rope
from tierkv_codecs import Unsuited
from tierkv_codecs.rope import rope, unrope
from tierkv_connectors.identities import layer_specs

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
HALF: dict[str, Any] = {"partial_rotary_factor": 0.5}
TOKENS = 100
YARN = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def llama(**rope_parameters: object) -> PreTrainedConfig:
    return LlamaConfig(**TINY, rope_parameters=rope_parameters)


CONFIGS = {
    "default": llama(rope_type="default", rope_theta=1e5),
    "linear": llama(rope_type="linear", rope_theta=1e4, factor=4.0),
    "dynamic": llama(rope_type="dynamic", rope_theta=1e4, factor=4.0),
    "llama3": llama(
        rope_type="llama3",
        rope_theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "yarn": llama(rope_type="yarn", **YARN),
    "yarn-mscale": llama(rope_type="yarn", mscale=1.0, mscale_all_dim=0.5, **YARN),
    "yarn-factor": llama(rope_type="yarn", attention_factor=1.3, truncate=False, **YARN),
    "partial": PhiConfig(**TINY, **HALF),
    "interleaved": CohereConfig(**TINY),
    "interleaved-ernie": Ernie4_5Config(**TINY),
    "interleaved-partial": GlmConfig(**TINY, **HALF),
    "two-bases": Gemma3TextConfig(**TINY, sliding_window=512),
    "some-layers": SmolLM3Config(**TINY, no_rope_layers=[1, 0, 1, 0]),
}


def keys_of(config: PreTrainedConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys [layer, token, head, dim] of a random model before and after RoPE."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("k_norm" if isinstance(config, Gemma3TextConfig) else "k_proj"):
            module.register_forward_hook(lambda _module, _input, output: plain.append(output))
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.randint(1, 64, (1, TOKENS)), cache=cache, use_cache=True)
    turned = torch.stack([keys[0].transpose(0, 1) for keys, _, _ in cache])
    if isinstance(config, Gemma3TextConfig):  # its norm comes after the split into heads
        return torch.stack([one[0].transpose(0, 1) for one in plain]), turned
    return torch.stack([one.view(turned.shape[1:]) for one in plain]), turned


@pytest.mark.parametrize("name", CONFIGS)
def test_rope_is_that_of_the_model(name: str) -> None:
    plain, turned = keys_of(CONFIGS[name])
    layers = layer_specs(CONFIGS[name])
    torch.testing.assert_close(rope(plain, layers, 0), turned, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(unrope(turned, layers, 0), plain, rtol=1e-5, atol=2e-5)
    later = unrope(turned[:, 70:], layers, 70)
    torch.testing.assert_close(later, plain[:, 70:], rtol=1e-5, atol=2e-5)


def spec(**settings: Any) -> LayerSpec:
    return LayerSpec(kv_heads=1, k_dim=64, v_dim=64, rope=Rope(**settings))


def test_far_positions_come_back() -> None:
    """The table's rounding cancels, even where an angle has lost most of its digits."""
    keys = torch.randn(2, 16, 1, 64)
    yarn = '{"attention_factor":1.5,"factor":4.0,"original_max_position_embeddings":4096.0}'
    layers = [spec(theta=1e4), spec(kind="yarn", scaling=yarn)]
    there_and_back = rope(unrope(keys, layers, 1_000_000), layers, 1_000_000)
    torch.testing.assert_close(there_and_back, keys, rtol=0, atol=2e-6)


def test_keys_are_left_as_they_are() -> None:
    keys = torch.randn(1, 8, 1, 64)
    before = keys.clone()
    assert not torch.equal(unrope(keys, [spec()], 5), keys)
    assert torch.equal(keys, before)
    assert torch.equal(unrope(keys, [spec(kind="none", theta=0.0)], 5), keys)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "longrope", "scaling": '{"factor":4.0}'},
        {"kind": "default", "scaling": '{"mrope_section":[16.0,24.0,24.0]}'},
        {"kind": "default", "rotary_dim": 63},
        {"kind": "default", "rotary_dim": 128},
    ],
    ids=["unknown", "several-axes", "odd", "too-wide"],
)
def test_a_rope_that_is_not_known_is_unsuited(settings: dict[str, Any]) -> None:
    with pytest.raises(Unsuited, match="cannot be coded"):
        unrope(torch.randn(1, 8, 1, 64), [spec(**settings)], 0)
