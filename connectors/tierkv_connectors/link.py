"""Link: one connection to a sidecar, for any number of threads.

Whoever waits for a reply and finds nobody reading becomes the reader, and leaves the replies of
others where they find them. So a single thread pays for no wake-up but the kernel's, and no thread
is needed to read. One thread only watches for the other side to go away: an idle engine must let go
of the arena then, or no new sidecar could start.
"""

import contextlib
import enum
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tierkv import calls
from tierkv.errors import TierKVError, incompatible, unavailable
from tierkv_connectors import threads, wire

_TIMEVAL = struct.Struct("ll")
_START_BYTES = 1 << 16
_MIN_TIMEOUT_S = 0.001
SPIN_S = 1e-4
"""To be woken takes 30 us on a virtual machine, about as long as the sidecar needs for an answer.
Whoever else wants the core gets it meanwhile."""
HELD = (calls.MatchCall, calls.GetCall, calls.ClaimCall, calls.PutCall)
"""Calls whose reply hands something out that must go back when it comes too late."""


class Miss(enum.Enum):
    """Why there is no reply."""

    TIMEOUT = "timeout"
    LOST = "lost"


Frame = tuple[int, bytes | memoryview]


class Link:
    """Calls over one connected socket, until it is lost; it never comes back.

    Args:
        sock: connected; the link closes it.
        on_lost: called once, by any thread, when the connection is over.
    """

    def __init__(self, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        self._sock = sock
        self._on_lost = on_lost
        self._sending = threading.Lock()
        self._out = bytearray()
        self._sequence = 0
        self._turn = threading.Condition(threading.Lock())
        self._reading = False
        self._waiting: dict[int, Frame | None] = {}
        self._late: dict[int, type[calls.Call]] = {}
        self._in = bytearray(_START_BYTES)
        self._view = memoryview(self._in)
        self._start = self._stop = 0
        self._timeout_s = 0.0
        self.lost = False

    def hello(self, hello: calls.Hello, timeout_s: float) -> tuple[calls.Welcome, int]:
        """Say hello and return the answer and the arena's descriptor, which the caller closes.

        Raises:
            TierKVError: refused, or no answer in time.
        """
        out = bytearray()
        wire.append(out, 1, wire.REPLY, hello)
        fds: list[int] = []
        data = b""
        try:
            self._sock.settimeout(timeout_s)
            self._sock.sendall(out)
            while len(data) < wire.HEADER.size or len(data) < self._hello_bytes(data):
                more, found, _flags, _peer = socket.recv_fds(
                    self._sock, 4096, 1, socket.MSG_CMSG_CLOEXEC
                )
                fds += found
                data += more
                if not more:
                    raise unavailable("the sidecar closed the connection")
            self._sock.settimeout(None)
            self._set_timeout(socket.SO_SNDTIMEO, timeout_s)
            return self._read_welcome(data), fds.pop()
        except OSError as error:
            raise unavailable(f"the sidecar did not answer hello: {error}") from error
        except (msgspec.DecodeError, IndexError) as error:
            raise incompatible(f"the sidecar answered something else to hello: {error}") from error
        finally:
            for fd in fds:
                socket.close(fd)

    def _hello_bytes(self, data: bytes) -> int:
        size = wire.HEADER.unpack_from(data)[0]
        if size > wire.MAX_FIRST_BYTES:
            raise incompatible(f"{size} bytes answer hello: is this tierkv's socket?")
        return wire.HEADER.size + int(size)

    def _read_welcome(self, data: bytes) -> calls.Welcome:
        _size, _sequence, kind = wire.HEADER.unpack_from(data)
        body = memoryview(data)[wire.HEADER.size :]
        if kind == wire.PROBLEM:
            raise unavailable(wire.PROBLEMS.decode(body).message)
        welcome: calls.Welcome = wire.REPLIES[calls.Hello].decode(body)
        if welcome.protocol != calls.PROTOCOL:
            raise incompatible(
                f"the sidecar speaks protocol {welcome.protocol}, this client {calls.PROTOCOL}:"
                " use one version for both"
            )
        return welcome

    def watch(self) -> None:
        """Start the thread that closes the socket once the connection is over.

        Raises:
            TierKVError: no thread can be started.
        """
        try:
            threads.start("link", self._watch)
        except RuntimeError as error:
            raise unavailable(f"cannot start a thread: {error}") from error

    def ask(self, call: calls.Call, timeout_s: float) -> Any:  # noqa: ANN401
        """Return the call's reply, a `wire.Problem` or a `Miss`."""
        timeout_s = max(timeout_s, _MIN_TIMEOUT_S)
        deadline = time.monotonic() + timeout_s
        sequence = self._send(call, timeout_s, wanted=True)
        if sequence <= 0:
            return Miss.LOST if self.lost else Miss.TIMEOUT
        frame = self._await(sequence, deadline)
        if frame is None:
            return Miss.LOST if self.lost else self._give_up(sequence, call)
        return self._decode(type(call), frame)

    def post(self, call: calls.Call, timeout_s: float) -> None:
        """Send a call that has no reply."""
        self._send(call, timeout_s, wanted=False)

    def lose(self) -> None:
        """End the connection. Idempotent."""
        if not self.lost:
            self.lost = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Forget the socket in a child after fork: it is the parent's."""
        self.lost = True
        self._sock.close()

    def _send(self, call: calls.Call, timeout_s: float, *, wanted: bool) -> int:
        """Return the sequence sent; 0: nothing was sent, or no reply is wanted."""
        if not self._sending.acquire(timeout=timeout_s):
            return 0
        sequence, whole = 0, True
        try:
            if self.lost:
                return 0
            if wanted:
                self._sequence = sequence = self._sequence % wire.MAX_SEQUENCE + 1
                self._waiting[sequence] = None
            out = self._out
            out.clear()
            wire.append(out, sequence, wire.REPLY, call)
            sent, whole = 0, False
            with memoryview(out) as view:
                while sent < len(out):
                    sent += self._sock.send(view[sent:])
            whole = True
        except OSError as error:
            whole = isinstance(error, BlockingIOError) and not sent
            self._waiting.pop(sequence, None)
            return 0
        finally:
            if not whole:
                self.lose()
            self._sending.release()
        return sequence

    def _await(self, sequence: int, deadline: float) -> Frame | None:
        with self._turn:
            while True:
                frame = self._waiting[sequence]
                if frame is not None:
                    return self._waiting.pop(sequence)
                if self.lost:
                    return None
                if not self._reading:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._turn.wait(left)
            self._reading = True
        try:
            return self._read(sequence, deadline)
        except (OSError, TierKVError):
            self.lose()
            return None
        finally:
            with self._turn:
                self._reading = False
                self._turn.notify_all()

    def _read(self, wanted: int, deadline: float) -> Frame | None:
        """Read messages until the one that is wanted."""
        while True:
            while self._stop - self._start < wire.HEADER.size or not self._is_whole():
                if not self._fill(deadline):
                    return None
            size, sequence, kind = wire.HEADER.unpack_from(self._in, self._start)
            at = self._start + wire.HEADER.size
            body = self._view[at : at + size]
            self._start = at + size
            if self._start == self._stop:
                self._start = self._stop = 0
            if sequence == wanted:
                with self._turn:
                    del self._waiting[wanted]
                return kind, bytes(body)
            self._put_aside(sequence, kind, body)

    def _is_whole(self) -> bool:
        size = wire.HEADER.unpack_from(self._in, self._start)[0]
        if size > calls.MAX_MESSAGE_BYTES:
            raise incompatible(f"a reply of {size} bytes")
        needed = wire.HEADER.size + size
        if self._stop - self._start >= needed:
            return True
        if self._start + needed > len(self._in):
            room = bytearray(max(needed, _START_BYTES))
            room[: self._stop - self._start] = self._view[self._start : self._stop]
            self._stop -= self._start
            self._start = 0
            self._in, self._view = room, memoryview(room)
        return False

    def _fill(self, deadline: float) -> bool:
        """Receive what there is; False at the deadline."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if not left * 0.9 <= self._timeout_s <= left * 1.1:
            self._set_timeout(socket.SO_RCVTIMEO, left)
            self._timeout_s = left
        if self._stop == len(self._in):
            self._in[: self._stop - self._start] = self._in[self._start : self._stop]
            self._stop -= self._start
            self._start = 0
        try:
            count = self._receive(self._view[self._stop :])
        except BlockingIOError:
            return True
        if not count:
            raise unavailable("the sidecar closed the connection")
        self._stop += count
        return True

    def _receive(self, room: memoryview) -> int:
        """Receive what there is; look for it a while before going to sleep, see SPIN_S."""
        until = time.monotonic() + SPIN_S
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                return self._sock.recv_into(room, 0, socket.MSG_DONTWAIT)
            os.sched_yield()
        return self._sock.recv_into(room)

    def _set_timeout(self, option: int, seconds: float) -> None:
        whole = int(seconds)
        packed = _TIMEVAL.pack(whole, int((seconds - whole) * 1e6) or 1)
        self._sock.setsockopt(socket.SOL_SOCKET, option, packed)

    def _put_aside(self, sequence: int, kind: int, body: memoryview) -> None:
        with self._turn:
            if sequence in self._waiting:
                self._waiting[sequence] = kind, bytes(body)
                self._turn.notify_all()
                return
            asked = self._late.pop(sequence, None)
        if asked is not None and kind == wire.REPLY:
            undo = wire.undo(self._decode(asked, (kind, body)))
            if undo is not None:
                self.post(undo, _MIN_TIMEOUT_S)

    def _give_up(self, sequence: int, call: calls.Call) -> Any:  # noqa: ANN401
        """Return that it timed out, or the reply that came at the last moment."""
        with self._turn:
            frame = self._waiting.pop(sequence, None)
            if frame is None:
                if isinstance(call, HELD):
                    self._late[sequence] = type(call)
                return Miss.TIMEOUT
        return self._decode(type(call), frame)

    def _decode(self, asked: type[calls.Call], frame: Frame) -> Any:  # noqa: ANN401
        kind, body = frame
        try:
            return (wire.PROBLEMS if kind else wire.REPLIES[asked]).decode(body)
        except (msgspec.DecodeError, KeyError):
            self.lose()
            return Miss.LOST

    def _watch(self) -> None:
        """Wait for the end of the connection, then close the socket when nobody uses it."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        with contextlib.suppress(OSError):
            poll.poll()
        self.lose()
        with self._turn:
            self._turn.notify_all()
            while self._reading:
                self._turn.wait()
        with self._sending:
            self._sock.close()
        self._on_lost()
