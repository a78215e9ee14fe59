"""The joint policy over modelled tiers, beside LRU, LRU with the best profile, and a bound.

    python -m bench.joint --traces FOLDER                      # every row; some take minutes
    python -m bench.joint --traces FOLDER --only agentic small --json
    python -m bench.joint --traces FOLDER --sweep              # sizes of host RAM and NVMe instead
    python -m bench.joint --traces FOLDER --sweep --kept FILE  # goes on where a run ended; hours
    python -m bench.joint --traces FOLDER --aims               # hints, floors, a known future

Gap closed is (LRU - ours) / (LRU - everything kept, loads free), in percent of mean time to first
token; LRU keeps raw copies, tail first. "bound" is what a linear programme that knows the trace
allows, and "before" what an earlier prototype of such a policy reached; both are figures of others.
GPU seconds are of encoding and decoding against the prefill that loads saved.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from bench.joint_aims import Aimed, rows_of, show_aims
from bench.joint_sweep import Cell, cells, read_cells, show_cells
from bench.timing import machine
from tierkv.simulation.scenario import read_scenario
from tierkv.simulation.serving import Workload, contest, read_workload, serve
from tierkv.simulation.traces import Trace

FILES = {
    "conversation": ("mooncake_conversation_512tok.jsonl.gz", 512),
    "agentic": ("agentic_merged48_64tok.jsonl.gz", 256),
}


class Known(NamedTuple):
    """Mean seconds to first token: what was reached before, and the bound."""

    before: float
    bound: float


def of_gap(base: float, free: float, before: float, bound: float) -> Known:
    """Return seconds for percents of a gap."""
    return Known(base - before / 100 * (base - free), base - bound / 100 * (base - free))


KNOWN = {
    ("conversation", "h100-8b", "safe"): of_gap(0.490, 0.382, 82.5, 88.4),
    ("conversation", "h100-8b", "economy"): of_gap(0.490, 0.382, 86.6, 89.7),
    ("agentic", "h100-8b", "safe"): of_gap(2.86, 0.706, 80.9, 84.3),
    ("agentic", "h100-8b", "economy"): of_gap(2.86, 0.706, 83.8, 86.4),
    ("conversation", "small", "safe"): of_gap(0.572, 0.382, 70.0, 91.0),
    ("conversation", "small", "economy"): of_gap(0.572, 0.382, 90.1, 92.9),
    ("agentic", "small", "safe"): Known(1.232, 1.168),
    ("agentic", "small", "economy"): Known(1.089, 1.064),
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table; seconds are means to first token."""

    trace: str
    scenario: str
    fidelity: str
    lru_s: float
    best_profile: str
    best_profile_s: float
    ours_s: float
    free_s: float
    full_prefill_s: float
    before_s: float
    bound_s: float
    gap_closed: float
    quality_loss_mean: float
    written_bytes_per_day: dict[str, float]
    codec_gpu_s: float
    prefill_saved_s: float
    seconds_per_million_decisions: float


def measure(workload: Workload, trace: str, scenario_name: str, fidelity: str) -> Row:
    """Replay ours, LRU, and LRU with each profile of the class."""
    scenario = read_scenario(scenario_name)

    def run(policy: str, served_class: str) -> float:
        chosen = contest(scenario, policy, served_class, workload, 0)
        return serve(workload, scenario, served_class, chosen).ttft_s.mean

    lru = run("lru", "exact")
    others = {
        form.name: run(f"lru@{form.name}", fidelity)
        for form in scenario.forms(fidelity)
        if form.name != "raw"
    }
    best = min(others, key=others.__getitem__)
    chosen = contest(scenario, "evicpress", fidelity, workload, 0)
    ours = serve(workload, scenario, fidelity, chosen)
    free, mean = ours.ttft_infinite_free_s.mean, ours.ttft_s.mean
    known = KNOWN[trace, scenario_name, fidelity]
    return Row(
        trace=trace,
        scenario=scenario_name,
        fidelity=fidelity,
        lru_s=lru,
        best_profile=best,
        best_profile_s=others[best],
        ours_s=mean,
        free_s=free,
        full_prefill_s=ours.ttft_full_prefill_s.mean,
        before_s=known.before,
        bound_s=known.bound,
        gap_closed=100 * (lru - mean) / (lru - free),
        quality_loss_mean=ours.quality_loss_mean,
        written_bytes_per_day=ours.written_bytes_per_day,
        codec_gpu_s=ours.encode_gpu_s + ours.decode_gpu_s,
        prefill_saved_s=ours.prefill_saved_s,
        seconds_per_million_decisions=ours.seconds_per_million_decisions,
    )


