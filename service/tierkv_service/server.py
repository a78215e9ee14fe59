"""Server: the store's calls over the socket. One broad except (`_edge`) keeps a bug to its call.

A client's owner number is its session. A closed connection ends its leases; what it may still be
copying ends when its process is gone, or says in the Hello of its next connection that it has
stopped. A client that breaks the framing is disconnected, counted and logged, and touches nobody
else; a call with an argument out of bounds is answered with a problem.
"""

import logging
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec

from tierkv import calls
from tierkv.control import Control, acts, deferred
from tierkv.errors import ErrorKind, TierKVError
from tierkv_connectors import wire
from tierkv_service import locks
from tierkv_service.checks import wrong
from tierkv_service.loop import READ, Loop
from tierkv_service.session import MAX_OUTPUT_BYTES, STALL_S, ArenaFile, Peer, Session

MAX_SESSIONS = 1024
MAX_SESSIONS_OF_PROCESS = 64
MAX_DEFERRED = 1024
"""Calls of one client that wait for something."""
LOOK_S = 1.0
"""Time between two looks at who is slow."""
CALLS_PER_TURN = 32
"""Calls of one client answered before others have their turn."""
_RECEIVE_BYTES = 1 << 18
_OUTPUT_STEP_BYTES = 1 << 18
_ACCEPTS_PER_TURN = 16

_log = logging.getLogger("tierkv.server")


