"""The entropy stage of kvtc: nested indices come back, in the bits that probabilities allow."""

import numpy as np
import pytest
from numpy.typing import NDArray

from tierkv_codecs.kvtc_measure import first_table, measure, refine_table
from tierkv_codecs.kvtc_rans import ESCAPE, FIRST_SYMBOLS, LANES, LOW, NONE, OFFSETS, SHIFTS, TOTAL
from tierkv_codecs.kvtc_stream import Level, StreamError, Tables, coarsened, decode, encode

TOKENS = 77
DEVIATIONS = np.array([60.0, 9.0, 2.5, 1.0, 0.6, 0.3])
STARTS = np.array([5, 3, 2, 3, 1, 0], np.int8)
LEVELS = [
    np.array([5, 3, 2, 3, NONE, NONE], np.int8),
    np.array([2, 3, 1, 2, 1, NONE], np.int8),
    np.array([0, 0, 0, 0, 0, 0], np.int8),
]


def normal(tokens: int, seed: int) -> NDArray[np.int16]:
    draw = np.random.default_rng(seed)
    drawn = draw.standard_normal((6, tokens)) * DEVIATIONS[:, None]
    return np.asarray(np.rint(drawn), np.int16)


def tables() -> Tables:
    rows = normal(4000, 1).astype(np.float32)
    counts = measure(rows, rows[:, :100]).counts
    return Tables(first_table(counts, STARTS), refine_table(counts))


def levels() -> list[Level]:
    before = [np.full(6, NONE, np.int8), *LEVELS[:-1]]
    return [Level(one, two, STARTS) for one, two in zip(before, LEVELS, strict=True)]


@pytest.mark.parametrize("tokens", [0, 1, 3, TOKENS])
def test_every_prefix_of_levels_gives_the_coarser_indices(tokens: int) -> None:
    indices, known = normal(tokens, 2), tables()
    found = np.zeros(indices.shape, np.int32)
    for level in levels():
        decode([(found, level)], known, encode([(indices, level)], known))
        assert np.array_equal(found, coarsened(indices, level.after))
    assert np.array_equal(found, indices)


def test_groups_of_tokens_share_a_stream_each_at_its_own_level() -> None:
    known, (coarse, middle, fine) = tables(), levels()
    whole = [normal(tokens, seed) for tokens, seed in ((50, 7), (0, 8), (7, 9))]
    jump = fine._replace(before=coarse.after)
    steps = [(coarse, middle), (coarse, jump), (middle._replace(before=coarse.before), fine)]
    found = [np.zeros(indices.shape, np.int32) for indices in whole]
    for turn in (0, 1):
        parts = [(indices, step[turn]) for indices, step in zip(whole, steps, strict=True)]
        stream = encode(parts, known)
        decode([(one, step[turn]) for one, step in zip(found, steps, strict=True)], known, stream)
        for one, (indices, level) in zip(found, parts, strict=True):
            assert np.array_equal(one, coarsened(indices, level.after))
    with pytest.raises(StreamError):
        decode([(np.zeros((6, 50), np.int32), coarse)], known, encode(parts[:1], known))


def test_coarser_cells_contain_finer_ones_and_are_as_wide_as_their_step() -> None:
    magnitudes = np.arange(3000)
    for shift in range(1, SHIFTS):
        coarse = (magnitudes + OFFSETS[shift]) >> shift
        finer = (magnitudes + OFFSETS[shift - 1]) >> (shift - 1)
        for cell in range(3000 >> shift):
            within = finer[coarse == cell]
            assert len(set(within)) == 2 if cell else len(set(within)) <= 2
        assert (np.bincount(coarse)[1:-1] == 1 << shift).all()
        zero = 2 * (coarse == 0).sum() - 1
        assert 0.6 < zero / (1 << shift) < 1.5 or shift == 1


def test_escapes_carry_the_largest_index() -> None:
    known = tables()
    indices = np.full((6, 5), 32767, np.int16)
    indices[:, ::2] *= -1
    found = np.zeros(indices.shape, np.int32)
    for level in levels():
        decode([(found, level)], known, encode([(indices, level)], known))
    assert np.array_equal(found, indices)


def test_bits_are_those_of_the_probabilities() -> None:
    indices, known = normal(5000, 3), tables()
    level = Level(np.full(6, NONE, np.int8), LEVELS[0], STARTS)
    _, words, _ = encode([(indices, level)], known)
    cells = coarsened(indices, np.where(LEVELS[0] == NONE, NONE, STARTS).astype(np.int8))
    share = np.take_along_axis(
        known.first[:4].astype(float) / TOTAL, np.clip(cells[:4], -ESCAPE, ESCAPE) + ESCAPE, 1
    )
    # Component 2 alone is refined within this level; its first index starts where it ends.
    expected = -np.log2(share).sum()
    assert 16 * words.size == pytest.approx(expected, rel=0.002)


def plain_states(ranges: list[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """Encode (low, size, lane) symbols as the format's text says, with Python's integers."""
    states, words = [LOW] * LANES, []
    for low, size, lane in reversed(ranges):
        state = states[lane]
        if state >= size << 20:
            words.append(state & 0xFFFF)
            state >>= 16
        states[lane] = (state // size << 12) + state % size + low
    return states, words[::-1]


def test_words_are_those_of_the_format() -> None:
    known, indices = tables(), normal(TOKENS, 4)
    level = levels()[0]
    low = np.concatenate([np.zeros((6, 1), int), np.cumsum(known.first, 1)], 1)
    ranges = []
    for c in range(4):
        shift = STARTS[c]
        cells = coarsened(indices[c : c + 1], np.array([shift], np.int8))[0]
        for token, cell in enumerate(np.clip(cells, -ESCAPE, ESCAPE) + ESCAPE):
            ranges.append((int(low[c, cell]), int(known.first[c, cell]), token % LANES))
    only = Level(level.before, np.where(LEVELS[0] < NONE, STARTS, NONE).astype(np.int8), STARTS)
    states, words, _ = encode([(indices, only)], known)
    expected_states, expected_words = plain_states(ranges)
    assert states.tolist() == expected_states
    assert words.tolist() == expected_words


def test_probabilities_add_up() -> None:
    known = tables()
    assert known.first.shape == (6, FIRST_SYMBOLS)
    assert (known.first.astype(int).sum(1) == TOTAL).all()
    assert known.first.min() >= 1
    assert known.refine.min() >= 1
    assert (known.refine[..., :2].astype(int).sum(-1) < TOTAL).all()


def test_words_that_are_not_ours_are_refused_or_decode_within_bounds() -> None:
    known, indices = tables(), normal(TOKENS, 5)
    level = levels()[0]
    states, words, escapes = encode([(indices, level)], known)
    refused = 0
    draw = np.random.default_rng(6)
    for turn in range(200):
        bad = words.copy()
        if turn % 3 == 0:
            bad = bad[: draw.integers(0, len(bad))]
        elif turn % 3 == 1:
            bad = np.append(bad, np.uint16(7))
        else:
            bad[draw.integers(0, len(bad))] ^= 1 << draw.integers(0, 16)
        try:
            decode([(np.zeros(indices.shape, np.int32), level)], known, (states, bad, escapes))
        except StreamError:
            refused += 1
    assert refused >= 190
