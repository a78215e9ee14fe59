"""Kernels of `int4`: the functions of `int4` in torch, fused, for blocks in host memory.

A block's values come and go as the upper bits of float32 (`bits.kernel_bits`), in the order
[layer, K/V, token, head, dim].
"""

import numpy as np

from tierkv_codecs.bits import (
    FIRST_NOT_FINITE,
    HALF_INFINITE,
    LAST,
    Bytes,
    Floats,
    Halves,
    Integers,
    affine_parameters,
    bits_of,
    float_of,
    in_order,
    inlined,
    kernel,
    least,
    most,
    of_half,
    shifted_left,
    upper_bits,
    widest,
)
from tierkv_codecs.fixed import Shape
from tierkv_codecs.rope import Turn

LEVELS = 15
GROUP = 32
"""Tokens of a key group, and channels of a value group, unless the axis ends."""


@inlined
def _result(worst: np.int32, largest: np.int32) -> int:
    """Return 1 for values that are not finite, 2 for ones too large for float16, else 0."""
    return 1 if worst >= FIRST_NOT_FINITE else 2 if largest >= HALF_INFINITE else 0


@inlined
def _code(value: np.float32, shift: np.float32, inverse: np.float32) -> np.float32:
    """Return a number that becomes the code when what follows its point is cut off."""
    code = (value - shift) * inverse
    return np.float32(least(most(code, np.float32(0.0)), np.float32(LEVELS)) + np.float32(0.5))


# Each kernel works on a tile, the heads of 32 tokens or 32 heads: a call costs as much as a few
# hundred values, and memory is written from its start to its end. Every innermost loop runs over
# few slices from their start, or it would not be vectorised: more than eight pairs that might
# overlap are too many for the compiler.


@kernel
def _load(source: Integers, by: int, start: int, dim: int, tile: Floats) -> np.int32:
    """Read heads that follow each other; returns the largest magnitude's bits."""
    widest()
    worst, (count, lanes) = np.int32(0), tile.shape
    # Heads without padding are one long row: a short one costs half as much again.
    rows, width = (count, dim) if dim < lanes else (1, count * dim)
    flat = tile.reshape(count * lanes)
    for number in range(rows):
        at = start * dim + number * width
        part, row = source[at : at + width], flat[number * lanes : number * lanes + width]
        for channel in range(width):
            bits = shifted_left(part[channel], by)
            worst = most(worst, np.int32(bits & 0x7FFF_FFFF))
            row[channel] = float_of(bits)
    return worst


@kernel
def _store(tile: Floats, target: Integers, by: int, start: int, dim: int) -> None:
    """Write heads that follow each other."""
    widest()
    count, lanes = tile.shape
    rows, width = (count, dim) if dim < lanes else (1, count * dim)
    flat = tile.reshape(count * lanes)
    for number in range(rows):
        at = start * dim + number * width
        part, row = target[at : at + width], flat[number * lanes : number * lanes + width]
        for channel in range(width):
            part[channel] = upper_bits(row[channel], by)


@kernel
def _rotate(tile: Floats, heads: int, turn: Turn, first: int) -> None:
    """Turn the leading dimensions of the heads of tokens from the first on, in place."""
    half = turn.cos.shape[1]
    for number in range(len(tile)):
        token = first + number // heads
        row, cosine, sine = tile[number], turn.cos[token], turn.sin[token]
        if turn.interleaved:
            for at in range(half):
                one, other = row[2 * at], row[2 * at + 1]
                row[2 * at] = one * cosine[at] - other * sine[at]
                row[2 * at + 1] = other * cosine[at] + one * sine[at]
            continue
        for at in range(half):
            one, other = row[at], row[half + at]
            row[at] = one * cosine[at] - other * sine[at]
            row[half + at] = other * cosine[at] + one * sine[at]


@kernel
def _channel_extremes(tile: Floats, low: Floats, high: Floats, order: Integers) -> None:
    """Find least and greatest of each channel; `order` has room for both."""
    widest()
    channels = len(low)
    lower, upper = order[:channels], order[channels : 2 * channels]
    for channel in range(channels):
        lower[channel], upper[channel] = LAST, ~LAST
    for number in range(len(tile)):
        row = tile[number]
        for channel in range(channels):
            one = in_order(bits_of(row[channel]))
            lower[channel] = least(lower[channel], one)
            upper[channel] = most(upper[channel], one)
    for channel in range(channels):
        low[channel] = float_of(in_order(lower[channel]))
        high[channel] = float_of(in_order(upper[channel]))


