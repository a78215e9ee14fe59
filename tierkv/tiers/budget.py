"""WriteBudget: bytes a day as a token bucket, so that a disk's endurance is spent evenly.

Pure: the caller passes the time, and a lock where threads share one.
"""

DAY_S = 86_400.0
BURST_S = 3_600.0
"""The bucket holds what this many seconds earn."""


class WriteBudget:
    """Says whether bytes may be written now.

    Args:
        bytes_per_day: earned evenly; 0 allows everything.
        now: seconds of a monotonic clock; the bucket starts full.
    """

    def __init__(self, bytes_per_day: int, now: float) -> None:
        self._rate = bytes_per_day / DAY_S
        self._burst = self._rate * BURST_S
        self._level = self._burst
        self._at = now

    def take(self, nbytes: int, now: float) -> bool:
        """Spend bytes and return True, or return False when they are not there yet.

        A write larger than the bucket is allowed when the bucket is full and paid off later.
        """
        if not self._rate:
            return True
        self._earn(now)
        if self._level < min(nbytes, self._burst):
            return False
        self._level -= nbytes
        return True

    def charge(self, nbytes: int) -> None:
        """Spend bytes that are written in any case; the level may fall below zero."""
        self._level -= nbytes

    def _earn(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._level + (now - self._at) * self._rate, self._burst)
            self._at = now
