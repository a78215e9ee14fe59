"""Blocks to feature rows and back: RoPE removed, all layers and heads of a token side by side.

On a CPU two fused kernels do it; the torch functions beside them say what they compute, and work on
any device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit

from tierkv.identity import LayerSpec, Rope
from tierkv_codecs.rope import rope, rotary_dim, table, unrope


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
    values = block.float().contiguous().numpy()
    count, _, tokens, heads, dim = values.shape
    keys, rest = (np.empty((tokens, count * heads * dim), np.float32) for _ in range(2))
    for number, layer in enumerate(layers):
        turn = _turn(layer.rope, dim, position, tokens, inverse=True)
        _gather(values[number], *turn, number, means[0].numpy(), means[1].numpy(), keys, rest)
    return torch.from_numpy(keys), torch.from_numpy(rest)


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
    keys, rest = (side.float().contiguous().numpy() for side in rows)
    count, _, tokens, heads, dim = out.shape
    values = np.empty((count, 2, tokens, heads, dim), np.float32)
    most = torch.finfo(out.dtype).max
    for number, layer in enumerate(layers):
        turn = _turn(layer.rope, dim, position, tokens, inverse=False)
        sides = (means[0].numpy(), means[1].numpy(), keys, rest)
        _scatter(values[number], *turn, number, *sides, np.float32(most))
    out.copy_(torch.from_numpy(values))


def plain_write_rows(
    rows: tuple[torch.Tensor, torch.Tensor],
    layers: Sequence[LayerSpec],
    position: int,
    means: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> None:
    """Do as `write_rows`, in torch alone."""
    count, _, tokens, heads, dim = out.shape
    most = torch.finfo(out.dtype).max
    keys, values = (
        (side.float() + mean).view(tokens, count, heads, dim).transpose(0, 1)
        for side, mean in zip(rows, means, strict=True)
    )
    out[:, 0] = rope(keys, layers, position).clamp_(-most, most).to(out.dtype)
    out[:, 1] = values.clamp(-most, most).to(out.dtype)


def _turn(one: Rope, dim: int, position: int, tokens: int, *, inverse: bool) -> tuple[Any, ...]:
    """Return cos and sin [token, pairs], the stride of pairs, and the step within one."""
    pairs = rotary_dim(one, dim) // 2
    if not pairs:
        nothing = np.zeros((tokens, 0), np.float32)
        return nothing, nothing, 1, 0
    cos, sin = table(one, dim, position, tokens, inverse=inverse)
    return (cos, sin, 2, 1) if one.interleaved else (cos, sin, 1, pairs)


def _jit(function: Any) -> Any:  # noqa: ANN401 - numba has no types
    return njit(nogil=True, cache=True)(function)


@_jit
def _gather(block, cos, sin, stride, step, number, key_mean, value_mean, keys, values):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0913, PLR0917
    _, tokens, heads, dim = block.shape
    pairs = cos.shape[1]
    for t in range(tokens):
        for h in range(heads):
            at = (number * heads + h) * dim
            for i in range(dim):
                values[t, at + i] = block[1, t, h, i] - value_mean[at + i]
            for i in range(2 * pairs, dim):
                keys[t, at + i] = block[0, t, h, i] - key_mean[at + i]
            for i in range(pairs):
                one, two = i * stride, i * stride + step
                x, y = block[0, t, h, one], block[0, t, h, two]
                keys[t, at + one] = x * cos[t, i] - y * sin[t, i] - key_mean[at + one]
                keys[t, at + two] = y * cos[t, i] + x * sin[t, i] - key_mean[at + two]


@_jit
def _scatter(block, cos, sin, stride, step, number, key_mean, value_mean, keys, values, most):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0913, PLR0917
    _, tokens, heads, dim = block.shape
    pairs = cos.shape[1]
    for t in range(tokens):
        for h in range(heads):
            at = (number * heads + h) * dim
            for i in range(dim):
                v = values[t, at + i] + value_mean[at + i]
                block[1, t, h, i] = min(max(v, -most), most)
            for i in range(2 * pairs, dim):
                v = keys[t, at + i] + key_mean[at + i]
                block[0, t, h, i] = min(max(v, -most), most)
            for i in range(pairs):
                one, two = i * stride, i * stride + step
                x = keys[t, at + one] + key_mean[at + one]
                y = keys[t, at + two] + key_mean[at + two]
                block[0, t, h, one] = min(max(x * cos[t, i] - y * sin[t, i], -most), most)
                block[0, t, h, two] = min(max(y * cos[t, i] + x * sin[t, i], -most), most)
