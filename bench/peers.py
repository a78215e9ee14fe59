"""Peers: other stores, each in a process with the Python of its own environment.

`bench/peers.sh` makes the environments. One that is absent is skipped, and the result says so.
A peer answers the line "put" or "get" with the seconds it took, so that it takes its turn with
everybody else.
"""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.engine import disk_folder
from bench.timing import Run

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
ROOT = Path(os.environ.get("TIERKV_PEERS", CACHE / "tierkv" / "peers"))


class Peer(NamedTuple):
    """A peer's name in results, its environment, its script and the script's first argument."""

    name: str
    environment: str
    script: str
    first: tuple[str, ...] = ()
    folder: bool = False
    """Whether its last argument is a directory on the disk."""


PEERS = {
    "host": (
        Peer("lmcache", "lmcache", "peer_lmcache.py", ("cpu",), folder=True),
        Peer("mooncake", "mooncake", "peer_mooncake.py", ("local",)),
    ),
    "sidecar": (
        Peer("lmcache server", "lmcache", "peer_lmcache_server.py"),
        Peer("mooncake tcp", "mooncake", "peer_mooncake.py", ("remote",)),
    ),
    "nvme": (Peer("lmcache disk", "lmcache", "peer_lmcache.py", ("disk",), folder=True),),
}


class Running:
    """A peer's process."""

    def __init__(self, peer: Peer, arguments: list[str]) -> None:
        python = str(ROOT / peer.environment / "bin" / "python")
        command = [python, str(HERE / peer.script), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.peer = peer
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            text=True, env=environment,
        )  # fmt: skip

    def ready(self) -> bool:
        """Wait until the peer can be asked; False when it ended instead."""
        return self._line() is not None

    def ask(self, op: str) -> float:
        """Let the peer do one operation. Raises: RuntimeError: it ended instead."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{op}\n")
            self._process.stdin.flush()
        except OSError:
            pass
        line = self._line()
        if line is None:
            raise RuntimeError(f"{self.peer.name} ended: {self.why()}")
        return float(line)

    def why(self) -> str:
        """Return the last line the peer wrote to standard error."""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "no message"

    def stop(self) -> None:
        """End the peer."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.errors.close()

    def _line(self) -> str | None:
        """Return the next line that is an answer; libraries print others."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word = line.strip()
            if word == "ready" or word.replace(".", "").replace("e-", "").isdigit():
                return word
        return None


@contextlib.contextmanager
def running(
    tier: str, block_bytes: int, blocks: int, absent: dict[str, str], *, wanted: bool
) -> Iterator[dict[str, tuple[Run, Run]]]:
    """Start the peers of a tier; yields (put, get) by name. `absent` learns who is missing why."""
    found: dict[str, tuple[Run, Run]] = {}
    with contextlib.ExitStack() as ends:
        for peer in PEERS.get(tier, ()) if wanted else ():
            if not (ROOT / peer.environment / "bin" / "python").exists():
                absent[peer.name] = f"no {ROOT / peer.environment}: run bench/peers.sh"
                continue
            arguments = [*peer.first, str(block_bytes), str(blocks)]
            if peer.folder:
                arguments.append(ends.enter_context(tempfile.TemporaryDirectory(dir=disk_folder())))
            one = Running(peer, arguments)
            ends.callback(one.stop)
            try:
                assert one.ready(), one.why()
                for op in ("put", "get"):
                    one.ask(op)
            except (AssertionError, RuntimeError) as error:
                absent[peer.name] = f"does not run here: {error}"
                continue
            found[peer.name] = (partial(one.ask, "put"), partial(one.ask, "get"))
        yield found