@kernel
def _group_extremes(tile: Floats, dim: int, low: Floats, high: Floats) -> None:
    """Find least and greatest of each head's groups of channels."""
    groups = (dim + GROUP - 1) // GROUP
    for number in range(len(tile)):
        for group in range(groups):
            part = tile[number, group * GROUP : min(group * GROUP + GROUP, dim)]
            lower, upper = LAST, ~LAST
            for at in range(len(part)):
                order = in_order(bits_of(part[at]))
                lower, upper = least(lower, order), most(upper, order)
            low[number * groups + group] = float_of(in_order(lower))
            high[number * groups + group] = float_of(in_order(upper))


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
def _channel_codes(tile: Floats, shift: Floats, inverse: Floats) -> None:
    """Turn values into codes, channel by channel."""
    widest()
    for number in range(len(tile)):
        row = tile[number]
        for channel in range(len(row)):
            row[channel] = _code(row[channel], shift[channel], inverse[channel])


@kernel
def _group_codes(tile: Floats, dim: int, shift: Floats, inverse: Floats) -> None:
    """Turn values into codes, group by group of each head's channels."""
    groups = (dim + GROUP - 1) // GROUP
    for number in range(len(tile)):
        for group in range(groups):
            part = tile[number, group * GROUP : min(group * GROUP + GROUP, dim)]
            at = number * groups + group
            for channel in range(len(part)):
                part[channel] = _code(part[channel], shift[at], inverse[at])


@kernel
def _channel_values(tile: Floats, shift: Floats, step: Floats) -> None:
    """Turn codes into values, channel by channel."""
    widest()
    for number in range(len(tile)):
        row = tile[number]
        for channel in range(len(row)):
            row[channel] = shift[channel] + row[channel] * step[channel]


@kernel
def _group_values(tile: Floats, dim: int, shift: Floats, step: Floats) -> None:
    """Turn codes into values, group by group of each head's channels."""
    groups = (dim + GROUP - 1) // GROUP
    for number in range(len(tile)):
        for group in range(groups):
            part = tile[number, group * GROUP : min(group * GROUP + GROUP, dim)]
            at = number * groups + group
            for channel in range(len(part)):
                part[channel] = shift[at] + part[channel] * step[at]


@kernel
def _pack(tile: Floats, codes: Bytes, start: int) -> None:
    """Write the codes of heads, which are what stands before the points of their numbers."""
    width = tile.shape[1] // 2
    for number in range(len(tile)):
        at = (start + number) * width
        to, row = codes[at : at + width], tile[number]
        for byte in range(width):
            to[byte] = np.uint8(np.int32(row[byte]) | (np.int32(row[width + byte]) << 4))


@kernel
def _unpack(codes: Bytes, start: int, tile: Floats) -> None:
    """Read the codes of heads back."""
    width = tile.shape[1] // 2
    for number in range(len(tile)):
        at = (start + number) * width
        coded, row = codes[at : at + width], tile[number]
        for byte in range(width):
            code = np.int32(coded[byte])
            row[byte], row[width + byte] = np.float32(code & 15), np.float32(code >> 4)


@kernel
def code_keys(
    source: Integers, by: int, shape: Shape, turn: Turn, parameters: Halves, codes: Bytes
) -> int:
    """Code the keys of some layers; `parameters` and `codes` are those of all layers."""
    tokens, heads, dim = shape.tokens - shape.sinks, shape.heads, shape.dim
    lanes, groups = (dim + 1) // 2 * 2, (tokens + GROUP - 1) // GROUP
    whole = np.zeros((GROUP * heads, lanes), np.float32)
    low, high = np.zeros(heads * lanes, np.float32), np.zeros(heads * lanes, np.float32)
    order = np.zeros(2 * heads * lanes, np.int32)
    worst, largest = np.int32(0), np.int32(0)
    for task in range(turn.start * groups, turn.stop * groups):
        layer, first = task // groups, task % groups * GROUP
        count = min(GROUP, tokens - first)
        tile = whole[: count * heads]
        wide = tile.reshape((count, heads * lanes))
        start = (layer * 2 * shape.tokens + shape.sinks + first) * heads
        worst = most(worst, _load(source, by, start, dim, tile))
        _rotate(tile, heads, turn, first)
        _channel_extremes(wide, low, high, order)
        for head in range(heads):
            at, lane = (task * heads + head) * 2 * dim, head * lanes
            shifts, spans = parameters[at : at + dim], parameters[at + dim : at + 2 * dim]
            found = affine_parameters(
                low[lane : lane + dim], high[lane : lane + dim], LEVELS, shifts, spans
            )
            largest = most(largest, found)
        _channel_codes(wide, low, high)
        _pack(tile, codes, (layer * tokens + first) * heads)
    return _result(worst, largest)


