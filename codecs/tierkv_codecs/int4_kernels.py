"""Kernels of `int4`: the functions of `int4` in torch, fused, for blocks in host memory.

A block's values come and go as the upper bits of float32 (`bits.kernel_bits`), in the order
[layer, K/V, token, head, dim].
"""

from typing import NamedTuple

import numpy as np

from tierkv_codecs.bits import (
    FIRST_NOT_FINITE,
    HALF_INFINITE,
    Bytes,
    Floats,
    Halves,
    Integers,
    affine_parameters,
    bits_of,
    float_of,
    inlined,
    kernel,
    least,
    most,
    of_half,
    upper_bits,
)
from tierkv_codecs.fixed import Shape

LEVELS = 15
GROUP = 32
"""Tokens of a key group, and channels of a value group, unless the axis ends."""


class Turn(NamedTuple):
    """Neighbouring layers with one RoPE: cos and sin [token, pair] of the tokens behind sinks."""

    start: int
    stop: int
    interleaved: bool
    cos: Floats
    sin: Floats


@inlined
def _result(worst: np.int32, largest: np.int32) -> int:
    """Return 1 for values that are not finite, 2 for ones too large for float16, else 0."""
    return 1 if worst >= FIRST_NOT_FINITE else 2 if largest >= HALF_INFINITE else 0


@inlined
def _code(value: np.float32, shift: np.float32, inverse: np.float32) -> np.int32:
    code = (value - shift) * inverse
    return np.int32(least(most(code, np.float32(0.0)), np.float32(LEVELS)) + np.float32(0.5))


# Each kernel works on a tile, at most 32 heads of a token: a call costs as much as a few hundred
# values. Every innermost loop runs over slices from their start, or it would not be vectorised.


@kernel
def _load(source: Integers, by: int, start: int, stride: int, dim: int, tile: Floats) -> np.int32:
    """Read heads that lie `stride` heads apart; returns the largest magnitude's bits."""
    worst = np.int32(0)
    for number in range(len(tile)):
        at = (start + number * stride) * dim
        part, row = source[at : at + dim], tile[number]
        for channel in range(dim):
            bits = np.int32(np.int32(part[channel]) << by)
            worst = most(worst, np.int32(bits & 0x7FFF_FFFF))
            row[channel] = float_of(bits)
    return worst


@kernel
def _store(tile: Floats, target: Integers, by: int, start: int, stride: int, dim: int) -> None:
    """Write heads that lie `stride` heads apart."""
    for number in range(len(tile)):
        at = (start + number * stride) * dim
        part, row = target[at : at + dim], tile[number]
        for channel in range(dim):
            part[channel] = upper_bits(row[channel], by)


@kernel
def _rotate(tile: Floats, cos: Floats, sin: Floats) -> None:
    """Turn the heads' leading dimensions in place, as halves (see `rope.table`)."""
    half = cos.shape[1]
    for number in range(len(tile)):
        first, second = tile[number, :half], tile[number, half : 2 * half]
        cosine, sine = cos[number], sin[number]
        for at in range(half):
            one, other = first[at], second[at]
            first[at] = one * cosine[at] - other * sine[at]
            second[at] = other * cosine[at] + one * sine[at]


@kernel
def _rotate_neighbours(tile: Floats, cos: Floats, sin: Floats) -> None:
    """Turn the heads' leading dimensions in place, as interleaved neighbours."""
    half = cos.shape[1]
    for number in range(len(tile)):
        row, cosine, sine = tile[number], cos[number], sin[number]
        for at in range(half):
            one, other = row[2 * at], row[2 * at + 1]
            row[2 * at] = one * cosine[at] - other * sine[at]
            row[2 * at + 1] = other * cosine[at] + one * sine[at]


@kernel
def _channel_extremes(tile: Floats, low: Floats, high: Floats) -> None:
    """Find least and greatest of each channel."""
    for channel in range(len(low)):
        low[channel] = high[channel] = tile[0, channel]
    for number in range(1, len(tile)):
        row = tile[number]
        for channel in range(len(low)):
            low[channel] = least(low[channel], row[channel])
            high[channel] = most(high[channel], row[channel])


@kernel
def _group_extremes(tile: Floats, dim: int, low: Floats, high: Floats) -> None:
    """Find least and greatest of each head's groups of channels.

    Signs and magnitudes are compared as integers in order: the extremes of those vectorise.
    """
    groups = (dim + GROUP - 1) // GROUP
    for number in range(len(tile)):
        for group in range(groups):
            part = tile[number, group * GROUP : min(group * GROUP + GROUP, dim)]
            lower, upper = np.int32(0x7FFF_FFFF), np.int32(-0x8000_0000)
            for at in range(len(part)):
                bits = np.int32(bits_of(part[at]))
                order = np.int32(bits ^ ((bits >> 31) & 0x7FFF_FFFF))
                lower, upper = least(lower, order), most(upper, order)
            low[number * groups + group] = float_of(lower ^ ((lower >> 31) & 0x7FFF_FFFF))
            high[number * groups + group] = float_of(upper ^ ((upper >> 31) & 0x7FFF_FFFF))


