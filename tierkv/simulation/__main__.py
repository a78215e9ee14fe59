"""`python -m tierkv.simulation`: run many seeds, or replay one."""

import argparse
import sys
import time
from collections import Counter

from tierkv.simulation.world import simulate

STEPS = 2000


def main() -> int:
    """Run the seeds asked for and say how each went."""
    parser = argparse.ArgumentParser(prog="tierkv.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds, from 0 on")
    parser.add_argument("--seed", type=int, help="replay this seed only")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    seeds = range(options.seeds) if options.seed is None else [options.seed]
    hits: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    steps, verified, start = 0, 0, time.monotonic()
    for seed in seeds:
        result = simulate(seed, options.steps)
        steps, verified = steps + result.steps, verified + result.verified
        hits += Counter({k: n for k, n in result.counters.items() if k.startswith("hit_")})
        faults += result.faults
        print(
            f"seed {seed}: {result.steps} steps, {result.verified} frames verified,"
            f" {result.faults.total()} faults, state {result.digest[:16]}"
        )
    print(
        f"{len(seeds)} seeds, {steps} steps in {time.monotonic() - start:.1f} s;"
        f" {verified} frames verified byte by byte; hits {_shown(hits)}; faults {_shown(faults)}"
    )
    return 0


def _shown(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"


if __name__ == "__main__":
    sys.exit(main())
