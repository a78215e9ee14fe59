"""Run by vLLM's own Python: its KV tensors, its attention's writing, our self-test of them."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor

from tierkv.errors import TierKVError
from tierkv_connectors.device.host import HostDevice
from tierkv_connectors.vllm import layout
from tierkv_connectors.vllm.layout import layout_of
from tierkv_connectors.vllm.selftest import attention_of, self_test

LAYERS, BLOCKS, HEADS, DIM = 4, 7, 3, 64


def one_memory(spec: Any, names: list[str]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return memory that all layers share, and each layer's view of it."""
    page = spec.page_size_bytes
    whole = KVCacheTensor(
        size=LAYERS * BLOCKS * page,
        layers=names,
        layer_stride=BLOCKS * page,
        block_stride=page,
    )
    raw = noise(whole.size)
    layout = kv_cache_interface.KVCacheLayout.LBHNC
    views = kv_cache_interface.create_kv_cache_views(raw, spec, BLOCKS, layout, whole)
    return [raw], dict(zip(names, views, strict=True))


def memory_each(spec: Any, names: list[str]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return memory of every layer and its view, of versions that have no layouts."""
    shape = cpu_attn.CPUAttentionBackend.get_kv_cache_shape(BLOCKS, spec.block_size, HEADS, DIM)
    raws = [noise(BLOCKS * spec.page_size_bytes) for _ in names]
    views = [raw.view(spec.dtype).view(shape) for raw in raws]
    return raws, dict(zip(names, views, strict=True))


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 127, (size,), dtype=torch.int8)


HAS_LAYOUTS = hasattr(kv_cache_interface, "KVCacheLayout")
"""0.27 has none: each layer has memory of its own, and the instructions are known elsewhere."""


class Engine:
    """KV tensors and attention layers as vLLM makes them for its CPU attention."""

    def __init__(self, dtype: torch.dtype, tokens: int) -> None:
        self.spec: Any = FullAttentionSpec(
            block_size=tokens, num_kv_heads=HEADS, head_size=DIM, dtype=dtype
        )
        names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
        memory = one_memory if HAS_LAYOUTS else memory_each
        self.raw, self.caches = memory(self.spec, names)
        impl = object.__new__(cpu_attn.CPUAttentionBackendImpl)
        impl.attn_type = "decoder"
        impl.kv_cache_dtype = "auto"
        layer = SimpleNamespace(
            attn_backend=cpu_attn.CPUAttentionBackend,
            impl=impl,
            _k_scale_float=1.0,
            _v_scale_float=1.0,
        )
        has_isa = layer if HAS_LAYOUTS else impl
        has_isa.isa = cpu_attn._get_attn_isa(dtype, tokens, DIM, "auto")
        self.layers: Any = dict.fromkeys(names, layer)

    def outcome(self) -> str:
        before = [raw.clone() for raw in self.raw]
        try:
            attention = attention_of(self.layers, list(self.caches))
            found = layout_of(BLOCKS, self.spec, list(self.caches), self.caches, attention)
            self_test(found, self.caches, self.layers, HostDevice())
        except TierKVError as error:
            outcome = str(error)
        else:
            outcome = "holds"
        same = all(map(torch.equal, self.raw, before))
        return outcome if same else f"{outcome}, but changed the cache"


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
