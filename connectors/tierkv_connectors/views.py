"""Views: an engine's memory as the pieces of a block.

Below the connector a block has one order: [layer, K/V, token, head, dim]. An engine's own
arrangement is given as *views*: pieces of the engine's memory that together are the block, each
with any strides. `gather` undoes the arrangement, `scatter` redoes it, with one copy for the keys
and one for the values of a piece: few large pieces are fast, many small ones are not.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch


class Piece(NamedTuple):
    """Some layers, tokens and heads of a block in an engine's memory.

    Keys and values are [layer, token, head, dim], where an engine's packing may split the token and
    dim axes further: [layer, token // 32, 32, head, dim // 2, 2] is fine.
    """

    layers: slice
    tokens: slice
    keys: torch.Tensor
    values: torch.Tensor
    heads: slice = slice(None)


Views = Sequence[Piece]


def halves(views: Views, block: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield keys and values of every piece, each with its place in the block, of one shape."""
    for layers, tokens, keys, values, heads in views:
        yield keys, block[layers, 0, tokens, heads].view(keys.shape)
        yield values, block[layers, 1, tokens, heads].view(values.shape)


def are_whole(views: Views, block: torch.Tensor) -> bool:
    """Whether the views are all of a block.

    A piece too few would leave what was there before, and pass for KV.
    """
    return 2 * sum(piece.keys.numel() for piece in views) == block.numel()


def gather(views: Views, block: torch.Tensor) -> None:
    """Copy an engine's tokens into a canonical block."""
    assert are_whole(views, block), "not a whole block"
    for tensor, place in halves(views, block):
        place.copy_(tensor)


def scatter(block: torch.Tensor, views: Views) -> None:
    """Copy a canonical block into an engine's memory.

    Of a block that is in part the engine's own already, the views have only the other pieces.
    """
    for tensor, place in halves(views, block):
        tensor.copy_(place)
