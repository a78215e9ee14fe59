"""Blocks to feature rows and back: RoPE removed, all layers and heads of a token side by side.

On a CPU two fused kernels do it; the torch functions beside them say what they compute, and work on
any device.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.identity import LayerSpec
from tierkv_codecs.bits import (
    KERNEL_DTYPES,
    Floats,
    Integers,
    float_of,
    inlined,
    kernel,
    least,
    most,
    shifted_left,
    upper_bits,
    widest,
)
from tierkv_codecs.rope import Turn, rope, turns, unrope
from tierkv_codecs.tensors import bits_of

Tokens = NDArray[np.int64]


class Rows(NamedTuple):
    """A side's centred features [token, features]: float32, and the same in bfloat16."""

    exact: torch.Tensor
    narrow: torch.Tensor

    @classmethod
    def of(cls, exact: torch.Tensor) -> Self:
        return cls(exact, exact.bfloat16())


def rows_of(
    block: torch.Tensor, layers: Sequence[LayerSpec], position: int, means: tuple[torch.Tensor, ...]
) -> tuple[Rows, Rows]:
    """Return centred keys without RoPE and centred values.

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
    shape, middles = (tokens, count * width), (means[0].numpy(), means[1].numpy())
    keys, values = (
        Rows(torch.empty(shape), torch.empty(shape, dtype=torch.bfloat16)) for _ in range(2)
    )
    exact = (keys.exact.numpy(), values.exact.numpy())
    narrow = (bits_of(keys.narrow).numpy(), bits_of(values.narrow).numpy())
    dim, by = block.shape[4], 8 * (4 - source.itemsize)
    for turn in turns(layers, dim, position, tokens, inverse=True):
        _gather(bits, by, dim, turn, middles, exact, narrow)
    return keys, values


def plain_rows_of(
    block: torch.Tensor, layers: Sequence[LayerSpec], position: int, means: tuple[torch.Tensor, ...]
) -> tuple[Rows, Rows]:
    """Do as `rows_of`, in torch alone."""
    keys, values = unrope(block[:, 0], layers, position), block[:, 1].float()
    flat = (side.transpose(0, 1).reshape(block.shape[2], -1) for side in (keys, values))
    first, second = (Rows.of(side - mean) for side, mean in zip(flat, means, strict=True))
    return first, second


def write_rows(
    rows: tuple[torch.Tensor, torch.Tensor],
    layers: Sequence[LayerSpec],
    position: int,
    means: tuple[torch.Tensor, ...],
    order: Tokens,
    out: torch.Tensor,
) -> None:
    """Fill `out` [layer, K/V, token, head, dim] from centred rows: the inverse of `rows_of`.

    `rows` and `means` may be those of a run of layers, whose `layers` and `out` are given; `order`
    says which token each row is. What a dtype cannot hold becomes its largest finite value.
    """
    if out.device.type != "cpu":
        plain_write_rows(rows, layers, position, means, order, out)
        return
    plain = out.dtype in KERNEL_DTYPES and out.stride()[3:] == (out.shape[4], 1)
    into = out if plain else torch.empty(out.shape)
    keys, values = (
        bits_of(side if side.dtype in KERNEL_DTYPES else side.float()).T.contiguous().numpy()
        for side in rows
    )
    by, of_rows = 8 * (4 - into.itemsize), 8 * (4 - keys.itemsize)
    limit = np.float32(torch.finfo(out.dtype).max)
    middles = (means[0].numpy(), means[1].numpy())
    bits, dim = bits_of(into).flatten(3).numpy(), out.shape[4]
    for turn in turns(layers, dim, position, out.shape[2], inverse=False):
        cos, sin = (np.ascontiguousarray(of[order].T) for of in (turn.cos, turn.sin))
        by_pair = turn._replace(cos=cos, sin=sin)
        _scatter(bits, by, dim, by_pair, middles, (keys, values), order, of_rows, limit)
    if into is not out:
        out.copy_(into)


def plain_write_rows(
    rows: tuple[torch.Tensor, torch.Tensor],
    layers: Sequence[LayerSpec],
    position: int,
    means: tuple[torch.Tensor, ...],
    order: Tokens,
    out: torch.Tensor,
) -> None:
    """Do as `write_rows`, in torch alone."""
    count, _, tokens, heads, dim = out.shape
    most_of, place = torch.finfo(out.dtype).max, torch.from_numpy(np.argsort(order))
    keys, values = (
        (side[place.to(side.device)].float() + mean).view(tokens, count, heads, dim).transpose(0, 1)
        for side, mean in zip(rows, means, strict=True)
    )
    out[:, 0] = rope(keys, layers, position).clamp_(-most_of, most_of).to(out.dtype)
    out[:, 1] = values.clamp(-most_of, most_of).to(out.dtype)


# Every innermost loop runs over slices from their start, or it would not be vectorised.


@inlined
def _load(bits: Integers, by: int, line: Floats) -> None:
    for i in range(len(line)):
        line[i] = float_of(shifted_left(bits[i], by))


@inlined
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


@inlined
def _centre(line: Floats, middle: Floats, exact: Floats, narrow: Integers) -> None:
    for i in range(len(line)):
        line[i] -= middle[i]
        exact[i] = line[i]
    for i in range(len(line)):
        narrow[i] = np.int16(upper_bits(line[i], 16))


@kernel
def _gather(
    block: Integers,
    by: int,
    dim: int,
    turn: Turn,
    means: tuple[Floats, Floats],
    exact: tuple[Floats, Floats],
    narrow: tuple[Integers, Integers],
) -> None:
    """Fill the features of some layers from the upper bits of [layer, side, token, width]."""
    widest()
    _, _, tokens, width = block.shape
    line = np.zeros(width, np.float32)
    for side in range(2):
        middle = means[side]
        for t in range(tokens):  # written from start to end: more memory than is read
            wide, less = exact[side][t], narrow[side][t]
            for layer in range(turn.start, turn.stop):
                start, stop = layer * width, (layer + 1) * width
                _load(block[layer, side, t], by, line)
                if side == 0:
                    _rotate(line, dim, turn.cos[t], turn.sin[t], turn.interleaved)
                _centre(line, middle[start:stop], wide[start:stop], less[start:stop])


@inlined
def _raise(bits: Integers, by: int, mean: np.float32, row: Floats) -> None:
    """Read a feature of all tokens and add its mean."""
    for t in range(len(row)):
        row[t] = float_of(shifted_left(bits[t], by)) + mean


@inlined
def _lower(row: Floats, limit: np.float32, by: int, bits: Integers) -> None:
    for t in range(len(row)):
        bits[t] = upper_bits(least(most(row[t], -limit), limit), by)


@inlined
def _turn(one: Floats, other: Floats, cos: Floats, sin: Floats) -> None:
    """Turn a pair of features of all tokens in place."""
    for t in range(len(one)):
        first, second = one[t], other[t]
        one[t] = first * cos[t] - second * sin[t]
        other[t] = second * cos[t] + first * sin[t]


@inlined
def _transpose(tile: Integers, order: Tokens, out: Integers) -> None:
    """Fill [token, width] from [width, token], whose tokens stand in another order."""
    for t in range(len(order)):
        line = out[order[t]]
        for i in range(len(line)):
            line[i] = tile[i, t]


@kernel
def _scatter(  # noqa: PLR0913, PLR0917
    block: Integers,
    by: int,
    dim: int,
    turn: Turn,
    means: tuple[Floats, Floats],
    sides: tuple[Integers, Integers],
    order: Tokens,
    of_rows: int,
    limit: np.float32,
) -> None:
    """Write the upper bits of some layers' values from those of their features [feature, token].

    A product has tokens side by side, so they are turned together, and come into order last, when
    they are smallest.
    """
    widest()
    _, _, tokens, width = block.shape
    half = len(turn.cos)
    rows, tile = np.zeros((dim, tokens), np.float32), np.zeros((width, tokens), block.dtype)
    for layer in range(turn.start, turn.stop):
        for side in range(2):
            for head in range(0, width, dim):
                first = layer * width + head
                for i in range(dim):
                    _raise(sides[side][first + i], of_rows, means[side][first + i], rows[i])
                if side == 0:
                    for i in range(half):
                        at, step = (2 * i, 1) if turn.interleaved else (i, half)
                        _turn(rows[at], rows[at + step], turn.cos[i], turn.sin[i])
                for i in range(dim):
                    _lower(rows[i], limit, by, tile[head + i])
            _transpose(tile, order, block[layer, side])
