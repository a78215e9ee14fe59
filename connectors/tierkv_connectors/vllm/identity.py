"""Which vLLM engines and requests can be kept, and what identifies their KV.

vLLM's configs and requests are read by attribute, so that nothing here imports vllm and one source
serves its versions. An engine that loads the same files as transformers has the same identity. What
is not known to be a prefix's own plain KV is refused, saying why: the engine then runs without us.
"""

from math import lcm
from pathlib import Path
from typing import Any

from tierkv.errors import TierKVError, invalid
from tierkv.identity import Identity, LayerSpec
from tierkv.key import Extras
from tierkv_connectors.identities import canonical, files_digest, layer_specs, name_model
from tierkv_connectors.pages import DTYPE_NAMES
from tierkv_connectors.vllm.groups import check_groups, kv_groups, layer_numbers
from tierkv_connectors.vllm.kept import Kept, Options, block_tokens
from tierkv_connectors.vllm.media import is_named
from tierkv_connectors.vllm.ranks import ranks_of

Foreign = Any
"""An object of vLLM's own."""

_PARALLEL = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)

_SAFETENSORS_FORMATS = frozenset({
    "auto", "fastsafetensors", "hf", "instanttensor", "mistral", "runai_streamer", "safetensors",
})  # fmt: skip
"""Load formats that read what `files_digest` reads."""

_ANGLES_MOVE = frozenset({"dynamic", "longrope"})
"""RoPE whose angles vLLM fixes by its longest context and others by the length of a prompt."""

_DRAFTS = "ngram"
"""Speculative decoding whose drafts come from the prompt and are computed by the model alone. KV of
those that are rejected lies behind the known tokens, of which alone blocks are made."""

_MEDIA = ("media_io_kwargs", "mm_processor_kwargs", "mm_encoder_attn_dtype", "video_pruning_rate")
"""Settings that change what media become, whether or not their hashes say so."""

