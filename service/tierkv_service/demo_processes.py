"""The processes of the demo, which end when it ends, however it ends.

Each is a session of its own, so that Ctrl-C reaches the demo alone, which then ends them. If the
demo is killed, the kernel ends them (where `setpriv` is there).
"""

import contextlib
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tierkv.client import Client
from tierkv.errors import unavailable
from tierkv.stat import StoreStat, from_wire
from tierkv_connectors.sidecar import SidecarChannel
from tierkv_service.demo_engine import Event, Order

START_S = 30.0
STOP_S = 40.0
ENGINE_S = 600.0
_STEP_S = 0.05
_LOG_TAIL = 2000

_SETTINGS = """
[socket]
path = "{folder}/{name}.sock"
[host]
size = "512MiB"
[nvme]
path = "{folder}/{name}.nvme"
size = "512MiB"
free_floor = "64MiB"
[http]
enabled = false
[store]
grace = "30s"
"""


class Processes(contextlib.ExitStack):
    """Every process that was started, with a folder for their sockets, files and logs."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def start(self, name: str, command: list[str], **options: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401 -- of Popen
        """Start a command; what it says on standard error goes to its log."""
        setpriv = shutil.which("setpriv")
        if setpriv:
            command = [setpriv, "--pdeathsig", "TERM", *command]
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                command, stderr=log, cwd=self.folder, start_new_session=True, **options
            )
        self.callback(stop, process)
        return process

    def log(self, name: str) -> Path:
        """Return where a process writes what it says."""
        return self.folder / f"{name}.log"

    def said(self, name: str) -> str:
        """Return the end of a process's log."""
        return self.log(name).read_text(errors="replace")[-_LOG_TAIL:]


def stop(process: subprocess.Popen[bytes], grace_s: float = STOP_S) -> None:
    """Ask a process to end, wait, and make it end."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(done: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for something that a process brings about; False: it ended, or took too long."""
    deadline = time.monotonic() + seconds
    while not done():
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(_STEP_S)
    return True


def start_redis(processes: Processes) -> str:
    """Start a redis-server on a Unix socket; returns its URL, "" where there is no redis-server.

    Raises: TierKVError (unavailable): it does not start.
    """
    program = shutil.which("redis-server")
    if program is None:
        return ""
    path = processes.folder / "redis.sock"
    lines = {"port": "0", "unixsocket": str(path), "save": "", "appendonly": "no"}
    command = [program, *(word for name, value in lines.items() for word in (f"--{name}", value))]
    with processes.log("redis").open("ab") as log:
        process = processes.start("redis", command, stdout=log)
    if not until(path.exists, process, START_S):
        raise unavailable(f"redis-server did not start:\n{processes.said('redis')}")
    return f"unix://{path}"


class Sidecar:
    """`tierkv serve` with RAM, its own NVMe folder, and Redis when there is a URL.

    `gate` is the file that allows lossy profiles; "": none.
    """

    def __init__(self, processes: Processes, name: str, redis_url: str, gate: str = "") -> None:
        self.socket = processes.folder / f"{name}.sock"
        self._processes = processes
        self._name = name
        self._settings = processes.folder / f"{name}.toml"
        text = _SETTINGS.format(folder=processes.folder, name=name)
        text += f'gate = "{gate}"\n' if gate else ""
        self._settings.write_text(text + (f'[redis]\nurl = "{redis_url}"\n' if redis_url else ""))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it. Raises: TierKVError (unavailable): it does not answer."""
        run = "from tierkv_service.cli import main; main()"
        command = [sys.executable, "-c", run, "serve", "--config", str(self._settings)]
        process = self._process = self._processes.start(
            self._name, command, stdout=subprocess.DEVNULL
        )
        if not until(self.socket.exists, process, START_S) or self.stat() is None:
            raise unavailable(f"the sidecar did not start:\n{self._processes.said(self._name)}")

    def stop(self) -> None:
        """Let it finish its writes and end."""
        if self._process is not None:
            stop(self._process)

    def stat(self) -> StoreStat | None:
        """Ask for its counters."""
        return stat_of(self.socket)

    def copied(self, frames: int, seconds: float) -> bool:
        """Wait until every lower tier holds as many frames."""
        assert self._process is not None, "the sidecar is running"
        return until(lambda: copies(self.stat()) >= frames, self._process, seconds)


def stat_of(socket: Path) -> StoreStat | None:
    """Ask a sidecar for its counters."""
    client = Client(SidecarChannel(socket, client="demo", arena=False))
    try:
        found = client.stat()
        return None if found is None else from_wire(found)
    finally:
        client.close()


def copies(stat: StoreStat | None) -> int:
    """Return the frames that every lower tier holds at least."""
    return min((tier.placements for tier in stat.tiers if tier.durable), default=0) if stat else 0


def run_engine(
    processes: Processes, name: str, order: Order, seen: Callable[[Event], None]
) -> None:
    """Run an engine process to its end; `seen` gets what it tells, as it does.

    Raises: TierKVError (unavailable): it fails, or takes too long.
    """
    module = "tierkv_service.demo_vllm" if order.vllm else "tierkv_service.demo_engine"
    command = [sys.executable, "-m", module]
    # Threads of the model that wait must not spin: there may be few cores.
    env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    pipe = subprocess.PIPE
    process = processes.start(name, command, stdin=pipe, stdout=pipe, env=env)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as stdin:
        stdin.write(msgspec.json.encode(order) + b"\n")
    deadline = time.monotonic() + ENGINE_S
    decoder = msgspec.json.Decoder(Event)
    rest = b""
    with process.stdout as stdout:
        waiting = select.poll()
        waiting.register(stdout, select.POLLIN)
        while waiting.poll(max(deadline - time.monotonic(), 0.0) * 1000):
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                seen(decoder.decode(line))
    if time.monotonic() > deadline or process.wait(STOP_S) != 0:
        raise unavailable(f"the engine failed or took too long:\n{processes.said(name)}")
