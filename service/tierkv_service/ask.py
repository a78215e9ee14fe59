"""Ask: one call to a running sidecar, for `tierkv policy` and `tierkv explain`."""

import logging
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tierkv import explain
from tierkv.calls import Call, ExplainCall, PolicyCall
from tierkv.errors import invalid, unavailable
from tierkv.settings import client_socket
from tierkv_connectors.sidecar import SidecarChannel

ANSWER_S = 5.0


def ask(socket: Path | None, call: Call) -> Any:  # noqa: ANN401 - what the call answers
    """Return the answer. Raises: TierKVError: nobody answers, or the call was refused."""
    path = socket or client_socket()
    logging.getLogger("tierkv.client").setLevel(logging.ERROR)  # what it warns of is told below
    channel = SidecarChannel(path, client=type(call).__name__, arena=False)
    try:
        reply = channel.call(call, ANSWER_S)
    finally:
        channel.close()
    if reply is None and channel.counters.refused:
        raise invalid(channel.last_error.partition(" refused: ")[2])
    if reply is None:
        why = f" ({channel.last_error})" if channel.last_error else ""
        raise unavailable(f"the sidecar on {path} did not do it{why}: is `tierkv serve` running?")
    return reply


def policy(name: str, socket: Path | None) -> int:
    """Change the policy, or show it; returns the exit status."""
    sys.stdout.write(f"{ask(socket, PolicyCall(name=name)).name}\n")
    return 0


def tell(key: str, socket: Path | None, *, last_drop: bool, as_json: bool) -> int:
    """Print why a block is where it is, or why the last drop was made; returns the exit status."""
    if bool(key) == last_drop:
        raise invalid("give a key of 64 hex digits, or --last-drop")
    try:
        call = ExplainCall(key=bytes.fromhex(key))
    except ValueError:
        raise invalid(f"a key is 64 hex digits, not {key[:80]!r}") from None
    told = explain.from_wire(ask(socket, call))
    if as_json:
        sys.stdout.write(f"{msgspec.json.encode(told).decode()}\n")
    else:
        _show(told, Console())
    return 0


def _show(told: explain.Explanation, console: Console) -> None:
    said = f"{told.key or 'no block'} ({told.policy}): {told.because}"
    console.print(said, soft_wrap=True, highlight=False)
    if told.copies:
        table = Table("tier", "state", "profile", "fidelity", "bytes", "held", "may become")
        for one in told.copies:
            lossy = ", ".join(f"{name} (KL {kl:g})" for name, kl in one.may_become.items())
            size, held = f"{one.nbytes:,}", str(one.held)
            table.add_row(one.tier, one.state, one.profile, one.fidelity, size, held, lossy)
        console.print(table)
    if told.numbers:
        terms = Table("term", "value")
        for name, value in told.numbers.items():
            terms.add_row(name, f"{value:.6g}")
        console.print(terms)
    if told.choices:
        choices = Table("what could be done", "leaves", "earns s/s", "loses s/s per byte freed")
        for other in told.choices:
            earns, loss = f"{other.earns:.4g}", f"{other.loss_per_byte:.4g}"
            choices.add_row(other.does, other.leaves, earns, loss)
        console.print(choices)
