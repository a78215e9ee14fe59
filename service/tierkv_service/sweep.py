"""Sweeps: every policy over rising capacities, as panels of curves to plot."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tierkv.simulation.blocks import Counts
from tierkv.simulation.cascade import MAKES
from tierkv.simulation.scenario import Scenario
from tierkv.simulation.serving import Served
from tierkv.simulation.traces import Accesses

BYTES_PER_TOKEN = 131_072
"""Of Llama-3.1-8B in 16 bits, for sizes in bytes."""
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Capacities, as shares of the trace's distinct blocks."""
POLICIES = ("lru", "arc-tail-first", "s3fifo-tail-first", "gdsf", "evicpress")
BOUND = "belady"
TIMES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Sizes of a scenario's first tier, by what it says."""
PREFIX = "usable prefix, % of prompt blocks"

Count = Callable[[Accesses, int, str], Counts]
"""Counts a trace over so many blocks under a policy."""
Serve = Callable[[Scenario, str], Served]
"""Replays a trace over a scenario under a policy."""


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


def sweep_blocks(accesses: Accesses, block_bytes: int, count: Count) -> Panel:
    """Return the usable prefix in percent over one tier of equal blocks."""
    blocks = [max(round(share * accesses.distinct), 1) for share in SHARES]
    curves = []
    for policy in (*POLICIES, BOUND):
        percent = [_prefix(count(accesses, each, policy)) for each in blocks]
        sizes = [each * block_bytes for each in blocks]
        curves.append(Curve(policy, sizes, percent, bound=policy == BOUND))
    return Panel(PREFIX, "GiB of KV of an 8B model (128 KiB a token)", curves)


def sweep_tiers(
    accesses: Accesses,
    tokens_per_block: int,
    scenario: Scenario,
    fidelity: str,
    serve: Serve,
    count: Count,
) -> list[Panel]:
    """Return mean time to first token and usable prefix over sizes of the first tier.

    Policies that know one profile get the one with which LRU is fastest at the scenario's own size;
    LRU with raw copies stands beside them. The bound of hits is Belady's with all tiers in one and
    every block at the least size that the class allows; that of time keeps all and loads for free.
    """
    forms = scenario.forms(fidelity)
    best = min(
        (f"lru@{form.name}" for form in forms), key=lambda each: _mean(serve(scenario, each))
    )
    profile = best.partition("@")[2]
    policies = ["lru@raw", best, *(f"{name}@{profile}" for name in MAKES), "evicpress"]
    sized = [_with_first(scenario, times) for times in TIMES]
    sizes = [each.capacity[0] for each in sized]
    found = {policy: [serve(each, policy) for each in sized] for policy in dict.fromkeys(policies)}
    times = [Curve(name, sizes, [_mean(each) for each in row]) for name, row in found.items()]
    least = [each.ttft_infinite_free_s.mean for each in found["evicpress"]]
    times.append(Curve("everything kept, loads free", sizes, least, bound=True))
    hits = [
        Curve(name, sizes, [100 * each.prefix_hit for each in row]) for name, row in found.items()
    ]
    block_bytes = tokens_per_block * scenario.model.bytes_per_token
    ratio = max(form.ratio for form in forms)
    blocks = [max(int(sum(each.capacity) * ratio / block_bytes), 1) for each in sized]
    known = [_prefix(count(accesses, each, BOUND)) for each in blocks]
    hits.append(Curve(BOUND, sizes, known, bound=True))
    of = f"GiB of {scenario.tier[0].name}"
    return [Panel("mean time to first token, s", of, times), Panel(PREFIX, of, hits)]


def _with_first(scenario: Scenario, times: float) -> Scenario:
    """Return a scenario whose first tier is so many times as large."""
    first, *rest = scenario.tier
    larger = msgspec.structs.replace(first, gib=first.gib * times)
    return msgspec.structs.replace(scenario, tier=[larger, *rest])


def _mean(served: Served) -> float:
    return served.ttft_s.mean


def _prefix(counts: Counts) -> float:
    return 100 * counts.prefix_hits / counts.accesses
