"""Tiers beside the limit and the peers: `python -m bench.tiers [--quick] [--json] [--only TIER]`.

Every tier moves a ring of 256 MiB in blocks of 2 MiB and of 32 MiB, too much for any cache. Within
a turn tierkv, the machine's limit and every peer run once, in an order drawn anew, and a ratio is
the median of the ratios of the turns: so load from elsewhere slows all of them, and does not tilt
it. A disk takes twice as many turns, for it changes from one second to the next. Speeds are in GB
(1e9 bytes) of blocks per second.

    host             match, get, copy, release and put, copy, commit; limit: plain copies of the
                     same blocks from and to the same arena; peers: LMCache's engine, Mooncake
    host_doubted     the same with `verify = "always"`, beside "arrival" in the peer's column
    sidecar          the same through `tierkv serve`; peers: `lmcache server` over shared memory,
                     Mooncake over TCP
    sidecar_latency  one 2 MiB block at a time; get_two_calls where match and get are two processes'
    nvme             the tier with its checksums; limit: O_DIRECT on a file beside it; peer: LMCache
    nvme_end_to_end  the store: put to flush, and match to copied out with all blocks on NVMe
    redis            the tier with its checksums; limit: a bare RESP loop; peer: redis-py

`bench/peers.sh` installs the peers; absent ones are named at the end.
"""

import argparse
import sys

import msgspec
import torch
from rich.console import Console

from bench import nvme, over_redis, ram
from bench.engine import MIB
from bench.rows import Row, show
from bench.timing import machine

SIZES = (2 * MIB, 32 * MIB)
TIERS = ("host", "doubted", "sidecar", "latency", "nvme", "stages", "redis")
FULL_TURNS, QUICK_TURNS = 15, 5
FULL_SAMPLES, QUICK_SAMPLES = 2000, 500


def measure(
    chosen: tuple[str, ...], absent: dict[str, str], *, quick: bool, with_peers: bool, seed: int
) -> list[Row]:
    """Measure the chosen tiers one after the other."""
    turns = QUICK_TURNS if quick else FULL_TURNS
    rows: list[Row] = []
    for tier in chosen:
        print(f"measuring {tier}", file=sys.stderr, flush=True)
        if tier == "latency":
            rows += ram.latency(QUICK_SAMPLES if quick else FULL_SAMPLES, seed)
            continue
        for size in SIZES:
            if tier in {"host", "sidecar"}:
                rows += ram.measure(tier, size, turns, seed, absent, with_peers=with_peers)
            elif tier == "doubted":
                rows += ram.doubted(size, turns, seed)
            elif tier == "nvme":
                rows += nvme.measure(size, 2 * turns + 1, seed, absent, with_peers=with_peers)
            elif tier == "stages":
                rows += nvme.stages(size, turns, seed)
            else:
                rows += over_redis.measure(size, turns, seed, absent)
    return rows


def main() -> int:
    arguments = argparse.ArgumentParser(description="Measure the tiers beside limits and peers.")
    arguments.add_argument("--quick", action="store_true", help="fewer turns")
    arguments.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments.add_argument("--only", action="append", choices=TIERS, help="may be repeated")
    arguments.add_argument("--no-peers", action="store_true")
    arguments.add_argument("--seed", type=int, default=1)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    about = machine()
    absent: dict[str, str] = {}
    rows = measure(
        tuple(chosen.only or TIERS), absent, quick=chosen.quick,
        with_peers=not chosen.no_peers, seed=chosen.seed,
    )  # fmt: skip
    about["load_after"] = machine()["load"]
    if chosen.json:
        print(msgspec.json.encode({**about, "rows": rows, "absent": absent}).decode())
        return 0
    console = Console(width=None if sys.stdout.isatty() else 190)
    console.print(about, highlight=False)
    show(rows, absent, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
