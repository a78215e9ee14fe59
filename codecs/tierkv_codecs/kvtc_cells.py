"""Cells of `kvtc`'s quantiser: from coefficients to indices, and what a reader takes indices for.

A magnitude m > 0 at shift s means (m + centre / 255) 2^s - OFFSETS[s] - 1/2 steps (docs/FORMAT.md,
section 11). The kernels work on some of a block's tokens, whose columns are given, and on the first
components.
"""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tierkv_codecs.bits import (
    Bytes,
    Floats,
    float_of,
    inlined,
    kernel,
    least,
    most,
    shifted_right,
    upper_bits,
    widest,
)
from tierkv_codecs.kvtc_rans import OFFSETS, SHIFTS, Shifts
from tierkv_codecs.kvtc_stream import MOST

CENTRES = 3
"""Cells of magnitude 1, 2 and more have a place of their own for their reconstruction."""
CENTRE_UNIT = 255

Columns = NDArray[np.int64]
Doubles = NDArray[np.float64]


def fill_indices(values: Floats, columns: Columns, found: NDArray[np.int16]) -> None:
    """Fill `found` [rank or fewer, columns] with the finest indices of coefficients in steps."""
    _indices(values, columns, found)


class Cells(NamedTuple):
    """Of a plan's components: shifts int8 [r], centres uint8 [r, CENTRES]."""

    shifts: Shifts
    centres: Bytes

    def behind(self, rank: int) -> Self:
        """Return those behind the first ones."""
        return type(self)(self.shifts[rank:], self.centres[rank:])


def restore(coarse: NDArray[np.signedinteger], columns: Columns, cells: Cells, out: Floats) -> None:
    """Fill some columns of `out` [rank, all] with what indices [rank or more, columns] stand for.

    Args:
        coarse: as they are by the plan of the cells.
        columns: of these tokens.
        cells: of these components.
        out: float32.
    """
    _restore(coarse, np.arange(len(columns)), columns, *cells, OFFSETS, False, out)  # noqa: FBT003


def restore_finest(
    indices: NDArray[np.int16], some: Columns, columns: Columns, cells: Cells, out: Floats
) -> None:
    """Do as `restore`, from some columns of the finest indices."""
    _restore(indices, some, columns, *cells, OFFSETS, True, out)  # noqa: FBT003


def restore_split(
    coarse: NDArray[np.signedinteger],
    first: int,
    cells: Cells,
    wide: int,
    bits: NDArray[np.int16],
) -> None:
    """Fill columns of `bits` from the first on, bfloat16 [2 wide + rank, all], from indices.

    The first `wide` rows are what bfloat16 has lost of as many coefficients, then come these, then
    all of them.
    """
    _restore_split(coarse, first, *cells, wide, bits)


def restore_whole(indices: NDArray[np.int32], centres: Bytes) -> Floats:
    """Return what indices [rank, few] at shift 0 stand for; centres uint8 [rank, CENTRES]."""
    found = np.empty(indices.shape, np.float32)
    _restore_whole(indices, centres, found)
    return found


def add_sums(indices: NDArray[np.int16], cells: Cells, sums: Doubles) -> None:
    """Add to `sums` [rank or more] what finest indices stand for by a plan, over all tokens."""
    _add_sums(indices, *cells, OFFSETS, sums)


@kernel
def _indices(values: Floats, columns: Columns, found: NDArray[np.int16]) -> None:
    limit = np.float32(MOST)
    for c in range(len(found)):
        row, to = values[c], found[c]
        for j in range(len(columns)):
            value = least(most(row[columns[j]], -limit), limit)
            to[j] = np.int16(np.rint(value))


@inlined
def _line(row: NDArray[np.signedinteger], shift: int, centres: Bytes, line: Floats) -> None:
    """Fill in what the indices of a component stand for."""
    if shift >= SHIFTS:
        for j in range(len(line)):
            line[j] = np.float32(0.0)
        return
    step, edge = np.float32(1 << shift), np.float32(OFFSETS[shift]) + np.float32(0.5)
    first = np.float32(centres[0]) / np.float32(CENTRE_UNIT)
    second = np.float32(centres[1]) / np.float32(CENTRE_UNIT)
    more = np.float32(centres[2]) / np.float32(CENTRE_UNIT)
    for j in range(len(line)):
        cell = np.int32(row[j])
        magnitude = np.int32(abs(cell))
        centre = first if magnitude == 1 else second if magnitude == 2 else more  # noqa: PLR2004
        value = (np.float32(magnitude) + centre) * step - edge
        value = value if magnitude > 0 else np.float32(0.0)
        line[j] = value if cell > 0 else -value


