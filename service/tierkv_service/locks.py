"""Locks: one sidecar per socket, one arena at a time, and the listening socket itself."""

import contextlib
import fcntl
import grp
import os
import select
import socket
import stat
import struct
import sys
import time
from pathlib import Path

from tierkv.errors import TierKVError, invalid, unavailable
from tierkv.settings import SocketSettings
from tierkv_connectors import wire

MAX_PATH_BYTES = 107
_BACKLOG = 128
_STEP_S = 0.05
_PEER = struct.Struct("3i")
_SO_PEERPIDFD = 77


class Locks:
    """The files beside a socket, locked for the life of this process.

    Raises:
        TierKVError: another sidecar serves this socket; the message names its pid.
    """

    def __init__(self, path: Path, settings: SocketSettings) -> None:
        self._mode = _mode(settings)
        self._group = _group(settings.group)
        self.path = path
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise invalid(f"the socket path {path} is longer than {MAX_PATH_BYTES} bytes")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(wire.lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._arena = os.open(
                wire.arena_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            self._permit(self._arena)
        except OSError as error:
            raise unavailable(
                f"cannot use {path} for the socket: {error.strerror}; give another [socket] path,"
                " in a folder of this user"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self._lock, 32).decode("ascii", "replace").strip() or "unknown"
            raise unavailable(
                f"another sidecar (pid {pid}) serves {path}: stop it, or choose another"
                " [socket] path"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def take_arena(self, wait_s: float) -> None:
        """Wait until no process maps an arena of this socket; call it before memory is reserved.

        Raises:
            TierKVError: somebody still does after `wait_s`; the message names their pids.
        """
        deadline = time.monotonic() + wait_s
        told = False
        while True:
            try:
                fcntl.flock(self._arena, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                who = f"pid {', '.join(map(str, holders(self._arena))) or 'unknown'}"
            else:
                return
            if time.monotonic() >= deadline:
                raise unavailable(
                    f"the memory of the sidecar that served {self.path} before is still mapped by"
                    f" {who}: end them, or choose another [socket] path"
                )
            if not told:
                told = True
                print(  # noqa: T201 - whoever starts a sidecar by hand must see why it waits
                    f"tierkv: waiting up to {wait_s:g} s for {who} to let go of the last arena",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(_STEP_S)

    def share_arena(self) -> None:
        """Let clients map the arena; this process goes on counting as one that does."""
        fcntl.flock(self._arena, fcntl.LOCK_SH)

    def listen(self) -> socket.socket:
        """Return the listening socket; it appears under its name complete, in place of a stale one.

        Raises:
            TierKVError: the path is something else, or cannot be used.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        fresh = self.path.with_name(f"{self.path.name}.new")
        try:
            self._refuse_foreign()
            fresh.unlink(missing_ok=True)
            listener.bind(str(fresh))
            fresh.chmod(self._mode)
            if self._group >= 0:
                os.chown(fresh, -1, self._group)
            listener.listen(_BACKLOG)
            listener.setblocking(False)  # noqa: FBT003 - the name is the method's
            fresh.rename(self.path)
        except OSError as error:
            listener.close()
            raise unavailable(f"cannot listen at {self.path}: {error.strerror}") from error
        except TierKVError:
            listener.close()
            raise
        return listener

    def close(self) -> None:
        """Remove the socket and let go of both files."""
        self.path.unlink(missing_ok=True)
        os.close(self._arena)
        os.close(self._lock)

    def _permit(self, fd: int) -> None:
        """Let whoever may connect lock the arena file; leave alone what another user owns."""
        with contextlib.suppress(PermissionError):
            os.fchmod(fd, self._mode & 0o644)
            if self._group >= 0:
                os.fchown(fd, -1, self._group)

    def _refuse_foreign(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise invalid(f"{self.path} exists and is not a socket: choose another path")
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.settimeout(1.0)
            probe.connect(str(self.path))
            raise unavailable(f"pid {peer(probe)[0]} listens at {self.path}: stop it")


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process at the other end; the pid is 0 when it is not visible."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _gid = _PEER.unpack(data)
    return pid, uid


def open_peer(sock: socket.socket, pid: int) -> int | None:
    """Return a pidfd of the process at the other end; None when it is gone or cannot be watched."""
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        os.set_inheritable(fd, False)  # noqa: FBT003 - the name is the function's
    except OSError:
        pass
    else:
        return fd
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def ended(pidfd: int) -> bool:
    """Return whether a process is gone."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def holders(fd: int) -> list[int]:
    """Return the pids of the other processes that lock an open file, those that can be seen."""
    found = os.fstat(fd)
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    pids = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if name in fields and "->" not in fields:
                pids.add(int(fields[fields.index(name) - 1]))
    return sorted(pids - {os.getpid(), 0, -1})


def _mode(settings: SocketSettings) -> int:
    if settings.uids:
        return 0o666
    return 0o660 if settings.group else 0o600


def _group(name: str) -> int:
    if not name:
        return -1
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise invalid(f"[socket] group {name!r} does not exist on this machine") from error
