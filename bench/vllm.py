"""What tierkv costs and gives a real vLLM: `python -m bench.vllm [--json] [--requests N]`.

Every engine computes with one OpenMP thread, on the same core: left alone, vLLM reserves two cores
where there is a connector and one where there is none, and so computes with other threads. None
waits in a busy loop (`vllm_quiet`). CPU seconds are those of all processes of an engine, in
nanoseconds, until it is idle again; the sidecar's are its own. Engines take turns, prompt by
prompt, in an order drawn anew for every two prompts: the second one's is the reverse. `threads_s`
is what of them the connector's own threads took, which no noise of the engine hides.

cost: prompts that share nothing, beside the same connector with `load` and `save` off, and tierkv
beside no connector too. Contenders: tierkv; vLLM's bundled example connector, which keeps KV in
files; its tiered offload, RAM, then files. burst: many such prompts at once, tierkv beside the same
two, with the last first token too: saves of what a step has computed are copied beside the next.
hit: one prompt again, from the engine's own prefix cache and, after that was emptied, from what a
connector keeps. scheduler: how long tierkv's calls kept vLLM's scheduler, each and all of a step.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from bench.timing import machine, percentile, spread
from bench.vllm_quiet import installed
from tests.engines.vllm_engine import BLOCK, Engine, environment
from tests.sidecars import Process
from tierkv_connectors.models import smollm2

PROMPT = 512
"""Tokens of a prompt; each ends in the middle of a block."""
NEW = 2
BURST = 12
"""Prompts at once."""
IDLE_S, IDLE_SHARE, SETTLE_S = 0.05, 0.2, 3.0
"""An engine is idle when it used less than this share of a core so long; waited for at most."""
GOAL = 0.02
"""Most that prompts without reuse may cost."""
SEED = 7
HOST_BYTES = 4 << 30
OFFLOAD_BYTES = 2 << 30
RESAMPLES = 10_000
THREADS = "tierkv-"
"""What the names of the connector's threads begin with."""
CALLS = "calls.jsonl"
OFF, PLAIN = "tierkv with load and save off", "no connector"
"""What contenders run beside."""


class Took(NamedTuple):
    """What prompts at once took."""

    cpu_s: float
    """Of the engine."""
    ttft_s: float
    """To the first token, in the mean of the prompts."""
    last_s: float
    """To the last of the first tokens."""
    cached: int
    """Tokens that were not computed."""
    threads_s: float
    """Of CPU, by the connector's own threads."""
    beside_s: float
    """What of that they took before the last answer was there."""


class Subject:
    """An engine whose requests are measured one by one."""

    def __init__(self, engine: Engine) -> None:
        assert engine._process is not None  # noqa: SLF001
        self.engine = engine
        main = psutil.Process(engine._process.pid)  # noqa: SLF001
        every = [main, *main.children(recursive=True)]
        self._clocks = [(~one.pid << 3) | 2 for one in every]  # CPU clocks of other processes
        self._tasks = [Path(f"/proc/{one.pid}/task") for one in every]

    def cpu_s(self) -> float:
        return sum(time.clock_gettime(clock) for clock in self._clocks)

    def threads_s(self) -> float:
        """Return the CPU seconds of threads of ours, which `TimedConnector` names."""
        found = 0
        for task in (one for tasks in self._tasks for one in tasks.iterdir()):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                if (task / "comm").read_text().startswith(THREADS):
                    found += int((task / "schedstat").read_text().split()[0])
        return found / 1e9

    def settle(self) -> None:
        """Wait until what a request leaves to be done is done: saves, above all."""
        until, used = time.monotonic() + SETTLE_S, self.cpu_s()
        while time.monotonic() < until:
            time.sleep(IDLE_S)
            before, used = used, self.cpu_s()
            if used - before < IDLE_S * IDLE_SHARE:
                return

    def ask(self, *prompts: Sequence[int]) -> Took:
        before, threads = self.cpu_s(), self.threads_s()
        answers = self.engine.generate(prompts, NEW)
        beside = self.threads_s() - threads
        first = [answer.ttft_s for answer in answers]
        self.settle()
        used = self.cpu_s() - before
        cached, threads = max(answer.cached for answer in answers), self.threads_s() - threads
        return Took(used, statistics.fmean(first), max(first), cached, threads, beside)