class Server:
    """Answer clients in the loop's thread.

    Args:
        loop: whose thread makes every call of `control`.
        control: the store.
        arena: what clients map.
        listener: see `locks.Locks.listen`.
        uids: whose processes may connect; None leaves that to the socket's mode.
    """

    def __init__(
        self,
        loop: Loop,
        control: Control,
        arena: ArenaFile,
        listener: socket.socket,
        uids: Collection[int] | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._loop = loop
        self._control = control
        self._arena = arena
        self._listener = listener
        self._uids = uids
        self._sessions: set[Session] = set()
        self._next_number = int(time.time()) << 20  # no number of an earlier sidecar comes again
        self._received = bytearray(_RECEIVE_BYTES)
        self._acts = acts(control)
        self._acts[calls.MatchCall] = self._match
        self._deferred = deferred(control)
        loop.tick = self._tick
        self._paused = True
        self._look_again = 0.0
        self._look()

    def close(self) -> None:
        """Stop accepting and close every connection: clients see a miss at once."""
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for session in list(self._sessions):
            session.close()
            self._forget(session)

    def _edge(self, what: str, act: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
        """Return what `act` returns, or the problem that it raised. A bug ends here."""
        try:
            return act(*args)
        except TierKVError as error:
            self.counters["server_refused_calls"] += 1
            return wire.Problem(kind=error.kind.value, message=str(error))
        except Exception as error:  # noqa: BLE001 - the one edge where nothing may escape
            self._count("server_bugs")
            _log.exception("bug in %s", what)
            return wire.Problem(kind="bug", message=f"{what}: {error!r}, see the sidecar's log")

    def _tick(self) -> float:
        if time.monotonic() >= self._look_again:
            self._look()
        due_s = self._edge("tick", self._control.tick)
        return due_s if isinstance(due_s, float) else 1.0

    def _look(self) -> None:
        """Close who leaves answers unread or never says hello; accept again after a pause."""
        now = time.monotonic()
        self._look_again = now + LOOK_S
        for session in list(self._sessions):
            if session.stalled and now - session.stalled_since > STALL_S:
                self._refuse(session, "slow_reader", f"left answers unread for {STALL_S:g} s")
            elif not session.number and now - session.opened > STALL_S:
                self._refuse(session, "silent", f"no hello in {STALL_S:g} s")
        if self._paused:
            self._paused = False
            self._loop.watch(
                self._listener.fileno(), select.EPOLLIN, lambda _events: self._accept()
            )

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._count("server_accept_failed", str(error))
                self._pause()
                return
            sock.setblocking(False)  # noqa: FBT003 - the name is the method's
            pid, uid = locks.peer(sock)
            pidfd = locks.open_peer(sock, pid)
            why = self._unwelcome(pid, uid, pidfd)
            if why or pidfd is None:
                self._turn_away(sock, f"pid {pid} of uid {uid}: {why}")
                if pidfd is not None:
                    socket.close(pidfd)
                continue
            session = Session(self._loop, sock, Peer(pid, uid, pidfd))
            self._sessions.add(session)
            self._loop.watch(sock.fileno(), READ, partial(self._react, session))
            self._loop.watch(pidfd, select.EPOLLIN, partial(self._gone, session))
            self.counters["server_connections"] += 1

    def _pause(self) -> None:
        """Let new connections wait a second: there are no descriptors left."""
        self._loop.forget(self._listener.fileno())
        self._paused = True

    def _unwelcome(self, pid: int, uid: int, pidfd: int | None) -> str:
        if self._uids is not None and uid not in self._uids:
            return "not one of [socket] uids"
        if pidfd is None:
            return "the process cannot be watched; containers must share the pid namespace"
        same = sum(session.peer.pid == pid > 0 for session in self._sessions)
        if len(self._sessions) >= MAX_SESSIONS or same >= MAX_SESSIONS_OF_PROCESS:
            return f"too many connections: {len(self._sessions)}, {same} of this process"
        return ""

    def _turn_away(self, sock: socket.socket, why: str) -> None:
        self._count("server_refused_connections", why)
        out = bytearray()
        problem = wire.Problem(kind=ErrorKind.UNAVAILABLE.value, message=why)
        wire.append(out, 0, wire.PROBLEM, problem)
        try:
            sock.send(out)
        except OSError:
            pass
        finally:
            sock.close()

    def _react(self, session: Session, events: int) -> None:
        act = self._drain if session.stalled else self._receive
        if isinstance(self._edge("a connection", act, session, events), wire.Problem):
            self._refuse(session, "server_bug", "its messages met a bug")

    def _receive(self, session: Session, _events: int) -> None:
        if session.resuming or session.sock is None:
            return
        try:
            count = session.sock.recv_into(self._received)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._drop(session)
            return
        session.input += memoryview(self._received)[:count]
        self._consume(session)

    def _drain(self, session: Session, events: int) -> None:
        if events & (select.EPOLLHUP | select.EPOLLERR):
            self._drop(session)
            return
        self._flush(session)
        if not session.stalled:
            self._consume(session)

    def _resume(self, session: Session) -> None:
        session.resuming = False
        if isinstance(self._edge("a connection", self._consume, session), wire.Problem):
            self._refuse(session, "server_bug", "its messages met a bug")

    def _consume(self, session: Session) -> None:
        """Answer the whole messages of the input, some now and the others in the next turn."""
        data, at, header = session.input, 0, wire.HEADER
        for _ in range(CALLS_PER_TURN):
            if len(data) - at < header.size or session.stalled:
                break
            size, sequence, kind = header.unpack_from(data, at)
            most = calls.MAX_MESSAGE_BYTES if session.number else wire.MAX_FIRST_BYTES
            if size > most or kind != wire.REPLY:
                self._refuse(session, "malformed", f"{size} bytes of kind {kind}; at most {most}")
                return
            stop = at + header.size + size
            if len(data) < stop:
                break
            try:
                call = wire.CALLS.decode(data[at + header.size : stop])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self._refuse(session, "malformed", str(error))
                return
            at = stop
            self._answer(session, sequence, call)
            if session.sock is None:
                return
            if len(session.output) > _OUTPUT_STEP_BYTES:
                self._flush(session)
        else:
            session.resuming = True
            self._loop.post(partial(self._resume, session))
        del data[:at]
        self._flush(session)

    def _answer(self, session: Session, sequence: int, call: calls.AnyCall) -> None:
        kind = type(call)
        why = wrong(call)
        if (kind is calls.Hello) == bool(session.number):
            self._refuse(session, "malformed", "hello comes first, and once")
            return
        if why:
            self.counters["call_refused"] += 1
            text = f"{kind.__name__}: {why}"
            reply: Any = wire.Problem(kind=ErrorKind.INVALID.value, message=text)
        elif isinstance(call, calls.Hello):
            self._hello(session, sequence, call)
            return
        elif kind in self._deferred:
            reply = self._defer(session, sequence, call)
            if reply is None:
                return
        else:
            reply = self._edge(kind.__name__, self._acts[kind], session.number, call)
        if sequence and not session.add(sequence, reply):
            undo = wire.undo(reply)
            if undo is not None:
                self._edge("undo", self._acts[type(undo)], session.number, undo)

    def _match(self, owner: int, call: calls.MatchCall) -> calls.MatchReply:
        reply = self._control.match(owner, call)
        self._loop.within(call.deadline_s)
        return reply

    def _defer(self, session: Session, sequence: int, call: calls.AnyCall) -> wire.Problem | None:
        """Answer when the store does; returns the problem when it never will."""
        if session.deferred >= MAX_DEFERRED:
            self.counters["server_refused_calls"] += 1
            text = f"{session.deferred} calls of this client wait already"
            return wire.Problem(kind=ErrorKind.UNAVAILABLE.value, message=text)
        kind = type(call)
        session.deferred += 1

        def done(reply: object) -> None:
            self._loop.post(lambda: self._deliver(session, sequence, reply))

        failed = self._edge(kind.__name__, self._deferred[kind], session.number, call, done)
        if isinstance(call, calls.FlushCall):
            self._loop.within(call.deadline_s)
        if isinstance(failed, wire.Problem):
            session.deferred -= 1
            return failed
        return None

    def _deliver(self, session: Session, sequence: int, reply: object) -> None:
        session.deferred -= 1
        if session.sock is None or not sequence:
            return
        if isinstance(reply, dict):
            reply = self._completed(reply)
        if isinstance(self._edge("an answer", session.add, sequence, reply), wire.Problem):
            self._refuse(session, "server_bug", "an answer met a bug")
            return
        self._flush(session)

    def _completed(self, stat: dict[str, Any]) -> dict[str, Any]:
        """Add to what the store says of itself who is connected, and what happened here."""
        clients = sum(bool(session.number and session.sock) for session in self._sessions)
        return {
            **stat,
            "holds": {**stat.get("holds", {}), "clients": clients},
            "counters": {**stat.get("counters", {}), **self.counters},
        }

    def _hello(self, session: Session, sequence: int, hello: calls.Hello) -> None:
        if hello.protocol != calls.PROTOCOL:
            text = f"the sidecar speaks protocol {calls.PROTOCOL}, the client {hello.protocol}"
            problem = wire.Problem(kind=ErrorKind.INCOMPATIBLE.value, message=text)
            session.add(sequence, problem)
            session.flush(time.monotonic())
            self._refuse(session, "incompatible", text)
            return
        over = set(hello.closed)
        for other in list(self._sessions):
            if other.number in over and other.peer.pid == session.peer.pid > 0:
                self._end(other)
        self._next_number += 1
        session.number = self._next_number
        session.name = hello.client
        session.add(
            sequence,
            calls.Welcome(
                protocol=calls.PROTOCOL,
                session=session.number,
                epoch=self._arena.epoch,
                arena_bytes=self._arena.nbytes,
                page_bytes=self._arena.page_bytes,
                max_message_bytes=calls.MAX_MESSAGE_BYTES,
                max_units=calls.MAX_UNITS,
            ),
        )
        assert session.sock is not None
        try:
            sent = socket.send_fds(session.sock, [session.output], [self._arena.fd])
        except OSError:
            sent = 0
        if sent != len(session.output):
            self._drop(session)
        session.output.clear()

    def _flush(self, session: Session) -> None:
        if not session.flush(time.monotonic()):
            self._drop(session)
        elif len(session.output) > MAX_OUTPUT_BYTES:
            self._refuse(session, "slow_reader", f"{len(session.output)} bytes of answers unread")

    def _refuse(self, session: Session, why: str, detail: str) -> None:
        if session.sock is not None:
            self._count(f"server_closed_{why}", f"{session}: {detail}")
            self._drop(session)

    def _drop(self, session: Session) -> None:
        """Close a connection; a session stays while its process may still be copying."""
        session.close()
        if not session.number:
            self._forget(session)
        elif session in self._sessions:
            copying = self._edge("end_leases", self._control.end_leases, session.number)
            if copying is False:
                self._forget(session)

    def _end(self, session: Session) -> None:
        """Give everything back: the process is gone, or says it has stopped."""
        session.close()
        self._forget(session)
        if session.number:
            self._edge("disown", self._control.disown, session.number)

    def _gone(self, session: Session, _events: int) -> None:
        self._end(session)

    def _forget(self, session: Session) -> None:
        if session in self._sessions:
            self._sessions.remove(session)
            self._loop.forget(session.peer.pidfd)
            socket.close(session.peer.pidfd)

    def _count(self, name: str, detail: str = "") -> None:
        """Count, and log the first, second, fourth, eighth time and so on."""
        self.counters[name] += 1
        count = self.counters[name]
        if detail and not count & (count - 1):
            _log.warning("%s (%d): %s", name, count, detail)
