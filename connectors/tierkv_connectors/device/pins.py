"""Pins: which bytes of an arena are registered with a device, so that it copies them by itself.

Registering takes about a second for a few GiB, and one registration of hundreds of GiB may fail:
so it goes piece by piece, in a thread of its own, and copies use what is registered so far. Where
it is refused (a limit on locked memory, confidential computing) what remains stays as it is.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tierkv_connectors import threads

PIECE_BYTES = 1 << 30

_log = logging.getLogger("vllm.tierkv")  # below the logger that vLLM shows


class PinRefusedError(Exception):
    """Memory cannot be registered; the message says why."""


class Span(NamedTuple):
    """Some bytes of a copy."""

    start: int
    """Of the copy."""
    nbytes: int
    pinned: bool


class Pins:
    """The registered pieces of one arena at a time.

    Args:
        register: register memory (address, bytes). Raises: PinRefusedError.
        unregister: undo it (address).
        counters: counts `pins_refused`.
        piece_bytes: of one registration.
    """

    def __init__(
        self,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        counters: Counter[str],
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._counters = counters
        self._piece_bytes = piece_bytes
        self._warned = False
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._base = self._top = 0
        """Addresses of the first byte that is registered, and of the first that is not."""

    def begin(self, address: int, nbytes: int) -> None:
        """Begin to register memory, which stays mapped until `end`."""
        self.end()
        self._base = self._top = address
        self._ending.clear()
        try:
            self._thread = threads.start("pin", lambda: self._run(address + nbytes))
        except RuntimeError as error:
            self._refused(str(error))

    def end(self) -> None:
        """Unregister everything; waits for the piece that is being registered. Idempotent."""
        thread, self._thread = self._thread, None
        self._ending.set()
        if thread is not None:
            thread.join()
        for address in range(self._base, self._top, self._piece_bytes):
            self._unregister(address)
        self._top = self._base

    def spans(self, address: int, nbytes: int) -> Iterator[Span]:
        """Cut memory so that each part lies in one piece, or in none.

        One copy over two registrations is an error, and one over the end of the last too.
        """
        at, end, top = address, address + nbytes, self._top
        while at < end:
            pinned = self._base <= at < top
            piece_end = at + self._piece_bytes - (at - self._base) % self._piece_bytes
            part = min(end, piece_end, top) - at if pinned else end - at
            yield Span(at - address, part, pinned)
            at += part

    def _run(self, end: int) -> None:
        while self._top < end and not self._ending.is_set():
            nbytes = min(self._piece_bytes, end - self._top)
            try:
                self._register(self._top, nbytes)
            except PinRefusedError as error:
                self._refused(str(error))
                return
            self._top += nbytes

    def _refused(self, reason: str) -> None:
        self._counters["pins_refused"] += 1
        if not self._warned:
            self._warned = True
            _log.warning(
                "the sidecar's memory cannot be pinned (%s): it is copied by way of a small pinned "
                "buffer, more slowly; allow this process to lock it (ulimit -l)",
                reason,
            )
