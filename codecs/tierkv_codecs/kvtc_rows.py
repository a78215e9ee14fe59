"""Blocks to feature rows and back: RoPE removed, all layers and heads of a token side by side.

On a CPU two fused kernels do it; the torch functions beside them say what they compute, and work on
any device.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tierkv.identity import LayerSpec
from tierkv_codecs.bits import (
    KERNEL_DTYPES,
    Floats,
    Integers,
    float_of,
    kernel,
    least,
    most,
    upper_bits,
)
from tierkv_codecs.rope import Turn, rope, turns, unrope
from tierkv_codecs.tensors import bits_of

TILE = 32
"""Tokens that are turned from columns into rows at a time."""


def rows_of(
    block: torch.Tensor, layers: Sequence[LayerSpec], position: int, means: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return centred keys without RoPE and centred values, float32 [token, features] each.

    Args:
        block: [layer, K/V, token, head, dim].
        layers: of its first axis.
        position: of its first token.
        means: float32 [features] of both sides, on the block's device.

    Raises: Unsuited for a RoPE that is not known.
    """
    if block.device.type != "cpu":
        return plain_rows_of(block, layers, position, means)
    source = block if block.dtype in KERNEL_DTYPES else block.float()
    bits = bits_of(source).flatten(3).numpy()
    count, _, tokens, width = bits.shape
    keys, values = (np.empty((tokens, count * width), np.float32) for _ in range(2))
    key_mean, value_mean = (mean.numpy() for mean in means)
    dim = block.shape[4]
    for turn in turns(layers, dim, position, tokens, inverse=True):
        by = 8 * (4 - source.itemsize)
        _gather(bits, by, dim, turn, key_mean, value_mean, keys, values)
    return torch.from_numpy(keys), torch.from_numpy(values)


