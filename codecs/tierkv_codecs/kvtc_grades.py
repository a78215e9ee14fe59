"""Grades: some tokens of a block are coded more finely than others, by what their errors will cost.

A few tokens of a text draw most of the attention of what follows (secondary sinks: now and then a
" the", a line break), and an error in them costs a hundred times what it costs elsewhere. The
calibration learned to tell them by their leading coefficients. Tokens of a higher grade take a plan
beyond that of a lower one, at every level, and anchors are coded apart (`kvtc_anchors`). Grades are
written, so a reader need not guess.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv_codecs.bits import Floats
from tierkv_codecs.codec import Unsuited
from tierkv_codecs.kvtc_artifact import ANCHOR, FINER, USUAL, Artifact, project
from tierkv_codecs.kvtc_cells import Columns, add_columns, indices_of, restore_finest, restore_split
from tierkv_codecs.tensors import bits_of

GRADES_PER_BYTE = 4
N = TypeVar("N", bound=np.signedinteger[Any])


class Group(NamedTuple, Generic[N]):
    """The tokens of one grade: where they are in the block, and both sides' [rank, tokens].

    While encoding int16, the finest indices; while decoding int32, as far as they are known.
    """

    grade: int
    tokens: NDArray[np.int64]
    sides: tuple[NDArray[N], NDArray[N]]


class Coefficients(NamedTuple):
    """A block in steps, as finely as each token needs it at a level.

    marks: uint8 [tokens], their grades. usual: float32 [rank, tokens] of both sides, for the tokens
    up to the usual grade. finest: of the tokens `fine`, that have a higher one and are no anchors,
    up to their own ranks.
    """

    marks: NDArray[np.uint8]
    usual: tuple[Floats, ...]
    fine: NDArray[np.int64]
    finest: tuple[Floats, ...]

    def of(self, grade: int, tokens: NDArray[np.int64]) -> tuple[tuple[Floats, ...], Columns]:
        """Return both sides' coefficients of tokens of a grade, and in which columns they are."""
        if grade > USUAL:
            return self.finest, np.searchsorted(self.fine, tokens)
        return self.usual, tokens

    def groups(self, artifact: Artifact, level: int) -> list[Group[np.int16]]:
        """Return the block as indices, by grades."""
        found = []
        for grade in np.unique(self.marks[self.marks < ANCHOR]):
            tokens, plan = np.flatnonzero(self.marks == grade), artifact.plan(level, int(grade))
            values, columns = self.of(int(grade), tokens)
            keys, rest = (
                indices_of(of_side, columns, artifact.ready(side, plan).rank)
                for side, of_side in enumerate(values)
            )
            found.append(Group(int(grade), tokens, (keys, rest)))
        return found


def coefficients_of(
    artifact: Artifact, rows: tuple[torch.Tensor, torch.Tensor], level: int
) -> Coefficients:
    """Return centred rows [tokens, features] of both sides in steps.

    Raises: Unsuited for rows that are not finite.
    """
    usual = [
        project(side, artifact.ready(number, artifact.plan(level, USUAL)))
        for number, side in enumerate(rows)
    ]
    # Whatever is not finite reaches each coefficient of its token.
    if not all(bool(side[0].isfinite().all()) for side in usual):
        raise Unsuited("it has values that are not finite")
    count = artifact.heed.shape[1]
    marks = artifact.grades((usual[0][:count], usual[1][:count]))
    plain = [side.cpu().numpy() for side in usual]
    fine = np.flatnonzero((marks > USUAL) & (marks < ANCHOR))
    finest = [
        _finest(
            artifact,
            number,
            side[torch.from_numpy(fine)],
            plain[number][:, fine],
            level,
            marks[fine],
        )
        for number, side in enumerate(rows)
    ]
    return Coefficients(marks, tuple(plain), fine, tuple(finest))


def _finest(
    artifact: Artifact,
    side: int,
    rows: torch.Tensor,
    usual: Floats,
    level: int,
    grades: NDArray[np.uint8],
) -> Floats:
    """Return a side's coefficients of tokens that need more than the usual ones, which are given.

    A basis is read from memory once for a few tokens, so no token has more of it than it needs.
    """
    done, most = len(usual), artifact.ready(side, artifact.plan(level, int(grades.max(initial=0))))
    found = np.zeros((max(most.rank, done), len(grades)), np.float32)
    found[:done] = usual
    for grade in range(USUAL + 1, int(grades.max(initial=0)) + 1):
        ready, mine = artifact.ready(side, artifact.plan(level, grade)), grades >= grade
        if ready.rank > done and mine.any():
            some = rows[torch.from_numpy(mine)].bfloat16()
            more = ready.basis[done:].to(rows.device) @ some.T
            found[done : ready.rank, mine] = more.float().cpu().numpy()
        done = max(done, ready.rank)
    return found


def sampled(
    artifact: Artifact,
    groups: Sequence[Group[np.int16]],
    side: int,
    level: int,
    tokens: NDArray[np.int64],
    into: Floats,
) -> None:
    """Fill the first columns of `into` [rank, columns] with what a reader has of some tokens."""
    for group in groups:
        mine = np.flatnonzero(np.isin(group.tokens, tokens))
        if len(mine):
            plan = artifact.plan(level, group.grade)
            rank = artifact.ready(side, plan).rank
            indices = np.ascontiguousarray(group.sides[side][:rank, mine])
            columns = np.searchsorted(tokens, group.tokens[mine])
            restore_finest(indices, columns, artifact.cells(side, plan), into[:rank])


