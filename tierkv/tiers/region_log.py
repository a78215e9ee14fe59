"""RegionLog: one preallocated, locked file, read and written past the page cache where possible.

Beside it lies the tail: one block, written through the page cache, where it survives a kill at a
tenth of what a direct write costs. A file of its own, because a buffered write would wait for all
direct reads of the log, and new ones for it.

It knows the superblock and the file's size; what lies in the regions is `region_index`'s matter.
Reads and writes go straight from and to the caller's pieces (`tier` says how they are aligned).
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import xxhash

from tierkv.errors import TierKVError, incompatible, unavailable
from tierkv.tier import ALIGN, DONE, Outcome, Status

LOG_NAME = "tierkv.log"
LOCK_NAME = "tierkv.lock"
TAIL_NAME = "tierkv.tail"
FRONT_BYTES = 1 << 20
"""Bytes before the first region: the superblock, and alignment to 1 MiB."""
VERSION = 1
MIN_REGION_BYTES = 64 << 10
MAX_REGION_BYTES = 4 << 30

_MAGIC = b"TKVNVME\n"
_SUPER = struct.Struct("<Q8sI4xQ")
_IOV_MAX = 1024
_ENDED = errno.ENODATA
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_LOG = logging.getLogger("tierkv.nvme")
_REFUSED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}

Vector = Callable[[int, Sequence[memoryview], int], int]


class RegionLog:
    """The file of one tier.

    Args:
        folder: directory of the log; made if it is not there.
        direct: ask for O_DIRECT; buffered where the file system refuses.

    Raises: TierKVError: another process has it, or it cannot be opened, or a newer release made it.
    """

    def __init__(self, folder: Path, *, direct: bool) -> None:
        self.path = folder / LOG_NAME
        self.direct = False
        """Whether I/O bypasses the page cache."""
        self.preallocated = False
        """Whether every block is reserved; otherwise a write can find the volume full."""
        self.size = 0
        self._tail = self._note = -1
        self._tail_path = folder / TAIL_NAME
        self._users = 0
        self._closed = False
        self._lock = threading.Lock()
        with _as_unavailable(f"cannot open {self.path}"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        self._io = self._fd
        with ExitStack() as undo:
            undo.callback(self.close)
            _lock_file(self._fd, folder)
            with _as_unavailable(f"cannot use {self.path}"):
                self._note = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
                self._write_note()
                self._tail = _open_tail(self._tail_path)
                self._opened = os.fstat(self._fd), os.fstat(self._tail)
                self.region_bytes = self._read_superblock()
                if direct:
                    self._open_direct()
            undo.pop_all()

    # --- start ---

    def format(self, region_bytes: int) -> None:
        """Empty the log, for regions of this size; `resize` must follow. Raises: TierKVError."""
        with _as_unavailable(f"cannot empty {self.path}"):
            os.ftruncate(self._fd, 0)
        self.region_bytes = region_bytes

    def resize(self, count: int, free_floor_bytes: int) -> None:
        """Give the file room for a count of regions; what lies behind is cut off.

        Args:
            count: regions.
            free_floor_bytes: bytes of the volume that must stay free.

        Raises: TierKVError (unavailable) when the volume is too small.
        """
        self.size = FRONT_BYTES + count * self.region_bytes
        with _as_unavailable(f"cannot reserve {self.size} bytes in {self.path}"):
            found = os.fstat(self._fd)
            if found.st_size > self.size:
                os.ftruncate(self._fd, self.size)
                found = os.fstat(self._fd)
            allocated = found.st_blocks * 512
            wanted = max(self.size - allocated, 0)
            available = self._available() - free_floor_bytes
            if wanted and wanted > available:
                raise unavailable(
                    f"{self.path} needs {wanted} bytes more (size {self.size}), but its volume has"
                    f" {max(available, 0)} bytes available above the floor of {free_floor_bytes}:"
                    " lower [nvme] size or make room"
                )
            self.preallocated = _allocate(self._fd, self.size)
            self._write_superblock()
            os.fsync(self._fd)

    def _read_superblock(self) -> int:
        """Return the region size of the file, 0 when it holds nothing of ours."""
        data = os.pread(self._fd, ALIGN, 0)
        if len(data) < ALIGN:
            return 0
        checksum, magic, version, region_bytes = _SUPER.unpack_from(data)
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(data[8:]) != checksum:
            return 0
        if version != VERSION:
            raise incompatible(
                f"{self.path} has format {version}, this release reads {VERSION}:"
                " use the release that wrote it, or remove the file"
            )
        sound = MIN_REGION_BYTES <= region_bytes <= MAX_REGION_BYTES and not region_bytes % ALIGN
        return int(region_bytes) if sound else 0

    def _write_superblock(self) -> None:
        data = bytearray(ALIGN)
        _SUPER.pack_into(data, 0, 0, _MAGIC, VERSION, self.region_bytes)
        struct.pack_into("<Q", data, 0, xxhash.xxh3_64_intdigest(memoryview(data)[8:]))
        os.pwrite(self._fd, data, 0)

    def _open_direct(self) -> None:
        """Use O_DIRECT if an open and a read with it work."""
        fd = -1
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_DIRECT)
            if os.path.sameopenfile(fd, self._fd):
                os.preadv(fd, [memoryview(mmap.mmap(-1, ALIGN))], 0)
                self._io, self.direct, fd = fd, True, -1
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            _LOG.warning(
                "%s: its file system refuses O_DIRECT, so all goes through the page cache: slower,"
                " and memory of the machine; use another one, or say so with [nvme] direct = false",
                self.path,
            )
        finally:
            if fd >= 0:
                os.close(fd)

    # --- use ---

    def enter(self) -> bool:
        """Begin to use the file; False when it is closed. Each True needs one `leave`."""
        with self._lock:
            self._users += not self._closed
            return not self._closed

    def leave(self) -> None:
        """End what `enter` began."""
        with self._lock:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            self._close_files()

    def close(self) -> None:
        """Refuse new use; the files are closed, and the lock given up, by the last user."""
        with self._lock:
            last = not self._closed and not self._users
            self._closed = True
        if last:
            self._close_files()

    def read(self, pieces: Sequence[memoryview], offset: int) -> Outcome:
        """Fill pieces from an offset; MISSING where the file ends before."""
        failure = _transfer(os.preadv, self._io, pieces, offset)
        if failure == _ENDED:
            return Outcome(Status.MISSING, f"{self.path} is shorter than it was")
        return Outcome(Status.FAILED, _reason(failure)) if failure else DONE

    def write(self, pieces: Sequence[memoryview], offset: int) -> Outcome:
        """Write pieces at an offset; FULL when the volume has no room."""
        failure = _transfer(os.pwritev, self._io, pieces, offset)
        if failure in _NO_ROOM:
            return Outcome(Status.FULL, _reason(failure))
        return Outcome(Status.FAILED, _reason(failure)) if failure else DONE

    def write_tail(self, block: memoryview) -> Outcome:
        """Replace the tail by a block of 4096 bytes."""
        failure = _transfer(os.pwritev, self._tail, [block], 0)
        return Outcome(Status.FAILED, _reason(failure)) if failure else DONE

    def read_tail(self, block: memoryview) -> Outcome:
        """Fill a block of 4096 bytes from the tail."""
        failure = _transfer(os.preadv, self._tail, [block], 0)
        return Outcome(Status.FAILED, _reason(failure)) if failure else DONE

    def sync(self) -> None:
        """Make finished writes survive a power loss. Raises: OSError."""
        os.fdatasync(self._io)

    def fault(self) -> str:
        """Return why what is written now would not be found at the next start, or ""."""
        try:
            there, tail = self.path.stat(), self._tail_path.stat()
        except OSError as error:
            return f"{error.filename or self.path}: {error.strerror}"
        opened, opened_tail = self._opened
        if not (os.path.samestat(there, opened) and os.path.samestat(tail, opened_tail)):
            return f"{self.path} or its tail was replaced by another file"
        if there.st_size < self.size:
            return f"{self.path} was cut to {there.st_size} of {self.size} bytes"
        return self._write_note()

    def _write_note(self) -> str:
        """Say whose the log is; returns why the volume takes no writes, or "".

        After an error a volume may refuse writes and show it nowhere else.
        """
        try:
            os.pwrite(self._note, b"%d\n" % os.getpid(), 0)
        except OSError as error:
            if error.errno not in _NO_ROOM:  # on a full volume the lock holds without its note
                return f"{self.path}: its volume takes no writes: {error.strerror}"
        return ""

    def has_room(self, nbytes: int, free_floor_bytes: int) -> bool:
        """Return whether these bytes may be written without going below the floor."""
        return self.preallocated or self._available() - nbytes >= free_floor_bytes

    def probe(self) -> str:
        """Return what is wrong with the medium, or "". Reads a block and writes what is there."""
        try:
            if os.fstatvfs(self._fd).f_flag & os.ST_RDONLY:
                return f"{self.path} is on a volume mounted read-only"
        except OSError as error:
            return f"{self.path}: {error.strerror}"
        if not os.access(self.path, os.R_OK | os.W_OK):
            return f"{self.path} may not be read and written any more, or is gone"
        block = memoryview(mmap.mmap(-1, ALIGN))
        outcome = self.read([block], 0)
        if outcome is not DONE or _SUPER.unpack_from(block)[1] != _MAGIC:
            return f"{self.path} does not read back: {outcome.detail or 'other content'}"
        return self.fault()

    def _available(self) -> int:
        volume = os.fstatvfs(self._fd)
        return volume.f_bavail * volume.f_frsize

    def _close_files(self) -> None:
        for fd in {self._io, self._fd, self._tail, self._note} - {-1}:
            os.close(fd)


def _reason(failure: int) -> str:
    """Return an errno for people."""
    return f"{errno.errorcode.get(failure, failure)}: {os.strerror(failure)}"


@contextmanager
def _as_unavailable(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unavailable(f"{what}: {error.strerror}; check the path and its owner") from error


def _lock_file(fd: int, folder: Path) -> None:
    """Lock the log for this process. Raises: TierKVError."""
    path = folder / LOCK_NAME
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _taken(path, folder) from error
    except OSError as error:
        raise unavailable(
            f"{folder} cannot be locked: {error.strerror}; use a local disk"
        ) from error


def _open_tail(path: Path) -> int:
    """Open the tail, its block on the disk, so that it never needs room again. Raises: OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with ExitStack() as undo:
        undo.callback(os.close, fd)
        if os.fstat(fd).st_size != ALIGN:
            os.ftruncate(fd, 0)
            os.pwrite(fd, bytes(ALIGN), 0)
            os.fsync(fd)
        undo.pop_all()
    return fd


