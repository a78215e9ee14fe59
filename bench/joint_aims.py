"""What the joint policy reaches when clients tell more, when they bear less, and given the future.

- hints: clients say with a request that none goes on with it, as a first pass over the trace knows.
- floor: sessions differ in what losses do to them, and no copy may lose more than 0.01 nats so.
- clairvoyant: the policy knows each block's next use; what is left is where to keep what.

Each row has what is aimed at: a share of the gap closed, or seconds near those of the bound.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from tierkv.simulation.foresight import clients_of
from tierkv.simulation.scenario import read_scenario
from tierkv.simulation.serving import CLAIRVOYANT, Workload, contest, serve

HINTS, FLOOR = "hints", "floor"
VARIATION, MOST_KL = 0.4, 0.01
NEAR = {"conversation": 1.005, "agentic": 1.02}
"""Times the bound's seconds that a policy which knows the future may take."""
CLOSED = {
    (HINTS, "conversation", "small", "safe"): 85.0,
    (FLOOR, "conversation", "small", "economy"): 81.5,
    (FLOOR, "conversation", "h100-8b", "economy"): 84.3,
}
"""Percent of the gap to be closed."""


class Aimed(msgspec.Struct, frozen=True, kw_only=True):
    """One row; seconds are means to first token."""

    what: str
    trace: str
    scenario: str
    fidelity: str
    ours_s: float
    aim_s: float
    gap_closed: float
    quality_loss_mean: float


class Place(NamedTuple):
    """A trace, a scenario and a class."""

    trace: str
    scenario: str
    fidelity: str


def rows_of(
    trace: str, workload: Workload, bounds: Mapping[tuple[str, str, str], float]
) -> Iterator[Aimed]:
    """Replay what is aimed at on a trace; `bounds` in seconds, by trace, scenario and class."""
    for (what, name, scenario, fidelity), percent in CLOSED.items():
        if name == trace:
            yield _row(what, Place(name, scenario, fidelity), workload, percent, 0.0)
    for place, bound in bounds.items():
        if place[0] == trace:
            yield _row(CLAIRVOYANT, Place(*place), workload, 0.0, bound * NEAR[trace])


def _row(what: str, place: Place, workload: Workload, percent: float, aim_s: float) -> Aimed:
    scenario = read_scenario(place.scenario)
    clients = clients_of(
        workload.ids,
        closed=what == HINTS,
        variation=VARIATION if what == FLOOR else 0.0,
        most_kl=MOST_KL if what == FLOOR else float("inf"),
        seed=0,
    )
    lru = contest(scenario, "lru", "exact", workload, 0)
    base = serve(workload, scenario, "exact", lru).ttft_s.mean
    policy = CLAIRVOYANT if what == CLAIRVOYANT else "evicpress"
    chosen = contest(scenario, policy, place.fidelity, workload, 0)
    told = workload._replace(clients=clients)
    served = serve(told, scenario, place.fidelity, chosen)
    gap = base - served.ttft_infinite_free_s.mean
    return Aimed(
        what=what,
        trace=place.trace,
        scenario=place.scenario,
        fidelity=place.fidelity,
        ours_s=served.ttft_s.mean,
        aim_s=aim_s or base - percent / 100 * gap,
        gap_closed=100 * (base - served.ttft_s.mean) / gap,
        quality_loss_mean=served.quality_loss_mean,
    )


def show_aims(rows: list[Aimed]) -> None:
    """Print a table; what misses its aim is marked."""
    table = Table(title="mean seconds to first token when more is known")
    for name in ("what", "trace", "scenario", "class"):
        table.add_column(name)
    for name in ("ours", "aim", "gap closed", "KL/token"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.what,
            row.trace,
            row.scenario,
            row.fidelity,
            f"{row.ours_s:.4f}",
            f"{row.aim_s:.4f}" + (" !" if row.ours_s > row.aim_s else ""),
            f"{row.gap_closed:.1f}%",
            f"{row.quality_loss_mean:.5f}",
        )
    Console(width=120).print(table)
