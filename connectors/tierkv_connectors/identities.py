"""Identities of models that come as Hugging Face configs and safetensors, for any engine.

Two engines that load the same files must find each other's blocks, so nothing here looks at an
engine, nor at where the files lie. Weights are named by the first of these that is known: what the
caller says, the hub's commit, a digest of the files. The digest reads every tensor's name, type,
shape and a few of its pages: it takes milliseconds and notices another training run or another
quantisation. It does not notice a handful of values edited by hand, nor weights changed in memory:
name those yourself.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tierkv.errors import invalid
from tierkv.identity import LayerSpec, Rope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

MIN_SAFETENSORS_HEADER = 2
MAX_SAFETENSORS_HEADER = 100 << 20
SAMPLES = 8
SAMPLE_BYTES = 4096

_COMMIT = re.compile(r"[0-9a-f]{40}")

_INTERLEAVED = frozenset({
    "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe",
    "glm", "glm4", "gptj", "helium", "llama4_text",
})  # fmt: skip
"""Model types that rotate neighbours instead of halves and do not say so in their config."""

_LENGTH_IN_ANGLE = frozenset({"dynamic", "longrope", "yarn"})
"""RoPE types whose angles depend on the config's longest position too."""


def name_model(
    config: "PreTrainedConfig",
    weights: str | None = None,
    path: str | None = None,
    commit: str | None = None,
) -> tuple[str, str]:
    """Return the `model` and `weights` of an Identity.

    Args:
        config: of the loaded model.
        weights: the caller's own name for the weights; two trainings must never share one.
        path: the directory or hub name that the weights came from, when the engine says so apart
            from its config.
        commit: of the hub, with `path`; a branch or tag names no weights and counts as none.

    Raises: TierKVError (invalid) when nothing names the weights.
    """
    if path is None:
        path = str(getattr(config, "name_or_path", "") or "")
        commit = getattr(config, "_commit_hash", None)
    model, found = _hub_or_files(config, weights, path, commit)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        found += f"|quantised:{hashlib.sha256(canonical(quantised).encode()).hexdigest()}"
    return model, found


def _hub_or_files(
    config: "PreTrainedConfig", weights: str | None, name: str, commit: str | None
) -> tuple[str, str]:
    path = Path(name or "/")
    if _COMMIT.fullmatch(path.name) and path.parent.name == "snapshots":
        commit = path.name
        name = path.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    elif name and path.is_dir():
        name, commit = path.resolve().name, None
    if weights:
        return name or config.model_type, f"id:{weights}"
    if _COMMIT.fullmatch(commit or ""):
        return name, f"hub:{commit}"
    if name and path.is_dir():
        # The digest covers config.json: two directories of equal content are one model.
        return config.model_type, f"files:{files_digest(path)}"
    raise invalid(
        f"nothing names the weights of {name!r}: load the model from a local directory or a hub "
        "snapshot, or pass weights= (an engine's connector takes it from its extra config) with "
        "a name that changes whenever they do"
    )


def files_digest(directory: Path, config_name: str = "config.json") -> str:
    """Return a digest of a model's config and samples of all its safetensors.

    Raises: TierKVError (invalid) when there are none, or one is broken.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise invalid(f"{directory} holds no *.safetensors: pass weights= to name its weights")
    digest = hashlib.sha256(b"tierkv.weights.1")
    config = directory / config_name
    for path in [config, *files] if config.is_file() else files:
        name = path.name.encode()
        digest.update(len(name).to_bytes(2, "little") + name)
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for sample in [file.read()] if path == config else _samples(file, path):
                digest.update(sample)
    return digest.hexdigest()


def _samples(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the header, then pages spread evenly over every tensor (the whole of a small one)."""
    size = int.from_bytes(file.read(8), "little")
    most = min(MAX_SAFETENSORS_HEADER, path.stat().st_size)
    if not MIN_SAFETENSORS_HEADER <= size <= most:
        raise invalid(f"{path} is no safetensors file: its header would have {size} bytes")
    header = file.read(size)
    yield header
    try:
        tensors = json.loads(header)
        spans = sorted(
            tuple(entry["data_offsets"])
            for name, entry in tensors.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise invalid(f"{path} is no safetensors file: its header is not readable") from None
    for start, stop in spans:
        length = stop - start
        count = 1 if length <= SAMPLES * SAMPLE_BYTES else SAMPLES
        step = (length - SAMPLE_BYTES) // (SAMPLES - 1)
        for number in range(count):
            file.seek(8 + size + start + number * step)
            yield file.read(length if count == 1 else SAMPLE_BYTES)


def layer_specs(config: "PreTrainedConfig") -> tuple[LayerSpec, ...]:
    """Return shape, positions and window of every layer of a decoder with plain K and V.

    Raises: TierKVError (invalid) for what keeps something else than K and V of its own tokens.
    """
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise invalid(f"{config.model_type} is an encoder-decoder: its KV is not one of a prefix")
    if getattr(text, "kv_lora_rank", None):
        raise invalid(f"{text.model_type} has latent attention (MLA), which is not supported yet")
    if getattr(text, "num_kv_shared_layers", None) or getattr(text, "kv_sharing_modes", None):
        raise invalid(f"{text.model_type} shares KV between layers, which is not supported yet")
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    windows = _windows(text)
    types = getattr(text, "layer_types", None) or [FULL_ATTENTION] * len(windows)
    with_rope = getattr(text, "no_rope_layers", None) or [1] * len(windows)  # 1: it has RoPE
    return tuple(
        LayerSpec(
            kv_heads=heads,
            k_dim=dim,
            v_dim=dim,
            rope=_rope(text, kind, dim) if rotated else Rope(kind="none", theta=0.0),
            window=window,
        )
        for window, kind, rotated in zip(windows, types, with_rope, strict=True)
    )


def _windows(text: "PreTrainedConfig") -> list[int | None]:
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types is None:
        if getattr(text, "attention_chunk_size", None):
            raise invalid(f"{text.model_type} has chunked attention, which is not supported yet")
        return [window] * text.num_hidden_layers
    unknown = sorted(set(types) - {FULL_ATTENTION, SLIDING_ATTENTION})
    if unknown:
        raise invalid(f"{text.model_type} has {', '.join(unknown)} layers, which keep no plain KV")
    return [window if kind == SLIDING_ATTENTION else None for kind in types]


def _rope(text: "PreTrainedConfig", layer_type: str, head_dim: int) -> Rope:
    parameters = getattr(text, "rope_parameters", None)
    if parameters and isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
    if not parameters:
        return Rope(kind="none", theta=0.0)
    rest = dict(parameters)
    kind = str(rest.pop("rope_type", rest.pop("type", "default")))
    theta = float(rest.pop("rope_theta", 10000.0))
    factor = rest.pop("partial_rotary_factor", None) or 1.0
    if kind in _LENGTH_IN_ANGLE:
        rest["max_position_embeddings"] = getattr(text, "max_position_embeddings", None)
    interleave = getattr(text, "rope_interleave", None)
    interleaved = text.model_type in _INTERLEAVED if interleave is None else bool(interleave)
    return Rope(
        kind=kind,
        theta=theta,
        rotary_dim=int(head_dim * factor),
        interleaved=interleaved,
        scaling=canonical(rest) if rest else "",
    )


def canonical(value: object) -> str:
    """Return JSON that is equal for equal settings: keys sorted, numbers as floats."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float):
        return float(value)
    to_dict = getattr(value, "to_dict", None)
    return _plain(to_dict()) if callable(to_dict) else str(value)
