"""Policies over equal blocks beside the reference, trace by trace.

    python -m bench.replay --traces FOLDER           # the table, and each difference in points
    python -m bench.replay --traces FOLDER --only miniswe taubench --json

FOLDER has the trace files. A cell is block hits / usable prefix in percent of all accesses. The
reference was counted by other programs on the same files with the same rules; "ideal" is what a
cache that never evicts reaches. A cell without a figure has no reference.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from bench.timing import machine
from tierkv.simulation.blocks import replay
from tierkv.simulation.policies import CONTENDERS
from tierkv.simulation.traces import Accesses, Trace, load

SHARES = (0.01, 0.05, 0.10, 0.20)
CHOSEN = (*SHARES, 1.0)
TOLERANCE = 0.3
"""Points of a percent."""
POLICIES = ["lru-prompt-order", "lru", "s3fifo", "s3fifo-tail-first", "belady"]
POLICIES += ["arc", "arc-tail-first"]


class Known(NamedTuple):
    """A trace's file, the tokens of its blocks where they are regrouped, and its reference.

    `cells` has a row for each of SHARES: policy by policy, block hits and usable prefix.
    """

    file: str
    tokens: int | None
    ideal: float
    cells: str


# Columns: LRU, LRU tail-first, S3-FIFO, S3-FIFO tail-first, MIN, ARC, ARC tail-first.
KNOWN = {
    "conversation": Known(
        "mooncake_conversation_512tok.jsonl.gz", None, 36.64,
        """5.2/5.2 5.2/5.2 7.5/7.5 7.5/7.5 24.6/24.6 6.5/6.4 6.5/6.5
        19.5/19.5 19.6/19.6 19.1/19.1 19.1/19.1 36.6/36.6 21.0/21.0 21.0/21.0
        27.8/27.8 27.8/27.9 24.4/24.4 24.4/24.4 36.6/36.6 28.4/28.4 28.4/28.4
        34.5/34.5 34.5/34.5 30.7/30.6 30.7/30.7 36.6/36.6 32.0/32.0 32.0/32.0""",
    ),
    "agentic": Known(
        "agentic_merged48_64tok.jsonl.gz", 256, 96.38,
        """55.0/55.0 55.0/58.1 58.8/53.3 58.7/57.3 79.3/79.3 58.4/56.5 58.3/59.9
        96.3/96.3 96.3/96.3 95.7/95.6 95.7/95.6 96.4/96.4 96.2/96.1 96.2/96.2
        96.4/96.4 96.4/96.4 96.3/96.3 96.3/96.3 96.4/96.4 96.3/96.3 96.3/96.3
        96.4/96.4 96.4/96.4 96.4/96.4 96.4/96.4 96.4/96.4 96.4/96.3 96.4/96.4""",
    ),
    "miniswe": Known(
        "lmcache_miniswe_256byte.jsonl.gz", None, 92.72,
        """2.4/2.4 1.6/27.6 11.5/4.3 7.0/6.4 27.6/27.6 9.9/6.0 5.2/13.9
        50.5/50.5 49.3/68.3 63.7/51.1 63.1/58.5 68.3/68.3 62.6/47.6 61.5/66.5
        60.4/60.4 59.1/81.6 71.8/62.1 70.8/70.6 81.6/81.6 66.5/54.3 65.7/81.1
        92.6/92.6 91.2/92.6 92.6/92.4 91.9/92.6 92.7/92.7 92.5/92.2 92.0/92.4""",
    ),
    "taubench": Known(
        "lmcache_taubench_256byte.jsonl.gz", None, 77.69,
        """23.4/23.4 23.4/35.8 26.3/22.3 32.2/37.5 45.5/45.5
        71.8/71.8 70.4/75.6 64.5/63.9 63.8/67.7 77.0/77.0
        77.4/77.4 77.4/77.4 74.2/74.2 73.7/76.4 77.7/77.7
        77.7/77.7 77.7/77.7 77.5/77.3 77.1/77.6 77.7/77.7""",
    ),
    "sharegpt300": Known(
        "sharegpt300_16tok.jsonl.gz", None, 7.65,
        """0.2/0.2 0.2/0.2 0.2/0.2 0.2/0.2 3.8/3.8
        0.8/0.8 0.8/0.8 0.8/0.8 0.8/0.8 7.7/7.7
        1.4/1.4 1.4/1.4 1.4/1.4 1.4/1.4 7.7/7.7
        3.7/3.7 3.7/3.8 3.4/3.4 3.4/3.5 7.7/7.7""",
    ),
}  # fmt: skip


class Row(msgspec.Struct, kw_only=True):
    """One replay in percent; `off` is the larger difference from the reference, in points."""

    trace: str
    policy: str
    share: float
    blocks: int
    block_hit: float
    prefix_hit: float
    reference: tuple[float, float] | None
    off: float | None
    cpu_s: float
    cpu_s_per_million_decisions: float


def references(known: Known) -> dict[tuple[float, str], tuple[float, float]]:
    """Return block hits and usable prefix by share and policy."""
    found = {}
    for share, line in zip(SHARES, known.cells.splitlines(), strict=True):
        for policy, cell in zip(POLICIES, line.split(), strict=False):
            block, _, prefix = cell.partition("/")
            found[share, policy] = float(block), float(prefix)
    found[1.0, "lru"] = known.ideal, known.ideal
    return found


def measure(
    name: str, accesses: Accesses, policy: str, share: float, reference: tuple[float, float] | None
) -> Row:
    """Replay once."""
    blocks = round(accesses.distinct * share)
    counts = replay(accesses, blocks, CONTENDERS[policy])
    hits = 100 * counts.block_hits / counts.accesses, 100 * counts.prefix_hits / counts.accesses
    off = max(abs(a - b) for a, b in zip(hits, reference, strict=True)) if reference else None
    return Row(
        trace=name, policy=policy, share=share, blocks=blocks, block_hit=hits[0],
        prefix_hit=hits[1], reference=reference, off=off, cpu_s=round(counts.seconds, 2),
        cpu_s_per_million_decisions=round(counts.seconds / counts.decisions * 1e6, 2),
    )  # fmt: skip


def show(rows: list[Row], console: Console) -> None:
    """Print a table for people."""
    table = Table(title="block hit / usable prefix in percent, ours and the reference")
    for title in ("trace", "cache", "blocks", "policy", "ours", "reference", "off", "s", "s/M"):
        table.add_column(title, justify="left" if title in {"trace", "policy"} else "right")
    for row in rows:
        known = "{:.1f} / {:.1f}".format(*row.reference) if row.reference else "-"
        off = "-" if row.off is None else f"{row.off:.2f}"
        mark = " !" if row.off is not None and row.off > TOLERANCE else ""
        table.add_row(
            row.trace, f"{row.share:.0%}", f"{row.blocks:,}", row.policy,
            f"{row.block_hit:.2f} / {row.prefix_hit:.2f}", known, off + mark,
            f"{row.cpu_s:.1f}", f"{row.cpu_s_per_million_decisions:.1f}",
        )  # fmt: skip
    console.print(table)


def main() -> int:
    arguments = argparse.ArgumentParser(description="Policies beside the reference.")
    arguments.add_argument("--traces", type=Path, required=True, help="the folder of trace files")
    arguments.add_argument("--only", nargs="*", choices=list(KNOWN), default=list(KNOWN))
    arguments.add_argument("--policy", nargs="*", choices=POLICIES, default=POLICIES)
    arguments.add_argument("--share", nargs="*", type=float, choices=CHOSEN, default=CHOSEN)
    arguments.add_argument("--json", action="store_true", help="print one line of JSON")
    chosen = arguments.parse_args()
    about, rows = machine(), []
    for name in chosen.only:
        known = KNOWN[name]
        accesses = load(Trace(chosen.traces / known.file, tokens=known.tokens))
        cells = references(known)
        for share, policy in product(chosen.share, chosen.policy):
            if share == 1 and policy != "lru":
                continue  # what evicts nothing is the same under all
            row = measure(name, accesses, policy, share, cells.get((share, policy)))
            rows.append(row)
            print(msgspec.json.encode(row).decode(), file=sys.stderr, flush=True)
    if chosen.json:
        print(json.dumps({**about, "rows": msgspec.to_builtins(rows)}))
    else:
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(about, highlight=False)
        show(rows, console)
    return int(any(row.off is not None and row.off > TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