def _taken(path: Path, folder: Path) -> TierKVError:
    try:
        owner = path.read_text(encoding="ascii").strip()[:20]
    except (OSError, UnicodeDecodeError):
        owner = ""
    return unavailable(
        f"{folder / LOG_NAME} is in use by process {owner or '(unknown)'}:"
        " stop it, or give each process a path of its own"
    )


def _allocate(fd: int, size: int) -> bool:
    """Reserve a file's blocks; False where the file system cannot (it is then only given a size).

    Not `os.posix_fallocate`: where the call is missing, that writes into every block.

    Raises: OSError: the volume is full.
    """
    found = os.fstat(fd)
    if found.st_size == size and found.st_blocks * 512 >= size:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", None) or libc.fallocate
    if fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
        return True
    failure = ctypes.get_errno()
    if failure not in _REFUSED:
        raise OSError(failure, os.strerror(failure))
    os.ftruncate(fd, size)
    return False


def _transfer(call: Vector, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Repeat a vectored call until all pieces are through.

    `os` repeats a call that a signal interrupted. Returns 0, or the errno that ended it.
    """
    done, first = 0, 0
    rest = list(pieces)
    while first < len(rest):
        vector = rest[first : first + _IOV_MAX]
        try:
            moved = call(fd, vector, offset + done)
        except OSError as error:
            cut = done % ALIGN and error.errno == errno.EINVAL  # direct, at the file's end
            return _ENDED if cut else error.errno or errno.EIO
        if not moved:
            return _ENDED
        done += moved
        if moved == sum(map(len, vector)):
            first += len(vector)
            continue
        while moved >= len(rest[first]):
            moved -= len(rest[first])
            first += 1
        if moved:
            rest[first] = rest[first][moved:]
    return 0
