"""Pace: copies take their share of the time while the engine computes, and all of it otherwise."""

import os
import threading
import time

import pytest

from tierkv_connectors.vllm.cores import leave_computing_cores
from tierkv_connectors.vllm.pace import IDLE_S, Pace


def waited(pace: Pace, seconds: float) -> float:
    started = time.monotonic()
    pace.copied(seconds)
    return time.monotonic() - started


def test_beside_a_step_copies_take_their_share() -> None:
    pace = Pace(0.25, 1 << 30)
    pace.step_begins()
    assert waited(pace, 0.02) >= 0.06
    assert waited(Pace(1.0, 1 << 30), 0.5) < 0.4, "all of it is no pace at all"


def test_an_idle_engine_is_not_waited_for() -> None:
    pace = Pace(0.01, 1 << 30)
    assert waited(pace, 1.0) < 0.5, "it has not begun yet"
    pace.step_begins()
    pace.step_ends()
    assert IDLE_S / 2 < waited(pace, 1.0) < 5.0, "the next step of a burst would have begun"


def test_a_burst_is_one_thing() -> None:
    """Steps that follow at once are waited for as if they were one."""
    pace, stop = Pace(0.01, 1 << 30), threading.Event()
    pace.step_begins()

    def steps() -> None:
        while not stop.is_set():
            pace.step_ends()
            pace.step_begins()
            time.sleep(0.001)

    thread = threading.Thread(target=steps)
    thread.start()
    assert waited(pace, 0.002) >= 0.19
    stop.set()
    thread.join()


def test_who_ends_is_in_a_hurry() -> None:
    pace = Pace(0.001, 1 << 30)
    pace.step_begins()
    threading.Timer(0.05, pace.hurry).start()
    assert waited(pace, 1.0) < 100.0
    assert waited(pace, 1.0) < 1.0


def test_what_waits_is_bounded() -> None:
    pace = Pace(0.25, 100)
    assert pace.admit(60)
    assert not pace.admit(60)
    assert pace.admit(40)
    pace.left(60)
    pace.left(40)
    assert pace.admit(1000), "what is larger than the bound may wait alone"
    assert not pace.admit(1)
    assert pace.waiting_bytes == 1000


def test_lanes_leave_the_cores_that_compute() -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one core")
    found: list[set[int]] = []

    def lane() -> None:
        leave_computing_cores()
        found.append(os.sched_getaffinity(0))

    def computing() -> None:
        os.sched_setaffinity(0, {min(allowed)})
        thread = threading.Thread(target=lane)  # inherits the binding
        thread.start()
        thread.join()

    thread = threading.Thread(target=computing)
    thread.start()
    thread.join()
    assert found == [os.sched_getaffinity(os.getppid()) - {min(allowed)}]