@kernel
def restore_keys(
    target: Integers, by: int, shape: Shape, turn: Turn, parameters: Halves, codes: Bytes
) -> None:
    """Fill the keys of some layers behind the sinks."""
    tokens, heads, dim = shape.tokens - shape.sinks, shape.heads, shape.dim
    lanes, groups = (dim + 1) // 2 * 2, (tokens + GROUP - 1) // GROUP
    whole = np.zeros((GROUP * heads, lanes), np.float32)
    shift, step = np.zeros(heads * lanes, np.float32), np.zeros(heads * lanes, np.float32)
    for task in range(turn.start * groups, turn.stop * groups):
        layer, first = task // groups, task % groups * GROUP
        count = min(GROUP, tokens - first)
        tile = whole[: count * heads]
        for head in range(heads):
            at, lane = (task * heads + head) * 2 * dim, head * lanes
            shifts, spans = parameters[at : at + dim], parameters[at + dim : at + 2 * dim]
            _steps(shifts, spans, shift[lane : lane + dim], step[lane : lane + dim])
        _unpack(codes, (layer * tokens + first) * heads, tile)
        _channel_values(tile.reshape((count, heads * lanes)), shift, step)
        _rotate(tile, heads, turn, first)
        start = (layer * 2 * shape.tokens + shape.sinks + first) * heads
        _store(tile, target, by, start, dim)


@kernel
def code_values(source: Integers, by: int, shape: Shape, parameters: Halves, codes: Bytes) -> int:
    """Code the values of all layers."""
    dim, width, groups = shape.dim, (shape.dim + 1) // 2, (shape.dim + GROUP - 1) // GROUP
    behind = (shape.tokens - shape.sinks) * shape.heads
    whole = np.zeros((GROUP, 2 * width), np.float32)
    low, high = np.zeros(GROUP * groups, np.float32), np.zeros(GROUP * groups, np.float32)
    shifts, spans = np.zeros(GROUP * groups, np.uint16), np.zeros(GROUP * groups, np.uint16)
    worst, largest = np.int32(0), np.int32(0)
    for layer in range(shape.layers):
        for first in range(0, behind, GROUP):
            count = min(GROUP, behind - first)
            tile, of_groups = whole[:count], count * groups
            start = ((layer * 2 + 1) * shape.tokens + shape.sinks) * shape.heads + first
            worst = most(worst, _load(source, by, start, dim, tile))
            _group_extremes(tile, dim, low, high)
            found = affine_parameters(low[:of_groups], high[:of_groups], LEVELS, shifts, spans)
            largest = most(largest, found)
            vector = layer * behind + first
            into = parameters[vector * 2 * groups : (vector + count) * 2 * groups]
            _pair(shifts, spans, groups, into)
            _group_codes(tile, dim, low, high)
            _pack(tile, codes, vector)
    return _result(worst, largest)


@kernel
def restore_values(
    target: Integers, by: int, shape: Shape, parameters: Halves, codes: Bytes
) -> None:
    """Fill the values of all layers behind the sinks."""
    dim, width, groups = shape.dim, (shape.dim + 1) // 2, (shape.dim + GROUP - 1) // GROUP
    behind = (shape.tokens - shape.sinks) * shape.heads
    whole = np.zeros((GROUP, 2 * width), np.float32)
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
            _unpack(codes, vector, tile)
            _group_values(tile, dim, low, high)
            start = ((layer * 2 + 1) * shape.tokens + shape.sinks) * shape.heads + first
            _store(tile, target, by, start, dim)
