"""What an engine double keeps: the KV of tokens in ranks' memory, which any wrong one betrays.

The KV of a token is a number that depends on every token before it. Groups' layers share memory and
block ids as vLLM's do, and each rank has some heads.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tierkv.client import Channel, Client
from tierkv.executor import Threads
from tierkv.identity import Identity, LayerSpec, Rope
from tierkv_connectors.device import Device
from tierkv_connectors.edge import Edge
from tierkv_connectors.vllm.group_layout import group_layouts
from tierkv_connectors.vllm.groups import kv_groups
from tierkv_connectors.vllm.kept import Kept, Options
from tierkv_connectors.vllm.ranks import Ranks
from tierkv_connectors.vllm.worker import Worker

ENGINE, STORE = 4, 16
"""Tokens of an engine block and of a store block, unless a test has others."""
LAYERS, HEADS, DIM = 2, 2, 4
"""Layers of a group, heads of a layer, values of a head."""
MOST = 1_000_003
"""States are below, so that 16 times one and the number of a layer are exact in float32."""


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """Named as vLLM's."""


def config_of(
    engine_tokens: int, windows: Sequence[int | None], blocks: int = 0, heads: int = HEADS
) -> Any:
    """Return a config whose layers take turns in groups with these windows (None: all)."""
    fields: dict[str, Any] = {
        "block_size": engine_tokens, "num_kv_heads": heads, "head_size": DIM, "head_size_v": DIM,
        "dtype": torch.float32,
    }  # fmt: skip
    groups = [
        SimpleNamespace(
            layer_names=[f"model.layers.{at * len(windows) + number}.attn" for at in range(LAYERS)],
            kv_cache_spec=FullAttentionSpec(**fields)
            if window is None
            else SlidingWindowSpec(**fields, sliding_window=window),
        )
        for number, window in enumerate(windows)
    ]
    return SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups)


def kept_of(
    engine_tokens: int,
    tokens: int,
    windows: Sequence[int | None] = (None,),
    heads: int = HEADS,
    shards: int = 1,
    **options: Any,
) -> Kept:
    layers = [
        LayerSpec(kv_heads=heads, k_dim=DIM, v_dim=DIM, rope=Rope(), window=window)
        for window in windows
    ]
    identity = Identity(
        model="double", weights="w", kv_dtype="fp32", tokens_per_block=tokens,
        layers=tuple(layers) * LAYERS,
    )  # fmt: skip
    groups = kv_groups(config_of(engine_tokens, windows), identity)
    return Kept(identity, groups, Options(**options), Ranks(shards))


def states(tokens: Sequence[int]) -> torch.Tensor:
    """Return a number for every token that depends on all tokens up to it."""
    state, out = 1, []
    for token in tokens:
        state = (state * 48271 + token + 1) % MOST
        out.append(state)
    return torch.tensor(out, dtype=torch.float32)


def following(tokens: Sequence[int]) -> int:
    """Return the token that the engine samples behind these."""
    return int(states(tokens)[-1]) % 1000


class Rank:
    """One worker and its memory, in which the groups' layers lie on top of each other."""

    def __init__(self, kept: Kept, config: Any, device: Device, where: str) -> None:
        self.kept, self.device = kept, device
        spec = config.kv_cache_groups[0].kv_cache_spec
        self.heads = spec.num_kv_heads
        shape = (2, config.num_blocks, spec.block_size, self.heads, DIM)
        pages = [torch.zeros(shape, device=where) for _ in range(LAYERS)]
        self.memory: dict[str, torch.Tensor] = {
            name: pages[at]
            for group in config.kv_cache_groups
            for at, name in enumerate(group.layer_names)
        }
        layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
        layers: Any = dict.fromkeys(self.memory, layer)
        self.layouts = group_layouts(kept.groups, config, self.memory, layers)

    def work(self, channel: Channel, threads: Threads, edge: Edge) -> None:
        client = Client(channel)
        self.worker = Worker(self.kept, client, threads, self.layouts, self.device, edge)

    def vectors(self, state: float, layer: int) -> torch.Tensor:
        """Return the keys of a token: [head, dim]; the last of each says which head it is."""
        keys = torch.full((self.heads, DIM), 16 * state + layer)
        first = self.kept.ranks.shard * self.heads
        keys[:, -1] = torch.arange(first, first + self.heads) + 1.0
        return keys
