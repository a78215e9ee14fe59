"""The catalog at a million placements: `python -m bench.catalog [--json] [--placements N]`.

A log on the real disk is filled with N frames of 4 KiB in all, whose keys are the chains of
prompts of 128k int32 tokens, 256 tokens a block. So N placements are in the NVMe tier, recovered
from its index. To be matched in RAM a block needs real pages, so only RAM_CHAINS of the chains,
drawn at random, are staged to RAM (16 KiB a block): matches ask for all of those in an order drawn
anew each time, and find their blocks among all N. A match includes hashing the prompt; the release
after it is not timed.

    embedded          in process, with resident bytes per placement (anonymous memory before and
                      after the N are taken in) and the longest pause of a forced full garbage
                      collection (of what the store has; what torch and others had is frozen)
    sidecar           through `tierkv serve`, quiet
    sidecar under load  beside puts that write-behind copies to disk, and scrapes of /metrics
    start             from exec of `tierkv serve` to the first block handed out
"""

import argparse
import contextlib
import gc
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench import million
from bench.engine import (
    FINGERPRINT,
    MIB,
    PARTS,
    QUIET,
    disk_folder,
    embedded,
    free_port,
    serve,
    wait_touched,
)
from bench.timing import machine, percentile
from tierkv.calls import MatchCall
from tierkv.client import Client
from tierkv_connectors.sidecar import connect

PLACEMENTS = 1_000_000
RAM_CHAINS = 128
PAGE_BYTES = 16 << 10
MATCHES = 1000
LOAD_PUT_BYTES = 8 * MIB
LOAD_PAUSE_S = 0.05
SCRAPE_PAUSE_S = 0.1
STAGE_S = 60.0


class Row(msgspec.Struct, kw_only=True):
    """What was measured with `n` placements; what a row does not measure is null."""

    name: str
    n: int
    p50_ms: float | None = None
    p99_ms: float | None = None
    hash_ms: float | None = None
    bytes_per_placement: float | None = None
    gc_pause_ms: float | None = None
    start_s: float | None = None
    remark: str = ""


def ask(keys: bytes) -> MatchCall:
    """Return the question of an engine's scheduler."""
    return MatchCall(
        namespace="bench", fingerprint=FINGERPRINT, keys=keys, parts=PARTS, fidelity=4, position=0,
        tokens_per_block=million.TOKENS_PER_BLOCK, raw_bytes=million.PAYLOAD, deadline_s=STAGE_S,
    )  # fmt: skip


def stage(client: Client, number: int) -> None:
    """Bring a chain from the log to RAM."""
    reply = client.match(ask(million.keys_of_prompt(million.prompt(number))))
    if reply.pending:
        reply = client.wait(reply.match, STAGE_S)
    assert reply.blocks == million.CHAIN, f"{reply.blocks} of {million.CHAIN} blocks were staged"
    client.release(reply.match)


def matches(client: Client, chains: list[int], count: int, seed: int) -> tuple[float, float, float]:
    """Return p50 and p99 of matches, and the median of the hashing in them, all in ms."""
    draw = random.Random(seed)
    took, hashing = [], []
    prompts = {number: million.prompt(number) for number in chains}
    order: list[int] = []
    for _ in range(count):
        order = order or draw.sample(chains, len(chains))
        tokens = prompts[order.pop()]
        start = time.perf_counter()
        keys = million.keys_of_prompt(tokens)
        middle = time.perf_counter()
        reply = client.match(ask(keys))
        took.append((time.perf_counter() - start) * 1e3)
        hashing.append((middle - start) * 1e3)
        assert reply.blocks == million.CHAIN, f"{reply.blocks} blocks, pending {reply.pending}"
        client.release(reply.match)
    return percentile(took, 50), percentile(took, 99), percentile(hashing, 50)


def anonymous_bytes() -> int:
    """Return this process's resident memory that is not the arena or files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def collection_ms() -> float:
    """Return the longest pause of three forced full collections."""
    pauses: list[float] = []
    began = 0.0

    def note(phase: str, _info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            pauses.append((time.perf_counter() - began) * 1e3)

    gc.callbacks.append(note)
    for _ in range(3):
        gc.collect()
    gc.callbacks.remove(note)
    return max(pauses)


def nvme_text(folder: Path, placements: int) -> str:
    """Return the settings' section of the log."""
    size = million.log_settings(folder, placements).size_bytes
    return f'[nvme]\npath = "{folder}"\nsize = {size}\nfree_floor = 0\n'


def host_bytes(chains: int) -> int:
    """Return the arena's size: the chains asked for, and room for puts."""
    return chains * million.CHAIN * PAGE_BYTES + 1024 * MIB