@kernel
def _steps(shifts: Halves, spans: Halves, shift: Floats, step: Floats) -> None:
    """Read parameters back."""
    for at in range(len(shift)):
        shift[at] = of_half(shifts[at])
        step[at] = of_half(spans[at]) / np.float32(LEVELS)


@kernel
def _pair(shifts: Halves, spans: Halves, groups: int, pairs: Halves) -> None:
    """Write the parameters of heads: the shifts of a head's groups, then their spans."""
    for at in range(len(pairs) // 2):
        to = at // groups * 2 * groups + at % groups
        pairs[to], pairs[to + groups] = shifts[at], spans[at]


@kernel
def _part(pairs: Halves, groups: int, shifts: Halves, spans: Halves) -> None:
    """Read what `_pair` has written."""
    for at in range(len(pairs) // 2):
        to = at // groups * 2 * groups + at % groups
        shifts[at], spans[at] = pairs[to], pairs[to + groups]


@kernel
def _spread(of_groups: Floats, dim: int, of_channels: Floats) -> None:
    """Repeat the numbers of each head's groups for each of its channels."""
    groups = (dim + GROUP - 1) // GROUP
    for number in range(len(of_channels)):
        for group in range(groups):
            part = of_channels[number, group * GROUP : min(group * GROUP + GROUP, dim)]
            for at in range(len(part)):
                part[at] = of_groups[number * groups + group]


@kernel
def _pack(
    tile: Floats, shift: Floats, inverse: Floats, codes: Bytes, start: int, stride: int
) -> None:
    """Write the codes of heads; `shift` and `inverse` are [1 or head, channel]."""
    width, rows = tile.shape[1] // 2, len(shift)
    for number in range(len(tile)):
        at = (start + number * stride) * width
        to, row = codes[at : at + width], min(number, rows - 1)
        first, second = tile[number, :width], tile[number, width:]
        shift_one, shift_two = shift[row, :width], shift[row, width:]
        inverse_one, inverse_two = inverse[row, :width], inverse[row, width:]
        for byte in range(width):
            lower = _code(first[byte], shift_one[byte], inverse_one[byte])
            upper = _code(second[byte], shift_two[byte], inverse_two[byte])
            to[byte] = np.uint8(lower | (upper << 4))


@kernel
def _unpack(
    codes: Bytes, start: int, stride: int, shift: Floats, step: Floats, tile: Floats
) -> None:
    """Read the values of heads back."""
    width, rows = tile.shape[1] // 2, len(shift)
    for number in range(len(tile)):
        at = (start + number * stride) * width
        coded, row = codes[at : at + width], min(number, rows - 1)
        first, second = tile[number, :width], tile[number, width:]
        shift_one, shift_two = shift[row, :width], shift[row, width:]
        step_one, step_two = step[row, :width], step[row, width:]
        for byte in range(width):
            code = np.int32(coded[byte])
            first[byte] = shift_one[byte] + np.float32(code & 15) * step_one[byte]
            second[byte] = shift_two[byte] + np.float32(code >> 4) * step_two[byte]


@kernel
def code_keys(
    source: Integers, by: int, shape: Shape, turn: Turn, parameters: Halves, codes: Bytes
) -> int:
    """Code the keys of some layers; `parameters` and `codes` are those of all layers."""
    tokens, heads, dim = shape.tokens - shape.sinks, shape.heads, shape.dim
    width, groups = (dim + 1) // 2, (tokens + GROUP - 1) // GROUP
    whole = np.zeros((GROUP, 2 * width), np.float32)
    low, high = np.zeros((1, 2 * width), np.float32), np.zeros((1, 2 * width), np.float32)
    worst, largest = np.int32(0), np.int32(0)
    for task in range(turn.start * groups * heads, turn.stop * groups * heads):
        layer, group, head = task // (groups * heads), task // heads % groups, task % heads
        first, last = group * GROUP, min(group * GROUP + GROUP, tokens)
        tile = whole[: last - first]
        start = (layer * 2 * shape.tokens + shape.sinks + first) * heads + head
        worst = most(worst, _load(source, by, start, heads, dim, tile))
        if turn.interleaved:
            _rotate_neighbours(tile, turn.cos[first:last], turn.sin[first:last])
        else:
            _rotate(tile, turn.cos[first:last], turn.sin[first:last])
        _channel_extremes(tile, low[0, :dim], high[0, :dim])
        at = task * 2 * dim
        shifts, spans = parameters[at : at + dim], parameters[at + dim : at + 2 * dim]
        largest = most(
            largest, affine_parameters(low[0, :dim], high[0, :dim], LEVELS, shifts, spans)
        )
        _pack(tile, low, high, codes, (layer * tokens + first) * heads + head, heads)
    return _result(worst, largest)


@kernel
def restore_keys(
    target: Integers, by: int, shape: Shape, turn: Turn, parameters: Halves, codes: Bytes
) -> None:
    """Fill the keys of some layers behind the sinks."""
    tokens, heads, dim = shape.tokens - shape.sinks, shape.heads, shape.dim
    width, groups = (dim + 1) // 2, (tokens + GROUP - 1) // GROUP
    whole = np.zeros((GROUP, 2 * width), np.float32)
    shift, step = np.zeros((1, 2 * width), np.float32), np.zeros((1, 2 * width), np.float32)
    for task in range(turn.start * groups * heads, turn.stop * groups * heads):
        layer, group, head = task // (groups * heads), task // heads % groups, task % heads
        first, last = group * GROUP, min(group * GROUP + GROUP, tokens)
        tile = whole[: last - first]
        at = task * 2 * dim
        shifts, spans = parameters[at : at + dim], parameters[at + dim : at + 2 * dim]
        _steps(shifts, spans, shift[0], step[0])
        _unpack(codes, (layer * tokens + first) * heads + head, heads, shift, step, tile)
        if turn.interleaved:
            _rotate_neighbours(tile, turn.cos[first:last], turn.sin[first:last])
        else:
            _rotate(tile, turn.cos[first:last], turn.sin[first:last])
        start = (layer * 2 * shape.tokens + shape.sinks + first) * heads + head
        _store(tile, target, by, start, heads, dim)


@kernel
def code_values(source: Integers, by: int, shape: Shape, parameters: Halves, codes: Bytes) -> int:
    """Code the values of all layers."""
    dim, width, groups = shape.dim, (shape.dim + 1) // 2, (shape.dim + GROUP - 1) // GROUP
    behind = (shape.tokens - shape.sinks) * shape.heads
    whole = np.zeros((GROUP, 2 * width), np.float32)
    shift, inverse = np.zeros_like(whole), np.zeros_like(whole)
    low, high = np.zeros(GROUP * groups, np.float32), np.zeros(GROUP * groups, np.float32)
    shifts, spans = np.zeros(GROUP * groups, np.uint16), np.zeros(GROUP * groups, np.uint16)
    worst, largest = np.int32(0), np.int32(0)
    for layer in range(shape.layers):
        for first in range(0, behind, GROUP):
            count = min(GROUP, behind - first)
            tile, of_groups = whole[:count], count * groups
            start = ((layer * 2 + 1) * shape.tokens + shape.sinks) * shape.heads + first
            worst = most(worst, _load(source, by, start, 1, dim, tile))
            _group_extremes(tile, dim, low, high)
            found = affine_parameters(low[:of_groups], high[:of_groups], LEVELS, shifts, spans)
            largest = most(largest, found)
            vector = layer * behind + first
            into = parameters[vector * 2 * groups : (vector + count) * 2 * groups]
            _pair(shifts, spans, groups, into)
            _spread(low, dim, shift[:count])
            _spread(high, dim, inverse[:count])
            _pack(tile, shift[:count], inverse[:count], codes, vector, 1)
    return _result(worst, largest)


@kernel
def restore_values(
    target: Integers, by: int, shape: Shape, parameters: Halves, codes: Bytes
) -> None:
    """Fill the values of all layers behind the sinks."""
    dim, width, groups = shape.dim, (shape.dim + 1) // 2, (shape.dim + GROUP - 1) // GROUP
    behind = (shape.tokens - shape.sinks) * shape.heads
    whole = np.zeros((GROUP, 2 * width), np.float32)
    shift, step = np.zeros_like(whole), np.zeros_like(whole)
    low, high = np.zeros(GROUP * groups, np.float32), np.zeros(GROUP * groups, np.float32)
    shifts, spans = np.zeros(GROUP * groups, np.uint16), np.zeros(GROUP * groups, np.uint16)
    for layer in range(shape.layers):
        for first in range(0, behind, GROUP):
            count = min(GROUP, behind - first)
            tile, of_groups = whole[:count], count * groups
            vector = layer * behind + first
            _part(
                parameters[vector * 2 * groups : (vector + count) * 2 * groups],
                groups,
                shifts,
                spans,
            )
            _steps(shifts, spans, low[:of_groups], high[:of_groups])
            _spread(low, dim, shift[:count])
            _spread(high, dim, step[:count])
            _unpack(codes, vector, 1, shift[:count], step[:count], tile)
            start = ((layer * 2 + 1) * shape.tokens + shape.sinks) * shape.heads + first
            _store(tile, target, by, start, 1, dim)
