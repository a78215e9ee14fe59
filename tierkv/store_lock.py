"""The store's lock: re-entrant, and the place where an assertion that fails under it is noticed."""

import threading
from collections.abc import Callable
from types import TracebackType

from tierkv.errors import unavailable


class StoreLock:
    """A failed assertion breaks the store.

    It leaves the lock as a TierKVError (unavailable), which every client takes for a miss.

    Args:
        broke: told of the assertion.
    """

    def __init__(self, broke: Callable[[BaseException], None]) -> None:
        self._broke = broke
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, AssertionError):
            self._broke(error)
        self._lock.release()
        if isinstance(error, AssertionError):
            raise unavailable(f"the store answers only misses: {error}") from error
