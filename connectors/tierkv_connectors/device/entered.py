"""Entered: how much of an arena this process can copy from and to without a fault.

The first use of a page in a process is a fault: for all pages of a block they take almost as long
as its copy, in the midst of a save. So pages are entered into the page table beforehand, in steps,
by a thread that rests longer than it works; that also takes a fifth of what the faults take.
"""

import contextlib
import ctypes
import threading
import time

from tierkv_connectors import threads

STEP_BYTES = 16 << 20
REST = 3.0
"""Seconds of rest for each second of work."""
_POPULATE_READ = 22


class Entered:
    """Enters one arena at a time."""

    def __init__(self) -> None:
        self.nbytes = 0
        """How much of the arena is done, from its start on."""
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, arena: memoryview) -> None:
        """Begin with an arena, which stays mapped until `end`. Without a thread it is left."""
        self.end()
        self._ending.clear()
        self.nbytes = 0
        with contextlib.suppress(RuntimeError):
            self._thread = threads.start("enter", lambda: self._run(arena))

    def end(self) -> None:
        """Use the arena no more; waits for the step that is under way. Idempotent."""
        thread, self._thread = self._thread, None
        self._ending.set()
        if thread is not None:
            thread.join()

    def _run(self, arena: memoryview) -> None:
        while self.nbytes < len(arena) and not self._ending.is_set():
            started = time.monotonic()
            with arena[self.nbytes : self.nbytes + STEP_BYTES] as step:
                enter(step)
                self.nbytes += len(step)
            self._ending.wait(REST * (time.monotonic() - started))


def enter(memory: memoryview) -> None:
    """Enter shared memory into this process's page table; the GIL is free meanwhile.

    Reading is enough: pages of a shared mapping that may be written are entered as such. A kernel
    that cannot do it (before 5.14) leaves it to the faults.
    """
    start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    ctypes.CDLL(None).madvise(start, ctypes.c_size_t(len(memory)), _POPULATE_READ)
