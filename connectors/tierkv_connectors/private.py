"""Private: a sidecar of one engine, for its life, when there is none on the node.

The child watches this process and ends with it, however it ends; so do no forked children of ours
keep it, as an inherited pipe would.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from tierkv.errors import unavailable
from tierkv.settings import Settings

START_S = 60.0
_STEP_S = 0.02


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is told on its standard input: one line of JSON."""

    settings: Settings
    parent: int


class PrivateSidecar:
    """A child that serves at `path`, a socket in a directory of its own.

    Args:
        settings: of the store; socket and HTTP are decided here.
        start_s: how long it may take to listen.

    Raises:
        TierKVError: it does not start; its own message is on standard error.
    """

    def __init__(self, settings: Settings, *, start_s: float = START_S) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="tierkv-")) / "tierkv.sock"
        replace = msgspec.structs.replace
        settings = replace(
            settings,
            socket=replace(settings.socket, path=str(self.path), group="", uids=()),
            http=replace(settings.http, enabled=False),
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tierkv_service.sidecar"],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(msgspec.json.encode(Order(settings=settings, parent=os.getpid())) + b"\n")
        deadline = time.monotonic() + start_s
        while not self.path.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close(grace_s=0.0)
                raise unavailable("a private sidecar did not start; standard error says why")
            time.sleep(_STEP_S)

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def close(self, grace_s: float = 30.0) -> None:
        """Let the child finish its writes and end. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.path.parent, ignore_errors=True)
