"""Channel: a store in this process, as a client sees it."""

import logging
import threading
import time
from typing import Any

from tierkv import calls
from tierkv.control import Control, acts, deferred
from tierkv.errors import TierKVError

_log = logging.getLogger("tierkv.client")


class EmbeddedChannel:
    """`client.Channel` over a store in this process, for any number of threads.

    Nothing else ticks an embedded store: deadlines pass when somebody calls. So every call ticks
    first when it is due, and one that waits for something goes on ticking.

    Args:
        control: the store; it locks itself.
        arena: its memory.
        owner: the number that the store knows this client by.
        timeout_s: how long a call waits for an answer that comes later.
    """

    def __init__(
        self, control: Control, arena: memoryview, owner: int = 1, *, timeout_s: float = 1.0
    ) -> None:
        self.owner = owner
        self.last_error = ""
        self._control = control
        self._arena = arena
        self._timeout_s = timeout_s
        self._due = 0.0
        self._closed = False
        self._borrows = 0
        self._guard = threading.Lock()
        self._acts = acts(control)
        self._deferred = deferred(control)

    def call(self, call: calls.Call, timeout_s: float | None = None) -> Any | None:  # noqa: ANN401
        try:
            if self._closed:
                return None
            self._tick()
            act = self._acts.get(type(call))
            if act is not None:
                return act(self.owner, call)
            return self._wait(call, self._timeout_s if timeout_s is None else timeout_s)
        except TierKVError as error:
            if str(error) != self.last_error:
                self.last_error = str(error)
                _log.warning("%s refused: %s", type(call).__name__, error)
            return None

    def post(self, call: calls.Call) -> None:
        self.call(call)

    def borrow(self) -> memoryview | None:
        with self._guard:
            if self._closed:
                return None
            self._borrows += 1
            return self._arena

    def give_back(self) -> None:
        with self._guard:
            self._borrows -= 1
            last = self._closed and self._borrows == 0
        if last:
            self._control.disown(self.owner)

    def close(self) -> None:
        with self._guard:
            if self._closed:
                return
            self._closed = True
            idle = self._borrows == 0
        self._control.end_leases(self.owner)
        if idle:
            self._control.disown(self.owner)

    def _wait(self, call: calls.Call, timeout_s: float) -> Any | None:  # noqa: ANN401
        answers: list[Any] = []
        answered = threading.Event()

        def done(reply: object) -> None:
            answers.append(reply)
            answered.set()

        deadline = time.monotonic() + timeout_s
        self._deferred[type(call)](self.owner, call, done)
        while not answered.is_set() and (left := deadline - time.monotonic()) > 0:
            answered.wait(min(left, self._tick()))
        return answers[0] if answers else None

    def _tick(self) -> float:
        """Let the store end what is past its deadline; returns seconds until that is due again."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._control.tick()
        return self._due - now
