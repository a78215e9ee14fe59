"""The joint policy beside LRU with the best one profile over sizes of host RAM and NVMe.

What the sweep asks: is the joint policy ever behind keeping everything at the one best profile of
the class, by how much, and what is it ahead on average. Tiers are those of `h100-8b`, without
Redis; the best profile is found anew in each cell. Seconds are means to first token.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tierkv.simulation.scenario import Scenario, read_scenario
from tierkv.simulation.serving import Workload, contest, serve

HOST_GIB = (16, 64, 256)
NVME_GIB = (128, 256, 1024, 4096)
BEHIND, AHEAD = 0.3, 1.5
"""Percent that no cell may be behind, and that all must be ahead on average."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One size; `ahead` is in percent of the seconds of LRU with its best profile."""

    trace: str
    fidelity: str
    host_gib: int
    nvme_gib: int
    best_profile: str
    best_profile_s: float
    ours_s: float
    ahead: float

    @property
    def of(self) -> tuple[str, str]:
        """Return its trace and class."""
        return self.trace, self.fidelity


def sized(host_gib: int, nvme_gib: int) -> Scenario:
    """Return the scenario with a host tier and a disk of these sizes."""
    scenario = read_scenario("h100-8b")
    sizes = zip(scenario.tier, (host_gib, nvme_gib), strict=False)
    tiers = [msgspec.structs.replace(tier, gib=gib) for tier, gib in sizes]
    return msgspec.structs.replace(scenario, tier=tiers)


def read_cells(path: Path | None) -> list[Cell]:
    """Return the cells that an earlier run has written, a line each."""
    if path is None or not path.exists():
        return []
    return [msgspec.json.decode(line, type=Cell) for line in path.read_bytes().splitlines()]


def cells(
    workload: Workload, trace: str, fidelity: str, known: set[tuple[int, int]]
) -> Iterator[Cell]:
    """Replay a workload over every size of host and disk that is not known yet."""
    for host_gib, nvme_gib in product(HOST_GIB, NVME_GIB):
        if (host_gib, nvme_gib) in known:
            continue
        scenario = sized(host_gib, nvme_gib)

        def seconds(policy: str, scenario: Scenario = scenario) -> float:
            chosen = contest(scenario, policy, fidelity, workload, 0)
            return serve(workload, scenario, fidelity, chosen).ttft_s.mean

        found = {form.name: seconds(f"lru@{form.name}") for form in scenario.forms(fidelity)}
        best = min(found, key=found.__getitem__)
        ours = seconds("evicpress")
        yield Cell(
            trace=trace,
            fidelity=fidelity,
            host_gib=host_gib,
            nvme_gib=nvme_gib,
            best_profile=best,
            best_profile_s=found[best],
            ours_s=ours,
            ahead=100 * (1 - ours / found[best]),
        )


def show_cells(rows: list[Cell]) -> None:
    """Print a table, the worst cell and the mean."""
    table = Table(title="mean seconds to first token over sizes of host RAM and NVMe")
    for name in ("trace", "class", "host GiB", "NVMe GiB", "LRU + best profile", "ours", "ahead"):
        table.add_column(name, justify="left" if name in {"trace", "class"} else "right")
    for row in rows:
        table.add_row(
            row.trace,
            row.fidelity,
            str(row.host_gib),
            str(row.nvme_gib),
            f"{row.best_profile_s:.4f} {row.best_profile}",
            f"{row.ours_s:.4f}",
            f"{row.ahead:+.2f}%" + (" !" if row.ahead < -BEHIND else ""),
        )
    console = Console(width=120)
    console.print(table)
    mean, least = sum(row.ahead for row in rows) / len(rows), min(row.ahead for row in rows)
    console.print(f"ahead {mean:.2f}% on average (wanted {AHEAD}), {least:+.2f}% at worst")
