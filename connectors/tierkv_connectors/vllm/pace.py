"""Pace: how fast saves may copy beside an engine's steps, and how many may wait.

While the engine computes, copying takes at most a share of the time, so that a burst of prefill
is not slowed by what it leaves to save; between bursts it goes as fast as it can. What waits is
bounded in bytes. A save that waits holds no engine block: a step that overwrites one ends it.
"""

import threading
import time
from collections.abc import Callable

IDLE_S = 0.02
"""An engine that began no step for so long has no more of a burst to do."""


class Pace:
    """When the lane of saves may go on. All calls are thread-safe.

    Args:
        share: of the time that copies may take while the engine computes, above 0, at most 1.
        limit_bytes: most that may wait to be copied.
        clock: seconds.
    """

    def __init__(
        self, share: float, limit_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rest = 1.0 / share - 1.0
        self._limit = limit_bytes
        self._clock = clock
        self._turn = threading.Condition()
        self._computes = False
        self._ended = -IDLE_S
        self._hurry = False
        self._waiting = 0

    def step_begins(self) -> None:
        """Note that the engine computes from now on."""
        self._computes = True

    def step_ends(self) -> None:
        """Note that it is done, or has queued all of the step."""
        self._ended, self._computes = self._clock(), False

    def admit(self, nbytes: int) -> bool:
        """Return whether so many more bytes may wait; one save may when nothing else does."""
        with self._turn:
            if self._waiting and self._waiting + nbytes > self._limit:
                return False
            self._waiting += nbytes
            return True

    def left(self, nbytes: int) -> None:
        """Note that bytes wait no more: they were copied, or given up."""
        with self._turn:
            self._waiting -= nbytes
        assert self._waiting >= 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were admitted and wait still."""
        return self._waiting

    def copied(self, seconds: float) -> None:
        """Wait after a copy that took so long, while the engine computes and nobody is in a hurry.

        Called by the lane, which begins the next copy afterwards.
        """
        until = self._clock() + seconds * self._rest
        with self._turn:
            while not self._hurry:
                left = min(until - self._clock(), self._idle_in())
                if left <= 0:
                    return
                self._turn.wait(min(left, IDLE_S))

    def hurry(self) -> None:
        """Let nothing wait any more: the engine ends."""
        with self._turn:
            self._hurry = True
            self._turn.notify_all()

    def _idle_in(self) -> float:
        """Return the seconds until the engine counts as idle, if no step begins."""
        return IDLE_S if self._computes else self._ended + IDLE_S - self._clock()
