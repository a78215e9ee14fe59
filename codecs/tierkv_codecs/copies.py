"""Copies: long runs of bytes in host memory, past the processor's caches.

A copy that is longer than the caches gains nothing from them, and without asking first for the
lines that it overwrites it moves two bytes for one instead of three. The C library does so only
above a size that it derives from the last cache: a virtual machine may report one of hundreds of
megabytes, and then never. `copy` gives what torch's `copy_` gives.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic

from tierkv_codecs.bits import kernel

LINE = 64
"""Bytes that are written at once: a whole line of a cache, where they lie at a multiple of it."""
LEAST_BYTES = 256 << 10
"""What is shorter is better read again from a cache."""
OUTER = 4
"""Most axes around a run."""

Axis = tuple[int, int, int]
"""Size, step of what is written, step of what is read, in elements."""
Steps = tuple[int, ...]


class Runs(NamedTuple):
    """A copy as runs of bytes, in axes around them."""

    to: int
    """Address."""
    of: int
    """Address."""
    nbytes: int
    """Of one run."""
    sizes: Steps
    to_steps: Steps
    """Bytes between neighbours."""
    of_steps: Steps


def copy(to: torch.Tensor, of: torch.Tensor) -> None:
    """Copy a tensor to one of the same shape and dtype; in host memory, they do not overlap."""
    runs = runs_of(to, of)
    if runs is None:
        to.copy_(of)
    else:
        _copy(*runs)


@cache
def compile_ahead() -> None:
    """Spend now the half second (1.3 without machine code on disk) of the first long copy."""
    copy(*torch.zeros(2, LEAST_BYTES, dtype=torch.uint8))


def runs_of(to: torch.Tensor, of: torch.Tensor) -> Runs | None:
    """Return a copy as runs; None where it is short, where its runs are, or for a device."""
    if not (to.is_cpu and of.is_cpu and to.dtype == of.dtype and to.shape == of.shape):
        return None
    size = to.element_size()
    if to.numel() * size < LEAST_BYTES:
        return None
    axes = joined(zip(to.shape, to.stride(), of.stride(), strict=True))
    run, *others = axes if axes[0][1:] == (1, 1) else [(1, 1, 1), *axes]
    nbytes = run[0] * size
    if len(others) > OUTER or (others and (nbytes % LINE or to.data_ptr() % LINE)):
        return None
    if any(to_step * size % LINE for _, to_step, _ in others):
        return None
    # Of both orders the one that goes through fewer places at a time.
    others = min(
        (sorted(others, key=lambda axis: axis[side]) for side in (1, 2)), key=lambda a: a[:1]
    )
    sizes, to_steps, of_steps = in_bytes(filled(others[::-1]), size)
    return Runs(to.data_ptr(), of.data_ptr(), nbytes, sizes, to_steps, of_steps)


def filled(others: list[Axis]) -> list[Axis]:
    """Return the axes around what a kernel copies, outermost first, as many as its loops."""
    return [(1, 0, 0)] * (OUTER - len(others)) + others


def in_bytes(axes: list[Axis], size: int) -> tuple[Steps, Steps, Steps]:
    """Return sizes and both steps of axes over elements of so many bytes."""
    sizes, to_steps, of_steps = zip(*axes, strict=True)
    return sizes, tuple(size * one for one in to_steps), tuple(size * one for one in of_steps)


def joined(axes: Any) -> list[Axis]:  # noqa: ANN401 -- any iterable of axes
    """Return axes by their step in what is written, innermost first, neighbours made one."""
    out: list[Axis] = []
    for size, to, of in sorted((axis for axis in axes if axis[0] != 1), key=lambda axis: axis[1]):
        if out and (to, of) == (out[-1][0] * out[-1][1], out[-1][0] * out[-1][2]):
            out[-1] = (size * out[-1][0], *out[-1][1:])
        else:
            out.append((size, to, of))
    return out or [(1, 1, 1)]


def past_caches(builder: Any, line: Any, place: Any) -> None:  # noqa: ANN401 -- llvmlite's types
    """Write a line, inside an intrinsic, that no cache keeps; `fence` must follow."""
    stored = builder.store(line, place, align=LINE)
    hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    stored.set_metadata("nontemporal", hint)


def _typed(store: Callable[[Any, Any, Any], None], bits: int, count: int) -> Callable[..., None]:
    """Return an intrinsic that copies so many integers between addresses."""
    whole = ir.VectorType(ir.IntType(bits), count)

    def typed(_context: Any, to: Any, of: Any) -> tuple[Any, Any]:  # noqa: ANN401 -- numba's types
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> None:  # noqa: ANN401
            to, of = (builder.inttoptr(address, whole.as_pointer()) for address in arguments)
            store(builder, builder.load(of, align=1), to)

        return types.void(to, of), generate

    found: Callable[..., None] = intrinsic(typed)
    return found


def _typed_fence(_context: Any) -> tuple[Any, Any]:  # noqa: ANN401 -- numba's own types
    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> None:  # noqa: ANN401
        builder.fence("seq_cst")

    return types.void(), generate


fence: Callable[..., None] = intrinsic(_typed_fence)
"""Inside a kernel: what is written later is not seen before what was written past the caches."""
_line = _typed(past_caches, 64, LINE // 8)
_byte = _typed(lambda builder, one, place: builder.store(one, place, align=1), 8, 1)


@kernel
def _run(to: int, of: int, nbytes: int) -> None:
    head = min(-to % LINE, nbytes)
    whole = head + (nbytes - head) // LINE * LINE
    for at in range(head):
        _byte(to + at, of + at)
    for at in range(head, whole, LINE):
        _line(to + at, of + at)
    for at in range(whole, nbytes):
        _byte(to + at, of + at)


@kernel
def _copy(to: int, of: int, nbytes: int, sizes: Steps, to_steps: Steps, of_steps: Steps) -> None:
    for a in range(sizes[0]):
        for b in range(sizes[1]):
            for c in range(sizes[2]):
                for d in range(sizes[3]):
                    there = a * to_steps[0] + b * to_steps[1] + c * to_steps[2] + d * to_steps[3]
                    here = a * of_steps[0] + b * of_steps[1] + c * of_steps[2] + d * of_steps[3]
                    _run(to + there, of + here, nbytes)
    fence()