def features_of(
    artifact: Artifact, side: int, values: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return what coefficients [rank, tokens] are in features, float32 [features, tokens]."""
    wide = len(artifact.wide[side])
    synthesis = artifact.synthesis[side][:, : 2 * wide + len(values)]
    return (synthesis.to(device) @ split(values, wide).to(device)).float()


def packed(marks: NDArray[np.uint8]) -> bytes:
    """Return the grade of each token, two bits each, the first in the lowest bits."""
    grades = np.zeros(packed_bytes(len(marks)) * GRADES_PER_BYTE, np.uint8)
    grades[: len(marks)] = marks
    apart = grades.reshape(-1, GRADES_PER_BYTE) << np.arange(0, 8, 2, dtype=np.uint8)
    together: NDArray[np.uint8] = np.bitwise_or.reduce(apart, 1)
    return together.tobytes()


def packed_bytes(tokens: int) -> int:
    """Return how long `packed` is."""
    return -(-tokens // GRADES_PER_BYTE)


def unpacked(data: bytes, tokens: int) -> NDArray[np.uint8]:
    """Return the grade of each token: the inverse of `packed`."""
    pairs = np.frombuffer(data, np.uint8)[:, None] >> np.arange(0, 8, 2, dtype=np.uint8)
    return (pairs & 3).astype(np.uint8).reshape(-1)[:tokens]


def empty_groups(artifact: Artifact, marks: NDArray[np.uint8], level: int) -> list[Group[np.int32]]:
    """Return the groups of a block whose tokens have these grades, with nothing decoded yet.

    They have room for the components that a reader of a level has.
    """
    found = []
    for grade in np.unique(marks[marks < ANCHOR]):
        at, plan = np.flatnonzero(marks == grade), artifact.plan(level, int(grade))
        keys, values = (
            np.zeros((artifact.ready(side, plan).rank, len(at)), np.int32) for side in (0, 1)
        )
        found.append(Group(int(grade), at, (keys, values)))
    return found


def restored(
    artifact: Artifact,
    groups: Sequence[Group[np.int32]],
    side: int,
    level: int,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]:
    """Return the coefficients that a reader of a level has, and which tokens have more of them.

    Bfloat16 [2 wide + rank, tokens] of all tokens, as `split` has them, with zeros for anchors;
    [more, some] of the components behind the usual ones; and where these tokens are. `groups` hold
    indices as they are at the level.
    """
    usual, wide = artifact.ready(side, artifact.plan(level, USUAL)).rank, len(artifact.wide[side])
    ranks = [artifact.ready(side, artifact.plan(level, group.grade)).rank for group in groups]
    fine = [group.tokens for group in groups if group.grade > USUAL]
    some = np.concatenate([np.empty(0, np.int64), *fine])
    whole = np.zeros((2 * wide + usual, tokens), np.int16)
    more = np.zeros((max([usual, *ranks]) - usual, len(some)), np.int16)
    done = 0
    for group, rank in zip(groups, ranks, strict=True):
        coarse = group.sides[side]
        cells = artifact.cells(side, artifact.plan(level, group.grade))
        restore_split(coarse[: min(usual, rank)], group.tokens, cells, wide, whole)
        if group.grade > USUAL:
            columns = np.arange(done, done + len(group.tokens))
            restore_split(coarse[usual:rank], columns, cells.behind(usual), 0, more)
            done += len(group.tokens)
    return (
        torch.from_numpy(whole).view(torch.bfloat16),
        torch.from_numpy(more).view(torch.bfloat16),
        some,
    )


def split(values: torch.Tensor, wide: int) -> torch.Tensor:
    """Return what bf16 loses of the first `wide` values, those in bf16, and then all in bf16.

    The rows [2 wide + rank, tokens] belong to the columns of `Ready.synthesis`.
    """
    narrow = values.bfloat16()
    first = narrow[:wide]
    return torch.cat([(values[:wide] - first.float()).bfloat16(), first, narrow])


class Restored:
    """One side of a block as a reader of a level has it, before it becomes features.

    Args:
        groups: hold indices as they are at the level.
        tokens: of the block; the features of anchors are zeros.
        device: where features are wanted.
    """

    def __init__(
        self,
        artifact: Artifact,
        groups: Sequence[Group[np.int32]],
        side: int,
        level: int,
        tokens: int,
        device: torch.device,
    ) -> None:
        ready = artifact.ready(side, artifact.plan(level, USUAL))
        usual, more, some = restored(artifact, groups, side, level, tokens)
        self._usual = usual.to(device)
        self._synthesis = ready.synthesis.to(device)
        self._some = torch.from_numpy(some).to(device)
        self._rest = more.to(device)
        finest = artifact.ready(side, artifact.plan(level, FINER)).synthesis
        behind = self._synthesis.shape[1]
        self._more = finest[:, behind : behind + len(more)].to(device)

    def features(self, span: slice) -> torch.Tensor:
        """Return centred features of a run, bfloat16 [tokens, features]."""
        found = self._synthesis[span] @ self._usual
        if self._rest.numel():
            more = self._more[span] @ self._rest
            if found.device.type == "cpu":
                add_columns(bits_of(found).numpy(), bits_of(more).numpy(), self._some.numpy())
            else:
                found[:, self._some] += more
        return found.T
