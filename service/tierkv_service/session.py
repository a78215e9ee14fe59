"""Session: one client process's connection, and what outlives it until the process is gone."""

import socket
import time
from typing import NamedTuple, Protocol

from tierkv.calls import MAX_MESSAGE_BYTES
from tierkv.errors import ErrorKind
from tierkv_connectors import wire
from tierkv_service.loop import READ, WRITE, Loop

MAX_OUTPUT_BYTES = 2 * MAX_MESSAGE_BYTES
"""Answers a client may leave unread before its connection is closed."""
STALL_S = 10.0
"""How long a client may leave answers unread."""


class ArenaFile(Protocol):
    """The memory that clients map."""

    @property
    def fd(self) -> int:
        """Its memfd."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def page_bytes(self) -> int:
        """Runs start and end at multiples of this."""

    @property
    def epoch(self) -> int:
        """Differs for every arena."""


class Peer(NamedTuple):
    """The process at the other end; `pidfd` tells when it is gone."""

    pid: int
    uid: int
    pidfd: int


class Session:
    """Bytes in and out of one connection. `number` is the owner in the store, 0 before Hello.

    Nobody is read from who leaves answers unread, so what waits here is bounded by what the client
    had asked for before.
    """

    def __init__(self, loop: Loop, sock: socket.socket, peer: Peer) -> None:
        self._loop = loop
        self.sock: socket.socket | None = sock
        self.peer = peer
        self.number = 0
        self.name = "?"
        self.input = bytearray()
        self.output = bytearray()
        self.resuming = False
        self.deferred = 0
        self.stalled_since = 0.0
        self.opened = time.monotonic()

    def __str__(self) -> str:
        return f"{self.name} (pid {self.peer.pid}, uid {self.peer.uid})"

    @property
    def stalled(self) -> bool:
        """Whether the client has left answers unread."""
        return self.stalled_since > 0

    def add(self, sequence: int, reply: object) -> bool:
        """Put an answer behind those that wait to be sent; False when it was too large to go."""
        at = len(self.output)
        kind = wire.PROBLEM if isinstance(reply, wire.Problem) else wire.REPLY
        wire.append(self.output, sequence, kind, reply)
        size = len(self.output) - at - wire.HEADER.size
        if size <= MAX_MESSAGE_BYTES:
            return True
        del self.output[at:]
        text = f"the answer has {size} bytes: ask for fewer blocks at once"
        problem = wire.Problem(kind=ErrorKind.INVALID.value, message=text)
        wire.append(self.output, sequence, wire.PROBLEM, problem)
        return False

    def flush(self, now: float) -> bool:
        """Send what the socket takes; False when the connection is broken."""
        sock, output = self.sock, self.output
        if sock is None or not output:
            return True
        try:
            sent = sock.send(output)
        except BlockingIOError:
            sent = 0
        except OSError:
            return False
        if sent == len(output):
            output.clear()
            if self.stalled:
                self.stalled_since = 0.0
                self._loop.change(sock.fileno(), READ)
        else:
            del output[:sent]
            if not self.stalled:
                self._loop.change(sock.fileno(), WRITE)
            if sent or not self.stalled:
                self.stalled_since = now
        return True

    def close(self) -> None:
        """Close the connection; the process stays watched. Idempotent."""
        sock, self.sock = self.sock, None
        if sock is not None:
            self._loop.forget(sock.fileno())
            sock.close()
        self.input.clear()
        self.output.clear()
