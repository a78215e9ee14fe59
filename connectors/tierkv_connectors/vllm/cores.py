"""Cores: where a worker's own threads may run.

vLLM on a CPU binds each OpenMP thread to a core of its own, and the thread that starts all others
is one of them: copies would take turns with one core's share of every step, for which all wait.
"""

import os
from contextlib import suppress
from pathlib import Path


def leave_computing_cores() -> None:
    """Let the calling thread run wherever the engine may, but on cores that compute if it can.

    Cores that other threads of this process are bound to compute; where none is left, all may be
    used. What the engine may use is what its parent process may.
    """
    with suppress(OSError):  # not allowed, or the parent is gone: it stays where it is
        allowed = os.sched_getaffinity(os.getppid())
        os.sched_setaffinity(0, allowed - _bound(allowed) or allowed)


def _bound(allowed: set[int]) -> set[int]:
    """Return the cores that single threads of this process are bound to."""
    bound: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended since
            cores = os.sched_getaffinity(int(thread.name))
            if len(cores) == 1 and cores != allowed:
                bound |= cores
    return bound
