"""Breaker: stops calling what keeps failing, and finds out by itself when it works again.

Closed: every call goes through. After `failures` failures in a row it opens: calls are refused at
once. When the delay is over one call may try; its success closes the breaker, its failure doubles
the delay, up to `most_s`. Delays are jittered, so that many sidecars do not try in step.

Pure: the caller passes the time, and a lock where threads share one.
"""

import random
from collections.abc import Callable

JITTER = 0.5
"""A delay lies between this share of its nominal length and all of it."""


class Breaker:
    """Counts failures in a row and says whether a call may be made.

    Args:
        failures: how many in a row open it.
        first_s: nominal delay before the first trial.
        most_s: the longest nominal delay; also how long a trial that never reports blocks others.
        draw: returns numbers in [0, 1).
    """

    def __init__(
        self,
        *,
        failures: int,
        first_s: float,
        most_s: float,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._failures = failures
        self._first_s = first_s
        self._most_s = most_s
        self._draw = draw
        self._row = 0
        self._delay_s = first_s
        self._trial_at: float | None = None
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether it is open; a trial in progress counts."""
        return self._trial_at is not None

    def allows(self, now: float) -> bool:
        """Return whether a call may be made now; whoever gets True reports how it ended."""
        if self._trial_at is None:
            return True
        if now < self._trial_at:
            return False
        self._trial_at = now + self._most_s
        self._trying = True
        return True

    def succeeded(self) -> None:
        """Report a call that worked."""
        self._row = 0
        self._delay_s = self._first_s
        self._trial_at = None
        self._trying = False

    def failed(self, now: float) -> None:
        """Report a call that failed; one that began before the breaker opened changes nothing."""
        self._row += 1
        if self._row < self._failures or (self.is_open and not self._trying):
            return
        self._trying = False
        self._trial_at = now + self._delay_s * (JITTER + (1 - JITTER) * self._draw())
        self._delay_s = min(self._delay_s * 2, self._most_s)
