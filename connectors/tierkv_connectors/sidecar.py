"""Sidecar: the channel of a client to a sidecar, and how to connect one.

It never raises into an engine. A sidecar that is gone, slow or restarting is None, at once except
for a call's own timeout; the next call after a backoff tries to connect again, in its own thread
and within `timeout_s`, while others get None. Nothing tries in between.

What was borrowed stays mapped until it is given back. Only then is there a new connection: so an
offset always belongs to the arena that was borrowed, and Hello can say that earlier sessions of
this process are over.
"""

import contextlib
import logging
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv import calls
from tierkv.client import Client
from tierkv.errors import TierKVError
from tierkv_connectors import wire
from tierkv_connectors.arena import Arena, ArenaLock
from tierkv_connectors.link import Link, Miss

MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0

_log = logging.getLogger("tierkv.client")
_channels: "weakref.WeakSet[SidecarChannel]" = weakref.WeakSet()


def connect(
    path: str | Path | None = None, *, timeout_s: float = 1.0, client: str = "python"
) -> Client:
    """Return a client of the sidecar at a socket path; one that is not there yet is a miss.

    Args:
        path: the socket; None: `TIERKV_SOCKET`, or the user's own.
        timeout_s: how long a call may take.
        client: a name for the sidecar's counters and logs.
    """
    from tierkv.settings import client_socket  # with it come the tiers, which an engine never uses

    return Client(SidecarChannel(path or client_socket(), timeout_s=timeout_s, client=client))


@dataclass
class ChannelCounters:
    """What became of the calls; totals."""

    calls: int = 0
    timeouts: int = 0
    refused: int = 0
    """Calls that the sidecar answered with an error."""
    disconnects: int = 0
    reconnects: int = 0
    """Connections made, the first one included."""
    unreachable: int = 0
    """Calls that were a miss because there was no connection."""


class SidecarChannel:
    """`client.Channel` over a sidecar's socket, for any number of threads.

    Args:
        path: the socket.
        timeout_s: how long a call may take, and how long connecting may.
        client: a name for the sidecar's counters and logs.
        arena: False leaves the arena unmapped: for calls that move no blocks.
        on_map: called with the arena when it is mapped, before any call uses it.
        on_unmap: called before it is unmapped, by any thread, once nothing is borrowed; it must end
            every other use of the arena.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        timeout_s: float = 1.0,
        client: str = "python",
        arena: bool = True,
        on_map: Callable[[memoryview], None] = lambda _view: None,
        on_unmap: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = Path(path)
        self.last_error = ""
        self.counters = ChannelCounters()
        self._timeout_s = timeout_s
        self._name = client
        self._wants_arena = arena
        self._on_map = on_map
        self._on_unmap = on_unmap
        self._random = random.Random()
        self._over: list[int] = []
        self._session = 0
        self._closed = False
        self._start()
        _channels.add(self)

    def call(self, call: calls.Call, timeout_s: float | None = None) -> Any | None:  # noqa: ANN401
        self.counters.calls += 1
        link = self._link
        if link is None or link.lost:
            link = self._connect()
            if link is None:
                self.counters.unreachable += 1
                return None
        reply = link.ask(call, self._timeout_s if timeout_s is None else timeout_s)
        if isinstance(reply, Miss):
            if reply is Miss.TIMEOUT:
                self.counters.timeouts += 1
            else:
                self.counters.unreachable += 1
            return None
        if isinstance(reply, wire.Problem):
            self.counters.refused += 1
            self._note(f"{type(call).__name__} refused: {reply.message}")
            return None
        return reply

    def post(self, call: calls.Call) -> None:
        link = self._link
        if link is not None and not link.lost:
            link.post(call, self._timeout_s)

    def borrow(self) -> memoryview | None:
        link = self._link
        if link is None or link.lost:
            link = self._connect()
        with self._guard:
            if link is None or self._link is not link or self._arena is None:
                return None
            return self._arena.borrow()

    def give_back(self) -> None:
        with self._guard:
            arena = self._arena
            last = arena is not None and arena.give_back()
        if arena is not None and last:
            arena.unmap()

    def close(self) -> None:
        self._closed = True
        link = self._link
        if link is not None:
            link.lose()

    def __getstate__(self) -> None:
        """Refuse to be copied into another process."""
        raise TypeError("a channel belongs to one process: connect again there")

    def _start(self) -> None:
        self._guard = threading.Lock()
        self._connecting = threading.Lock()
        self._link: Link | None = None
        self._arena: Arena | None = None
        self._next_try = 0.0
        self._backoff_s = MIN_BACKOFF_S

    def _connect(self) -> Link | None:
        """Return a connection, None when there is none now. Never waits for another thread."""
        if self._closed or time.monotonic() < self._next_try:
            return None
        if not self._connecting.acquire(blocking=False):
            return None
        try:
            with self._guard:
                link = self._link
                if link is not None and not link.lost:
                    return link
                if link is not None or not (self._arena is None or self._arena.gone):
                    return None
            return self._open()
        except (OSError, TierKVError) as error:
            self._note(str(error))
            self._next_try = time.monotonic() + self._backoff_s * self._random.uniform(0.5, 1.0)
            self._backoff_s = min(self._backoff_s * 2, MAX_BACKOFF_S)
            return None
        finally:
            self._connecting.release()

    def _open(self) -> Link:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            sock.settimeout(self._timeout_s)
            sock.connect(str(self.path))
            lock = ArenaLock(self.path) if self._wants_arena else None
            link = Link(sock, lambda: self._lost(link))
            hello = calls.Hello(
                protocol=calls.PROTOCOL, client=self._name, closed=tuple(self._over)
            )
            welcome, fd = link.hello(hello, self._timeout_s)
            try:
                arena = None
                if lock is not None:
                    arena = Arena(fd, welcome.arena_bytes, welcome.epoch, lock, self._on_unmap)
                    self._on_map(arena.view)
            finally:
                os.close(fd)
            self._begin(link, arena, welcome)
            undo.pop_all()
        return link

    def _begin(self, link: Link, arena: Arena | None, welcome: calls.Welcome) -> None:
        with self._guard:
            self._over.clear()
            self._session = welcome.session
            self._link, self._arena = link, arena
            self._backoff_s = MIN_BACKOFF_S
            self.counters.reconnects += 1
        try:
            link.watch()
        except TierKVError:
            self._lost(link)
            raise
        if self._closed:
            link.lose()

    def _lost(self, link: Link) -> None:
        """Let go of the arena: the connection is over."""
        with self._guard:
            if self._link is not link:
                return
            arena, self._link = self._arena, None
            self._over.append(self._session)
            self.counters.disconnects += 1
            last = arena is not None and arena.drop()
        if arena is not None and last:
            arena.unmap()

    def _note(self, message: str) -> None:
        """Keep what went wrong, and log it when it is something new."""
        if message != self.last_error:
            self.last_error = message
            _log.warning("%s: %s", self.path, message)

    def _forked(self) -> None:
        """Begin anew in a child: socket and mapping are the parent's."""
        link, arena = self._link, self._arena
        self._over.clear()
        self.counters = ChannelCounters()
        self._start()
        if link is not None:
            link.abandon()
        if arena is not None:
            arena.abandon()


def _after_fork() -> None:
    for channel in list(_channels):
        channel._forked()  # noqa: SLF001 - the module's own class


os.register_at_fork(after_in_child=_after_fork)
