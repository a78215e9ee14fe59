"""Identities of vLLM engines, from plain stand-ins of its configs: equal, different or refused."""

import enum
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from tierkv.errors import TierKVError
from tierkv.identity import Identity
from tierkv_connectors import transformers_identity
from tierkv_connectors.vllm.groups import layer_numbers
from tierkv_connectors.vllm.identity import LoraNames, identity_of, kept_of, request_extras
from tierkv_connectors.vllm.kept import Options

BLOCK = 128
COMMIT = "0123456789abcdef0123456789abcdef01234567"
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
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


@pytest.fixture
def engine(saved: Path) -> SimpleNamespace:
    return engine_of(saved, AutoConfig.from_pretrained(saved))


def identity(engine: SimpleNamespace, **changes: Any) -> Identity:
    spec = spec_of(engine.model_config.hf_config, **changes)
    return identity_of(engine, cache_of(spec), BLOCK)


def refused(engine: SimpleNamespace, cache: SimpleNamespace | None = None, **changes: Any) -> str:
    spec = spec_of(engine.model_config.hf_config, **changes)
    with pytest.raises(TierKVError) as caught:
        kept_of(engine, cache or cache_of(spec), Options())
    return str(caught.value)


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


def test_an_id_stands_in_for_files_that_we_do_not_read(engine: SimpleNamespace) -> None:
    engine.load_config.load_format = "dummy"
    engine.kv_transfer_config.extra["weights"] = "seed-0"
    assert identity(engine).weights == "id:seed-0"


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


def request(**changes: Any) -> SimpleNamespace:
    fields = dict.fromkeys(
        ("pooling_params", "prompt_embeds", "cache_salt", "lora_request"), None
    ) | {"mm_features": [], "resumable": False}
    return SimpleNamespace(**fields | changes)


def lora(path: Path, number: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_name="law", lora_int_id=number, lora_path=str(path))


def test_plain_requests_have_no_extras() -> None:
    assert request_extras(request(), LoraNames()) == {}
    assert request_extras(request(cache_salt="one"), LoraNames()) == {"salt": "one"}


@pytest.mark.parametrize(
    "changes",
    [
        {"pooling_params": object()},
        {"prompt_embeds": torch.zeros(1)},
        {"mm_features": [SimpleNamespace(identifier="my-cat", mm_hash="my-cat")]},
        {"resumable": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_requests_that_tokens_do_not_name_are_left_alone(changes: dict[str, Any]) -> None:
    assert request_extras(request(**changes), LoraNames()) is None


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"lora_alpha": 16}')
    (directory / "adapter_model.safetensors").write_bytes(
        (saved / "model.safetensors").read_bytes()
    )
    return directory


def test_r04_adapters_are_named_by_their_content(adapter: Path) -> None:
    loras = LoraNames()
    extras = request_extras(request(lora_request=lora(adapter), cache_salt="one"), loras)
    assert extras is not None
    assert extras["salt"] == "one"
    name = extras["lora"]
    assert loras.name_of(lora(adapter)) == name == LoraNames().name_of(lora(adapter, 7))
    (adapter / "adapter_config.json").write_text('{"lora_alpha": 32}')
    # The engine may hold either content under this number; another number is read anew.
    assert loras.name_of(lora(adapter)) is None
    assert loras.name_of(lora(adapter, 2)) not in {name, None}


def test_adapters_that_cannot_be_read_are_left_alone(adapter: Path) -> None:
    for path in (Path("org/adapter"), adapter / "none"):
        assert request_extras(request(lora_request=lora(path)), LoraNames()) is None
    os.truncate(adapter / "adapter_model.safetensors", 4)
    assert LoraNames().name_of(lora(adapter)) is None


def test_media_that_come_from_elsewhere_are_refused(engine: SimpleNamespace) -> None:
    """What every engine with a connector of both roles says of itself since 0.32 is not that."""
    engine.model_config.multimodal_config = SimpleNamespace(allow_missing_mm_embeddings=True)
    kept_of(engine, cache_of(spec_of(engine.model_config.hf_config)), Options())
    engine.ec_transfer_config = SimpleNamespace(is_ec_consumer=True)
    assert "from elsewhere" in refused(engine)


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
