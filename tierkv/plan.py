"""Plan: what to do, decided without I/O. Immutable; the executor carries it out."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from tierkv.catalog import Catalog, Rows
from tierkv.codec import Profile


class Kind(IntEnum):
    """What a Move does."""

    DROP = 0
    """Give a copy up."""
    DOWNGRADE = 1
    """Cut a progressive copy short where it lies."""
    DEMOTE = 2
    """Make a copy in a lower tier, as it is or coarser, then give this one up."""
    PROMOTE = 3
    """Make a copy in RAM; this one stays."""


class Move(NamedTuple):
    """One change of one placement. `lineage.lawful` says which there may be."""

    kind: Kind
    row: int
    """Of the placement that is changed or copied."""
    tier: int
    """Where what results lies; a drop's own tier."""
    profile: int
    """Number of the profile of what results; 0 of a drop."""


@dataclass(frozen=True, slots=True)
class PutPlan:
    """Which of the offered units to write, in order, under which profile, and what goes first."""

    units: list[int]
    known: int
    refused: int
    """Missing units that are not written; `declined` counts those of them that no policy wants."""
    declined: int
    profile: Profile
    moves: list[Move]
    """What makes room in RAM, at once."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """How many blocks of a chain to bring up in all, and the predicted seconds."""

    blocks: int
    load_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class ReclaimPlan:
    """What makes room in a tier, in order, and the bytes that it frees there in the end."""

    moves: list[Move]
    freed: int
    refused: int
    """Moves that a policy asked for and that may not be."""


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """Which region to reclaim, what is carried to the open region and what is dropped."""

    number: int
    carry: list[int]
    drops: list[int]


def drops(view: Catalog, rows: Rows) -> list[Move]:
    """Return the Moves that give placements up."""
    tier = view.tier
    return [Move(Kind.DROP, row, tier[row], 0) for row in rows]
