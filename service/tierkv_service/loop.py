"""Loop: one thread that waits for sockets, processes, timers and posted work. No asyncio.

What it calls must be quick and must not raise: `server.Server` puts its one broad except around
what it registers here. Everything but `post` belongs to the thread that calls `run`.
"""

import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

MAX_EVENTS = 64
MAX_POSTED = 64
"""Posted work done between two looks at the sockets."""

READ = select.EPOLLIN | select.EPOLLRDHUP
WRITE = select.EPOLLOUT | select.EPOLLRDHUP

React = Callable[[int], None]


class Loop:
    """Run reactions to file descriptors, posted functions and one timer.

    `tick` is called when it is due and returns the seconds until it is due again.
    """

    def __init__(self) -> None:
        self.tick: Callable[[], float] = lambda: 1.0
        self._due = 0.0
        self._epoll = select.epoll()
        self._reactions: dict[int, React] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self.turns = 0
        self.watch(self._wake, READ, self._woken)

    def watch(self, fd: int, events: int, react: React) -> None:
        """Call `react(events)` whenever `fd` is ready for one of `events`."""
        self._reactions[fd] = react
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Wait for other events of a watched descriptor."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching; call it before the descriptor is closed."""
        if self._reactions.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def post(self, act: Callable[[], None]) -> None:
        """Call `act` in the loop soon. For any thread and for signals; acts keep their order."""
        self._posted.append(act)
        os.eventfd_write(self._wake, 1)

    def within(self, seconds: float) -> None:
        """Let the next tick come no later than in `seconds`."""
        self._due = min(self._due, time.monotonic() + seconds)

    def stop(self) -> None:
        """Let `run` return after this turn."""
        self._stopping = True

    def run(self) -> None:
        """React until `stop`."""
        reactions = self._reactions
        while not self._stopping:
            now = time.monotonic()
            if now >= self._due:
                self._due = now + self.tick()
            wait_s = 0.0 if self._posted else max(self._due - now, 0.0)
            for fd, events in self._epoll.poll(wait_s, MAX_EVENTS):
                react = reactions.get(fd)
                if react is not None:
                    react(events)
            for _ in range(min(len(self._posted), MAX_POSTED)):
                self._posted.popleft()()
            self.turns += 1

    def close(self) -> None:
        """Give the descriptors back. Nothing may be posted any more."""
        self._epoll.close()
        os.close(self._wake)

    def _woken(self, _events: int) -> None:
        os.eventfd_read(self._wake)


def on_signals(loop: Loop, act: Callable[[], None]) -> None:
    """Call `act` in the loop at the first SIGTERM or SIGINT; the second ends the process at once.

    The wait for sockets is interrupted by a signal and goes on; the posted work is what ends it.
    """
    seen: list[int] = []

    def react(number: int, _frame: FrameType | None) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        loop.post(act)

    signal.signal(signal.SIGTERM, react)
    signal.signal(signal.SIGINT, react)
