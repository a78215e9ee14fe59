"""Engines' KV tensors in every arrangement that is known, written as an engine writes them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tierkv_connectors.vllm.layout import Attention, Layout, layout_of

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 6, 2, 32, 16
FLASH = Attention("FLASH_ATTN")
VEC = Attention("CPU_ATTN", "vec")
AMX = Attention("CPU_ATTN", "amx")
Put = Callable[[torch.Tensor, int, int, int, torch.Tensor, torch.Tensor], None]


@dataclass
class FullAttentionSpec:
    block_size: int = TOKENS
    num_kv_heads: int = HEADS
    head_size: int = DIM
    dtype: torch.dtype = torch.bfloat16
    head_size_v: int | None = DIM
    kv_quant_mode: int = 0
    tokens_per_state: int = 1
    num_head_slots: int | None = None


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class Engine:
    """What vLLM would register; `put` writes keys and values of one (row, token, head)."""

    tensors: list[torch.Tensor]
    put: Put
    attention: Attention
    row_tokens: int = TOKENS
    spec: FullAttentionSpec = field(default_factory=FullAttentionSpec)

    def __post_init__(self) -> None:
        self.names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
        self.caches = dict(zip(self.names, self.tensors, strict=True))
        group = SimpleNamespace(layer_names=self.names[::-1], kv_cache_spec=self.spec)
        self.config: Any = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group])

    def layout(self) -> Layout:
        return layout_of(self.config.num_blocks, self.spec, self.names, self.caches, self.attention)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        for slot, keys, values in zip(slots.tolist(), key, value, strict=True):
            row, token = divmod(slot, self.row_tokens)
            for head in range(HEADS):
                self.put(kv_cache, row, token, head, keys[head], values[head])

    def attention_layers(self) -> Any:
        kind = SimpleNamespace(get_name=lambda: self.attention.name)
        layer = SimpleNamespace(attn_backend=kind, impl=self, isa=self.attention.isa)
        return dict.fromkeys(self.names, layer)

    def write(self, block_ids: list[int], block: torch.Tensor) -> None:
        slots = torch.tensor([b * TOKENS + token for b in block_ids for token in range(TOKENS)])
        for tensor, (keys, values) in zip(self.tensors, block, strict=True):
            self.do_kv_cache_update(None, keys, values, tensor, slots)


def put_fused(kv: torch.Tensor, row: int, token: int, head: int, k: Any, v: Any) -> None:
    kv[row, head, token, :DIM] = k
    kv[row, head, token, DIM:] = v


def put_kv_first(kv: torch.Tensor, row: int, token: int, head: int, k: Any, v: Any) -> None:
    kv[0, row, token, head] = k
    kv[1, row, token, head] = v


def put_kv_second(kv: torch.Tensor, row: int, token: int, head: int, k: Any, v: Any) -> None:
    kv[row, 0, token, head] = k
    kv[row, 1, token, head] = v


def put_transposed(kv: torch.Tensor, row: int, token: int, head: int, k: Any, v: Any) -> None:
    inside, tokens = kv[row, head].view(-1), kv.shape[2]
    inside[token : tokens * DIM : tokens] = k
    inside[(tokens + token) * DIM :][:DIM] = v


def put_amx(kv: torch.Tensor, row: int, token: int, head: int, k: Any, v: Any) -> None:
    inside, tokens = kv[row, head].view(-1), kv.shape[2]
    for d in range(DIM):
        tile, column = divmod(token, 16)
        inside[tile * 16 * DIM + d // 2 * 32 + column * 2 + d % 2] = k[d]
        tile, column = divmod(d, 16)
        at = tile * 16 * tokens + token // 2 * 32 + column * 2 + token % 2
        inside[tokens * DIM + at] = v[d]


def one_storage(order: str, **sizes: int) -> list[torch.Tensor]:
    """Make tensors [B, H, N, C] of the layers, in one storage with these axes in this order."""
    all_sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * DIM} | sizes
    whole = torch.zeros([all_sizes[axis] for axis in order], dtype=torch.bfloat16)
    return list(whole.permute([order.index(axis) for axis in "LBHNC"]))


def apart(*shape: int) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]


ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
MAKE: dict[str, Callable[[], Engine]] = {
    "cpu": lambda: Engine(one_storage("LBHNC"), put_transposed, VEC),
    "cpu apart": lambda: Engine(apart(BLOCKS, HEADS, TOKENS, 2 * DIM), put_transposed, VEC),
    "cpu amx": lambda: Engine(one_storage("LBHNC"), put_amx, AMX),
    "kv first": lambda: Engine(apart(2, BLOCKS, TOKENS, HEADS, DIM), put_kv_first, FLASH),
    "kv second": lambda: Engine(apart(BLOCKS, 2, TOKENS, HEADS, DIM), put_kv_second, FLASH),
    "kv second HND": lambda: Engine(
        [kv.transpose(2, 3) for kv in apart(BLOCKS, 2, HEADS, TOKENS, DIM)], put_kv_second, FLASH
    ),
    "fused apart": lambda: Engine(apart(BLOCKS, HEADS, TOKENS, 2 * DIM), put_fused, FLASH),
    "small rows": lambda: Engine(
        one_storage("LBHNC", B=2 * BLOCKS, N=TOKENS // 2), put_fused, FLASH, TOKENS // 2
    ),
    "cpu small rows": lambda: Engine(
        one_storage("LBHNC", B=2 * BLOCKS, N=TOKENS // 2), put_transposed, VEC, TOKENS // 2
    ),
}


def fused_in(order: str) -> Callable[[], Engine]:
    return lambda: Engine(one_storage(order), put_fused, FLASH)


MAKE |= {order: fused_in(order) for order in ORDERS}


def pattern(blocks: int, seed: int = 0) -> torch.Tensor:
    shape = (LAYERS, 2, blocks * TOKENS, HEADS, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
