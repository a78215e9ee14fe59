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
from tierkv_codecs.kvtc_cells import fill_indices, restore_finest, restore_split
from tierkv_codecs.kvtc_rows import Rows

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

    marks: uint8 [tokens], their grades. usual: float32 [rank, tokens] of both sides. fine: the
    tokens of a higher grade that are no anchors; finer: of these, the components behind.
    """

    marks: NDArray[np.uint8]
    usual: tuple[Floats, ...]
    fine: NDArray[np.int64]
    finer: tuple[Floats, ...]

    def groups(self, artifact: Artifact, level: int) -> list[Group[np.int16]]:
        """Return the block as indices, by grades."""
        found = []
        for grade in np.unique(self.marks[self.marks < ANCHOR]):
            tokens, plan = np.flatnonzero(self.marks == grade), artifact.plan(level, int(grade))
            keys, values = (
                self._indices(side, artifact.ready(side, plan).rank, tokens) for side in (0, 1)
            )
            found.append(Group(int(grade), tokens, (keys, values)))
        return found

    def _indices(self, side: int, rank: int, tokens: NDArray[np.int64]) -> NDArray[np.int16]:
        found, usual = np.empty((rank, len(tokens)), np.int16), self.usual[side]
        fill_indices(usual, tokens, found[: len(usual)])
        if rank > len(usual):
            fill_indices(self.finer[side], np.arange(len(tokens)), found[len(usual) :])
        return found


def coefficients_of(artifact: Artifact, rows: tuple[Rows, Rows], level: int) -> Coefficients:
    """Return both sides in steps.

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
    fine = np.flatnonzero(marks == FINER)
    finer = [_finer(artifact, number, side, fine, level) for number, side in enumerate(rows)]
    return Coefficients(marks, tuple(side.cpu().numpy() for side in usual), fine, tuple(finer))


def _finer(
    artifact: Artifact, side: int, rows: Rows, tokens: NDArray[np.int64], level: int
) -> Floats:
    """Return a side's coefficients behind the usual ones, of tokens that need more of them.

    A basis is read from memory once for a few tokens, so no others have more of it than they need.
    """
    done, ready = (artifact.ready(side, artifact.plan(level, grade)) for grade in (USUAL, FINER))
    if not len(tokens):
        return np.zeros((0, 0), np.float32)
    some = rows.narrow[torch.from_numpy(tokens)]
    more: Floats = (ready.basis[done.rank :].to(some.device) @ some.T).float().cpu().numpy()
    return more


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
            columns = np.searchsorted(tokens, group.tokens[mine])
            known = into[: artifact.ready(side, plan).rank]
            restore_finest(group.sides[side], mine, columns, artifact.cells(side, plan), known)


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
    artifact: Artifact, groups: Sequence[Group[np.int32]], side: int, level: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the coefficients that a reader of a level has, columns in the order of `order_of`.

    Bfloat16 [2 wide + rank, tokens] of all tokens, as `split` has them, with zeros for anchors; and
    [more, some] of the components behind the usual ones, of tokens of a higher grade. `groups` hold
    indices as they are at the level.
    """
    usual, wide = artifact.ready(side, artifact.plan(level, USUAL)).rank, len(artifact.wide[side])
    whole, more = np.zeros((2 * wide + usual, tokens), np.int16), np.zeros((0, 0), np.int16)
    done = 0
    for group in groups:
        plan, coarse = artifact.plan(level, group.grade), group.sides[side]
        rank, cells = artifact.ready(side, plan).rank, artifact.cells(side, plan)
        restore_split(coarse[: min(usual, rank)], done, cells, wide, whole)
        if group.grade > USUAL:
            more = np.empty((rank - usual, len(group.tokens)), np.int16)
            restore_split(coarse[usual:rank], 0, cells.behind(usual), 0, more)
        done += len(group.tokens)
    return torch.from_numpy(whole).view(torch.bfloat16), torch.from_numpy(more).view(torch.bfloat16)


def order_of(marks: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the tokens of a block by grades, anchors last: what one grade has lies together."""
    return np.argsort(marks, kind="stable")


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
        usual, more = restored(artifact, groups, side, level, tokens)
        self._usual, self._rest = usual.to(device), more.to(device)
        self._synthesis = ready.synthesis.to(device)
        finest = artifact.ready(side, artifact.plan(level, FINER)).synthesis
        behind = self._synthesis.shape[1]
        self._more = finest[:, behind : behind + len(more)].to(device)
        stop = sum(len(group.tokens) for group in groups)
        self._some = slice(stop - more.shape[1], stop)

    def features(self, span: slice) -> torch.Tensor:
        """Return centred features of a run, bfloat16 [tokens, features], in `order_of` them."""
        found = self._synthesis[span] @ self._usual
        if self._rest.numel():
            found[:, self._some].add_(self._more[span] @ self._rest)
        return found.T
