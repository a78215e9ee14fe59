"""Result: what a replay found, the same for blocks that are counted and for a modelled node."""

import msgspec

from tierkv.fidelity import Fidelity
from tierkv.simulation.blocks import Counts

RAM = "host"
COMPUTED = "computed"


class Spread(msgspec.Struct, frozen=True):
    """Seconds over all requests."""

    mean: float
    p50: float
    p99: float


class Result(msgspec.Struct, kw_only=True, frozen=True):
    """What `tierkv replay --json` prints; all but the last field is the same in every run.

    Hits are shares of all accesses. What a replay does not model is null: counted blocks know no
    time.
    """

    trace: str
    policy: str
    capacity_bytes: dict[str, int]
    """By tier."""
    requests: int
    accesses: int
    block_hit: float
    """Of the accesses, those to a block that is there when its turn comes."""
    prefix_hit: float
    """Of the accesses, those before the first gap that the request finds on arrival."""
    ttft_s: Spread | None = None
    ttft_full_prefill_s: Spread | None = None
    ttft_infinite_free_s: Spread | None = None
    by_tier: dict[str, float]
    """Of the accesses, those that hit a copy in this tier."""
    by_class: dict[str, float]
    """Of the accesses, those that hit a copy of this fidelity class, and what was `computed`."""
    written_bytes: dict[str, int]
    """By tier."""
    quality_loss_mean: float
    """KL in nats per token served."""
    seconds_per_million_decisions: float
    """Of one core, measured; a decision keeps a block at a use, takes in, refuses or gives up."""


def of_blocks(trace: str, policy: str, blocks: int, block_bytes: int, counts: Counts) -> Result:
    """Return the result of a block-count replay."""
    hits = counts.block_hits / counts.accesses
    return Result(
        trace=trace,
        policy=policy,
        capacity_bytes={RAM: blocks * block_bytes},
        requests=counts.requests,
        accesses=counts.accesses,
        block_hit=hits,
        prefix_hit=counts.prefix_hits / counts.accesses,
        by_tier={RAM: hits},
        by_class={Fidelity.EXACT.label: hits, COMPUTED: 1 - hits},
        written_bytes={RAM: counts.stored * block_bytes},
        quality_loss_mean=0.0,
        seconds_per_million_decisions=counts.seconds / counts.decisions * 1e6,
    )
