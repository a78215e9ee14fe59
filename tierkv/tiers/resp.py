"""RESP: connections to a Redis server that carry values straight between its socket and our memory.

A request is buffers sent with one `sendmsg`; a bulk reply is received with `recvmsg_into` into the
caller's pieces. Only lines and small replies pass through a buffer of `BUFFER_BYTES`, so nothing is
ever allocated from a length that the server names. Protocol 2 throughout: every server and proxy
speaks it, and a connection that sends no HELLO gets it.

Whatever goes wrong (end of stream, silence, garbage) is a `LostError`, and the connection is then
of no use: there is no telling which reply would come next. An error reply is a value, `Refused`.

Time is bounded twice: no operation waits longer than `timeout_s` without its bytes, and a call ends
at the deadline that `begin` was given. TLS sockets know neither sendmsg nor recvmsg: they take
`send` and `recv_into`, a buffer at a time.
"""

import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from tierkv.tiers.endpoint import Endpoint

Buffer: TypeAlias = bytes | bytearray | memoryview

BUFFER_BYTES = 8192
MOST_SMALL_BYTES = 4096
"""The longest bulk that `reply` takes."""
MOST_SKIPPED_BYTES = 1 << 20
"""The longest bulk of a wrong length that is read to its end; a longer one ends the connection."""
MOST_VIEWS = 64
"""Buffers for one system call."""
WAKE_BYTES = 1 << 19
"""What of a value must have arrived to wake us. On a virtual machine a wake-up costs more than 100
KiB to copy, and the server pays for it too when it runs beside us."""


