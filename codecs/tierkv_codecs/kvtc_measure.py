"""What calibration rows say of one component at every shift: error, bits, and probabilities."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tierkv_codecs.kvtc_cells import CENTRE_UNIT, CENTRES
from tierkv_codecs.kvtc_rans import ESCAPE, FIRST_SYMBOLS, OFFSETS, SHIFTS, TOTAL
from tierkv_codecs.kvtc_stream import MOST

LARGEST = MOST
DOUBT = 0.3
"""What is added to every count before it becomes a probability."""

Floats = NDArray[np.float64]


class Measured(NamedTuple):
    """Of r components: what `measure` found.

    error, bits: float64 [r, SHIFTS + 1], of held-out rows, per token; the last: not coded.
    centres: uint8 [r, SHIFTS, CENTRES], where in a cell its reconstruction lies, in 1/255.
    counts: r arrays int64 [2 reach + 1], of the indices -reach to reach of all rows.
    """

    error: Floats
    bits: Floats
    centres: NDArray[np.uint8]
    counts: list[NDArray[np.int64]]


def measure(train: NDArray[np.float32], held: NDArray[np.float32]) -> Measured:
    """Measure coefficients [r, rows], in steps: learn from `train`, state what `held` shows."""
    components = len(train)
    error, bits = np.zeros((components, SHIFTS + 1)), np.zeros((components, SHIFTS + 1))
    centres = np.zeros((components, SHIFTS, CENTRES), np.uint8)
    counts = [
        _measure(train[c], held[c], OFFSETS, error[c], bits[c], centres[c])
        for c in range(components)
    ]
    return Measured(error, bits, centres, counts)


def _jit(function: Any) -> Any:  # noqa: ANN401 - numba has no types
    return njit(nogil=True, cache=True)(function)


@_jit
def _measure(train, held, offsets, error, bits, centres):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    reach = 1
    for values in (train, held):
        for value in values:
            reach = max(reach, int(min(abs(np.rint(value)), LARGEST)))
    known, seen = _histogram(train, reach), _histogram(held, reach)
    error[SHIFTS] = seen[2].sum() / held.size
    for shift in range(SHIFTS):
        of_known = _cells(known, shift, offsets[shift])
        of_seen = _cells(seen, shift, offsets[shift])
        _centres(of_known, shift, offsets[shift], centres[shift])
        error[shift], bits[shift] = _cost(
            of_known[0], of_seen, shift, offsets[shift], centres[shift]
        )
    return (known[0] + seen[0]).astype(np.int64)


@_jit
def _histogram(values, reach):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return float64 [3, 2 reach + 1]: counts, sums of magnitudes and of squares of each index."""
    found = np.zeros((3, 2 * reach + 1))
    for value in values:
        index = np.int64(min(max(np.rint(value), -reach), reach)) + reach
        found[0, index] += 1
        found[1, index] += abs(value)
        found[2, index] += value * value
    return found


@_jit
def _cells(found, shift, offset):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return the same of the cells of a shift, -reach to reach of them."""
    reach = found.shape[1] // 2
    top = (reach + offset) >> shift
    cells = np.zeros((3, 2 * top + 1))
    for index in range(-reach, reach + 1):
        cell = (abs(index) + offset) >> shift
        cells[:, top + (cell if index >= 0 else -cell)] += found[:, index + reach]
    return cells


@_jit
def _centres(cells, shift, offset, centres):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    step, top = 1 << shift, cells.shape[1] // 2
    for kind in range(CENTRES):
        number, total = 1.0, 0.5
        for sign in (-1, 1):
            stop = top if kind == CENTRES - 1 else min(kind + 1, top)
            for magnitude in range(kind + 1, stop + 1):
                at = top + sign * magnitude
                edge = magnitude * step - offset - 0.5
                number += cells[0, at]
                total += (cells[1, at] - edge * cells[0, at]) / step
        centres[kind] = np.uint8(min(max(np.rint(total / number * CENTRE_UNIT), 0), CENTRE_UNIT))


@_jit
def _cost(known, seen, shift, offset, centres):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    step = 1 << shift
    rows = seen[0].sum()
    used = 0
    for at in range(known.size):
        used += known[at] > 0
    total = known.sum() + DOUBT * (used + 2)
    error, bits = 0.0, 0.0
    for at in range(known.size):
        if seen[0, at] == 0:
            continue
        bits -= seen[0, at] * np.log2((known[at] + DOUBT) / total)
        magnitude = abs(at - known.size // 2)
        value = 0.0
        if magnitude:
            centre = centres[min(magnitude, CENTRES) - 1] / CENTRE_UNIT
            value = (magnitude + centre) * step - offset - 0.5
        error += seen[2, at] - 2 * value * seen[1, at] + value * value * seen[0, at]
    return error / rows, bits / rows


def first_table(counts: list[NDArray[np.int64]], start: NDArray[np.int8]) -> NDArray[np.uint16]:
    """Return the probabilities u16 [r, FIRST_SYMBOLS] of first indices at the shifts `start`."""
    found = np.zeros((len(counts), FIRST_SYMBOLS))
    for one, shift, into in zip(counts, start, found, strict=True):
        _first_counts(one, shift, OFFSETS, into)
    return probabilities(found)


def refine_table(counts: list[NDArray[np.int64]]) -> NDArray[np.uint16]:
    """Return the probabilities u16 [r, SHIFTS, 4] of refinements (see `kvtc_stream.Tables`)."""
    zero = np.zeros((len(counts), SHIFTS, 3))
    halves = np.zeros((2, len(counts), SHIFTS, 2))
    for c, one in enumerate(counts):
        _refine_counts(one, OFFSETS, zero[c], halves[0, c], halves[1, c])
    of_halves = [probabilities(part)[..., :1] for part in halves]
    return np.concatenate([probabilities(zero)[..., :2], *of_halves], axis=-1)


def probabilities(counts: Floats) -> NDArray[np.uint16]:
    """Return counts along the last axis as whole numbers of at least 1 that add up to TOTAL."""
    share = (counts + DOUBT) / (counts + DOUBT).sum(-1, keepdims=True)
    spare = TOTAL - counts.shape[-1]
    whole = np.floor(share * spare).astype(np.int64) + 1
    largest = whole.argmax(-1)
    rest = TOTAL - whole.sum(-1)
    np.put_along_axis(
        whole,
        largest[..., None],
        np.take_along_axis(whole, largest[..., None], -1) + rest[..., None],
        -1,
    )
    shares: NDArray[np.uint16] = whole.astype(np.uint16)
    return shares


@_jit
def _first_counts(counts, shift, offsets, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    reach = counts.size // 2
    for index in range(-reach, reach + 1):
        cell = min((abs(index) + offsets[shift]) >> shift, ESCAPE)
        out[ESCAPE + (cell if index >= 0 else -cell)] += counts[index + reach]


@_jit
def _refine_counts(counts, offsets, zero, one, more):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    reach = counts.size // 2
    for shift in range(1, SHIFTS):
        for index in range(-reach, reach + 1):
            number = counts[index + reach]
            a = (abs(index) + offsets[shift]) >> shift
            b = (abs(index) + offsets[shift - 1]) >> (shift - 1)
            upper = b - (2 * a - 1 + (shift & 1))
            if a == 0:
                zero[shift, 0 if b == 0 else 1 if index < 0 else 2] += number
            elif a == 1:
                one[shift, upper] += number
            else:
                more[shift, upper] += number
