"""Plan: what the scheduler side tells the worker side with every step. Plain data, pickled by vLLM.

Tokens come in *engine blocks* (vLLM's, by id) and in *store blocks* (tierkv's, by key), of which
each holds a whole number of engine blocks.
"""

from dataclasses import dataclass

from tierkv.fidelity import Fidelity


@dataclass(frozen=True, slots=True)
class Load:
    """Fill engine blocks of one request from a leased match."""

    request: str
    match: int
    start: int
    """First store block."""
    fingerprint: bytes
    """Of the identity that the keys belong to."""
    keys: bytes
    """Of the store blocks, n x 32."""
    fidelity: Fidelity
    skip: int
    """Engine blocks of the first store block that the engine holds already."""
    blocks: tuple[int, ...]
    """Engine blocks to fill, in order."""
    deadline: float
    """`time.monotonic`, which all processes of a machine share; no copy begins after it."""


@dataclass(frozen=True, slots=True)
class Save:
    """Offer the sealed store blocks of a chain from its first one on."""

    fingerprint: bytes
    keys: bytes
    fidelity: Fidelity
    """Class of the prefix that they were computed on."""
    blocks: tuple[int, ...]
    """Engine blocks that hold them, in order."""
    fresh: int = 0
    """Store blocks of these that were not offered before."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that the worker side does for one step."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    overwritten: frozenset[int] | None = frozenset()
    """Engine blocks that this step, or a load of it, writes: nothing may be copied from them any
    more, because what they held belongs to a request that has lost them. None: any of them."""