class LostError(Exception):
    """A connection that is of no use any more.

    `stale`: it ended before it answered anything, as one does that lay idle over a restart of the
    server; the same call may work on a new one.
    """

    def __init__(self, message: str, *, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale


class Refused(NamedTuple):
    """An error reply; `code` is its first word."""

    code: str
    text: str


Reply: TypeAlias = int | bytes | Refused | None


def request(*words: bytes) -> bytes:
    """Return a command as bytes."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


class Connection:
    """One connection, for one thread at a time.

    Args:
        endpoint: the server.
        timeout_s: the longest wait for the bytes of one operation.
        connect_timeout_s: for connecting, with TLS, AUTH and SELECT.
        context: for TLS; None when the endpoint has none.

    Raises: LostError.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.used = False
        """Whether an earlier call was made on it."""
        self._timeout_s = timeout_s
        self._answered = False
        self._wakes_at = 1
        self._bytes = bytearray(BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._stop = 0
        self.begin(time.monotonic() + connect_timeout_s)
        try:
            self._socket = self._connect(endpoint)
        except OSError as error:
            raise LostError(f"cannot connect to {endpoint}: {error}") from None
        try:
            if context is not None:
                self._socket = context.wrap_socket(self._socket, server_hostname=endpoint.host)
            self._plain = context is None
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN)
            self._bound_waits(timeout_s if context is None else min(timeout_s, connect_timeout_s))
            self._log_in(endpoint)
        except (OSError, LostError) as error:
            self.close()
            raise LostError(f"cannot open {endpoint}: {error}") from None

    def _connect(self, endpoint: Endpoint) -> socket.socket:
        if endpoint.path:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(self._left())
            try:
                sock.connect(endpoint.path)
            except OSError:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((endpoint.host, endpoint.port), self._left())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _bound_waits(self, seconds: float) -> None:
        """Bound each wait; that to send in the kernel where it can, which saves a poll."""
        if not self._plain:
            self._socket.settimeout(seconds)
            return
        self._socket.settimeout(None)
        whole = int(seconds)
        interval = struct.pack("@ll", whole, max(int((seconds - whole) * 1e6), 1))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)

    def _log_in(self, endpoint: Endpoint) -> None:
        commands: list[tuple[bytes, ...]] = []
        if endpoint.user:
            commands.append((b"AUTH", endpoint.user.encode(), endpoint.password.encode()))
        elif endpoint.password:
            commands.append((b"AUTH", endpoint.password.encode()))
        if endpoint.database:
            commands.append((b"SELECT", b"%d" % endpoint.database))
        self.send([request(*words) for words in commands])
        for words in commands:
            reply = self.reply()
            if reply != b"OK":
                # Some servers quote the arguments in their error: only its first word is repeated.
                code = reply.code if isinstance(reply, Refused) else "a strange reply"
                raise LostError(f"{words[0].decode()} was refused with {code}")

    def begin(self, deadline: float) -> None:
        """Start a call that ends by `deadline` on the monotonic clock."""
        self._deadline = deadline
        self._answered = False

    @property
    def quiet(self) -> bool:
        """Whether nothing was received that no call asked for."""
        return self._start == self._stop

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    # --- sending ---

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send buffers in order. None may be empty."""
        views = [memoryview(buffer) for buffer in buffers]
        at = 0
        while at < len(views):
            some = views[at : at + MOST_VIEWS]
            began = time.monotonic()
            try:
                sent = self._socket.sendmsg(some) if self._plain else self._socket.send(some[0])
            except OSError as error:
                raise self._lost(error) from None
            while at < len(views) and sent >= len(views[at]):
                sent -= len(views[at])
                at += 1
            if sent:
                views[at] = views[at][sent:]
                self._check_progress(began)

    # --- receiving ---

    def reply(self) -> Reply:
        """Receive a status, an error, a number or a small bulk."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            length = self._length(rest, MOST_SMALL_BYTES)
            if length < 0:
                return None
            out = bytearray(length + 2)
            self._receive([memoryview(out)])
            return bytes(self._ended(out, length))
        if kind == b"+":
            return rest
        if kind == b":":
            return self._number(rest)
        if kind == b"-":
            return self._refusal(rest)
        raise LostError("not a reply of Redis")

    def array(self, count: int) -> Refused | None:
        """Receive the start of an array of `count` replies; returns the error that came instead."""
        line = self._line()
        if line.startswith(b"-"):
            return self._refusal(line[1:])
        if line != b"*%d" % count:
            raise LostError(f"not an array of {count} replies")
        return None

    def fill(self, views: Sequence[memoryview]) -> int:
        """Receive a bulk of exactly the views' bytes into them; none may be empty.

        Returns the bulk's length, -1 for nil. One of another length is dropped.
        """
        line = self._line()
        if not line.startswith(b"$"):
            raise LostError("not a bulk reply")
        size = sum(map(len, views))
        length = self._length(line[1:], max(size, MOST_SKIPPED_BYTES))
        if length == size:
            end = bytearray(2)
            self._receive([*views, memoryview(end)])
            self._ended(end, 0)
        elif length >= 0:
            scratch = bytearray(length + 2)
            self._receive([memoryview(scratch)])
            self._ended(scratch, length)
        return length

    @staticmethod
    def _ended(data: bytearray, length: int) -> bytearray:
        if data[length:] != b"\r\n":
            raise LostError("a bulk reply does not end where it should")
        return data[:length]

    @staticmethod
    def _refusal(text: bytes) -> Refused:
        words = text.decode(errors="replace")
        return Refused(words.partition(" ")[0], words)

    @staticmethod
    def _number(text: bytes) -> int:
        digits = text.removeprefix(b"-")
        if not digits.isdigit() or len(digits) > 19:  # noqa: PLR2004, digits of an int64
            raise LostError("not a number")
        return int(text)

    def _length(self, text: bytes, most: int) -> int:
        length = self._number(text)
        if not -1 <= length <= most:
            raise LostError(f"a bulk reply of {length} bytes")
        return length

    def _line(self) -> bytes:
        """Receive up to CR LF; returns what is before it."""
        while True:
            start, stop = self._start, self._stop
            at = self._bytes.find(b"\r\n", start, stop)
            if at >= 0:
                self._start = at + 2
                return bytes(self._buffer[start:at])
            if stop - start == BUFFER_BYTES:
                raise LostError("a reply's line is too long")
            self._buffer[: stop - start] = self._buffer[start:stop]
            self._start, self._stop = 0, stop - start
            self._stop += self._receive_some([self._buffer[self._stop :]])

    def _receive(self, targets: list[memoryview]) -> None:
        """Fill all targets: from the buffer first, then from the socket."""
        at, left = 0, sum(map(len, targets))
        while at < len(targets):
            target = targets[at]
            count = min(len(target), self._stop - self._start)
            if count:
                target[:count] = self._buffer[self._start : self._start + count]
                self._start += count
            else:
                count = self._receive_some(targets[at : at + MOST_VIEWS], left)
            left -= count
            while at < len(targets) and count >= len(targets[at]):
                count -= len(targets[at])
                at += 1
            if count:
                targets[at] = targets[at][count:]

    def _receive_some(self, targets: Sequence[memoryview], awaited: int = 1) -> int:
        """Receive at least a byte, once all that is awaited or WAKE_BYTES of it has arrived."""
        began = time.monotonic()
        try:
            if self._plain:
                self._await(min(awaited, WAKE_BYTES))
                count = self._socket.recvmsg_into(targets, 0, socket.MSG_DONTWAIT)[0]
            else:
                count = self._socket.recv_into(targets[0])
        except OSError as error:
            raise self._lost(error) from None
        if count == 0:
            raise LostError("the server closed the connection", stale=not self._answered)
        self._answered = True
        if count < sum(map(len, targets)):
            self._check_progress(began)
        return count

    def _await(self, nbytes: int) -> None:
        """Wait until so many bytes have arrived; a Unix socket is content with one.

        Polls, because a blocking receive takes what is there and then waits for as many again, of
        which the last ones may never come.
        """
        if nbytes != self._wakes_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wakes_at = nbytes
        if not self._poll.poll(self._timeout_s * 1000):
            raise TimeoutError

    # --- time ---

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline is over")
        return left

    def _check_progress(self, began: float) -> None:
        """Refuse to go on after an operation that moved less than it should."""
        now = time.monotonic()
        if now - began >= self._timeout_s:
            raise LostError(f"too few bytes within {self._timeout_s:g} s")
        if now >= self._deadline:
            raise LostError("the deadline is over")

    def _lost(self, error: OSError) -> LostError:
        if isinstance(error, BlockingIOError | TimeoutError):
            return LostError(f"no answer within {self._timeout_s:g} s")
        gone = isinstance(error, ConnectionError | ssl.SSLEOFError)
        return LostError(str(error) or type(error).__name__, stale=gone and not self._answered)


class Pool:
    """At most `size` connections, made when they are needed and kept while they work."""

    def __init__(self, connect: Callable[[], Connection], size: int) -> None:
        self._connect = connect
        self._free = threading.Semaphore(size)
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    def take(self, timeout_s: float) -> Connection | None:
        """Return a connection for `give` or `lose`, None when all stay taken for the time.

        Raises: LostError when a new one cannot be made.
        """
        if not self._free.acquire(timeout=max(timeout_s, 0)):
            return None
        link: Connection | None = None
        try:
            with self._lock:
                link = self._idle.pop() if self._idle else None
            link = link or self._connect()
        finally:
            if link is None:
                self._free.release()
        return link

    def give(self, connection: Connection) -> None:
        """Take back a connection that works."""
        connection.used = True
        with self._lock:
            keep = not self._closed and connection.quiet
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
        self._free.release()

    def lose(self, connection: Connection) -> None:
        """Take back a connection that is of no use any more."""
        connection.close()
        self._free.release()

    def forget(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close the idle connections, and the others when they come back. Idempotent."""
        self._closed = True
        self.forget()
