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
from tierkv.simulation.policies import contender
from tierkv.simulation.result import Result, of_blocks
from tierkv.simulation.traces import Accesses, Trace, load
from tierkv_service.replay_serving import Setting, replay_over, show_served, write_json
from tierkv_service.show import size
from tierkv_service.sweep import BYTES_PER_TOKEN, sweep


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
    """Replay, then say or draw what came of it; returns the exit status."""
    if order.setting is not None:
        return _serve(order, order.setting, as_json=as_json)
    if order.blocks is None and order.plot is None:
        raise invalid(
            "say --blocks N for a cache of N equal blocks, --config SCENARIO for modelled tiers, or"
            " --plot FILE.png for a sweep"
        )
    if order.plot is not None and not order.plot.absolute().parent.is_dir():
        raise invalid(f"--plot {order.plot}: there is no such folder")
    contender(order.policy)
    console = Console()
    trace = Trace(order.trace, order.file_tokens, order.tokens)
    accesses = load(trace)
    if order.blocks is not None:
        result = count(trace, accesses, order.policy, order.blocks)
        if as_json:
            sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        else:
            show(result, accesses, order.blocks, console)
    if order.plot is not None:
        from tierkv_service.replay_plot import draw

        panel = sweep(accesses, trace.tokens_per_block * BYTES_PER_TOKEN, watched)
        order.plot.write_bytes(draw(trace.path.name, [panel]))
        if not as_json:
            console.print(f"drew {order.plot}", highlight=False)
    return 0


def _serve(order: Order, setting: Setting, *, as_json: bool) -> int:
    if order.blocks is not None or order.plot is not None:
        raise invalid("--config goes without --blocks and --plot: a scenario has its own tiers")
    trace = Trace(order.trace, order.file_tokens, order.tokens)
    with _progress(f"{setting.policy} over {setting.scenario}") as tell:
        served = replay_over(trace, setting, tell)
    if as_json:
        write_json(trace, setting, served)
    else:
        show_served(trace, setting, served, Console())
    return 0


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
        return blocks.replay(accesses, capacity, contender(policy), tell)


@contextmanager
def _progress(title: str) -> Iterator[blocks.Progress]:
    """Show a bar on standard error while a replay runs, when somebody sees it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(title, total=None)

        def tell(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield tell
