"""What tierkv costs and gives a real vLLM: `python -m bench.vllm [--json] [--requests N]`.

Engines run in pairs and take turns, request by request, with one OpenMP thread. CPU seconds are
those of all processes of an engine; the sidecar's are its own and shown beside them. The peers are
vLLM's bundled example connector, which keeps KV in files, and its tiered offload: RAM, then files.

cost: prompts that share nothing, with tierkv and without any connector. hit: one prompt again, from
the engine's own prefix cache and, after that was emptied, from what a connector keeps. scheduler:
how long tierkv's calls kept vLLM's scheduler meanwhile, each call and all of a step.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from bench.timing import machine, percentile, spread
from tests.engines.vllm_engine import BLOCK, Engine
from tests.sidecars import Process
from tierkv_connectors.models import smollm2

PROMPT = 512
"""Tokens of a prompt; each ends in the middle of a block."""
NEW = 1
SEED = 7
HOST_BYTES = 4 << 30
OFFLOAD_BYTES = 2 << 30
RESAMPLES = 10_000
CALLS = "calls.jsonl"


class Took(NamedTuple):
    """One request: CPU seconds of the engine, seconds to the first token, tokens not computed."""

    cpu_s: float
    ttft_s: float
    cached: int


class Subject:
    """An engine whose requests are measured one by one."""

    def __init__(self, engine: Engine) -> None:
        assert engine._process is not None  # noqa: SLF001
        self.engine = engine
        self._main = psutil.Process(engine._process.pid)  # noqa: SLF001

    def cpu_s(self) -> float:
        every = [self._main, *self._main.children(recursive=True)]
        return sum(sum(one.cpu_times()[:2]) for one in every)

    def ask(self, tokens: Sequence[int]) -> Took:
        before = self.cpu_s()
        answer = self.engine.generate([tokens], NEW)[0]
        return Took(self.cpu_s() - before, answer.ttft_s, answer.cached)


def prompts(count: int) -> Iterator[list[int]]:
    """Yield prompts that share nothing."""
    draw = random.Random(SEED)
    for _ in range(count):
        yield [draw.randrange(100, 40_000) for _ in range(PROMPT + BLOCK // 2)]


def tierkv(sidecar: Process) -> dict[str, Any]:
    return {
        "kv_connector": "TimedConnector",
        "kv_connector_module_path": "bench.vllm_timed",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(sidecar.path)},
    }


def example(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def offload(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "bench.vllm_offload",
            "cpu_bytes_to_use": OFFLOAD_BYTES,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
        },
    }


@contextmanager
def subject(
    model: Path, folder: Path, name: str, config: Mapping[str, Any] | None
) -> Iterator[Subject]:
    print(f"starting vLLM with {name}", file=sys.stderr, flush=True)
    log = folder / f"{name}.log"
    more = {"OMP_NUM_THREADS": "1", "TIERKV_BENCH_CALLS": str(folder / CALLS)}
    with Engine(model, log, config, more, max_model_len=2 * PROMPT) as engine:
        one = Subject(engine)
        for tokens in prompts(2):  # what the first requests of a process cost is no one's
            one.ask(tokens[::-1])
        yield one


def paired(mine: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return the mean difference as a share of the others' mean, with a 95 % bootstrap interval."""
    own, other = np.array(mine), np.array(others)
    draw = np.random.default_rng(SEED).integers(0, len(own), (RESAMPLES, len(own)))
    shares = (own[draw].mean(axis=1) / other[draw].mean(axis=1) - 1).tolist()
    low, high = np.quantile(shares, [0.025, 0.975])
    share = float(own.mean() / other.mean() - 1)
    return {"share": round(share, 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def cost(plain: Subject, with_tierkv: Subject, requests: int) -> dict[str, Any]:
    """Ask each prompt of both engines, in an order drawn anew."""
    draw, took = random.Random(SEED), {"plain": list[Took](), "tierkv": list[Took]()}
    for number, tokens in enumerate(prompts(requests)):
        order = [("plain", plain), ("tierkv", with_tierkv)]
        draw.shuffle(order)
        for name, one in order:
            took[name].append(one.ask(tokens))
        _progress("cost", number + 1, requests)
    assert not any(one.cached for one in took["tierkv"]), "prompts that share nothing"
    found: dict[str, Any] = {"name": "cost", "requests": requests, "prompt_tokens": PROMPT}
    for field in ("cpu_s", "ttft_s"):
        mine, other = ([getattr(one, field) for one in took[name]] for name in ("tierkv", "plain"))
        found[field] = {"tierkv": round(statistics.median(mine), 4)}
        found[field]["plain"] = round(statistics.median(other), 4)
        found[field]["difference"] = paired(mine, other)
    return found


def hit(name: str, one: Subject, turns: int) -> dict[str, Any]:
    """Ask prompts again: from the engine's own cache, then, that being empty, from `name`."""
    local, kept = list[Took](), list[Took]()
    for number, tokens in enumerate(prompts(turns)):
        one.ask(tokens)
        local.append(one.ask(tokens))
        one.engine.reset_prefix_cache()
        kept.append(one.ask(tokens))
        one.engine.reset_prefix_cache()
        _progress(f"hit: {name}", number + 1, turns)
    cpu = [mine.cpu_s / own.cpu_s for mine, own in zip(kept, local, strict=True)]
    return {
        "name": "hit",
        "from": name,
        "turns": turns,
        "cached_tokens": statistics.median(took.cached for took in kept),
        "local_cached_tokens": statistics.median(took.cached for took in local),
        "cpu_s": round(statistics.median(took.cpu_s for took in kept), 4),
        "local_cpu_s": round(statistics.median(took.cpu_s for took in local), 4),
        "ratio_cpu": round(statistics.median(cpu), 3),
        "ratio_cpu_iqr": [round(spread(cpu).low, 3), round(spread(cpu).high, 3)],
        "ttft_s": round(statistics.median(took.ttft_s for took in kept), 4),
        "local_ttft_s": round(statistics.median(took.ttft_s for took in local), 4),
    }


def scheduler(calls: Path) -> dict[str, Any]:
    """Return what the calls of every step took, in microseconds."""
    steps = [json.loads(line) for line in calls.read_text().splitlines()]
    each = [seconds * 1e6 for step in steps for _, seconds in step]
    whole = [sum(seconds for _, seconds in step) * 1e6 for step in steps]
    found: dict[str, Any] = {"name": "scheduler", "steps": len(steps), "calls": len(each)}
    for name, values in (("call", each), ("step", whole)):
        for percent in (50, 99, 100):
            found[f"{name}_p{percent}_us"] = round(percentile(values, percent), 1)
    return found


def _progress(what: str, done: int, of: int) -> None:
    print(f"\r{what}: {done}/{of}", end="\n" if done == of else "", file=sys.stderr, flush=True)


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the tables for people."""
    for row in rows:
        if row["name"] == "cost":
            for field in ("cpu_s", "ttft_s"):
                found, share = row[field], row[field]["difference"]
                console.print(
                    f"no reuse, {row['requests']} prompts: {field} {found['tierkv']} with tierkv, "
                    f"{found['plain']} without: {share['share']:+.2%} "
                    f"(95 %: {share['low']:+.2%} to {share['high']:+.2%})"
                )
        if row["name"] == "scheduler":
            console.print(
                f"its scheduler, {row['steps']} steps: a call p99 {row['call_p99_us']} us, at most "
                f"{row['call_p100_us']}; all of a step p50 {row['step_p50_us']}, p99 "
                f"{row['step_p99_us']}, at most {row['step_p100_us']} us"
            )
    table = Table(title="one prompt again: its own prefix cache, then what the connector keeps")
    for column in ("from", "tokens", "CPU s", "local CPU s", "ratio (IQR)", "TTFT s", "local"):
        table.add_column(column)
    for row in rows:
        if row["name"] == "hit":
            low, high = row["ratio_cpu_iqr"]
            table.add_row(
                row["from"], f"{row['cached_tokens']:.0f}", str(row["cpu_s"]),
                str(row["local_cpu_s"]), f"{row['ratio_cpu']} ({low}-{high})",
                str(row["ttft_s"]), str(row["local_ttft_s"]),
            )  # fmt: skip
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line for programs")
    parser.add_argument("--requests", type=int, default=50, help="prompts of the cost row")
    parser.add_argument("--turns", type=int, default=15, help="prompts of each hit row")
    parser.add_argument("--no-peers", action="store_true", help="leave vLLM's own ways out")
    asked = parser.parse_args(arguments)
    about, rows, model = machine(), list[dict[str, Any]](), smollm2()
    folder = Path(tempfile.mkdtemp(prefix="tierkv-bench-"))
    sidecar = Process(folder, host_bytes=HOST_BYTES)
    try:
        sidecar.start()
        with ExitStack() as stack:
            plain = stack.enter_context(subject(model, folder, "no connector", None))
            mine = stack.enter_context(subject(model, folder, "tierkv", tierkv(sidecar)))
            rows.append(cost(plain, mine, asked.requests))
            rows.append(hit("tierkv, the sidecar's RAM", mine, asked.turns))
        rows.append(scheduler(folder / CALLS))
        peers = {"its example connector": example, "its tiered offload": offload}
        for name, config in {} if asked.no_peers else peers.items():
            with subject(model, folder, name, config(folder / "peer")) as peer:
                rows.append(hit(name, peer, asked.turns))
            shutil.rmtree(folder / "peer", ignore_errors=True)
    finally:
        sidecar.kill()
        shutil.rmtree(folder, ignore_errors=True)
    if asked.json:
        print(json.dumps({**about, "rows": rows}))
    else:
        show(rows, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
