"""What a decision of the joint policy costs among few and among many.

    python -m bench.decisions          # a minute or two of one core; --json for programs

Time of one core, best of forty on a store's Catalog (room for four blocks in RAM) and of three runs
over modelled tiers (segments of 16 blocks, where a prompt of one segment makes room for itself).
The aim is that a hundred times as many cost at most 1.5 times as much.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.table import Table

from bench.timing import machine
from tests.unit.test_evicpress import DECISIONS, decisions_among
from tests.unit.test_joint_store import reclaim_among

FEW, MANY = 10_240, 1_000_192
SEGMENT_BLOCKS = 16
MOST = 1.5


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a decision with so many placements, and how many times those among few."""

    where: str
    placements: int
    ms: float
    times_few: float


def _seconds(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measure() -> list[Row]:
    """Measure both policies among few and among many."""

    def store(placements: int) -> float:
        reclaim = reclaim_among(placements)
        return min(_seconds(reclaim) for _ in range(40))

    def modelled(placements: int) -> float:
        segments = placements // SEGMENT_BLOCKS
        return min(_seconds(decisions_among(segments)) for _ in range(3)) / DECISIONS

    rows = []
    for where, seconds in (("store", store), ("modelled tiers", modelled)):
        seconds(FEW)  # what a first run imports and compiles is no decision
        few = seconds(FEW)
        for placements, took in ((FEW, few), (MANY, seconds(MANY))):
            times = took / few
            rows.append(Row(where=where, placements=placements, ms=took * 1e3, times_few=times))
    return rows


def main() -> int:
    """Measure, and say so where many cost too much."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    about, rows = parser.parse_args(), measure()
    if about.json:
        found = {"machine": machine(), "rows": msgspec.to_builtins(rows)}
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        table = Table("where", "placements", "ms a decision", "times few")
        for row in rows:
            mark = " !" if row.times_few > MOST else ""
            times = f"{row.times_few:.2f}{mark}"
            table.add_row(row.where, f"{row.placements:,}", f"{row.ms:.3f}", times)
        Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