def in_process(folder: Path, placements: int, chains: list[int], count: int) -> Row:
    """Measure an embedded store."""
    with embedded(64 * MIB):
        gc.collect()
    gc.freeze()
    before = anonymous_bytes()
    with embedded(host_bytes(len(chains)), nvme_text(folder, placements)) as (_, client):
        gc.collect()
        resident = anonymous_bytes() - before
        stat = client.stat()
        assert stat is not None
        n = stat["tiers"][1]["placements"]
        pause = collection_ms()
        for number in chains:
            stage(client, number)
        matches(client, chains, count // 10, 0)
        p50, p99, hashing = matches(client, chains, count, 1)
    return Row(
        name="embedded", n=n, p50_ms=p50, p99_ms=p99, hash_ms=hashing,
        bytes_per_placement=resident / n, gc_pause_ms=pause,
        remark=f"{million.CHAIN} keys: {hashing:.2f} ms of hashing and"
        f" {(p50 - hashing) / million.CHAIN * 1e6:.0f} ns a key of lookup",
    )  # fmt: skip


def started(folder: Path, placements: int, chains: list[int], runs: int) -> Row:
    """Measure the time from exec to the first block, several times."""
    took = []
    keys = million.keys_of_prompt(million.prompt(chains[0]))
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as name:
            place = Path(name)
            text = nvme_text(folder, placements) + QUIET
            start = time.perf_counter()
            process = serve(place, 256 * MIB, text)
            try:
                wait_listening(place / "tierkv.sock", process)
                client = connect(place / "tierkv.sock", timeout_s=10.0)
                reply = client.match(ask(keys[: 32 * 16]))
                reply = client.wait(reply.match, 10.0) if reply.pending else reply
                transfer = client.get(reply.match, reply.blocks)
                assert transfer is not None
                assert transfer.header(0) is not None
                took.append(time.perf_counter() - start)
                transfer.close()
                client.close()
            finally:
                process.terminate()
                process.wait(60)
    best = f"{runs} starts, {min(took):.2f} to {max(took):.2f} s"
    return Row(name="start", n=placements, start_s=percentile(took, 50), remark=best)


def wait_listening(path: Path, process: "subprocess.Popen[bytes]") -> None:
    """Wait until somebody accepts connections."""
    while process.poll() is None:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return
        time.sleep(0.002)
    raise RuntimeError("the sidecar ended")


@contextlib.contextmanager
def load(path: Path, port: int) -> Iterator[None]:
    """Put blocks and scrape /metrics from another process until the end."""
    figures = [path, LOAD_PUT_BYTES, LOAD_PAUSE_S, port, SCRAPE_PAUSE_S]
    command = [sys.executable, "-m", "bench.load", *map(str, figures)]
    loading = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert loading.stdin is not None
    assert loading.stdout is not None
    assert loading.stdout.readline().strip() == b"ready"
    try:
        time.sleep(1.0)
        yield
    finally:
        loading.stdin.close()
        put, scrapes = map(int, (loading.stdout.readline() or b"0 0").split())
        loading.wait(30)
        print(f"load: {put >> 20} MiB put, {scrapes} scrapes", file=sys.stderr)
        assert put, "the load did nothing"
        assert scrapes, "nothing was scraped"


def through_sidecar(folder: Path, placements: int, chains: list[int], count: int) -> list[Row]:
    """Measure matches through a sidecar, quiet and under load."""
    port = free_port()
    text = nvme_text(folder, placements) + f"[http]\nport = {port}\n"
    rows = []
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as name:
        place = Path(name)
        process = serve(place, host_bytes(len(chains)), text)
        try:
            wait_listening(place / "tierkv.sock", process)
            client = connect(place / "tierkv.sock", timeout_s=STAGE_S)
            wait_touched(process.pid, host_bytes(len(chains)))
            for number in chains:
                stage(client, number)
            matches(client, chains, count // 10, 0)
            for title, beside in (
                ("sidecar", contextlib.nullcontext()),
                ("sidecar under load", load(place / "tierkv.sock", port)),
            ):
                with beside:
                    p50, p99, hashing = matches(client, chains, count, 2)
                row = Row(name=title, n=placements, p50_ms=p50, p99_ms=p99, hash_ms=hashing)
                row.remark = f"{p50 - hashing:.2f} ms beside the hashing"
                rows.append(row)
            client.close()
        finally:
            process.terminate()
            process.wait(60)
    rows[1].remark += (
        f"; {LOAD_PUT_BYTES >> 20} MiB put every {LOAD_PAUSE_S:g} s,"
        f" a scrape every {SCRAPE_PAUSE_S:g} s"
    )
    return rows


def show(rows: list[Row], console: Console) -> None:
    """Print a table for people."""
    table = Table(title="the catalog")
    names = [field.name for field in msgspec.structs.fields(Row)]
    for name in names:
        table.add_column(name, justify="left" if name in {"name", "remark"} else "right")
    for row in rows:
        cells = [getattr(row, name) for name in names]
        table.add_row(
            *("-" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell)
              for cell in cells)
        )  # fmt: skip
    console.print(table)


def main() -> int:
    arguments = argparse.ArgumentParser(description="Measure the catalog with many placements.")
    arguments.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments.add_argument("--placements", type=int, default=PLACEMENTS)
    arguments.add_argument("--ram-chains", type=int, default=RAM_CHAINS)
    arguments.add_argument("--matches", type=int, default=MATCHES)
    chosen = arguments.parse_args()
    about = machine()
    total = max(-(-chosen.placements // million.CHAIN), 1)
    asked = random.Random(3).sample(range(total), min(chosen.ram_chains, total))
    with tempfile.TemporaryDirectory(dir=disk_folder()) as name:
        folder = Path(name)
        start = time.perf_counter()
        written = million.build(folder, total * million.CHAIN)
        about["build_s"] = round(time.perf_counter() - start, 1)
        print(f"wrote {written} frames in {about['build_s']} s", file=sys.stderr, flush=True)
        rows = [
            started(folder, written, asked, 5),
            in_process(folder, written, asked, chosen.matches),
        ]
        rows += through_sidecar(folder, written, asked, chosen.matches)
    about["load_after"] = machine()["load"]
    about["ram_chains"] = len(asked)
    if chosen.json:
        print(json.dumps({**about, "rows": msgspec.to_builtins(rows)}))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(about, highlight=False)
    show(rows, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