def show(rows: list[Row]) -> None:
    """Print the rows as a table."""
    table = Table(title="mean seconds to first token")
    for name in ("trace", "scenario", "class"):
        table.add_column(name)
    names = ("LRU", "LRU + best profile", "ours", "before", "bound", "all kept, free")
    more = (
        "gap closed",
        "KL/token",
        "written TB/day",
        "codec GPU s",
        "saved GPU s",
        "s/M decisions",
    )
    for name in names + more:
        table.add_column(name, justify="right")
    for row in rows:
        written = ", ".join(
            f"{name} {nbytes / 1e12:.0f}" for name, nbytes in row.written_bytes_per_day.items()
        )
        table.add_row(
            row.trace,
            row.scenario,
            row.fidelity,
            f"{row.lru_s:.4f}",
            f"{row.best_profile_s:.4f} {row.best_profile}",
            f"{row.ours_s:.4f}",
            f"{row.before_s:.4f}",
            f"{row.bound_s:.4f}",
            f"{row.free_s:.4f}",
            f"{row.gap_closed:.1f}%",
            f"{row.quality_loss_mean:.5f}",
            written,
            f"{row.codec_gpu_s:,.0f}",
            f"{row.prefill_saved_s:,.0f}",
            f"{row.seconds_per_million_decisions:.1f}",
        )
    Console(width=200).print(table)


def main() -> None:
    """Measure the rows that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="traces, scenarios or classes")
    parser.add_argument("--sweep", action="store_true", help="over sizes of host RAM and NVMe")
    parser.add_argument(
        "--kept", type=Path, help="cells of a sweep, a line each, read and added to"
    )
    parser.add_argument("--aims", action="store_true", help="with what more may be known")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows: list[Row] | list[Cell] | list[Aimed]
    rows = sweep(asked) if asked.sweep else aims(asked) if asked.aims else measured(asked)
    if asked.json:
        found = {"machine": machine(), "rows": msgspec.to_builtins(rows)}
        sys.stdout.write(json.dumps(found, indent=1) + "\n")


def measured(asked: argparse.Namespace) -> list[Row]:
    """Return the rows that were asked for, and show them as a table where JSON was not asked."""
    rows, read = [], {}
    for trace, scenario, fidelity in KNOWN:
        if not set(asked.only) <= {trace, scenario, fidelity}:
            continue
        if trace not in read:
            read = {trace: workload_of(asked.traces, trace)}
        rows.append(measure(read[trace], trace, scenario, fidelity))
    if not asked.json:
        show(rows)
    return rows


def sweep(asked: argparse.Namespace) -> list[Cell]:
    """The same over sizes; each cell is told on standard error when it is done."""
    rows = read_cells(asked.kept)
    for trace in FILES:
        for fidelity in ("safe", "economy"):
            if not set(asked.only) <= {trace, fidelity}:
                continue
            known = {(row.host_gib, row.nvme_gib) for row in rows if row.of == (trace, fidelity)}
            for cell in cells(workload_of(asked.traces, trace), trace, fidelity, known):
                rows.append(cell)
                print(msgspec.json.encode(cell).decode(), file=sys.stderr, flush=True)
                if asked.kept:
                    with asked.kept.open("ab") as file:
                        file.write(msgspec.json.encode(cell) + b"\n")
    if not asked.json:
        show_cells(rows)
    return rows


def aims(asked: argparse.Namespace) -> list[Aimed]:
    """What is aimed at beside the main rows; each is told on standard error when it is done."""
    bounds = {place: known.bound for place, known in KNOWN.items()}
    rows: list[Aimed] = []
    for trace in FILES:
        if set(asked.only) <= {trace}:
            for row in rows_of(trace, workload_of(asked.traces, trace), bounds):
                rows.append(row)
                print(msgspec.json.encode(row).decode(), file=sys.stderr, flush=True)
    if not asked.json:
        show_aims(rows)
    return rows


def workload_of(folder: Path, trace: str) -> Workload:
    """Read a trace by name."""
    file, tokens = FILES[trace]
    return read_workload(Trace(folder / file, tokens=tokens))


if __name__ == "__main__":
    main()
