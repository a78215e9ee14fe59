"""Turned: copies in host memory where elements lie along another axis than they shall.

vLLM's attention on a CPU keeps the keys of a block and head as [dim, token], a block has them as
[token, dim]. torch copies such elements one by one; here squares of 16 x 16 are read row by row,
turned in registers, and written row by row. `copy` gives what torch's `copy_` gives.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic

from tierkv_codecs import copies
from tierkv_codecs.bits import kernel
from tierkv_codecs.copies import LINE, OUTER, Axis, Steps, fence, filled, in_bytes, past_caches

SIDE = 16
"""Elements of a square's row: of four bytes a whole line of a processor's caches."""
_ELEMENTS = {
    (2, False): np.uint16(0),
    (4, False): np.uint32(0),
    (4, True): np.int32(0),
}
"""What is turned, by its bytes and whether the rows written are whole lines, past the caches."""

_ALIGN = 2
"""Bytes; pairs need not lie at multiples of four."""
_SHUFFLED = [
    ir.Constant(
        ir.VectorType(ir.IntType(32), SIDE),
        [number // 2 + half + SIDE * (number % 2) for number in range(SIDE)],
    )
    for half in (0, SIDE // 2)
]
"""Which elements of two rows, numbered through, make the halves of both shuffled together."""


class Turn(NamedTuple):
    """A copy as squares: of all axes the two last ones change places."""

    element: Any
    to: int
    """Address."""
    of: int
    """Address."""
    sizes: Steps
    to_steps: Steps
    """Bytes between neighbours; the last of these axes has elements side by side here."""
    of_steps: Steps
    """The last but one has them here."""


def copy(to: torch.Tensor, of: torch.Tensor) -> None:
    """Copy a tensor to one of the same shape and dtype; in host memory, they do not overlap."""
    turn = turn_of(to, of)
    if turn is None:
        copies.copy(to, of)
    else:
        _turn(*turn)


def turn_of(to: torch.Tensor, of: torch.Tensor) -> Turn | None:
    """Return a copy as squares; None where nothing is turned, or not in whole squares."""
    if not (to.is_cpu and of.is_cpu and to.dtype == of.dtype and to.shape == of.shape):
        return None
    axes = [axis for axis in zip(to.shape, to.stride(), of.stride(), strict=True) if axis[0] != 1]
    size, axes = _pairs(to.element_size(), axes)
    columns = [axis for axis in axes if axis[1] == 1 != axis[2]]
    rows = [axis for axis in axes if axis[2] == 1 != axis[1]]
    others = [axis for axis in axes if axis not in (*rows, *columns)]
    if (size, False) not in _ELEMENTS or len(rows) != 1 or len(columns) != 1 or len(others) > OUTER:
        return None
    if rows[0][0] % SIDE or columns[0][0] % SIDE:
        return None
    sizes, to_steps, of_steps = in_bytes([*filled(others), *rows, *columns], size)
    lines = size * SIDE == LINE and not any(
        place % LINE for place in (to.data_ptr(), *to_steps[:-1])
    )
    return Turn(_ELEMENTS[size, lines], to.data_ptr(), of.data_ptr(), sizes, to_steps, of_steps)


def _pairs(size: int, axes: list[Axis]) -> tuple[int, list[Axis]]:
    """Return bytes of an element and axes, for two neighbours of two bytes as one element."""
    if size != 2 or axes[-1:] != [(2, 1, 1)]:  # noqa: PLR2004 -- two
        return size, axes
    rest = axes[:-1]
    if any(step % 2 for _, *steps in rest for step in steps):
        return size, axes
    return 2 * size, [(count, to // 2, of // 2) for count, to, of in rest]


def _typed_square(
    _context: Any,  # noqa: ANN401 -- numba's own types
    element: Any,  # noqa: ANN401
    to: Any,  # noqa: ANN401
    to_step: Any,  # noqa: ANN401
    of: Any,  # noqa: ANN401
    of_step: Any,  # noqa: ANN401
) -> tuple[Any, Any]:
    """Copy one square between addresses with steps from row to row."""
    whole = types.void(element, to, to_step, of, of_step)
    row = ir.VectorType(ir.IntType(element.bitwidth), SIDE)

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> None:  # noqa: ANN401
        def at(base: Any, step: Any, number: int) -> Any:  # noqa: ANN401
            offset = builder.mul(step, ir.Constant(step.type, number))
            return builder.inttoptr(builder.add(base, offset), row.as_pointer())

        _, to, to_step, of, of_step = arguments
        rows = [builder.load(at(of, of_step, number), align=_ALIGN) for number in range(SIDE)]
        # Each round shuffles rows n and n + half together like cards: once for each bit of a row's
        # number, which then is the number of a column.
        for _ in range(SIDE.bit_length() - 1):
            pairs = zip(rows[: SIDE // 2], rows[SIDE // 2 :], strict=True)
            rows = [builder.shuffle_vector(*pair, half) for pair in pairs for half in _SHUFFLED]
        for number, one in enumerate(rows):
            place = at(to, to_step, number)
            if element.signed:
                past_caches(builder, one, place)
            else:
                builder.store(one, place, align=_ALIGN)

    return whole, generate


_square: Callable[..., None] = intrinsic(_typed_square)


@kernel
def _turn(
    element: Any,  # noqa: ANN401
    to: int,
    of: int,
    sizes: Steps,
    to_steps: Steps,
    of_steps: Steps,
) -> None:
    for a in range(sizes[0]):
        for b in range(sizes[1]):
            for c in range(sizes[2]):
                for d in range(sizes[3]):
                    there = to + a * to_steps[0] + b * to_steps[1] + c * to_steps[2]
                    here = of + a * of_steps[0] + b * of_steps[1] + c * of_steps[2]
                    there += d * to_steps[3]
                    here += d * of_steps[3]
                    for row in range(0, sizes[4], SIDE):
                        for column in range(0, sizes[5], SIDE):
                            _square(
                                element,
                                there + row * to_steps[4] + column * to_steps[5],
                                to_steps[4],
                                here + column * of_steps[5] + row * of_steps[4],
                                of_steps[5],
                            )
    fence()
