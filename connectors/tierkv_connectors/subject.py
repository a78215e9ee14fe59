"""A transformers model as a subject of the quality lab: float32 on the CPU, attention watched."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
)

from tierkv.errors import invalid
from tierkv.identity import Identity
from tierkv_codecs.lab.subject import Kv, LayerKv
from tierkv_connectors.transformers import cache_argument, layers_of
from tierkv_connectors.transformers_identity import TOKENS_PER_BLOCK, identity_of

INNER = "sdpa"
WATCHED = "tierkv_watched"
"""Transformers' own attention under a name of ours: it looks attention up by name alone."""

_watching: list[list["_Call"]] = []
"""Where calls of attention are kept, layer by layer, while a model is watched."""


class _Call:
    """What one layer's attention was called with, and what it gave."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.module, self.query, self.keys, self.values, self.mask = arguments
        self.options = options

    def again(self, kv: LayerKv) -> torch.Tensor:
        """Return the output when the first tokens have other KV."""
        rest = kv.keys.shape[2]
        keys = torch.cat([kv.keys, self.keys[:, :, rest:]], 2)
        values = torch.cat([kv.values, self.values[:, :, rest:]], 2)
        inner = AttentionInterface()[INNER]
        found: tuple[torch.Tensor, Any] = inner(
            self.module, self.query, keys, values, self.mask, **self.options
        )
        return found[0]


def _watched(*arguments: Any, **options: Any) -> tuple[torch.Tensor, Any]:  # noqa: ANN401
    """Run transformers' attention and keep its arguments while somebody watches."""
    for calls in _watching:
        calls.append(_Call(arguments[:5], options))
    found: tuple[torch.Tensor, Any] = AttentionInterface()[INNER](*arguments, **options)
    return found


AttentionInterface.register(WATCHED, _watched)
AttentionMaskInterface.register(WATCHED, AttentionMaskInterface()[INNER])


class _Attention:
    """The calls of a continuation, in order of layers."""

    def __init__(self, calls: list[_Call]) -> None:
        self._calls = calls

    def outputs(self, kv: Kv) -> Iterator[torch.Tensor]:
        for call, layer in zip(self._calls, kv, strict=True):
            yield call.again(layer)


class TransformersSubject:
    """A model of a local directory.

    Args:
        directory: with config, safetensors and tokenizer; nothing is downloaded.
        kv_dtype: of the engine whose copies are to be gated: "bf16", "fp16" or "fp32".
        tokens_per_block: of its blocks.

    Raises: TierKVError (invalid): it is no such directory, or its KV cannot be kept.
    """

    def __init__(
        self,
        directory: Path,
        kv_dtype: str = "bf16",
        tokens_per_block: int = TOKENS_PER_BLOCK,
    ) -> None:
        if not (directory / "config.json").is_file():
            raise invalid(f"{directory} is no model directory: it has no config.json")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, local_files_only=True, attn_implementation=WATCHED
            ).eval()
        except (OSError, ValueError) as error:
            raise invalid(f"transformers cannot load {directory}: {error}") from error
        # Gradients are taken of KV alone; those of weights would take as much again as they do.
        self._model.requires_grad_(requires_grad=False)
        self._cache_argument = cache_argument(self._model)
        self.identity: Identity = msgspec.structs.replace(
            identity_of(self._model, tokens_per_block), kv_dtype=kv_dtype
        )

    def tokens(self, text: str) -> list[int]:
        found = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(found)

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor) -> Kv:
        cache = DynamicCache()  # without a config every layer keeps all of its tokens
        self._run(ids, cache, logits_to_keep=1)
        sides = [(layer.keys, layer.values) for layer in layers_of(cache)]
        return [LayerKv(k, v) for k, v in sides if k is not None and v is not None]

    @torch.inference_mode()
    def proceed(self, kv: Kv, ids: torch.Tensor) -> torch.Tensor:
        return self._run(ids, cache_of(kv))

    @torch.inference_mode()
    def watch(self, kv: Kv, ids: torch.Tensor) -> tuple[torch.Tensor, _Attention]:
        calls: list[_Call] = []
        _watching.append(calls)
        try:
            return self._run(ids, cache_of(kv)), _Attention(calls)
        finally:
            _watching.remove(calls)

    def _run(self, ids: torch.Tensor, cache: DynamicCache, **options: Any) -> torch.Tensor:  # noqa: ANN401
        options[self._cache_argument] = cache
        out = self._model(input_ids=ids, use_cache=True, **options)
        logits: torch.Tensor = out.logits
        return logits


def cache_of(kv: Kv) -> DynamicCache:
    """Return a cache that holds these keys and values, and keeps all of them."""
    cache = DynamicCache()
    for number, layer in enumerate(kv):
        cache.update(layer.keys, layer.values, number)
    return cache
