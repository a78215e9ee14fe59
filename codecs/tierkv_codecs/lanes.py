"""64 values at a time inside compiled kernels, and one bit of each of them as a 64-bit word.

Bit i of a word belongs to value i. Addresses are integers, and whoever calls has made sure that
memory is there. Everything is plain integer arithmetic: no result depends on a CPU's vectors.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from tierkv_codecs.bits import inlined

LANES = 64
SLOWLY = frozenset({"znver1", "znver2"})
"""CPUs that have the instruction for moving bits, and need many cycles for it."""
NONE = np.uint64(0)
ONE = np.uint64(1)

Made = Callable[[Any, Any], Any]
BYTE, HALF, WORD = ir.IntType(8), ir.IntType(16), ir.IntType(64)


def vector(kind: Any, count: int = LANES) -> Any:  # noqa: ANN401 -- llvmlite's types
    """Return the type of a vector."""
    return ir.VectorType(kind, count)


def every(value: int, count: int = LANES, kind: Any = BYTE) -> Any:  # noqa: ANN401
    """Return a vector of one number."""
    return ir.Constant(vector(kind, count), [value] * count)


def read(builder: Any, address: Any, kind: Any) -> Any:  # noqa: ANN401
    """Read what begins at any address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def write(builder: Any, value: Any, address: Any) -> None:  # noqa: ANN401
    """Write to any address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def lowered(make: Made) -> Callable[..., Any]:
    """Return how numba lowers a function of the builder and the arguments."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        made = make(builder, arguments)
        return context.get_dummy_value() if made is None else made

    return generate


def _of_one(result: Any, kind: Any, make: Made) -> Callable[..., Any]:  # noqa: ANN401
    found: Callable[..., Any] = intrinsic(lambda _context, _one: (result(kind), lowered(make)))
    return found


def _of_two(result: Any, kinds: Any, make: Made) -> Callable[..., Any]:  # noqa: ANN401
    found: Callable[..., Any] = intrinsic(
        lambda _context, _one, _other: (result(*kinds), lowered(make))
    )
    return found


def _moved(name: str) -> Callable[..., Any]:
    """Return the x86 instruction that moves bits to where a mask has ones, or from there."""

    def make(builder: Any, arguments: Any) -> Any:  # noqa: ANN401 -- llvmlite's types
        kind = ir.FunctionType(WORD, [WORD, WORD])
        insert: Any = cgutils.get_or_insert_function
        function = insert(builder.module, kind, f"llvm.x86.bmi.{name}.64")
        return builder.call(function, arguments)

    return _of_two(types.uint64, (types.uint64, types.uint64), make)


word_at = _of_one(
    types.uint64, types.intp, lambda builder, arguments: read(builder, arguments[0], WORD)
)
"""The word at an address."""
put_word = _of_two(
    types.void,
    (types.uint64, types.intp),
    lambda builder, arguments: write(builder, arguments[0], arguments[1]),
)
"""Write a word to an address."""
ones = _of_one(types.int64, types.uint64, lambda builder, arguments: builder.ctpop(arguments[0]))
"""How many bits of a word are one."""
lowest = _of_one(
    types.int64,
    types.uint64,
    lambda builder, arguments: builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1)),
)
"""The place of the lowest one of a word that has one."""


@inlined
def deposit_slowly(word: Any, mask: Any) -> Any:  # noqa: ANN401 -- words inside a kernel
    """Return the lowest bits of a word, in order, where the mask has ones."""
    found = NONE
    while mask != NONE:
        low = mask & (~mask + ONE)
        found |= low if word & ONE else NONE
        word >>= ONE
        mask ^= low
    return found


@inlined
def extract_slowly(word: Any, mask: Any) -> Any:  # noqa: ANN401 -- words inside a kernel
    """Return the bits of a word where the mask has ones, in order, as the lowest."""
    found, to = NONE, ONE
    while mask != NONE:
        low = mask & (~mask + ONE)
        found |= to if word & low else NONE
        to <<= ONE
        mask ^= low
    return found


def _moves_bits() -> bool:
    binding: Any = llvmlite.binding
    has = bool(binding.get_host_cpu_features().get("bmi2"))
    return has and binding.get_host_cpu_name() not in SLOWLY


deposit = _moved("pdep") if _moves_bits() else deposit_slowly
extract = _moved("pext") if _moves_bits() else extract_slowly
