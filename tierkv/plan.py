"""Plan: what to do, decided without I/O. Immutable; the executor carries it out."""

from dataclasses import dataclass

from tierkv.codec import Profile


@dataclass(frozen=True, slots=True)
class PutPlan:
    """Which of the offered units to write, in order, under which profile, and what goes first."""

    units: list[int]
    known: int
    refused: int
    profile: Profile
    drops: list[int]
    """RAM placements to drop."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """How many blocks of a chain to bring up in all, and the predicted seconds."""

    blocks: int
    load_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """Which region to reclaim, what is carried to the open region and what is dropped."""

    number: int
    carry: list[int]
    drops: list[int]
