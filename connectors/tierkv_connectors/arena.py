"""Arena: a sidecar's memory as this process sees it."""

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from tierkv.errors import unavailable
from tierkv_connectors import wire


class ArenaLock:
    """A shared hold on the socket's arena file: no new sidecar reserves memory meanwhile.

    Raises:
        TierKVError: a sidecar is starting; or, of another user, its files cannot be read.
    """

    def __init__(self, socket: Path) -> None:
        path = wire.arena_path(socket)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unavailable(f"cannot open {path}: {error.strerror}") from error
        self._end = weakref.finalize(self, os.close, fd)
        self._end.atexit = False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            self._end()
            raise unavailable(f"{path} is locked: a sidecar is starting") from error

    def release(self) -> None:
        """Let go. Idempotent."""
        self._end()


class Arena:
    """One mapping, counted by its borrows.

    `drop` forbids further borrows. It and `give_back` say when nothing is borrowed any more: then
    the owner calls `unmap`. The lock is released once no view of the memory is left (`gone`). The
    owner serialises all calls but `unmap`, which may take long.

    Args:
        fd: the arena's memory file; not kept.
        nbytes: its size.
        epoch: the sidecar's name for this arena.
        lock: held for as long as the memory is mapped.
        on_unmap: called just before the memory is unmapped.

    Raises:
        TierKVError: it cannot be mapped.
    """

    def __init__(
        self, fd: int, nbytes: int, epoch: int, lock: ArenaLock, on_unmap: Callable[[], None]
    ) -> None:
        try:
            if os.fstat(fd).st_size < nbytes:
                raise unavailable(f"the arena has fewer than its {nbytes} bytes")
            mapped = mmap.mmap(fd, nbytes)
        except (OSError, ValueError) as error:
            raise unavailable(f"cannot map the arena's {nbytes} bytes: {error}") from error
        self.epoch = epoch
        self.view = memoryview(mapped)
        self._mapped: mmap.mmap | None = mapped
        self._unmapped = weakref.finalize(mapped, lock.release)
        self._unmapped.atexit = False
        self._on_unmap = on_unmap
        self._dropped = False
        self.borrows = 0

    @property
    def gone(self) -> bool:
        """Whether the memory is unmapped."""
        return not self._unmapped.alive

    def borrow(self) -> memoryview | None:
        """Count a borrow and return the memory, None after `drop`."""
        if self._dropped:
            return None
        self.borrows += 1
        return self.view

    def give_back(self) -> bool:
        """Count a borrow less; returns whether to unmap. Safe to call once too often."""
        self.borrows = max(self.borrows - 1, 0)
        return self._dropped and not self.borrows

    def drop(self) -> bool:
        """Allow no more borrows; returns whether to unmap."""
        self._dropped = True
        return not self.borrows

    def abandon(self) -> None:
        """Unmap in a child after fork; what the parent does with the memory is its own matter."""
        self._on_unmap = lambda: None
        self.borrows = 0
        self.drop()
        self.unmap()

    def unmap(self) -> None:
        """Unmap now, or when the last view dies that somebody keeps. Idempotent."""
        mapped, self._mapped = self._mapped, None
        if mapped is None:
            return
        self._on_unmap()
        with contextlib.suppress(BufferError):
            self.view.release()
            mapped.close()
            self._unmapped()
        self.view = memoryview(b"")
