"""Codec `int8` (id 3): eight bits a value; keys by channel, values by token and head.

Keys have channels that are far larger than the others: a scale for each token would drown those in
the rounding of the few. Keys stay as the engine holds them, with RoPE: at eight bits the rotation
costs nothing that can be measured, so any RoPE is taken. Keys that are not apart from values (one
plane instead of two) are coded like keys.

The codec's own bytes (see `fixed`), of the tokens behind the sinks; a group is shorter where the
block ends:

    u16  shift, span       float16 (see `affine`), of keys: [layer, group, shift/span, head, dim]
    u16  shift, span       float16, of values: [layer, token, head, shift/span]
    u8   code              of keys: [layer, token, head, dim]
    u8   code              of values: [layer, token, head, dim]

Error: at most span / 510, plus the float16 rounding of the group's ends and the rounding to the
block's dtype.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tierkv_codecs.affine import Coded, quantised, restored
from tierkv_codecs.bits import (
    FIRST_NOT_FINITE,
    HALF_INFINITE,
    LAST,
    Bytes,
    Floats,
    Halves,
    Integers,
    affine_parameters,
    float_of,
    in_order,
    kernel,
    least,
    most,
    of_half,
    shifted_left,
    upper_bits,
    widest,
)
from tierkv_codecs.codec import Place, Unsuited
from tierkv_codecs.fixed import FixedRate, Sections, Shape, behind

LEVELS = 255
GROUP = 128
"""Tokens of a key group."""
BATCH = 64
"""Heads of values whose parameters are found at once."""
PLANES = 2


@dataclass(frozen=True)
class Int8(FixedRate):
    """1.91 times smaller than 16 bits at heads of 64, 1.94 at 128, in blocks of 128 tokens."""

    id: int = 3
    name: str = "int8"

    def coded_bytes(self, shape: tuple[int, int, int, int, int], itemsize: int) -> int:  # noqa: ARG002
        if shape[1] > PLANES:
            raise Unsuited("it has more than keys and values")
        return sum(_sizes(shape))

    def code_in_torch(self, values: torch.Tensor, place: Place, coded: Bytes) -> None:  # noqa: ARG002
        keys = [quantised(part, 1, LEVELS) for part in values[:, 0].split(GROUP, 1)]
        rest = quantised(values[:, 1:], 4, LEVELS)
        parts = [
            torch.cat([torch.stack([one.shift, one.span], 2) for one in keys], 1).view(torch.uint8),
            torch.cat([rest.shift, rest.span], -1).view(torch.uint8),
            torch.cat([one.codes for one in keys], 1),
            rest.codes,
        ]
        coded[:] = torch.cat([part.flatten() for part in parts]).cpu().numpy()

    def restore_in_torch(
        self,
        coded: Bytes,
        shape: tuple[int, ...],
        place: Place,  # noqa: ARG002
        device: torch.device,
    ) -> torch.Tensor:
        layers, planes, tokens, heads, dim = shape
        parts = [torch.from_numpy(part).to(device) for part in _split(coded, shape)]
        pairs = parts[0].view(torch.float16).view(layers, -1, 2, heads, dim)
        codes = parts[2].view(layers, tokens, heads, dim).split(GROUP, 1)
        keys = [
            restored(Coded(part, pairs[:, at : at + 1, 0], pairs[:, at : at + 1, 1]), LEVELS)
            for at, part in enumerate(codes)
        ]
        shape = (layers, planes - 1, tokens, heads, dim)
        shift, span = parts[1].view(torch.float16).view(*shape[:4], 2).split(1, -1)
        rest = restored(Coded(parts[3].view(shape), shift, span), LEVELS)
        return torch.cat([torch.cat(keys, 1)[:, None], rest], 1)

    def code_compiled(
        self,
        source: Integers,
        by: int,
        shape: Shape,
        place: Place,  # noqa: ARG002
        coded: Bytes,
    ) -> int:
        parts = _split(coded, behind(shape))
        results = [
            _code_keys(source, by, shape, parts.key_parameters, parts.key_codes),
            _code_values(source, by, shape, parts.value_parameters, parts.value_codes),
        ]
        return parts.finish(coded, results)

    def restore_compiled(
        self,
        coded: Bytes,
        target: Integers,
        by: int,
        shape: Shape,
        place: Place,  # noqa: ARG002
    ) -> None:
        parts = _split(coded, behind(shape))
        _restore_keys(target, by, shape, parts.key_parameters, parts.key_codes)
        _restore_values(target, by, shape, parts.value_parameters, parts.value_codes)


def _sizes(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return the bytes of the parameters of keys and of values, and of the codes of each."""
    layers, planes, tokens, heads, dim = shape
    vectors = layers * tokens * heads
    keys = layers * -(-tokens // GROUP) * heads * dim * 4
    return keys, vectors * (planes - 1) * 4, vectors * dim, vectors * (planes - 1) * dim


def _split(coded: Bytes, shape: tuple[int, ...]) -> Sections:
    keys, values, key_codes, _ = _sizes(shape)
    return Sections.of(coded, keys, values, key_codes)


@kernel
def _code_keys(source: Integers, by: int, shape: Shape, parameters: Halves, codes: Bytes) -> int:
    """Code the first plane of every layer, all heads of a token at a time.

    Returns: 0, 1 for values not finite, 2 for ones too large.
    """
    widest()
    width, tokens = shape.heads * shape.dim, shape.tokens - shape.sinks
    low, high = np.zeros(width, np.float32), np.zeros(width, np.float32)
    lower, upper = np.zeros(width, np.int32), np.zeros(width, np.int32)
    worst, largest = np.int32(0), np.int32(0)
    pair, to = 0, 0
    for layer in range(shape.layers):
        start = (layer * shape.sides * shape.tokens + shape.sinks) * width
        for first in range(0, tokens, GROUP):
            last = min(first + GROUP, tokens)
            for channel in range(width):
                lower[channel], upper[channel] = LAST, ~LAST
            for token in range(first, last):
                part = source[start + token * width : start + token * width + width]
                for channel in range(width):
                    order = in_order(shifted_left(part[channel], by))
                    lower[channel] = least(lower[channel], order)
                    upper[channel] = most(upper[channel], order)
            for channel in range(width):
                worst = most(worst, most(np.int32(~lower[channel]), upper[channel]))
                low[channel] = float_of(in_order(lower[channel]))
                high[channel] = float_of(in_order(upper[channel]))
            shifts = parameters[pair : pair + width]
            spans = parameters[pair + width : pair + 2 * width]
            largest = most(largest, affine_parameters(low, high, LEVELS, shifts, spans))
            pair += 2 * width
            for token in range(first, last):
                part = source[start + token * width : start + token * width + width]
                coded = codes[to : to + width]
                for channel in range(width):
                    code = (float_of(shifted_left(part[channel], by)) - low[channel]) * high[
                        channel
                    ]
                    code = least(most(code, np.float32(0.0)), np.float32(LEVELS))
                    coded[channel] = np.uint8(np.int32(code + np.float32(0.5)))
                to += width
    return 1 if worst >= FIRST_NOT_FINITE else 2 if largest >= HALF_INFINITE else 0


@kernel
def _restore_keys(
    target: Integers, by: int, shape: Shape, parameters: Halves, codes: Bytes
) -> None:
    """Fill the first plane of every layer behind the sinks."""
    widest()
    width, tokens = shape.heads * shape.dim, shape.tokens - shape.sinks
    shift, step = np.zeros(width, np.float32), np.zeros(width, np.float32)
    pair, at = 0, 0
    for layer in range(shape.layers):
        start = (layer * shape.sides * shape.tokens + shape.sinks) * width
        for first in range(0, tokens, GROUP):
            shifts = parameters[pair : pair + width]
            spans = parameters[pair + width : pair + 2 * width]
            pair += 2 * width
            for channel in range(width):
                shift[channel] = of_half(shifts[channel])
                step[channel] = of_half(spans[channel]) / np.float32(LEVELS)
            for token in range(first, min(first + GROUP, tokens)):
                part = target[start + token * width : start + token * width + width]
                coded = codes[at : at + width]
                for channel in range(width):
                    value = shift[channel] + np.float32(coded[channel]) * step[channel]
                    part[channel] = upper_bits(value, by)
                at += width


@kernel
def _extremes(
    source: Integers, by: int, start: int, dim: int, low: Floats, high: Floats
) -> np.int32:
    """Find least and greatest of each vector from the start on; returns the largest's bits."""
    worst = np.int32(0)
    for vector in range(len(low)):
        part = source[start + vector * dim : start + vector * dim + dim]
        lower, upper = LAST, ~LAST
        for at in range(dim):
            order = in_order(shifted_left(part[at], by))
            lower, upper = least(lower, order), most(upper, order)
        worst = most(worst, most(np.int32(~lower), upper))
        low[vector], high[vector] = float_of(in_order(lower)), float_of(in_order(upper))
    return worst


@kernel
def _code_values(source: Integers, by: int, shape: Shape, parameters: Halves, codes: Bytes) -> int:
    """Code the other planes of every layer, a head of a token at a time; as `_code_keys`.

    Parameters are found for BATCH heads at once: one after the other, each would wait for itself.
    """
    rows, skip, dim = shape.tokens * shape.heads, shape.sinks * shape.heads, shape.dim
    lows, highs = np.zeros(BATCH, np.float32), np.zeros(BATCH, np.float32)
    shifts, spans = np.zeros(BATCH, np.uint16), np.zeros(BATCH, np.uint16)
    worst, largest, row = np.int32(0), np.int32(0), 0
    for plane in range(shape.layers * shape.sides):
        if plane % shape.sides == 0:
            continue
        for first in range(plane * rows + skip, plane * rows + rows, BATCH):
            count = min(BATCH, plane * rows + rows - first)
            low, high = lows[:count], highs[:count]
            worst = most(worst, _extremes(source, by, first * dim, dim, low, high))
            largest = most(largest, affine_parameters(low, high, LEVELS, shifts, spans))
            for vector in range(count):
                parameters[2 * row], parameters[2 * row + 1] = shifts[vector], spans[vector]
                start, shift, inverse = (first + vector) * dim, low[vector], high[vector]
                part, to = source[start : start + dim], codes[row * dim : row * dim + dim]
                for at in range(dim):
                    code = (float_of(shifted_left(part[at], by)) - shift) * inverse
                    code = least(most(code, np.float32(0.0)), np.float32(LEVELS))
                    to[at] = np.uint8(np.int32(code + np.float32(0.5)))
                row += 1
    return 1 if worst >= FIRST_NOT_FINITE else 2 if largest >= HALF_INFINITE else 0


@kernel
def _restore_values(
    target: Integers, by: int, shape: Shape, parameters: Halves, codes: Bytes
) -> None:
    """Fill the other planes of every layer behind the sinks."""
    rows, skip, dim = shape.tokens * shape.heads, shape.sinks * shape.heads, shape.dim
    row = 0
    for plane in range(shape.layers * shape.sides):
        if plane % shape.sides == 0:
            continue
        for inside in range(plane * rows + skip, plane * rows + rows):
            shift = of_half(parameters[2 * row])
            step = of_half(parameters[2 * row + 1]) / np.float32(LEVELS)
            part = target[inside * dim : inside * dim + dim]
            coded = codes[row * dim : row * dim + dim]
            for at in range(dim):
                part[at] = upper_bits(shift + np.float32(coded[at]) * step, by)
            row += 1
