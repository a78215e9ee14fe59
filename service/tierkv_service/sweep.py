"""A sweep: every policy over rising capacities, as curves to plot."""

from collections.abc import Callable
from typing import NamedTuple

from tierkv.simulation.blocks import Counts
from tierkv.simulation.traces import Accesses

BYTES_PER_TOKEN = 131_072
"""Of Llama-3.1-8B in 16 bits, for sizes in bytes."""
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Capacities, as shares of the trace's distinct blocks."""
POLICIES = ("lru", "arc-tail-first", "s3fifo-tail-first", "gdsf")
BOUND = "belady"

Replay = Callable[[Accesses, int, str], Counts]
"""Counts a trace over so many blocks under a policy."""


class Curve(NamedTuple):
    """Values over capacities; a bound is what no policy can pass."""

    name: str
    capacity_bytes: list[int]
    values: list[float]
    bound: bool = False


class Panel(NamedTuple):
    """Curves of one quantity: what it is, and of what capacity."""

    what: str
    of: str
    curves: list[Curve]


def sweep(accesses: Accesses, block_bytes: int, replay: Replay) -> Panel:
    """Return the usable prefix in percent under each policy."""
    blocks = [max(round(share * accesses.distinct), 1) for share in SHARES]
    curves = []
    for policy in (*POLICIES, BOUND):
        found = [replay(accesses, each, policy) for each in blocks]
        percent = [100 * counts.prefix_hits / counts.accesses for counts in found]
        sizes = [each * block_bytes for each in blocks]
        curves.append(Curve(policy, sizes, percent, bound=policy == BOUND))
    return Panel(
        "usable prefix, % of prompt blocks", "GiB of KV of an 8B model (128 KiB a token)", curves
    )
