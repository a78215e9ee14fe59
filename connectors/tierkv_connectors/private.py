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
import uuid
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


def private_socket(name: str) -> Path:
    """Return where the private sidecar of this name listens; names are hard to guess."""
    return Path(tempfile.gettempdir()) / f"tierkv-{name}" / "tierkv.sock"


class PrivateSidecar:
    """A child that serves at `path`, a socket in a directory of its own.

    Args:
        settings: of the store; socket and HTTP are decided here.
        name: what others that know it find the socket by (`private_socket`); "": nobody does.
        start_s: how long it may take to listen.

    Raises:
        TierKVError: it does not start; its own message is on standard error.
    """

    def __init__(self, settings: Settings, name: str = "", *, start_s: float = START_S) -> None:
        self.path = private_socket(name or uuid.uuid4().hex)
        try:
            self.path.parent.mkdir(mode=0o700)
        except OSError as error:
            raise unavailable(f"cannot make {self.path.parent}: {error.strerror}") from error
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