def plain_rows_of(
    block: torch.Tensor, layers: Sequence[LayerSpec], position: int, means: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `rows_of`, in torch alone."""
    keys, values = unrope(block[:, 0], layers, position), block[:, 1].float()
    flat = (side.transpose(0, 1).reshape(block.shape[2], -1) for side in (keys, values))
    first, second = (side - mean for side, mean in zip(flat, means, strict=True))
    return first, second


def write_rows(
    rows: tuple[torch.Tensor, torch.Tensor],
    layers: Sequence[LayerSpec],
    position: int,
    means: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> None:
    """Fill `out` [layer, K/V, token, head, dim] from centred rows: the inverse of `rows_of`.

    `rows` and `means` may be those of a run of layers, whose `layers` and `out` are given. What a
    dtype cannot hold becomes its largest finite value.
    """
    if out.device.type != "cpu":
        plain_write_rows(rows, layers, position, means, out)
        return
    plain = out.dtype in KERNEL_DTYPES and out.stride()[3:] == (out.shape[4], 1)
    into = out if plain else torch.empty(out.shape)
    keys, values = (
        bits_of(side if side.dtype in KERNEL_DTYPES else side.float()).T.contiguous().numpy()
        for side in rows
    )
    by, of_rows = 8 * (4 - into.itemsize), 8 * (4 - keys.itemsize)
    limit = np.float32(torch.finfo(out.dtype).max)
    key_mean, value_mean = (mean.numpy() for mean in means)
    bits, dim = bits_of(into).flatten(3).numpy(), out.shape[4]
    for turn in turns(layers, dim, position, out.shape[2], inverse=False):
        _scatter(bits, by, dim, turn, key_mean, value_mean, keys, values, of_rows, limit)
    if into is not out:
        out.copy_(into)


def plain_write_rows(
    rows: tuple[torch.Tensor, torch.Tensor],
    layers: Sequence[LayerSpec],
    position: int,
    means: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> None:
    """Do as `write_rows`, in torch alone."""
    count, _, tokens, heads, dim = out.shape
    most_of = torch.finfo(out.dtype).max
    keys, values = (
        (side.float() + mean).view(tokens, count, heads, dim).transpose(0, 1)
        for side, mean in zip(rows, means, strict=True)
    )
    out[:, 0] = rope(keys, layers, position).clamp_(-most_of, most_of).to(out.dtype)
    out[:, 1] = values.clamp(-most_of, most_of).to(out.dtype)


# All heads of a token at a time: a call costs as much as a few hundred values. Every innermost loop
# runs over slices from their start, or it would not be vectorised.


@kernel
def _load(bits: Integers, by: int, to: Floats) -> None:
    if by:  # a shift that the compiler knows takes 32 bits, another one 64
        for i in range(len(to)):
            to[i] = float_of(np.int32(bits[i]) << 16)
    else:
        for i in range(len(to)):
            to[i] = float_of(np.int32(bits[i]))


@kernel
def _turn(bits: Integers, by: int, tile: Floats) -> None:
    """Fill the first rows of a tile with the columns of `bits` [features, tokens]."""
    for i in range(len(bits)):
        row = bits[i]
        if by:
            for j in range(len(row)):
                tile[j, i] = float_of(np.int32(row[j]) << 16)
        else:
            for j in range(len(row)):
                tile[j, i] = float_of(np.int32(row[j]))


@kernel
def _store(line: Floats, limit: np.float32, by: int, bits: Integers) -> None:
    for i in range(len(line)):
        bits[i] = upper_bits(least(most(line[i], -limit), limit), by)


@kernel
def _rotate(line: Floats, dim: int, cos: Floats, sin: Floats, interleaved: bool) -> None:  # noqa: FBT001
    """Turn the leading dimensions of heads in place (see `rope.table`)."""
    half = len(cos)
    for start in range(0, len(line), dim):
        if interleaved:
            pairs = line[start : start + 2 * half]
            for i in range(half):
                one, other = pairs[2 * i], pairs[2 * i + 1]
                pairs[2 * i] = one * cos[i] - other * sin[i]
                pairs[2 * i + 1] = other * cos[i] + one * sin[i]
            continue
        first, second = line[start : start + half], line[start + half : start + 2 * half]
        for i in range(half):
            one, other = first[i], second[i]
            first[i] = one * cos[i] - other * sin[i]
            second[i] = other * cos[i] + one * sin[i]


@kernel
def _gather(
    block: Integers,
    by: int,
    dim: int,
    turn: Turn,
    key_mean: Floats,
    value_mean: Floats,
    keys: Floats,
    values: Floats,
) -> None:
    """Fill the features of some layers from the upper bits of [layer, side, token, width]."""
    _, _, tokens, width = block.shape
    for layer in range(turn.start, turn.stop):
        start, stop = layer * width, (layer + 1) * width
        key_middle, value_middle = key_mean[start:stop], value_mean[start:stop]
        for t in range(tokens):
            line = values[t, start:stop]
            _load(block[layer, 1, t], by, line)
            for i in range(width):
                line[i] -= value_middle[i]
            line = keys[t, start:stop]
            _load(block[layer, 0, t], by, line)
            _rotate(line, dim, turn.cos[t], turn.sin[t], turn.interleaved)
            for i in range(width):
                line[i] -= key_middle[i]


@kernel
def _scatter(  # noqa: PLR0913, PLR0917
    block: Integers,
    by: int,
    dim: int,
    turn: Turn,
    key_mean: Floats,
    value_mean: Floats,
    keys: Integers,
    values: Integers,
    of_rows: int,
    limit: np.float32,
) -> None:
    """Write the upper bits of some layers' values from those of their features [feature, token].

    A product has tokens side by side, so tiles of some tokens are turned on the way.
    """
    _, _, tokens, width = block.shape
    tile = np.zeros((TILE, width), np.float32)
    for layer in range(turn.start, turn.stop):
        start, stop = layer * width, (layer + 1) * width
        key_middle, value_middle = key_mean[start:stop], value_mean[start:stop]
        for first in range(0, tokens, TILE):
            last = min(first + TILE, tokens)
            _turn(values[start:stop, first:last], of_rows, tile)
            for t in range(first, last):
                line = tile[t - first]
                for i in range(width):
                    line[i] += value_middle[i]
                _store(line, limit, by, block[layer, 1, t])
            _turn(keys[start:stop, first:last], of_rows, tile)
            for t in range(first, last):
                line = tile[t - first]
                for i in range(width):
                    line[i] += key_middle[i]
                _rotate(line, dim, turn.cos[t], turn.sin[t], turn.interleaved)
                _store(line, limit, by, block[layer, 0, t])
