"""Group layout: where the KV of a KV group is, when vLLM deals its layers out to several groups.

Each share has a layout and block ids of its own; the canonical block has all layers of the KV
group in the model's order, so that it does not depend on how an engine dealt them out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tierkv_connectors.views import Piece, Views
from tierkv_connectors.vllm.groups import Foreign, KvGroup, Share
from tierkv_connectors.vllm.layout import Layout, layout_of
from tierkv_connectors.vllm.selftest import AttentionLayer, attention_of


def group_layouts(
    groups: Sequence[KvGroup],
    kv_cache_config: Foreign,
    kv_caches: Mapping[str, torch.Tensor],
    layers: Mapping[str, AttentionLayer],
) -> tuple["GroupLayout", ...]:
    """Return where the KV of each KV group is.

    Args:
        groups: of the engine.
        kv_cache_config: vLLM's.
        kv_caches: vLLM's tensors by layer.
        layers: vLLM's attention layers by name.

    Raises: TierKVError (invalid) for what is not understood, saying why.
    """

    def layout(share: Share) -> Layout:
        spec = kv_cache_config.kv_cache_groups[share.engine_group].kv_cache_spec
        attention = attention_of(layers, share.names)
        return layout_of(kv_cache_config.num_blocks, spec, share.names, kv_caches, attention)

    return tuple(GroupLayout(group.shares, layout) for group in groups)


class Heads(NamedTuple):
    """Heads that a block and an engine's memory share: where they are in each."""

    block: slice
    engine: slice


class GroupLayout:
    """The layouts of a KV group's shares, in their order."""

    def __init__(self, shares: Sequence[Share], layout_of: Callable[[Share], Layout]) -> None:
        self.layouts = tuple(layout_of(share) for share in shares)
        self._places = tuple(share.places for share in shares)

    def views(
        self, blocks: Sequence[Sequence[int]], skip: int = 0, heads: Heads | None = None
    ) -> Views:
        """Return the engine blocks of all shares as one block.

        Args:
            blocks: ids by share.
            skip: engine blocks of the block that come before them and are left out.
            heads: those to copy of a block that has more or fewer than the engine; None: all.

        Raises: TierKVError (invalid) for an id that no request can have.
        """
        return [
            piece if heads is None else _narrowed(piece, heads)
            for layout, places, ids in zip(self.layouts, self._places, blocks, strict=True)
            for view in layout.views(ids, skip)
            for piece in _placed(view, places)
        ]


def _placed(piece: Piece, places: Sequence[int]) -> Iterator[Piece]:
    """Yield a piece of a share's layers as pieces of the group's: one, where they lie evenly."""
    mine = places[piece.layers]
    step = mine[1] - mine[0] if len(mine) > 1 else 1
    if step > 0 and list(mine) == list(range(mine[0], mine[-1] + 1, step)):
        yield piece._replace(layers=slice(mine[0], mine[-1] + 1, step))
        return
    for at, place in enumerate(mine):
        keys, values = piece.keys[at : at + 1], piece.values[at : at + 1]
        yield piece._replace(layers=slice(place, place + 1), keys=keys, values=values)


def _narrowed(piece: Piece, heads: Heads) -> Piece:
    """Return a piece of some heads only. The head axis is the middle one, however K is packed."""
    axis = (piece.keys.ndim + 1) // 2
    start, count = heads.engine.start, heads.engine.stop - heads.engine.start
    return piece._replace(
        keys=piece.keys.narrow(axis, start, count),
        values=piece.values.narrow(axis, start, count),
        heads=heads.block,
    )
