"""Identities of Hugging Face models: equal for equal KV, different or refused for anything else."""

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from tests.dict_store import DictStore
from tierkv.client import Client
from tierkv.errors import TierKVError
from tierkv.identity import Identity
from tierkv_connectors.identities import canonical, files_digest, layer_specs, name_model
from tierkv_connectors.transformers import PrefixCache, identity_of

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

ONE_PROCESS = """
import sys
from transformers import AutoConfig
from tierkv.identity import Identity
from tierkv.key import root_key
from tierkv_connectors.identities import layer_specs, name_model
config = AutoConfig.from_pretrained(sys.argv[1])
model, weights = name_model(config)
identity = Identity(model=model, weights=weights, kv_dtype="fp32", tokens_per_block=128,
                    layers=layer_specs(config))
print(root_key(identity.fingerprint).hex(), root_key(identity.fingerprint, {}).hex())
"""


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    made = LlamaForCausalLM(LlamaConfig(**SMALL | changes))
    made.eval()
    return made


def config_of(cls: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    return cls(**SMALL | changes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    llama(
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}
    ).save_pretrained(directory)
    return directory


def test_r01_fresh_interpreters_agree(saved: Path) -> None:
    """With an empty set of extras and with none; `test_keys.py` tries every kind of hash seed."""
    started = []
    for seed in ("0", "random"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", ONE_PROCESS, str(saved)]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    roots = {root for process in started for root in process.communicate()[0].split()}
    assert [process.returncode for process in started] == [0, 0]
    assert len(roots) == 1


def test_equal_files_elsewhere_are_the_same_model(saved: Path, tmp_path: Path) -> None:
    there = shutil.copytree(saved, tmp_path / "another-name")
    identities = [
        identity_of(LlamaForCausalLM.from_pretrained(path, dtype=torch.float32))
        for path in (saved, there)
    ]
    assert identities[0] == identities[1]
    assert identities[0].model == "llama"
    assert identities[0].weights == f"files:{files_digest(saved)}"


def test_other_dtypes_and_block_sizes_are_other_identities(saved: Path) -> None:
    full = LlamaForCausalLM.from_pretrained(saved, dtype=torch.float32)
    half = LlamaForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    found = [identity_of(full), identity_of(half), identity_of(full, tokens_per_block=64)]
    found.append(identity_of(full, weights="mine"))
    assert len({identity.fingerprint for identity in found}) == 4
    assert [identity.kv_dtype for identity in found[:2]] == ["fp32", "bf16"]


def fingerprint(config: PreTrainedConfig) -> bytes:
    return Identity(
        model="m", weights="w", kv_dtype="bf16", tokens_per_block=16, layers=layer_specs(config)
    ).fingerprint


def test_r03_every_setting_of_positions_is_seen() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    ropes: list[dict[str, Any]] = [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 2e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 1.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        yarn | {"factor": 2.0},
        yarn | {"factor": 4.0},
        yarn | {"factor": 4.0, "beta_fast": 16.0},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ]
    found = [fingerprint(config_of(LlamaConfig, rope_parameters=dict(rope))) for rope in ropes]
    assert len(set(found)) == len(ropes)


def test_r03_numbers_that_are_equal_are_equal() -> None:
    one, two = (
        config_of(LlamaConfig, rope_parameters={"rope_type": "linear", "factor": factor, **rest})
        for factor, rest in ((2, {"rope_theta": 10000}), (2.0, {"rope_theta": 1e4}))
    )
    assert fingerprint(one) == fingerprint(two)


def test_partial_and_interleaved_rotation_are_seen() -> None:
    from transformers import GlmConfig, GPTNeoXConfig

    glm = layer_specs(config_of(GlmConfig, head_dim=16, pad_token_id=0))[0]
    assert (glm.rope.rotary_dim, glm.rope.interleaved) == (8, True)
    neox = layer_specs(config_of(GPTNeoXConfig))[0]
    assert (neox.rope.rotary_dim, neox.rope.interleaved) == (4, False)


def test_layers_without_rope_are_seen() -> None:
    from transformers import SmolLM3Config

    config = config_of(SmolLM3Config, num_hidden_layers=4, pad_token_id=0)
    assert [layer.rope.kind for layer in layer_specs(config)] == ["default"] * 3 + ["none"]


def test_windows_and_ropes_are_per_layer() -> None:
    from transformers import Gemma3TextConfig

    layers = layer_specs(
        config_of(Gemma3TextConfig, num_hidden_layers=6, sliding_window=512, head_dim=16)
    )
    assert [layer.window for layer in layers] == [512] * 5 + [None]
    assert [layer.rope.theta for layer in layers] == [1e4] * 5 + [1e6]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_digest_sees_every_small_tensor_and_the_config(saved: Path, tmp_path: Path) -> None:
    original = files_digest(saved)
    size = (saved / "model.safetensors").stat().st_size
    for number, at in enumerate([9, size // 2, size - 1]):
        copied = shutil.copytree(saved, tmp_path / str(number))
        flip(copied / "model.safetensors", at)
        if at > 9:
            assert files_digest(copied) != original
        else:
            with pytest.raises(TierKVError, match="safetensors"):
                files_digest(copied)
    copied = shutil.copytree(saved, tmp_path / "config")
    text = (copied / "config.json").read_text()
    (copied / "config.json").write_text(text.replace("1e-06", "1e-05"))
    assert files_digest(copied) != original


def test_the_digest_samples_large_tensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
        scale = 1.0 if directory.name == "one" else 1.001
        torch.manual_seed(1)
        tensors = {"frozen": torch.randn(1 << 18), "trained": torch.randn(1 << 18) * scale}
        save_file(tensors, directory / "model.safetensors")
    assert files_digest(directories[0]) != files_digest(directories[1])


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_broken_weight_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(TierKVError, match="no safetensors file"):
        files_digest(tmp_path)


def test_hub_snapshots_are_named_by_commit(saved: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--name" / "snapshots" / commit
    shutil.copytree(saved, snapshot)
    config = LlamaForCausalLM.from_pretrained(snapshot).config
    assert name_model(config) == ("org/name", f"hub:{commit}")
    assert name_model(config, "tuned-3") == ("org/name", "id:tuned-3")


def test_quantised_weights_are_other_weights() -> None:
    config = config_of(LlamaConfig)
    plain = name_model(config, "w")
    config.quantization_config = {"bits": 4}
    four = name_model(config, "w")
    config.quantization_config = {"bits": 8}
    assert len({plain, four, name_model(config, "w")}) == 3


def test_canonical_text_is_one_per_value() -> None:
    assert canonical({"b": [1, True], "a": None}) == canonical({"b": (1.0, True)})
    assert canonical({"a": 1}) != canonical({"a": True})
    assert canonical({"a": "1"}) != canonical({"a": 1})


def refused(model: LlamaForCausalLM, **options: Any) -> str:
    with pytest.raises(TierKVError) as caught:
        PrefixCache(Client(DictStore()), model, **{"weights": "w"} | options)
    return str(caught.value)


def test_models_without_a_name_for_their_weights_are_refused() -> None:
    assert "weights=" in refused(llama(), weights=None)


def test_sliding_windows_are_refused_by_name() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=32))
    with pytest.raises(TierKVError, match="sliding-window"):
        PrefixCache(Client(DictStore()), model, weights="w")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_move_with_the_prompt_are_refused(kind: str) -> None:
    more: dict[str, Any] = {"factor": 2.0}
    if kind == "longrope":
        more |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        more |= {"original_max_position_embeddings": 128}
    model = llama(rope_parameters={"rope_type": kind, "rope_theta": 1e4, **more})
    assert kind in refused(model)


def mark(**attributes: Any) -> Callable[[LlamaForCausalLM], None]:
    def change(model: LlamaForCausalLM) -> None:
        for name, value in attributes.items():
            setattr(model.config, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (mark(is_encoder_decoder=True), "encoder-decoder"),
        (mark(kv_lora_rank=64), "MLA"),
        (mark(num_kv_shared_layers=1), "shares KV"),
        (mark(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (mark(attention_chunk_size=64), "attention"),
        (mark(vision_config={}), "vision_config"),
        (mark(use_bidirectional_attention=True), "later tokens"),
    ],
)
def test_other_kinds_of_cache_are_refused(
    change: Callable[[LlamaForCausalLM], None], says: str
) -> None:
    model = copy.deepcopy(llama())
    change(model)
    assert says in refused(model)


def test_r04_adapters_need_a_name_in_the_extras() -> None:
    model = llama()
    setattr(model, "peft_config", {"default": object()})  # noqa: B010 -- typed by PEFT
    assert "adapter" in refused(model)
    named = PrefixCache(Client(DictStore()), model, weights="w", extras={"lora": "a@1"})
    plain = PrefixCache(Client(DictStore()), llama(), weights="w")
    assert named._root != plain._root
    assert msgspec.to_builtins(named.identity) == msgspec.to_builtins(plain.identity)


def test_unknown_profiles_are_refused() -> None:
    assert "kvtc" in refused(llama(), profiles=("raw", "kvtc@16x"))


def test_models_of_other_dtypes_are_refused() -> None:
    assert "float64" in refused(torch.nn.Module.double(llama()))


def test_models_in_training_are_refused() -> None:
    assert "eval()" in refused(torch.nn.Module.train(llama()))
