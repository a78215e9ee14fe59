"""Lanes: an Executor whose jobs run when the world says so, in any order that real threads allow.

A lane starts its jobs first come first served, on as many threads as it has; a job that does I/O
lets the world go on before it ends (`Pause`), so other jobs begin and end meanwhile. A job may
hang: it keeps its thread and does nothing until it is woken.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tierkv.executor import Job

Pause = Callable[[], None]
"""Called in the middle of modelled I/O: lets others run; may raise `CrashError`."""


class CrashError(BaseException):
    """The simulated process was killed; everything in it is gone."""


class Time:
    """The clock that a world turns by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass(slots=True)
class _Lane:
    threads: int
    jobs: deque[Job] = field(default_factory=deque)
    started: list[float] = field(default_factory=list)
    hung: deque[tuple[float, Job]] = field(default_factory=deque)


class Lanes:
    """`executor.Executor` for one simulated process."""

    def __init__(self, time: Time, threads: dict[str, int]) -> None:
        self._time = time
        self._lanes = {name: _Lane(count) for name, count in threads.items()}

    def submit(self, lane: str, job: Job) -> None:
        """Queue a job."""
        self._lanes[lane].jobs.append(job)

    def stuck(self, lane: str, longer_s: float) -> float:
        """Return the share of threads whose job has run, or hung, longer."""
        found, since = self._lanes[lane], self._time() - longer_s
        begun = found.started + [start for start, _ in found.hung]
        return sum(start < since for start in begun) / found.threads

    def waiting(self, lane: str) -> int:
        """Return jobs queued, running or hung."""
        found = self._lanes[lane]
        return len(found.jobs) + len(found.started) + len(found.hung)

    def close(self, timeout_s: float) -> None:
        """Forget what is queued, as real lanes do."""
        del timeout_s
        for lane in self._lanes.values():
            lane.jobs.clear()

    def ready(self) -> list[str]:
        """Return the lanes that have a job and a thread for it."""
        return [
            name
            for name, lane in self._lanes.items()
            if lane.jobs and len(lane.started) + len(lane.hung) < lane.threads
        ]

    def hanging(self) -> list[str]:
        """Return the lanes in which a job hangs."""
        return [name for name, lane in self._lanes.items() if lane.hung]

    def step(self, name: str) -> None:
        """Run a lane's next job."""
        self._run(self._lanes[name], self._lanes[name].jobs.popleft())

    def hang(self, name: str) -> None:
        """Start a lane's next job and let it hang."""
        lane = self._lanes[name]
        lane.hung.append((self._time(), lane.jobs.popleft()))

    def wake(self, name: str) -> None:
        """Let the job that hangs longest run to its end."""
        lane = self._lanes[name]
        self._run(lane, lane.hung.popleft()[1])

    def _run(self, lane: _Lane, job: Job) -> None:
        begun = self._time()
        lane.started.append(begun)
        try:
            job()
        finally:
            lane.started.remove(begun)
