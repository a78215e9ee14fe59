"""Run by vLLM's own Python: its KV tensors, its attention's writing, our self-test of them."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    create_kv_cache_views,
)

from tierkv.errors import TierKVError
from tierkv_connectors.device.host import HostDevice
from tierkv_connectors.vllm import layout
from tierkv_connectors.vllm.layout import layout_of
from tierkv_connectors.vllm.selftest import attention_of, self_test

LAYERS, BLOCKS, HEADS, DIM = 4, 7, 3, 64


class Engine:
    """KV tensors and attention layers as vLLM makes them for its CPU attention."""

    def __init__(self, dtype: torch.dtype, tokens: int) -> None:
        spec = FullAttentionSpec(block_size=tokens, num_kv_heads=HEADS, head_size=DIM, dtype=dtype)
        names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
        page = spec.page_size_bytes
        whole = KVCacheTensor(
            size=LAYERS * BLOCKS * page,
            layers=names,
            layer_stride=BLOCKS * page,
            block_stride=page,
        )
        self.config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[whole],
            kv_cache_groups=[KVCacheGroupSpec(names, spec)],
            kv_cache_layout="LBHNC",
        )
        self.raw = torch.randint(0, 127, (whole.size,), dtype=torch.int8)
        views = create_kv_cache_views(self.raw, spec, BLOCKS, KVCacheLayout.LBHNC, whole)
        self.caches = dict(zip(names, views, strict=True))
        impl = object.__new__(cpu_attn.CPUAttentionBackendImpl)
        impl.attn_type = "decoder"
        impl.kv_cache_dtype = "auto"
        layer = SimpleNamespace(
            attn_backend=cpu_attn.CPUAttentionBackend,
            impl=impl,
            isa=cpu_attn._get_attn_isa(dtype, tokens, DIM, "auto"),
            _k_scale_float=1.0,
            _v_scale_float=1.0,
        )
        self.layers: Any = dict.fromkeys(names, layer)

    def outcome(self) -> str:
        before = self.raw.clone()
        try:
            attention = attention_of(self.layers, list(self.caches))
            spec = self.config.kv_cache_groups[0].kv_cache_spec
            found = layout_of(BLOCKS, spec, list(self.caches), self.caches, attention)
            self_test(found, self.caches, self.layers, HostDevice())
        except TierKVError as error:
            outcome = str(error)
        else:
            outcome = "holds"
        return outcome if torch.equal(self.raw, before) else f"{outcome}, but changed the cache"


def swapped(tensor: torch.Tensor, geometry: Any) -> layout.Halves:
    keys, values = TRANSPOSED(tensor, geometry)
    return values, keys


TRANSPOSED = layout._keys_transposed
WRONG = {"K and V swapped": swapped, "K not transposed": layout._fused}


def outcomes() -> dict[str, str]:
    """Return for each case what came of it: "holds", or the reason of the refusal."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (32, 128):
            engine = Engine(dtype, tokens)
            case = f"{str(dtype).removeprefix('torch.')} {tokens}"
            found[case] = engine.outcome()
            attention = attention_of(engine.layers, list(engine.caches))
            known = layout._ARRANGEMENTS[attention]
            for name, halves in WRONG.items():
                layout._ARRANGEMENTS[attention] = (known[0]._replace(halves=halves),)
                found[f"{case} {name}"] = engine.outcome()
            layout._ARRANGEMENTS[attention] = known
    return found
