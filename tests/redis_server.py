"""A real redis-server of our own for tests: loopback port, Unix socket, nothing kept on disk."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
START_ATTEMPTS = 5


def binary() -> str | None:
    """Return the path of redis-server, or None where it is not installed."""
    return shutil.which("redis-server")


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """One server process; address and settings outlive a restart, its content does not.

    `settings` are lines of redis.conf by name, with _ for -: maxmemory="8mb", requirepass="secret".
    """

    def __init__(self, directory: Path, **settings: str) -> None:
        self.directory = directory
        self.settings = settings
        self.socket = directory / "redis.sock"
        self.log = directory / "redis.log"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{self._login}127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self._login}{self.socket}?db=0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> None:
        """Start, on the port of before if there was one. Returns when the server answers."""
        assert self._process is None, "the server is running"
        for _ in range(1 if self.port else START_ATTEMPTS):
            port = self.port or free_port()
            self._process = subprocess.Popen(self._command(port))
            if self._answers(port):
                self.port = port
                return
            self.kill()
        text = self.log.read_text() if self.log.exists() else "(no log)"
        message = f"redis-server did not start; its log ends with:\n{text[-2000:]}"
        raise RuntimeError(message)

    def stop(self) -> None:
        """End the server politely; nothing happens when it is not running."""
        if self._process is not None:
            self.thaw()
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            self.kill()

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop the process where it is: it accepts connections and answers nothing."""
        assert self._process is not None, "the server is not running"
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        assert self._process is not None, "the server is not running"
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Stop and start: an empty server at the same addresses."""
        self.stop()
        self.start()

    @property
    def _login(self) -> str:
        password = self.settings.get("requirepass")
        return f":{password}@" if password else ""

    def _command(self, port: int) -> list[str]:
        program = binary()
        assert program is not None, "redis-server is not installed"
        # setpriv makes the kernel end the server when the test run is killed.
        setpriv = shutil.which("setpriv")
        command = [setpriv, "--pdeathsig", "KILL", program] if setpriv else [program]
        lines = {
            "port": str(port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "dir": str(self.directory),
            "logfile": str(self.log),
            "save": "",
            "appendonly": "no",
            **self.settings,
        }
        for name, value in lines.items():
            command += [f"--{name.replace('_', '-')}", value]
        return command

    def _answers(self, port: int) -> bool:
        """Wait until a PING is answered; an answer that asks for a password counts."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as probe:
                probe.sendall(b"PING\r\n")
                # Another process may own the port by now: then ours has ended, or soon does.
                if probe.recv(64).startswith((b"+PONG", b"-NOAUTH")) and self.socket.exists():
                    return self._process.poll() is None
            time.sleep(0.02)
        return False


RedisFactory = Callable[..., RedisServer]
"""Takes settings as RedisServer does and gives a running server."""