@inlined
def _coarsen(cells: NDArray[np.int32], shift: int, offset: np.int32) -> None:
    """Turn the finest indices of a component into those at a shift."""
    for j in range(len(cells)):
        magnitude = shifted_right(np.int32(np.int32(abs(cells[j])) + offset), shift)
        cells[j] = magnitude if cells[j] > 0 else -magnitude


@kernel
def _restore(
    indices: NDArray[np.signedinteger],
    some: Columns,
    columns: Columns,
    shifts: Shifts,
    centres: Bytes,
    offsets: NDArray[np.int32],
    finest: bool,  # noqa: FBT001
    out: Floats,
) -> None:
    cells, line = np.zeros(len(columns), np.int32), np.zeros(len(columns), np.float32)
    for c in range(len(out)):
        row, to, shift = indices[c], out[c], int(shifts[c])
        for j in range(len(columns)):
            cells[j] = row[some[j]]
        if finest and shift < SHIFTS:
            _coarsen(cells, shift, offsets[shift])
        _line(cells, shift, centres[c], line)
        for j in range(len(columns)):
            to[columns[j]] = line[j]


@kernel
def _restore_whole(indices: NDArray[np.int32], centres: Bytes, found: Floats) -> None:
    # Where a component has a token or two, to begin a loop takes longer than the loop.
    for c in range(len(indices)):
        for j in range(indices.shape[1]):
            cell = indices[c, j]
            magnitude = np.int32(abs(cell))
            centre = centres[c, least(most(magnitude, np.int32(1)), np.int32(CENTRES)) - 1]
            value = np.float32(magnitude) + np.float32(centre) / np.float32(CENTRE_UNIT)
            value = value - np.float32(0.5) if magnitude > 0 else np.float32(0.0)
            found[c, j] = value if cell > 0 else -value


@kernel
def _restore_split(
    indices: NDArray[np.signedinteger],
    first: int,
    shifts: Shifts,
    centres: Bytes,
    wide: int,
    bits: NDArray[np.int16],
) -> None:
    widest()
    tokens = indices.shape[1]
    line = np.zeros(tokens, np.float32)
    for c in range(len(indices)):
        _line(indices[c], int(shifts[c]), centres[c], line)
        to = bits[2 * wide + c][first : first + tokens]
        for j in range(tokens):
            to[j] = np.int16(upper_bits(line[j], 16))
        if c < wide:
            bits[wide + c][first : first + tokens] = to
            lost = bits[c][first : first + tokens]
            for j in range(tokens):
                rest = line[j] - float_of(np.int32(to[j]) << 16)
                lost[j] = np.int16(upper_bits(rest, 16))


@kernel
def _add_sums(
    indices: NDArray[np.int16],
    shifts: Shifts,
    centres: Bytes,
    offsets: NDArray[np.int32],
    sums: Doubles,
) -> None:
    # In whole numbers, whose sum is the same in any order.
    for c in range(len(indices)):
        row, shift = indices[c], np.int32(shifts[c])
        if shift >= SHIFTS:
            continue
        offset = np.int32(offsets[shift])
        first, second, more = (
            np.int32(centres[c, 0]),
            np.int32(centres[c, 1]),
            np.int32(centres[c, 2]),
        )
        parts, signs = np.int64(0), np.int64(0)
        for t in range(len(row)):
            index = np.int32(row[t])
            magnitude = shifted_right(np.int32(np.int32(abs(index)) + offset), shift)
            centre = first if magnitude == 1 else second if magnitude == 2 else more  # noqa: PLR2004
            sign = np.int32(1) if index > 0 else np.int32(-1)
            sign = sign if magnitude > 0 else np.int32(0)
            parts += np.int32(sign * np.int32(np.int32(magnitude * CENTRE_UNIT) + centre))
            signs += sign
        sums[c] += parts * (float(1 << shift) / CENTRE_UNIT) - signs * (offset + 0.5)


def mean_row(rows: Floats, tokens: Columns) -> Floats:
    """Return the mean [features] of some of the rows, added up one after the other."""
    found = np.zeros(rows.shape[1], np.float32)
    _add_rows(rows, tokens, found)
    found /= np.float32(len(tokens))
    return found


@kernel
def _add_rows(rows: Floats, tokens: Columns, sums: Floats) -> None:
    for j in range(len(tokens)):
        row = rows[tokens[j]]
        for i in range(len(sums)):
            sums[i] += row[i]


@kernel
def lose(rows: Floats, tokens: Columns, mean: Floats, remade: Floats) -> None:
    """Turn what some tokens and, behind these, a mean are remade as into what they have lost.

    Args:
        rows: [token, features].
        tokens: whose columns the first ones are.
        mean: [features], of all other columns.
        remade: [features, columns].
    """
    for i in range(len(remade)):
        line = remade[i]
        for j in range(len(tokens)):
            line[j] = rows[tokens[j], i] - line[j]
        for j in range(len(tokens), len(line)):
            line[j] = mean[i] - line[j]
