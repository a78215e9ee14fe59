"""Plan: what the scheduler side tells the worker side with every step. Plain data, pickled by vLLM.

Tokens come in *engine blocks* (vLLM's, by id) and in *store blocks* (tierkv's, by key), of which
each holds a whole number of engine blocks.
"""

from dataclasses import dataclass

from tierkv.fidelity import Fidelity
from tierkv.key import KEY_BYTES
from tierkv_connectors.vllm.groups import Span
from tierkv_connectors.vllm.wishes import NO_HINTS, Hints


@dataclass(frozen=True, slots=True)
class Load:
    """Fill engine blocks of one request from a leased match; no spans: report that it failed."""

    request: str
    match: int
    shards: int
    """Runs of heads in which the matched blocks are stored."""
    fingerprint: bytes
    """Of the identity that the keys belong to."""
    keys: bytes
    """Of the chain's store blocks from its first one on, n x 32."""
    fidelity: Fidelity
    spans: tuple[Span, ...]
    """What is to be filled, by KV group; each span ends where the keys do."""
    deadline: float
    """`time.monotonic`, which all processes of a machine share; no copy begins after it."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """Engine blocks to fill."""
        return tuple(block for span in self.spans for block in span.ids)


@dataclass(frozen=True, slots=True)
class Save:
    """Offer sealed store blocks of a chain."""

    fingerprint: bytes
    keys: bytes
    """Of the chain's store blocks from its first one on, n x 32."""
    fidelity: Fidelity
    """Class of the prefix that they were computed on."""
    spans: tuple[Span, ...]
    """What is offered: whole store blocks of KV groups."""
    fresh: int = 0
    """Store blocks of these that were not offered before."""
    hints: Hints = NO_HINTS

    @property
    def fresh_keys(self) -> bytes:
        """Keys of those, the last ones."""
        return self.keys[len(self.keys) - self.fresh * KEY_BYTES :]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that the worker side does for one step."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    overwritten: frozenset[int] | None = frozenset()
    """Engine blocks that this step, or a load of it, writes: nothing may be copied from them any
    more, because what they held belongs to a request that has lost them. None: any of them."""
