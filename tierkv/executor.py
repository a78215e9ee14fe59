"""Executor: the one place that starts threads. Lanes carry out I/O; decisions are made elsewhere.

A lane is a named queue with its own threads. `Inline` has the same interface without threads: the
simulator and tests step it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

Job = Callable[[], None]
_LOG = logging.getLogger("tierkv")


class Executor(Protocol):
    """Runs jobs on named lanes, in order of submission."""

    def submit(self, lane: str, job: Job) -> None:
        """Queue a job; it must not raise."""

    def stuck(self, lane: str, longer_s: float) -> float:
        """Return the share of a lane's threads, 0 to 1, whose job has run longer than that."""

    def waiting(self, lane: str) -> int:
        """Return jobs queued or running."""

    def close(self, timeout_s: float) -> None:
        """Stop taking jobs and wait for those running."""


class Threads:
    """Lanes of daemon threads.

    Args:
        lanes: each lane's name and count of threads.
        on_bug: told of a job that raised, by the lane's thread; jobs do not raise.
    """

    def __init__(
        self, lanes: dict[str, int], on_bug: Callable[[BaseException], None] = lambda _: None
    ) -> None:
        self.on_bug = on_bug
        self._lanes = {name: _Lane(name, count, self._bug) for name, count in lanes.items()}

    def submit(self, lane: str, job: Job) -> None:
        """Queue a job."""
        self._lanes[lane].submit(job)

    def stuck(self, lane: str, longer_s: float) -> float:
        """Return the share of threads whose job has run longer."""
        found, since = self._lanes[lane], time.monotonic() - longer_s
        return sum(begun < since for begun in list(found.running.values())) / len(found.threads)

    def waiting(self, lane: str) -> int:
        """Return jobs queued or running."""
        return len(self._lanes[lane].jobs) + len(self._lanes[lane].running)

    def close(self, timeout_s: float) -> None:
        """Stop the lanes; a thread that hangs in I/O is left behind, as a daemon."""
        end = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.stop()
        for lane in self._lanes.values():
            for thread in lane.threads:
                thread.join(max(end - time.monotonic(), 0.0))

    def _bug(self, error: BaseException) -> None:
        self.on_bug(error)


class _Lane:
    def __init__(self, name: str, count: int, on_bug: Callable[[BaseException], None]) -> None:
        self._on_bug = on_bug
        self.jobs: deque[Job] = deque()
        self.running: dict[int, float] = {}
        self._ready = threading.Semaphore(0)
        self._stopped = False
        self.threads = [
            threading.Thread(target=self._run, name=f"tierkv-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, job: Job) -> None:
        if not self._stopped:
            self.jobs.append(job)
            self._ready.release()

    def stop(self) -> None:
        self._stopped = True
        self.jobs.clear()
        for _ in self.threads:
            self._ready.release()

    def _run(self) -> None:
        me = threading.get_ident()
        while True:
            self._ready.acquire()
            if self._stopped:
                return
            try:
                job = self.jobs.popleft()
            except IndexError:  # the lane was stopped since the look at `_stopped`
                return
            self.running[me] = time.monotonic()
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - the edge; SystemExit ends threads unseen
                _LOG.exception("a job of lane %s failed", threading.current_thread().name)
                self._on_bug(error)
            finally:
                del self.running[me]


class Inline:
    """Jobs wait until `step` runs one; nothing runs by itself."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, Job]] = []

    def submit(self, lane: str, job: Job) -> None:
        """Queue a job."""
        self.jobs.append((lane, job))

    def stuck(self, lane: str, longer_s: float) -> float:
        """Return 0: no job runs while another is asked for."""
        del lane, longer_s
        return 0.0

    def waiting(self, lane: str) -> int:
        """Return queued jobs."""
        return sum(name == lane for name, _ in self.jobs)

    def step(self, number: int = 0) -> bool:
        """Run one queued job; returns whether there was one."""
        if number >= len(self.jobs):
            return False
        _, job = self.jobs.pop(number)
        job()
        return True

    def drain(self) -> None:
        """Run jobs until none is left, those they submit included."""
        while self.step():
            pass

    def close(self, timeout_s: float) -> None:
        """Run what is left."""
        del timeout_s
        self.drain()
