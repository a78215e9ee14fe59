"""Edge: the one place where what goes wrong in tierkv stops before it reaches an engine.

A connector runs everything that an engine calls through its Edge: an error becomes a miss, is
counted and is logged (with its trace the first time of its kind). The caller's own wrong arguments
are checked before, so that they do raise.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Edge:
    """What one connector shields its engine from. `failures` counts errors by action."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._seen: set[tuple[str, type[BaseException]]] = set()

    def shield(self, action: str, call: Callable[[], T], otherwise: T) -> T:
        """Return what `call` returns, or `otherwise` when it fails."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 -- the engine goes on without us
            self.failures[action] += 1
            kind = (action, type(error))
            if kind not in self._seen:
                self._seen.add(kind)
                _log.warning("%s failed, going on without tierkv", action, exc_info=error)
            else:
                _log.debug("%s failed again: %s", action, error)
            return otherwise
