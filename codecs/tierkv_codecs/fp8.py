"""Codec `fp8` (id 5): E4M3 values under one scale for each token and head.

    greatest = fp16(max |x|)    code = e4m3(clip(x * (448 / greatest), -448, 448))
    x' = code * (greatest / 448)

Saturating: no finite value becomes NaN, which E4M3FN has instead of infinity. Keys stay as the
engine holds them, so any RoPE is taken.

The codec's own bytes (see `fixed`), of the tokens behind the sinks in the block's order:

    u16  greatest          float16, of each (layer, K/V, token, head)
    u8   code              E4M3FN, of each value

Error: |x| / 16 or, near zero, greatest / 448 / 1024, and the rounding to the block's dtype.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tierkv_codecs.bits import (
    FIRST_NOT_FINITE,
    HALF_INFINITE,
    Bytes,
    Halves,
    Integers,
    bits_of,
    float_of,
    half_of,
    kernel,
    least,
    most,
    of_half,
    shifted_left,
    upper_bits,
)
from tierkv_codecs.codec import Place, Unsuited
from tierkv_codecs.fixed import NOT_FINITE, TOO_LARGE, FixedRate, Shape

GREATEST = 448.0
LEAST_NORMAL = 2.0**-6
SUBNORMAL = 2.0**-9
PARAMETERS = 2
"""Bytes of a scale."""


@dataclass(frozen=True)
class Fp8(FixedRate):
    """1.94 times smaller than 16 bits at heads of 64, 1.97 at 128."""

    id: int = 5
    name: str = "fp8"

    def coded_bytes(self, shape: tuple[int, int, int, int, int], itemsize: int) -> int:  # noqa: ARG002
        layers, sides, tokens, heads, dim = shape
        return layers * sides * tokens * heads * (dim + PARAMETERS)

    def code_in_torch(self, values: torch.Tensor, place: Place, coded: Bytes) -> None:  # noqa: ARG002
        if not values.isfinite().all():
            raise Unsuited(NOT_FINITE)
        greatest = values.abs().amax(4, keepdim=True).half()
        if not greatest.isfinite().all():
            raise Unsuited(TOO_LARGE)
        limit = torch.full_like(greatest, GREATEST).float()  # see `affine` for why not a number
        inverse = torch.where(greatest > 0, limit / greatest.float(), 0.0)
        codes = (values * inverse).clamp(-GREATEST, GREATEST).to(torch.float8_e4m3fn)
        scales = greatest.view(torch.uint8).flatten()
        coded[: len(scales)] = scales.cpu().numpy()
        coded[len(scales) :] = codes.view(torch.uint8).flatten().cpu().numpy()

    def restore_in_torch(
        self,
        coded: Bytes,
        shape: tuple[int, ...],
        place: Place,  # noqa: ARG002
        device: torch.device,
    ) -> torch.Tensor:
        scales, codes = _split(coded, shape[4])
        greatest = torch.from_numpy(scales).view(torch.float16).to(device).view(*shape[:4], 1)
        found = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(device).view(shape)
        return found.float() * (greatest.float() / torch.full_like(greatest, GREATEST).float())

    def code_compiled(
        self,
        source: Integers,
        by: int,
        shape: Shape,
        place: Place,  # noqa: ARG002
        coded: Bytes,
    ) -> int:
        scales, codes = _split(coded, shape.dim)
        skip, rows = shape.sinks * shape.heads, shape.tokens * shape.heads
        result: int = _encode(source, by, rows, skip, shape.dim, scales, codes)
        coded[: scales.nbytes] = scales.view(np.uint8)
        return result

    def restore_compiled(
        self,
        coded: Bytes,
        target: Integers,
        by: int,
        shape: Shape,
        place: Place,  # noqa: ARG002
    ) -> None:
        skip, rows = shape.sinks * shape.heads, shape.tokens * shape.heads
        _decode(target, by, rows, skip, shape.dim, *_split(coded, shape.dim))


def _split(coded: Bytes, dim: int) -> tuple[Halves, Bytes]:
    """Return a copy of the scales, which need not lie aligned, and the codes."""
    scales = len(coded) // (dim + PARAMETERS) * PARAMETERS
    return coded[:scales].copy().view(np.uint16), coded[scales:]


@kernel
def _encode(
    source: Integers, by: int, rows: int, skip: int, dim: int, scales: Halves, codes: Bytes
) -> int:
    """Code vectors of `dim` values; returns 0, 1 for values not finite, 2 for ones too large.

    `source` has the upper bits of float32 values, without the lowest `by`; of every `rows` vectors
    the first `skip` are left out.
    """
    worst, largest, row = np.int32(0), np.int32(0), 0
    for plane in range(len(source) // (rows * dim)):
        for inside in range(plane * rows + skip, plane * rows + rows):
            part = source[inside * dim : inside * dim + dim]
            high = np.int32(0)
            for at in range(dim):
                high = most(high, np.int32(shifted_left(part[at], by) & 0x7FFF_FFFF))
            worst = most(worst, high)
            scales[row] = scale_bits = half_of(float_of(high))
            largest = most(largest, scale_bits)
            scale = of_half(scale_bits)
            inverse = np.float32(GREATEST) / scale if scale > np.float32(0.0) else np.float32(0.0)
            to = codes[row * dim : row * dim + dim]
            for at in range(dim):
                bits = np.int32(bits_of(float_of(shifted_left(part[at], by)) * inverse))
                size = least(float_of(bits & 0x7FFF_FFFF), np.float32(GREATEST))
                magnitude = np.int32(bits_of(size))
                # Below the least normal, one step is the last bit of a number near 2**14.
                small = np.int32(bits_of(size + np.float32(16384.0)) - 0x4680_0000)
                rounded = np.int32(magnitude + 0x7_FFFF + ((magnitude >> 20) & 1)) >> 20
                code = small if size < np.float32(LEAST_NORMAL) else np.int32(rounded - (120 << 3))
                to[at] = np.uint8(code | ((bits >> 24) & 0x80))
            row += 1
    return 1 if worst >= FIRST_NOT_FINITE else 2 if largest >= HALF_INFINITE else 0


@kernel
def _decode(
    target: Integers, by: int, rows: int, skip: int, dim: int, scales: Halves, codes: Bytes
) -> None:
    """Fill vectors of `dim` values, of which `target` takes the upper bits; as `_encode`."""
    row = 0
    for plane in range(len(target) // (rows * dim)):
        for inside in range(plane * rows + skip, plane * rows + rows):
            step = of_half(scales[row]) / np.float32(GREATEST)
            part = target[inside * dim : inside * dim + dim]
            coded = codes[row * dim : row * dim + dim]
            for at in range(dim):
                code = np.int32(coded[at])
                magnitude = np.int32(code & 0x7F)
                small = np.float32(magnitude) * np.float32(SUBNORMAL)
                normal = float_of((magnitude << 20) + (120 << 23))
                size = small if magnitude >> 3 == 0 else normal
                value = -size if code & 0x80 else size
                part[at] = upper_bits(value * step, by)
            row += 1
