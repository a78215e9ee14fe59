"""Segments: runs of one history, against a reference of single blocks."""

import random

import numpy as np
import numpy.typing as npt
import pytest

from tierkv.policies.segments import NONE, SEGMENT_BLOCKS, Segments

Ids = npt.NDArray[np.int32]
SIZE = 10.0


def ask(segments: Segments, context: int, chain: list[int]) -> npt.NDArray[np.int64]:
    """Ask for a chain: walk, grow, use; return its rows."""
    ids = np.array(chain, np.int32)
    walk = segments.walk(ids)
    rows = walk.rows
    if walk.blocks < len(ids):
        each = np.full(len(ids), SIZE)
        grown = segments.grow(ids, walk.blocks, len(ids), each, np.ones(len(ids)))
        rows = np.concatenate([rows, grown])
    segments.use(context, rows)
    return rows


def blocks_of(segments: Segments, rows: npt.NDArray[np.int64]) -> list[int]:
    return [
        block
        for row in rows.tolist()
        for block in range(segments.first[row], segments.first[row] + segments.blocks[row])
    ]


def test_a_long_chain_is_cut() -> None:
    segments = Segments()
    rows = ask(segments, 0, list(range(40)))
    assert segments.blocks[rows].tolist() == [SEGMENT_BLOCKS, SEGMENT_BLOCKS, 40 % SEGMENT_BLOCKS]
    assert segments.parents(rows).tolist() == [NONE, *rows[:-1].tolist()]
    assert segments.nbytes[rows].sum() == 40 * SIZE


def test_a_block_that_is_not_full_stands_alone() -> None:
    segments = Segments()
    ids = np.arange(5, dtype=np.int32)
    rows = segments.grow(ids, 0, 4, np.array([10.0, 10, 10, 10, 3]), np.ones(5))
    assert segments.blocks[rows].tolist() == [4, 1]
    assert segments.partial[rows].tolist() == [False, True]
    assert segments.nbytes[rows].tolist() == [40.0, 3.0]


def test_a_branch_splits_a_segment() -> None:
    segments = Segments()
    (row,) = ask(segments, 0, list(range(8))).tolist()
    segments.configuration[row] = 1
    rows = ask(segments, 1, [0, 1, 2, 8, 9])
    assert blocks_of(segments, rows) == [0, 1, 2, 8, 9]
    behind = segments.tail[0]
    assert blocks_of(segments, np.array([behind])) == [3, 4, 5, 6, 7]
    assert segments.parents(np.array([behind])).tolist() == [row]
    assert segments.children[row] == 1
    assert segments.configuration[behind] == 1
    assert segments.context[[row, behind]].tolist() == [1, 0]
    assert segments.nbytes[[row, behind]].tolist() == [3 * SIZE, 5 * SIZE]


def test_a_context_ends_where_its_copies_end() -> None:
    """Of 40 blocks the first segment has a copy, then the last as well, then none."""
    segments = Segments()
    rows = ask(segments, 0, list(range(40)))
    first, _, last = rows.tolist()
    assert segments.end(0) == NONE
    for row in first, last:
        segments.configuration[row] = 1
        segments.gained(np.array([row]))
        assert segments.end(0) == row
        assert segments.ends(np.zeros(3, np.int64)).tolist() == [row] * 3
    for row, left in (last, first), (first, NONE):
        segments.configuration[row] = 0
        segments.lost(np.array([row]))
        assert segments.end(0) == left


def test_random_trees_keep_blocks_parents_and_contexts() -> None:
    rng = random.Random(3)
    segments, chains, context_of, newest = Segments(), [list(range(5))], {}, 5
    ask(segments, 0, chains[0])
    context_of.update(dict.fromkeys(chains[0], 0))
    for context in range(1, 400):
        old = rng.choice(chains)
        keep = rng.randrange(len(old) + 1)
        chain = old[:keep] + list(range(newest, newest + rng.randrange(1, 30)))
        newest = max(newest, chain[-1] + 1)
        rows = ask(segments, context, chain)
        context_of.update(dict.fromkeys(chain, context))
        chains.append(chain)
        assert blocks_of(segments, rows) == chain
        assert segments.parents(rows).tolist() == [NONE, *rows[:-1].tolist()]
    for row in range(segments.count):
        mine = blocks_of(segments, np.array([row]))
        assert {context_of[block] for block in mine} == {segments.context[row]}
        assert segments.nbytes[row] == pytest.approx(len(mine) * SIZE)
    assert sum(segments.blocks[: segments.count]) == newest