def prompts(count: int, seed: str = str(SEED)) -> Iterator[list[int]]:
    """Yield prompts that share nothing, nor with those of another seed."""
    draw = random.Random(seed)
    for _ in range(count):
        yield [draw.randrange(100, 40_000) for _ in range(PROMPT + BLOCK // 2)]


def tierkv(sidecar: Process, **options: bool) -> dict[str, Any]:
    return {
        "kv_connector": "TimedConnector",
        "kv_connector_module_path": "bench.vllm_timed",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(sidecar.path), **options},
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
    core = str(max(os.sched_getaffinity(0)))
    path = os.pathsep.join([str(installed(folder)), environment()["PYTHONPATH"]])
    more = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": core, "PYTHONPATH": path}
    more["TIERKV_BENCH_CALLS"] = str(folder / f"{name} {CALLS}")
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


def taken(
    what: str, subjects: Sequence[Subject], asked: Sequence[Sequence[Sequence[int]]]
) -> list[list[Took]]:
    """Ask the same of all engines, in turns; returns what each took.

    The order is drawn for every two turns and reversed between them, so that what gets slower or
    faster meanwhile does so for all alike.
    """
    draw, order = random.Random(SEED), list(range(len(subjects)))
    took: list[list[Took]] = [[] for _ in subjects]
    for number, prompts in enumerate(asked):
        if number % 2:
            order.reverse()
        else:
            draw.shuffle(order)
        for index in order:
            took[index].append(subjects[index].ask(*prompts))
        _progress(what, number + 1, len(asked))
    assert not any(one.cached for took_by in took for one in took_by), "prompts that share nothing"
    return took


def cost(
    name: str, one: Subject, bases: Mapping[str, Subject], requests: int, at_once: int
) -> Iterator[dict[str, Any]]:
    """Yield what prompts without reuse take, `at_once` of them at a time, beside each base."""
    what = "cost" if at_once == 1 else "burst"
    drawn = list(prompts(requests * at_once, f"{SEED} {what} {name}"))
    asked = [drawn[at : at + at_once] for at in range(0, len(drawn), at_once)]
    mine, *all_others = taken(f"{what}: {name}", [one, *bases.values()], asked)
    for base, others in zip(bases, all_others, strict=True):
        found: dict[str, Any] = {
            "name": what, "of": name, "beside": base, "turns": requests, "prompts": at_once,
            "prompt_tokens": len(drawn[0]),
        }  # fmt: skip
        for field in ("cpu_s", "ttft_s") if at_once == 1 else ("cpu_s", "ttft_s", "last_s"):
            own, base_s = ([getattr(took, field) for took in all_] for all_ in (mine, others))
            difference = paired(own, base_s)
            found[field] = {
                "of": round(statistics.median(own), 4),
                "beside": round(statistics.median(base_s), 4),
                "difference": difference,
                "meets": difference["high"] < GOAL,
            }
        whole = statistics.fmean(took.cpu_s for took in others)
        for field in ("threads_s", "beside_s"):
            own = [getattr(took, field) for took in mine]
            share = round(statistics.fmean(own) / whole, 4)
            found[field] = {"of": round(statistics.median(own), 4), "share": share}
        yield found


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
    """Return what the calls of every step took, in microseconds; the first are the warm-up's."""
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
        if row["name"] in ("cost", "burst"):
            for field in (one for one in ("cpu_s", "ttft_s", "last_s") if one in row):
                found, share = row[field], row[field]["difference"]
                console.print(
                    f"{row['name']} of {row['of']}, {row['turns']} x {row['prompts']} prompts: "
                    f"{field} {found['of']}, {row['beside']} {found['beside']}: "
                    f"{share['share']:+.2%} "
                    f"(95 %: {share['low']:+.2%} to {share['high']:+.2%})"
                )
            threads, beside = row["threads_s"], row["beside_s"]
            console.print(
                f"  its threads: {threads['of']} s of CPU, {threads['share']:.2%}, of which "
                f"{beside['of']} s before the last answer"
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


def measure(
    off: Subject, sidecar: Process, model: Path, folder: Path, asked: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the rows, one contender's engine after the other."""
    name, same = "tierkv", {OFF: off}
    with subject(model, folder, name, tierkv(sidecar)) as mine:
        with subject(model, folder, PLAIN, None) as plain:
            both = {**same, PLAIN: plain}
            if asked.requests:
                yield from cost(name, mine, both, asked.requests, 1)
            if asked.bursts:
                yield from cost(name, mine, both, asked.bursts, BURST)
        if asked.turns:
            yield hit("tierkv, the sidecar's RAM", mine, asked.turns)
    yield scheduler(folder / f"{name} {CALLS}")
    peers = {
        "its example connector": example(folder / "peer"),
        "its tiered offload": offload(folder / "peer"),
    }
    for name, config in {} if asked.no_peers else peers.items():
        with subject(model, folder, name, config) as peer:
            yield from cost(name, peer, same, asked.peer_requests, 1)
            if asked.turns:
                yield hit(name, peer, asked.turns)
        shutil.rmtree(folder / "peer", ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line for programs")
    parser.add_argument("--requests", type=int, default=50, help="prompts of tierkv's; 0: none")
    parser.add_argument("--peer-requests", type=int, default=20, help="prompts of each peer's")
    parser.add_argument("--bursts", type=int, default=6, help="bursts of its burst rows; 0: none")
    parser.add_argument("--turns", type=int, default=15, help="prompts of each hit row; 0: none")
    parser.add_argument("--no-peers", action="store_true", help="leave vLLM's own ways out")
    asked = parser.parse_args(arguments)
    about, model = machine(), smollm2()
    folder = Path(tempfile.mkdtemp(prefix="tierkv-bench-"))
    sidecar = Process(folder, host_bytes=HOST_BYTES)
    try:
        sidecar.start()
        with subject(model, folder, OFF, tierkv(sidecar, load=False, save=False)) as base:
            rows = list(measure(base, sidecar, model, folder, asked))
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
