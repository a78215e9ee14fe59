"""Executor: lanes in order, and what becomes of a job that raises."""

import logging
import sys
import threading
from collections import deque

import pytest

from tierkv import calls
from tierkv.cache import TierKV
from tierkv.executor import Inline, Job, Threads
from tierkv.settings import Settings
from tierkv.tiers.host import HostSettings


def test_a_lane_of_one_thread_keeps_the_order() -> None:
    executor, seen, end = Threads({"one": 1}), list[int](), threading.Event()
    for number in range(100):
        executor.submit("one", lambda number=number: seen.append(number))  # type: ignore[misc]
    executor.submit("one", end.set)
    assert end.wait(30)
    assert seen == list(range(100))
    executor.close(5)


def test_a_job_under_way_is_seen_and_close_does_not_wait_for_it() -> None:
    executor, begun, go = Threads({"one": 1}), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go.wait(30)

    executor.submit("one", hang)
    assert begun.wait(30)
    assert executor.stuck("one", 0.0) == 1.0
    assert executor.stuck("one", 600.0) == 0.0
    assert executor.waiting("one") == 1
    executor.close(0.01)
    go.set()


def test_r28_a_job_cannot_end_its_thread_unseen() -> None:
    """A thread that meets SystemExit ends without a word, and all behind it would wait for ever."""
    told, goes_on = list[BaseException](), threading.Event()
    executor = Threads({"one": 1}, told.append)
    executor.submit("one", sys.exit)
    executor.submit("one", goes_on.set)
    assert goes_on.wait(30)
    assert [type(error) for error in told] == [SystemExit]
    executor.close(5)


def test_a_bug_in_a_job_ends_in_misses(caplog: pytest.LogCaptureFixture) -> None:
    store = TierKV.open(Settings(host=HostSettings(size_bytes=1 << 20)))
    executor = store._store.executor
    told = threading.Event()

    def bug() -> None:
        raise RuntimeError("spilled")

    with caplog.at_level(logging.ERROR, "tierkv"):
        executor.submit("host-probe", bug)
        executor.submit("host-probe", told.set)
        assert told.wait(30)
    answers: list[dict[str, object]] = []
    store.stat(calls.StatCall(), answers.append)
    assert "spilled" in str(answers[0])
    assert "spilled" in caplog.text
    put = calls.PutCall(
        namespace="a", fingerprint=bytes(32), keys=bytes(32), parts=bytes(10),
        raw_bytes=(8).to_bytes(8, "little"), fidelity=4, position=0, tokens_per_block=1,
    )  # fmt: skip
    assert store.put(1, put).reservation == 0
    store.close(0.0)


def test_inline_runs_only_when_stepped() -> None:
    executor, seen = Inline(), list[str]()
    executor.submit("a", lambda: seen.append("first"))
    executor.submit("b", lambda: seen.append("second"))
    assert not seen
    assert executor.waiting("a") == 1
    executor.step(1)
    assert seen == ["second"]
    executor.drain()
    assert seen == ["second", "first"]
    assert not executor.step()


def test_a_stop_between_two_steps_of_a_thread_ends_it_quietly() -> None:
    """The queue is emptied after a thread was woken for a job and before it takes it."""

    class Emptied(deque[Job]):
        def popleft(self) -> Job:
            self.clear()
            return super().popleft()

    lane = Threads({"read": 1})._lanes["read"]
    lane.jobs = Emptied()
    lane.submit(lambda: None)
    lane.threads[0].join(30)
    assert not lane.threads[0].is_alive()
    assert lane.running == {}
