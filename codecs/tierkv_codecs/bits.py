"""Floats as bits inside compiled kernels: the same roundings that torch makes, on plain integers.

Everything here is exact or rounds to nearest, ties to even, as IEEE 754 has it, so a kernel made of
it gives the bits of its torch twin. No result depends on a compiler's freedom: fastmath stays off.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numba import types
from numba.core.extending import intrinsic
from numpy.typing import NDArray

from tierkv_codecs.tensors import INTEGER_OF_WIDTH

Integers = NDArray[np.signedinteger]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.uint16]
Floats = NDArray[np.float32]
F = TypeVar("F", bound=Callable[..., Any])

FIRST_NOT_FINITE = 0x7F80_0000
"""The bits of |x|, as an integer, are below this for every finite float32."""
LAST = np.int32(0x7FFF_FFFF)
"""No float's bits come after it in order, and none before ~LAST."""
HALF_INFINITE = 0x7C00
"""As for float16."""
LEAST_NORMAL = 2.0**-14
"""As for float16."""
KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float32})
"""What kernels write in place."""


def kernel(function: F) -> F:
    """Compile on first use, keep the machine code on disk, and let other threads run meanwhile."""
    compiled: F = numba.njit(function, nogil=True, cache=True, error_model="numpy")
    return compiled


def inlined(function: F) -> F:
    """Compile as a part of the kernels that call it."""
    compiled: F = numba.njit(
        function, nogil=True, cache=True, error_model="numpy", forceinline=True
    )
    return compiled


def _cast(target: Any, through: Any) -> Callable[..., Any]:  # noqa: ANN401 -- numba's own types
    """Return an intrinsic that reads the bits of a number as those of another type."""

    def typed(_context: Any, value: Any) -> Any:  # noqa: ANN401
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
            plain = context.cast(builder, arguments[0], signature.args[0], through)
            return builder.bitcast(plain, context.get_value_type(target))

        return target(value), generate

    found: Callable[..., Any] = intrinsic(typed)
    return found


def _shift(direction: str) -> Callable[..., Any]:
    """Return an intrinsic that shifts in 32 bits, where Python's operator would take 64."""

    def typed(_context: Any, value: Any, by: Any) -> Any:  # noqa: ANN401 -- numba's own types
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
            pairs = zip(arguments, signature.args, strict=True)
            narrow = [context.cast(builder, of, kind, types.int32) for of, kind in pairs]
            return getattr(builder, direction)(*narrow)

        return types.int32(value, by), generate

    found: Callable[..., Any] = intrinsic(typed)
    return found


def _vectors(bits: int) -> Callable[..., Any]:
    """Return an intrinsic that lets loops of its kernel take vectors of so many bits."""

    def typed(_context: Any) -> Any:  # noqa: ANN401 -- numba's own types
        def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:  # noqa: ANN401
            # llvmlite lets only attributes pass that it knows by name.
            set.add(builder.function.attributes, f'"prefer-vector-width"="{bits}"')
            return context.get_dummy_value()

        return types.none(), generate

    found: Callable[..., Any] = intrinsic(typed)
    return found


shifted_left = _shift("shl")
"""The number times a power of two, in 32 bits: twice as many of them in one instruction."""
shifted_right = _shift("lshr")
"""A number that is not negative, divided by a power of two."""
float_of = _cast(types.float32, types.uint32)
"""The float32 with these 32 bits."""
bits_of = _cast(types.int32, types.float32)
"""The bits of a float32."""
widest = _vectors(512)
"""For kernels whose loops are long: of itself the compiler stops at 256 bits, where a CPU has more.
Loops of 32 or 64 numbers take longer with it."""


@inlined
def least(one: Any, other: Any) -> Any:  # noqa: ANN401 -- numbers of one type inside a kernel
    """Return the lesser: unlike `min`, whose rule for NaN keeps a loop from being vectorised."""
    return one if one < other else other  # noqa: FURB136


@inlined
def most(one: Any, other: Any) -> Any:  # noqa: ANN401 -- numbers of one type inside a kernel
    """Return the greater."""
    return one if one > other else other  # noqa: FURB136


@inlined
def in_order(bits: Any) -> Any:  # noqa: ANN401 -- an integer inside a kernel
    """Return a float32's bits as an integer that compares as the float does, or those of one back.

    Extremes of such integers vectorise; those of floats that stay in memory become stores by mask,
    which some CPUs take ten times as long for.
    """
    return np.int32(bits ^ ((bits >> 31) & 0x7FFF_FFFF))


@inlined
def half_of(value: Any) -> Any:  # noqa: ANN401 -- a float32 inside a kernel
    """Return a finite float32 as the bits of the nearest float16, infinite where that is."""
    bits = bits_of(value)
    magnitude = np.int32(bits & 0x7FFF_FFFF)
    # Below the least normal half, one step is 2**-24, which is the last bit of a number near 0.75.
    small = np.int32(bits_of(float_of(magnitude) + np.float32(0.75)) - 0x3F40_0000)
    normal = np.int32(((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112 << 10))
    normal = least(normal, np.int32(HALF_INFINITE))
    half = small if float_of(magnitude) < np.float32(LEAST_NORMAL) else normal
    return np.int32(half | ((bits >> 16) & 0x8000))


@inlined
def of_half(bits: Any) -> Any:  # noqa: ANN401 -- an integer inside a kernel
    """Return the float32 that a finite float16 with these bits is."""
    magnitude = np.int32(bits & 0x7FFF)
    small = np.float32(magnitude) * np.float32(2.0**-24)
    normal = float_of(np.int32((magnitude << 13) + (112 << 23)))
    value = small if magnitude >> 10 == 0 else normal
    return -value if bits & 0x8000 else value


@inlined
def upper_bits(value: Any, by: int) -> Any:  # noqa: ANN401 -- a float32 inside a kernel
    """Return a finite float32 without its lowest `by` bits: a bfloat16's for 16, its own for 0."""
    bits = np.int32(bits_of(value))
    if by:
        bits = np.int32(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.int32(bits)


@kernel
def affine_parameters(
    low: Floats, high: Floats, levels: int, shifts: Halves, spans: Halves
) -> np.int32:
    """Turn least and greatest into shift and levels / span (see `affine`), in place; store both.

    Returns: the largest float16 magnitude among those.
    """
    largest = np.int32(0)
    for at in range(len(low)):
        shift_bits = half_of(low[at] + np.float32(0.0))
        shift = of_half(shift_bits)
        span_bits = half_of(most(high[at] - shift, np.float32(0.0)))
        span = of_half(span_bits)
        inverse = np.float32(levels) / span
        low[at], high[at] = shift, inverse if span > np.float32(0.0) else np.float32(0.0)
        shifts[at], spans[at] = np.uint16(shift_bits), np.uint16(span_bits)
        largest = most(largest, most(np.int32(shift_bits & 0x7FFF), span_bits))
    return largest


def kernel_bits(block: torch.Tensor) -> tuple[Integers, int]:
    """Return a contiguous block in host memory as kernels take it, and what is cut off.

    bfloat16 comes as its own bits, whose lowest 16 are missing; float32 as its own; what else there
    is as a copy in float32.
    """
    if block.dtype in KERNEL_DTYPES:
        by = 8 * (4 - block.itemsize)
        return block.view(INTEGER_OF_WIDTH[block.itemsize]).view(-1).numpy(), by
    return block.float().view(torch.int32).view(-1).numpy(), 0
