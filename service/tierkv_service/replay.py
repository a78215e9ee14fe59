"""`tierkv replay`: a trace through a policy, for people or as JSON, and the plot of a sweep."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tierkv.errors import invalid
from tierkv.simulation import blocks
from tierkv.simulation.blocks import Counts
from tierkv.simulation.joint_blocks import check_policy, count_blocks
from tierkv.simulation.result import Result, of_blocks
from tierkv.simulation.scenario import Scenario, read_scenario
from tierkv.simulation.serving import Served, contest, serve
from tierkv.simulation.traces import Accesses, Trace, load
from tierkv_service.replay_serving import (
    Setting,
    replay_over,
    show_served,
    workload_of,
    write_json,
)
from tierkv_service.show import size
from tierkv_service.sweep import BYTES_PER_TOKEN, Panel, sweep_blocks, sweep_tiers


class Order(NamedTuple):
    """What the command line asks for."""

    trace: Path
    policy: str
    setting: Setting | None
    blocks: int | None
    plot: Path | None
    file_tokens: int | None
    tokens: int | None


def run(order: Order, *, as_json: bool) -> int:
    """Replay and say what came of it, or draw a sweep; returns the exit status."""
    if order.blocks is None and order.setting is None and order.plot is None:
        raise invalid(
            "say --blocks N for a cache of N equal blocks, --config SCENARIO for modelled tiers, or"
            " --plot FILE.png for a sweep"
        )
    if order.blocks is not None and (order.setting or order.plot):
        raise invalid("--blocks goes without --config, which has its own tiers, and without --plot")
    if order.setting is None:
        check_policy(order.policy)
    trace = Trace(order.trace, order.file_tokens, order.tokens)
    if order.plot is not None:
        _draw(order.plot, trace, order.setting)
    elif order.setting is not None:
        _serve(trace, order.setting, as_json=as_json)
    elif order.blocks is not None:
        accesses = load(trace)
        result = count(trace, accesses, order.policy, order.blocks)
        if as_json:
            sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        else:
            show(result, accesses, order.blocks, Console())
    return 0


def _serve(trace: Trace, setting: Setting, *, as_json: bool) -> None:
    with _progress(f"{setting.policy} over {setting.scenario}") as tell:
        served = replay_over(trace, setting, tell)
    if as_json:
        write_json(trace, setting, served)
    else:
        show_served(trace, setting, served, Console())


def _draw(path: Path, trace: Trace, setting: Setting | None) -> None:
    """Sweep and write a PNG file. Raises: TierKVError (invalid)."""
    from tierkv_service.replay_plot import draw

    if not path.absolute().parent.is_dir():
        raise invalid(f"--plot {path}: there is no such folder")
    if setting is None:
        title = trace.path.name
        block_bytes = trace.tokens_per_block * BYTES_PER_TOKEN
        panels = [sweep_blocks(load(trace), block_bytes, watched)]
    else:
        title = f"{trace.path.name} over {setting.scenario}, class {setting.fidelity}"
        panels = _sweep_tiers(trace, setting)
    path.write_bytes(draw(title, panels))
    sys.stderr.write(f"drew {path}\n")


def _sweep_tiers(trace: Trace, setting: Setting) -> list[Panel]:
    scenario = read_scenario(setting.scenario)
    workload = workload_of(trace, setting)

    def over(each: Scenario, policy: str) -> Served:
        chosen = contest(each, policy, setting.fidelity, workload, setting.seed)
        with _progress(f"{policy}, {each.tier[0].gib:g} GiB of {each.tier[0].name}") as tell:
            return serve(workload, each, setting.fidelity, chosen, setting.engines, tell)

    accesses = load(trace)
    return sweep_tiers(accesses, trace.tokens_per_block, scenario, setting.fidelity, over, watched)


def count(trace: Trace, accesses: Accesses, policy: str, capacity: int) -> Result:
    """Replay over one tier of so many equal blocks."""
    counts = watched(accesses, capacity, policy)
    block_bytes = trace.tokens_per_block * BYTES_PER_TOKEN
    return of_blocks(trace.path.name, policy, capacity, block_bytes, counts)


def show(result: Result, accesses: Accesses, capacity: int, console: Console) -> None:
    """Print a result for people."""
    table = Table(title=f"{result.trace} through {result.policy}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    ideal = 1 - accesses.distinct / len(accesses.ids)
    rows = {
        "requests": f"{result.requests:,}",
        "block accesses": f"{result.accesses:,}",
        "distinct blocks": f"{accesses.distinct:,}",
        "cache": f"{capacity:,} blocks, {capacity / accesses.distinct:.1%} of distinct",
        "cache in bytes of an 8B model": size(sum(result.capacity_bytes.values())),
        "block hits": f"{result.block_hit:.2%}",
        "usable prefix on arrival": f"{result.prefix_hit:.2%}",
        "a cache that never evicts": f"{ideal:.2%}",
        "a million decisions": f"{result.seconds_per_million_decisions:.1f} s of one core",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def watched(accesses: Accesses, capacity: int, policy: str) -> Counts:
    """Replay with a progress bar."""
    with _progress(f"{policy}, {capacity:,} blocks") as tell:
        return count_blocks(accesses, capacity, policy, tell)


@contextmanager
def _progress(title: str) -> Iterator[blocks.Progress]:
    """Show a bar on standard error while a replay runs, when somebody sees it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(title, total=None)

        def tell(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield tell
