"""HTTP: health, metrics and administration, in a process of its own.

A busy thread beside the data loop would make its answers a hundred times slower, so this is another
process and an ordinary client of the socket. `spawn` opens the listening socket, so that a taken
port or a missing token is an error at start, and hands it over. The child ends with its parent: it
waits for the end of its standard input, which only the parent holds open.

`routes.py` has what is served, and to whom.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from tierkv.errors import invalid, unavailable
from tierkv.settings import HttpSettings

MIN_TOKEN_CHARS = 16
MAX_TOKEN_BYTES = 4096
MAX_CONNECTIONS = 256
_BACKLOG = 128

_log = logging.getLogger("tierkv.http")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is told on its standard input: one line of JSON."""

    settings: HttpSettings
    socket_path: str
    listener: int


class HttpProcess(NamedTuple):
    """The child and where it listens."""

    process: subprocess.Popen[bytes]
    url: str

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the child and wait for it. Idempotent."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def spawn(settings: HttpSettings, socket_path: str | Path) -> HttpProcess:
    """Start the HTTP process; it serves at once, and answers 503 until the sidecar does.

    Raises: TierKVError: the address cannot be used, or the token file cannot be.
    """
    read_token(settings)
    with listen(settings) as listener:
        order = Order(settings=settings, socket_path=str(socket_path), listener=listener.fileno())
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tierkv_service.http"],
            stdin=subprocess.PIPE,
            pass_fds=(listener.fileno(),),
        )
        port = listener.getsockname()[1]
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    process.stdin.flush()
    address = f"[{settings.address}]" if ":" in settings.address else settings.address
    url = f"http://{address}:{port}"
    _log.info("health and metrics at %s", url)
    return HttpProcess(process, url)


def listen(settings: HttpSettings) -> socket.socket:
    """Return a listening socket. Raises: TierKVError: the address cannot be used."""
    family = socket.AF_INET6 if ":" in settings.address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.address, settings.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise unavailable(
            f"cannot listen on {settings.address} port {settings.port}: {error.strerror};"
            " set [http] address and port, or [http] enabled = false"
        ) from error
    return listener


def read_token(settings: HttpSettings) -> bytes:
    """Return the token, empty when there is none. Raises: TierKVError: its file cannot be used."""
    if not settings.token_file:
        return b""
    try:
        with Path(settings.token_file).open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES).strip()
    except OSError as error:
        raise unavailable(
            f"cannot read [http] token_file {settings.token_file}: {error.strerror}"
        ) from error
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or len(token.split()) != 1:
        raise invalid(
            f"[http] token_file {settings.token_file} must hold one word of {MIN_TOKEN_CHARS} or"
            f" more ASCII characters: openssl rand -hex 32 > {settings.token_file}"
        )
    return token


async def _serve(order: Order) -> None:
    import uvicorn

    from tierkv_connectors.sidecar import SidecarChannel
    from tierkv_service.routes import build

    channel = SidecarChannel(order.socket_path, client="http", arena=False)
    app = build(order.settings, read_token(order.settings), channel)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()

    def parent_gone() -> None:
        loop.remove_reader(sys.stdin.fileno())
        server.should_exit = True

    loop.add_reader(sys.stdin.fileno(), parent_gone)
    await server.serve(sockets=[socket.socket(fileno=order.listener)])


def main() -> None:
    """Serve as the order on standard input says, until its end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    asyncio.run(_serve(order))
    sys.stderr.flush()
    os._exit(0)  # a thread may still wait for a sidecar that is gone or stopped


if __name__ == "__main__":
    main()
