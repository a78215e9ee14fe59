"""`tierkv replay --config`: a trace over the modelled tiers of a scenario, told as time."""

import math
import sys
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from tierkv.simulation.foresight import clients_of
from tierkv.simulation.scenario import read_scenario
from tierkv.simulation.serving import (
    Progress,
    Served,
    Spread,
    Workload,
    check_policy,
    contest,
    read_workload,
    serve,
)
from tierkv.simulation.traces import Trace
from tierkv_service.show import size


class Setting(NamedTuple):
    """What the command line asks for beside the trace."""

    scenario: str
    policy: str
    fidelity: str
    engines: int
    seed: int
    hints: str | None
    """`closed`, where clients say with a request that none goes on with it."""
    sensitivity_cv: float
    kl_floor: float | None


def replay_over(trace: Trace, setting: Setting, progress: Progress) -> Served:
    """Replay a trace as the setting says."""
    scenario = read_scenario(setting.scenario)
    # A policy that is not known is said before a long trace is read.
    check_policy(scenario, setting.policy, setting.fidelity)
    workload = workload_of(trace, setting)
    chosen = contest(scenario, setting.policy, setting.fidelity, workload, setting.seed)
    return serve(workload, scenario, setting.fidelity, chosen, setting.engines, progress)


def workload_of(trace: Trace, setting: Setting) -> Workload:
    """Read a whole trace, with clients as the setting says."""
    workload = read_workload(trace)
    clients = clients_of(
        workload.ids,
        closed=setting.hints is not None,
        variation=setting.sensitivity_cv,
        most_kl=math.inf if setting.kl_floor is None else setting.kl_floor,
        seed=setting.seed,
    )
    return workload._replace(clients=clients)


def write_json(trace: Trace, setting: Setting, served: Served) -> None:
    """Print what was asked and what was found."""
    asked = {"trace": trace.path.name, **setting._asdict()}
    found = {name: getattr(served, name) for name in served.__struct_fields__}
    sys.stdout.write(msgspec.json.encode(asked | found).decode() + "\n")


def show_served(trace: Trace, setting: Setting, served: Served, console: Console) -> None:
    """Print what was found, for people."""
    title = f"{trace.path.name} over {setting.scenario}, {setting.policy}, {setting.fidelity}"
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "requests": f"{served.requests:,}",
        "blocks loaded": f"{served.prefix_hit:.2%} of {served.accesses:,}",
        "time to first token": _seconds(served.ttft_s),
        "  everything computed": _seconds(served.ttft_full_prefill_s),
        "  everything kept, loads free": _seconds(served.ttft_infinite_free_s),
    }
    if served.ttft_queued_s:
        rows[f"  with {setting.engines} engines and a queue"] = _seconds(served.ttft_queued_s)
    rows |= {f"tokens from {name}": f"{share:.2%}" for name, share in served.by_tier.items()}
    rows |= {f"tokens {name}": f"{share:.2%}" for name, share in served.by_class.items()}
    rows["KL per token served"] = f"{served.quality_loss_mean:.2g} nats"
    for name, nbytes in served.written_bytes_per_day.items():
        rows[f"written to {name}"] = f"{size(int(nbytes))} a day"
    spent = served.encode_gpu_s + served.decode_gpu_s
    rows["GPU seconds to encode and decode"] = f"{spent:,.0f}"
    rows["GPU seconds of prefill saved"] = f"{served.prefill_saved_s:,.0f}"
    moves = ", ".join(f"{name} {count:,}" for name, count in served.moved.items())
    rows["moves"] = moves
    rows["a million decisions"] = f"{served.seconds_per_million_decisions:.1f} s of one core"
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def _seconds(spread: Spread) -> str:
    return f"mean {spread.mean:.4f} s, p50 {spread.p50:.3f}, p99 {spread.p99:.2f}"
