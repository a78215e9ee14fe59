"""Timing: contenders take turns, so that a busy machine slows all of them alike."""

import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

Run = Callable[[], float]
"""Does one measurement and returns its seconds; what it prepares before is not in them."""

PACKAGES = ("tierkv-sidecar", "torch", "numpy", "msgspec", "xxhash", "redis")


class Spread(NamedTuple):
    """Median and quartiles."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


def take_turns(
    contenders: Mapping[str, Run], turns: int, warm: int, seed: int
) -> dict[str, list[float]]:
    """Run every contender once a turn, in an order drawn anew; returns seconds by contender.

    A peer that ends in the middle (RuntimeError) is left out and said so; ours may not.
    """
    order, draw = list(contenders), random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warm + turns):
        draw.shuffle(order)
        for name in list(order):
            try:
                took = contenders[name]()
            except RuntimeError as error:
                print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
                order.remove(name)
                del seconds[name]
                continue
            if turn >= warm:
                seconds[name].append(took)
    return seconds


def ratios(mine: Sequence[float], others: Sequence[float]) -> Spread:
    """Return how many times as fast as the other one was, turn by turn."""
    return spread([other / own for own, other in zip(mine, others, strict=True)])


def machine() -> dict[str, Any]:
    """Say what was measured, where and beside what load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    memory = Path("/proc/meminfo").read_text().split(None, 2)[1]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted": bool(_git("status", "--porcelain", "--", "*.py")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": names[0] if names else platform.machine(),
        "cores": len(names),
        "memory_gib": round(int(memory) / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": Path("/proc/loadavg").read_text().split()[:3],
        "packages": versions,
    }


def _git(*words: str) -> str:
    found = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return found.stdout.strip()
