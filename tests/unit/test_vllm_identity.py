"""Identities of vLLM engines, from plain stand-ins of its configs: equal or different."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig

from tests.vllm_configs import BLOCK, Mode, cache_of, engine_of, identity, refused, save, spec_of
from tierkv.identity import Identity
from tierkv_connectors import transformers_identity
from tierkv_connectors.vllm.identity import identity_of, kept_of
from tierkv_connectors.vllm.kept import Options

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def engine(saved: Path) -> SimpleNamespace:
    return engine_of(saved, AutoConfig.from_pretrained(saved))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_of_transformers_is_found(model_dir: Path, dtype: torch.dtype) -> None:
    config = AutoConfig.from_pretrained(model_dir)
    cache = cache_of(spec_of(config, dtype=dtype), count=config.num_hidden_layers)
    found = identity_of(engine_of(model_dir, config, dtype), cache, BLOCK)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    theirs = transformers_identity.identity_of(model, BLOCK)
    assert found == theirs
    assert found.fingerprint == theirs.fingerprint


def test_the_epoch_and_the_weights_are_seen(engine: SimpleNamespace) -> None:
    cache = cache_of(spec_of(engine.model_config.hf_config))
    first, next_epoch = (identity_of(engine, cache, BLOCK, epoch) for epoch in (0, 1))
    engine.kv_transfer_config.extra["weights"] = "mine"
    named = identity_of(engine, cache, BLOCK)
    assert len({first.fingerprint, next_epoch.fingerprint, named.fingerprint}) == 3
    assert named.weights == "id:mine"


def test_hub_models_are_named_by_commit_only(engine: SimpleNamespace) -> None:
    engine.model_config.model = "org/name"
    engine.model_config.revision = "main"
    assert "nothing names the weights" in refused(engine)

    class Resolved(str):
        __slots__ = ("resolved",)

    engine.model_config.revision = Resolved("main")
    engine.model_config.revision.resolved = COMMIT
    found = identity(engine)
    assert (found.model, found.weights) == ("org/name", f"hub:{COMMIT}")
    engine.model_config.revision = COMMIT
    assert identity(engine) == found


def test_a_revision_names_no_directory(engine: SimpleNamespace) -> None:
    plain = identity(engine)
    engine.model_config.revision = COMMIT
    assert identity(engine) == plain
    assert plain.weights.startswith("files:")


def test_settings_that_change_values_are_seen(engine: SimpleNamespace) -> None:
    found = {identity(engine).fingerprint}
    model = engine.model_config
    for name, value in [
        ("hf_overrides", {"rms_norm_eps": 1e-3}),
        ("hf_overrides", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        ("quantization", "fp8"),
        ("model_class_overrides", {"LlamaForCausalLM": "Other"}),
        ("dtype", torch.bfloat16),
        ("multimodal_config", SimpleNamespace(mm_processor_kwargs={"do_resize": False})),
    ]:
        before = getattr(model, name, None)
        setattr(model, name, value)
        found.add(identity(engine).fingerprint)
        setattr(model, name, before)
    assert len(found) == 7


def test_rope_overrides_are_seen_in_the_layers(engine: SimpleNamespace) -> None:
    engine.model_config.hf_config.rope_parameters = {
        "rope_type": "linear",
        "rope_theta": 2e4,
        "factor": 4.0,
    }
    rope = identity(engine).layers[0].rope
    assert (rope.kind, rope.theta, rope.scaling) == ("linear", 2e4, '{"factor":4.0}')


def test_fp8_kv_has_scales(engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8: dict[str, Any] = {"kv_quant_mode": Mode.FP8_PER_TENSOR, "dtype": torch.uint8}
    found = {}
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        engine.cache_config.cache_dtype = name
        one = identity(engine, **fp8)
        found[name] = (one.kv_dtype, one.kv_scales)
    assert found["fp8"] == found["fp8_e4m3"] == ("fp8_e4m3", "checkpoint")
    assert found["fp8_e5m2"] == ("fp8_e5m2", "checkpoint")
    engine.cache_config.calculate_kv_scales = True
    assert "calculate_kv_scales" in refused(engine, **fp8)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "fnuz" in refused(engine, **fp8)


def test_an_id_stands_in_for_files_that_we_do_not_read(engine: SimpleNamespace) -> None:
    engine.load_config.load_format = "dummy"
    engine.kv_transfer_config.extra["weights"] = "seed-0"
    assert identity(engine).weights == "id:seed-0"


def test_windows_and_rope_are_each_layer_s_own(tmp_path: Path) -> None:
    """Gemma 3: two thetas, two hit rules, and both in the fingerprint."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=3, sliding_window=64, layer_types=kinds, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    engine = engine_of(tmp_path, config)
    engine.kv_transfer_config.extra["weights"] = "mine"
    cache = cache_of(spec_of(config, sliding_window=64), count=3)

    def found() -> Identity:
        return kept_of(engine, cache, Options()).identity

    plain = found()
    assert [layer.window for layer in plain.layers] == [64, 64, None]
    assert [layer.rope.theta for layer in plain.layers] == [1e4, 1e4, 1e6]
    assert plain.groups == ((0, 1), (2,))
    assert config.rope_parameters is not None
    config.rope_parameters["sliding_attention"]["rope_theta"] = 2e4
    other = found()
    assert other.fingerprint != plain.fingerprint
    config.sliding_window = 128
    cache.kv_cache_groups[0].kv_cache_spec.sliding_window = 128
    assert found().fingerprint not in {plain.fingerprint, other.fingerprint}


def test_workers_have_runs_of_heads(engine: SimpleNamespace) -> None:
    """Two KV heads on 1, 2 and 4 workers: one identity, and of four workers two store."""
    found = []
    for size, rank in [(1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (4, 3)]:
        engine.parallel_config.tensor_parallel_size, engine.parallel_config.rank = size, rank
        spec = spec_of(engine.model_config.hf_config, num_kv_heads=max(2 // size, 1))
        kept = kept_of(engine, cache_of(spec), Options())
        part = kept.ranks.own(kept.identity, 0)
        found.append((part.head_start, part.head_stop, kept.ranks.writes))
        assert kept.identity.fingerprint == identity(engine_with_size_1(engine)).fingerprint
    assert found == [
        (0, 2, True), (0, 1, True), (1, 2, True), (0, 1, True), (0, 1, False), (1, 2, False),
    ]  # fmt: skip


def engine_with_size_1(engine: SimpleNamespace) -> SimpleNamespace:
    one = SimpleNamespace(**vars(engine))
    one.parallel_config = SimpleNamespace(tensor_parallel_size=1, rank=0)
    return one
