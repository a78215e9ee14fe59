"""Windows: which blocks of a chain a hit needs of each part, and how long a hit can be.

A part of full attention is needed from the chain's first block to the end of the hit. A part of
sliding-window attention is needed only for the last blocks before that end: what lies before them
is outside every window that will still be looked at. So a part has a *window* in blocks, 0 for
full attention, and a hit may end wherever every part has all that its window asks for: the longest
of these ends is the hit. Pure functions over plain arrays; a unit is (block, part).
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.errors import invalid

Windows = tuple[int, ...]
"""Blocks by part; 0: all from the head on."""
Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


def window_blocks(window: int, tokens_per_block: int) -> int:
    """Return the blocks that a window of tokens asks for before an end between two blocks.

    The first token behind the end looks back at `window - 1` others.
    """
    return max(-(-(window - 1) // tokens_per_block), 1)


def unpack(packed: bytes, parts: int) -> Windows:
    """Read the uint32 windows of a call; () when no part has one.

    Raises: TierKVError (invalid) unless there are none, or one for each part.
    """
    if not packed:
        return ()
    if len(packed) != 4 * parts:
        raise invalid(f"windows are 4 bytes for each of {parts} parts, not {len(packed)} bytes")
    windows = struct.unpack(f"<{parts}I", packed)
    return windows if any(windows) else ()


def pack(windows: Sequence[int]) -> bytes:
    """Return what `unpack` reads."""
    return struct.pack(f"<{len(windows)}I", *windows)


def ends(there: Bools, windows: Windows) -> Bools:
    """Return for every number of blocks from 0 on whether a hit may end there.

    Args:
        there: (blocks, parts), what is to be had.
        windows: by part.
    """
    blocks = np.arange(len(there) + 1)
    fits = np.ones(len(there) + 1, np.bool_)
    for column, window in zip(there.T, windows, strict=True):
        gap = np.zeros(len(there) + 1, np.int64)  # blocks up to the last one missing before an end
        np.maximum.accumulate(np.where(column, 0, blocks[1:]), out=gap[1:])
        fits &= gap <= _first(blocks, window)
    return fits


def longest(there: Bools, windows: Windows) -> int:
    """Return the blocks of the longest hit."""
    return int(np.flatnonzero(ends(there, windows))[-1])


def reach(there: Bools, windows: Windows) -> int:
    """Return the blocks from the head on that every part without a window has; 0: no such part."""
    if all(windows):
        return 0
    full = np.all(there[:, np.array(windows) == 0], axis=1)
    return len(full) if full.all() else int(full.argmin())


def needed(shape: tuple[int, int], blocks: int, windows: Windows) -> Bools:
    """Return which units of a chain of `shape` (blocks, parts) a hit of `blocks` blocks needs."""
    mask = np.zeros(shape, np.bool_)
    for part, window in enumerate(windows):
        mask[int(_first(np.int64(blocks), window)) : blocks, part] = True
    return mask


def sums(values: npt.NDArray[np.signedinteger[Any]], windows: Windows) -> Numbers:
    """Return for every end the sum of the `values` (blocks, parts) of the units that it needs."""
    blocks = np.arange(len(values) + 1)
    total = np.zeros(len(values) + 1, np.int64)
    for column, window in zip(values.T, windows, strict=True):
        up_to = np.append(0, np.cumsum(column))
        total += up_to - up_to[_first(blocks, window)]
    return total


def _first(blocks: Numbers | np.int64, window: int) -> Numbers | np.int64:
    """Return the first block that a window asks for before an end, or before each of several."""
    return np.maximum(blocks - window, 0) if window else blocks * 0
