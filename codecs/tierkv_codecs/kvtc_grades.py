"""Grades: some tokens of a block are coded more finely than others, by what their errors will cost.

A few tokens of a text draw most of the attention of what follows (secondary sinks: now and then a
" the", a line break), and an error in them costs a hundred times what it costs elsewhere. The
calibration learned to tell them by their leading coefficients. A token of grade g takes the plan g
beyond that of a token of grade 0, at every level; its grade is written, so a reader need not guess.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv_codecs.codec import Unsuited
from tierkv_codecs.kvtc_artifact import USUAL, Artifact, project
from tierkv_codecs.kvtc_stream import MOST

GRADES_PER_BYTE = 4
N = TypeVar("N", bound=np.signedinteger[Any])


class Group(NamedTuple, Generic[N]):
    """The tokens of one grade: where they are in the block, and both sides' [rank, tokens].

    While encoding int16, the finest indices; while decoding int32, as far as they are known.
    """

    grade: int
    tokens: NDArray[np.int64]
    sides: tuple[NDArray[N], NDArray[N]]


def groups_of(
    artifact: Artifact, rows: tuple[torch.Tensor, torch.Tensor], level: int
) -> list[Group[np.int16]]:
    """Return centred rows [tokens, features] of both sides as indices at a level, by grades.

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
    grades = artifact.grades((usual[0][:count], usual[1][:count]))
    fine = np.flatnonzero(grades > USUAL)
    finest = _finer(artifact, rows, level, fine, int(grades.max(initial=0)))
    found = []
    for grade in np.unique(grades):
        tokens, plan = np.flatnonzero(grades == grade), artifact.plan(level, int(grade))
        sides = []
        for number in (0, 1):
            rank = artifact.ready(number, plan).rank
            if grade > USUAL:
                part = finest[number][:rank, torch.from_numpy(np.searchsorted(fine, tokens))]
            else:
                part = usual[number][:rank, torch.from_numpy(tokens)]
            whole = part.round_().clamp_(-MOST, MOST).to(torch.int16)
            sides.append(np.ascontiguousarray(whole.cpu().numpy()))
        found.append(Group(int(grade), tokens, (sides[0], sides[1])))
    return found


def _finer(
    artifact: Artifact,
    rows: tuple[torch.Tensor, torch.Tensor],
    level: int,
    tokens: NDArray[np.int64],
    grade: int,
) -> list[torch.Tensor]:
    """Return both sides' coefficients of those tokens that need more than the usual ones."""
    if not len(tokens):
        return []
    some, plan = torch.from_numpy(tokens), artifact.plan(level, grade)
    return [project(side[some], artifact.ready(number, plan)) for number, side in enumerate(rows)]


def packed(groups: Sequence[Group[Any]]) -> bytes:
    """Return the grade of each token, two bits each, the first in the lowest bits."""
    tokens = sum(len(group.tokens) for group in groups)
    grades = np.zeros(-(-tokens // GRADES_PER_BYTE) * GRADES_PER_BYTE, np.uint8)
    for group in groups:
        grades[group.tokens] = group.grade
    apart = grades.reshape(-1, GRADES_PER_BYTE) << np.arange(0, 8, 2, dtype=np.uint8)
    together: NDArray[np.uint8] = np.bitwise_or.reduce(apart, 1)
    return together.tobytes()


def packed_bytes(tokens: int) -> int:
    """Return how long `packed` is."""
    return -(-tokens // GRADES_PER_BYTE)


def unpacked(artifact: Artifact, data: bytes, tokens: int) -> list[Group[np.int32]]:
    """Return the groups of a block with nothing decoded yet: the inverse of `packed`."""
    pairs = np.frombuffer(data, np.uint8)[:, None] >> np.arange(0, 8, 2, dtype=np.uint8)
    grades = (pairs & 3).reshape(-1)[:tokens]
    found = []
    for grade in np.unique(grades):
        at = np.flatnonzero(grades == grade)
        keys, values = (np.zeros((len(side.basis), len(at)), np.int32) for side in artifact.sides)
        found.append(Group(int(grade), at, (keys, values)))
    return found


def restored(
    artifact: Artifact, groups: Sequence[Group[np.int32]], side: int, level: int
) -> torch.Tensor:
    """Return the coefficients that a reader of a level has, float32 [rank, tokens].

    `groups` hold indices as they are at the level; the rank is that of the finest grade.
    """
    plans = [artifact.plan(level, group.grade) for group in groups]
    rank = max((artifact.ready(side, plan).rank for plan in plans), default=1)
    tokens = sum(len(group.tokens) for group in groups)
    whole = torch.zeros(rank, tokens)
    for group, plan in zip(groups, plans, strict=True):
        values = artifact.restored(side, plan, group.sides[side])
        whole[: len(values), torch.from_numpy(group.tokens)] = values
    return whole


def split(values: torch.Tensor, wide: int) -> torch.Tensor:
    """Return bf16 values, then what bf16 has lost of the first `wide` ones, then those again.

    The rows [rank + 2 wide, tokens] belong to those of `Ready.synthesis`.
    """
    narrow = values.bfloat16()
    first = narrow[:wide]
    return torch.cat([narrow, (values[:wide] - first.float()).bfloat16(), first])


class Restored:
    """One side of a block as a reader of a level has it, before it becomes features.

    Args:
        groups: hold indices as they are at the level.
        device: where features are wanted.
    """

    def __init__(
        self,
        artifact: Artifact,
        groups: Sequence[Group[np.int32]],
        side: int,
        level: int,
        device: torch.device,
    ) -> None:
        ready = artifact.ready(side, artifact.plan(level, USUAL))
        whole = restored(artifact, groups, side, level).to(device)
        padded = torch.zeros(max(ready.rank - len(whole), 0), whole.shape[1], device=device)
        usual = torch.cat([whole[: ready.rank], padded])
        self._usual, self._synthesis = split(usual, len(ready.wide)).T, ready.synthesis.to(device)
        tokens = [group.tokens for group in groups if group.grade > USUAL]
        self._fine = torch.from_numpy(np.concatenate(tokens)) if tokens else None
        if self._fine is not None:
            grade = max(group.grade for group in groups)
            finer = artifact.ready(side, artifact.plan(level, grade))
            self._rest = whole[ready.rank :, self._fine].bfloat16().T
            self._more = finer.synthesis[ready.rank : finer.rank].to(device)

    def features(self, span: slice) -> torch.Tensor:
        """Return centred features of a run, bfloat16 [tokens, features]."""
        found = self._usual @ self._synthesis[:, span]
        if self._fine is not None:
            found[self._fine] += self._rest @ self._more[:, span]
        return found


def picked(groups: Sequence[Group[N]], tokens: NDArray[np.int64]) -> list[Group[N]]:
    """Return some tokens of a block, in rising order, as a block of their own."""
    found = []
    for grade, at, sides in groups:
        mine = np.flatnonzero(np.isin(at, tokens))
        if len(mine):
            keys, values = (np.ascontiguousarray(side[:, mine]) for side in sides)
            found.append(Group(grade, np.searchsorted(tokens, at[mine]), (keys, values)))
    return found


def coarser(
    artifact: Artifact, groups: Sequence[Group[np.int16]], level: int
) -> list[Group[np.int32]]:
    """Return groups of finest indices as they are at a level."""
    found = []
    for grade, tokens, sides in groups:
        plan = artifact.plan(level, grade)
        keys, values = (artifact.coarse(side, plan, sides[side]) for side in (0, 1))
        found.append(Group(grade, tokens, (keys, values)))
    return found