_UNSCALED = ("bf16", "fp16", "fp32")
_FP8 = {"auto": "fp8_e4m3", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


def identity_of(
    vllm_config: Foreign,
    kv_cache_config: Foreign,
    tokens_per_block: int,
    epoch: int = 0,
) -> Identity:
    """Return what makes this engine's KV interchangeable.

    Args:
        vllm_config: the engine's; "weights" in the connector's extra config names the weights where
            neither a hub commit nor safetensors do.
        kv_cache_config: the engine's.
        tokens_per_block: the size of our blocks.
        epoch: counts updates of the weights in a running engine.

    Raises: TierKVError (invalid) for what cannot be kept, saying why.
    """
    _refuse_engine(vllm_config)
    layers = layer_specs(vllm_config.model_config.hf_text_config)
    groups = kv_cache_config.kv_cache_groups
    check_groups(groups)
    names = [name for group in groups for name in group.layer_names]
    layer_numbers(names)
    size = getattr(vllm_config.parallel_config, "tensor_parallel_size", 1)
    for group in groups:
        _refuse_layers(layers, group.kv_cache_spec, len(names), size)
    kinds = {_kv_dtype(vllm_config.cache_config, group.kv_cache_spec) for group in groups}
    if len(kinds) != 1:
        raise invalid(f"the KV cache groups have {len(kinds)} dtypes: {sorted(kinds)}")
    ((kv_dtype, kv_scales),) = kinds
    model, weights = _name(vllm_config, kv_dtype)
    return Identity(
        model=model,
        weights=weights,
        epoch=epoch,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        tokens_per_block=tokens_per_block,
        layers=layers,
    )


def kept_of(vllm_config: Foreign, kv_cache_config: Foreign, options: Options) -> Kept:
    """Return what is kept of this engine. Raises: TierKVError (invalid), saying why nothing is."""
    groups = kv_cache_config.kv_cache_groups
    check_groups(groups)
    engine_tokens = lcm(*(group.kv_cache_spec.block_size for group in groups))
    tokens = block_tokens(engine_tokens, options.tokens_per_block)
    identity = identity_of(vllm_config, kv_cache_config, tokens)
    ranks = ranks_of(
        vllm_config.parallel_config.tensor_parallel_size,
        vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size,
        identity.layers[0].kv_heads,
        groups[0].kv_cache_spec.num_kv_heads,
    )
    return Kept(identity, kv_groups(kv_cache_config, identity), options, ranks)


def _refuse_engine(vllm_config: Foreign) -> None:
    model = vllm_config.model_config
    _refuse_spread(vllm_config.parallel_config)
    drafts = getattr(vllm_config.speculative_config, "method", None)
    if vllm_config.speculative_config is not None and drafts != _DRAFTS:
        raise invalid(
            f"speculative decoding by {drafts}: only drafts by {_DRAFTS} are known to have no KV"
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise invalid("weight_transfer_config replaces the weights of a running engine")
    if getattr(getattr(vllm_config, "ec_transfer_config", None), "is_ec_consumer", False):
        raise invalid("ec_transfer_config: media come from elsewhere, and no hash says what came")
    if model.runner_type != "generate":
        raise invalid(f"a {model.runner_type} engine has no prefixes to keep")
    if model.is_encoder_decoder:
        raise invalid("an encoder-decoder's KV is not one of a prefix")
    if getattr(model.hf_config, "dual_chunk_attention_config", None):
        raise invalid("dual chunk attention rotates keys in its own way")
    for config in (model.hf_config, model.hf_text_config):
        if getattr(config, "use_bidirectional_attention", None):
            raise invalid("the model attends to later tokens: its KV is not a prefix's own")


def _refuse_spread(parallel: Foreign) -> None:
    for size in _PARALLEL:
        count = getattr(parallel, size, 1)
        if count > 1:
            raise invalid(f"{size} is {count}: KV spread over ranks is not supported yet")


def _refuse_layers(layers: tuple[LayerSpec, ...], spec: Foreign, count: int, size: int) -> None:
    if len(layers) != count:
        raise invalid(f"the config has {len(layers)} layers, the KV cache {count}")
    shape = (spec.head_size, spec.head_size_v)
    for layer in layers:
        here = max(layer.kv_heads // size, 1)
        if (here, layer.k_dim, layer.v_dim) != (spec.num_kv_heads, *shape):
            raise invalid(
                f"the config says {here} KV heads of {layer.k_dim} and {layer.v_dim} for each "
                f"worker, the KV cache {spec.num_kv_heads} of {shape[0]} and {shape[1]}"
            )
        if layer.rope.kind in _ANGLES_MOVE:
            raise invalid(f"{layer.rope.kind} RoPE: keys of equal tokens differ between engines")


def _kv_dtype(cache: Foreign, spec: Foreign) -> tuple[str, str]:
    """Return the names of the KV's dtype and of its scales."""
    mode = spec.kv_quant_mode.name
    name = DTYPE_NAMES.get(spec.dtype)
    if mode == "NONE" and name in _UNSCALED:
        return name, ""
    if mode != "FP8_PER_TENSOR" or cache.cache_dtype not in _FP8:
        raise invalid(f"KV of {spec.dtype} in mode {mode} ({cache.cache_dtype}) is not supported")
    if _fp8_is_fnuz():
        raise invalid("this device's fp8 has another exponent bias (fnuz), which is not supported")
    if getattr(cache, "calculate_kv_scales", False):
        raise invalid("calculate_kv_scales takes the KV's scales from an engine's first request")
    # Without scales in the checkpoint they are 1, so the weights name them either way.
    return _FP8[cache.cache_dtype], "checkpoint"


def _fp8_is_fnuz() -> bool:
    import torch

    return torch.version.hip is not None


def _name(vllm_config: Foreign, kv_dtype: str) -> tuple[str, str]:
    """Return the `model` and `weights` of the Identity."""
    model = vllm_config.model_config
    given = vllm_config.kv_transfer_config.get_from_extra_config("weights", None)
    load_format = str(vllm_config.load_config.load_format)
    if not given and load_format not in _SAFETENSORS_FORMATS:
        raise invalid(
            f"load_format {load_format} reads weights that we do not: name them as "
            '"weights" in kv_connector_extra_config'
        )
    if getattr(model, "hf_config_path", None) not in {None, model.model}:
        raise invalid("hf_config_path: the config is not that of the weights")
    revision = getattr(model.revision, "resolved", model.revision)
    commit = revision or getattr(model.hf_config, "_commit_hash", None)
    name, weights = name_model(model.hf_config, given, model.model, commit)
    changes = _changes(model, kv_dtype)
    return name, f"{weights}|set:{canonical(changes)}" if changes else weights


def _changes(model: Foreign, kv_dtype: str) -> dict[str, object]:
    """Return the settings that change values of KV and show in no file and no layer."""
    if callable(model.hf_overrides):
        raise invalid("hf_overrides is a function: nothing names what it changes")
    changes: dict[str, object] = {
        "hf_overrides": model.hf_overrides,
        "model_class_overrides": getattr(model, "model_class_overrides", None),
    }
    if getattr(model.hf_config, "quantization_config", None) is None:
        changes["quantization"] = model.quantization
        changes["quantization_config"] = getattr(model, "quantization_config", None)
    media = getattr(model, "multimodal_config", None)
    changes |= {name: getattr(media, name, None) for name in _MEDIA}
    computed = DTYPE_NAMES.get(model.dtype, str(model.dtype))
    if computed != kv_dtype:
        changes["computed"] = computed
    return {name: value for name, value in changes.items() if value}


class LoraNames:
    """Names LoRA adapters by their files, as they were when this process first saw them."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[object, str]] = {}

    def name_of(self, lora: Foreign) -> str | None:
        """Return a name of the adapter's content, or None when nothing sure can be said.

        The engine reads an adapter's files when it likes: once they have changed, nobody knows
        which of the two contents it holds, so the adapter has no name until it has a new id or
        path.
        """
        directory = Path(lora.lora_path)
        try:
            state = sorted(
                (entry.name, entry.stat().st_size, entry.stat().st_mtime_ns)
                for entry in directory.iterdir()
            )
            who = (lora.lora_int_id, str(directory))
            if who not in self._seen:
                self._seen[who] = (state, files_digest(directory, "adapter_config.json"))
        except (OSError, TierKVError):
            return None  # of a hub, or in another format
        first, digest = self._seen[who]
        return f"{lora.lora_name}@files:{digest}" if state == first else None


def request_extras(request: Foreign, loras: LoraNames) -> Extras | None:
    """Return what else than its tokens and the engine names a request's KV.

    None when the request cannot be kept: embeddings and media without a hash stand in place of
    tokens, a pooling request may read later tokens, a streaming session takes tokens back.
    """
    if (
        request.pooling_params is not None
        or request.prompt_embeds is not None
        or not is_named(request.mm_features or ())
        or getattr(request, "resumable", False)
    ):
        return None
    extras: dict[str, str] = {}
    if request.cache_salt:
        extras["salt"] = request.cache_salt
    if request.lora_request is not None:
        name = loras.name_of(request.lora_request)
        if name is None:
            return None
        extras["lora"] = name
    return extras
