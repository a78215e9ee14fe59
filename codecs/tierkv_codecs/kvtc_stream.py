"""The entropy stage of `kvtc`: nested indices of coefficients to bytes and back.

A coefficient is an index q, its value in steps rounded to the nearest integer. Coarser indices nest
in it: at *shift* s a magnitude m becomes (m + OFFSETS[s]) >> s, a uniform quantiser of step 2^s
whose zero cell is about two thirds or four thirds of a step wide, in turn. So a shift of one less
refines every cell, and what is coded for a coarse index is never coded again.

A component is coded first at some shift (its *first*: a signed index up to +-ESCAPE, beyond that an
escape), then refined from shift to shift. Every symbol has a probability calibrated for its
component and its context: which shift, and whether the coarser magnitude is 0, 1 or more. Symbols
go through one range asymmetric coder (rANS, arXiv 1311.2540) of LANES interleaved 32-bit states, 12
bits of probability and 16-bit words; token t uses state t mod LANES.

These functions are integer only, so their bytes are the same on every machine.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv_codecs.kvtc_rans import (
    GUESSES,
    LANES,
    LOW,
    NONE,
    OFFSETS,
    TOTAL,
    Indices,
    Shifts,
    Words,
    pull,
    push,
)

MOST = (1 << 15) - 1
"""The largest magnitude of an index."""


@dataclass(frozen=True, eq=False)
class Tables:
    """Probabilities of one side, in 1/4096, for `r` components.

    first: u16 [r, FIRST_SYMBOLS], of the indices -ESCAPE to ESCAPE at the first shift.
    refine: u16 [r, SHIFTS, 4]: when going from shift s to s - 1, of staying at zero, of becoming
        negative (what is left: positive), and of the lower half of a cell with magnitude 1, and
        with a greater one.
    """

    first: Words
    refine: Words

    @functools.cached_property
    def ranges(self) -> NDArray[np.uint32]:
        """Of first indices, [r, FIRST_SYMBOLS]: where a symbol's range begins, its size above."""
        sizes = self.first.astype(np.uint32)
        lows = np.cumsum(sizes, 1, dtype=np.uint32) - sizes
        found: NDArray[np.uint32] = (lows | sizes << 16).astype(np.uint32)
        return found

    @functools.cached_property
    def guesses(self) -> NDArray[np.uint8]:
        """The symbol [r, GUESSES] with which each of equal parts of the range begins."""
        parts = np.arange(0, TOTAL, TOTAL // GUESSES)
        found = np.zeros((len(self.first), GUESSES), np.uint8)
        for lows in (self.ranges[:, 1:] & 0xFFFF).T:
            found += parts >= lows[:, None]
        return found


class Level(NamedTuple):
    """What one segment does to one side's components: int8 [r] each.

    before, after: the shift that earlier segments left and that this one leaves; NONE: not coded.
    start: the shift of the first index, where `before` is NONE and `after` is not.
    """

    before: NDArray[np.int8]
    after: NDArray[np.int8]
    start: NDArray[np.int8]


Stream = tuple[NDArray[np.uint32], Words, Words]
"""States, words and escapes."""


class StreamError(Exception):
    """The words are not what `encode` makes for these tables."""


def encode(parts: Sequence[tuple[Indices, Level]], tables: Tables) -> Stream:
    """Return final states [LANES], words and escapes of one side.

    Args:
        parts: indices int16 [r, tokens] of groups of tokens, one behind the other, each with what
            happens to it; of the first r components.
        tables: of the side.
    """
    cut = [(indices, Level(*(of[: len(indices)] for of in level))) for indices, level in parts]
    most = sum(indices.shape[1] * _passes(level) for indices, level in cut)
    # One more than there can be: a word is written before it is known whether it is one.
    words, escapes = np.empty(most + 1, np.uint16), np.empty(most, np.uint16)
    states, ends = np.full(LANES, LOW, np.uint64), np.array([most + 1, most], np.uint64)
    for indices, level in reversed(cut):
        push(indices, tuple(level), tables.ranges, tables.refine, states, words, escapes, ends)
    return states.astype(np.uint32), words[int(ends[0]) :].copy(), escapes[int(ends[1]) :].copy()


def decode(parts: Sequence[tuple[NDArray[np.int32], Level]], tables: Tables, of: Stream) -> None:
    """Bring indices int32 [r, tokens], as `level.before` left them, to `level.after` in place.

    Raises: StreamError where states, words or escapes end early or late.
    """
    states, words, escapes = of[0].astype(np.uint64), of[1], of[2]
    # A component looks at most so many words beyond the end before that is noticed.
    room = max((coarse.shape[1] for coarse, _ in parts), default=0) + 1
    more, ends = np.concatenate([words, np.zeros(room, np.uint16)]), np.zeros(2, np.uint64)
    for coarse, level in parts:
        if not pull(
            coarse,
            tuple(level),
            tables.ranges,
            tables.guesses,
            tables.refine,
            states,
            more,
            words.size,
            escapes,
            ends,
        ):
            raise StreamError
    if ends.tolist() != [words.size, escapes.size] or (states != LOW).any():
        raise StreamError


def coarsened(indices: Indices, shifts: Shifts) -> NDArray[np.int32]:
    """Return int32 [r, tokens], what `decode` gives for these indices at shifts int8 [r]."""
    coded = shifts < NONE
    by = np.where(coded, shifts, 0)[:, None]
    magnitudes = (np.abs(indices.astype(np.int32)) + OFFSETS[by]) >> by
    coarse: NDArray[np.int32] = np.sign(indices) * magnitudes * coded[:, None]
    return coarse


def _passes(level: Level) -> int:
    """Return the symbols that a token has at most."""
    begin = np.where(level.before == NONE, level.start + 1, level.before)
    return int(np.where(level.after != level.before, begin - level.after, 0).sum())
