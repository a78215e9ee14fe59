"""Pace: copies take their share of the time while the engine computes, and all of it otherwise."""

import os
import threading
from collections.abc import Callable

import pytest

from tierkv_connectors.vllm.cores import leave_computing_cores
from tierkv_connectors.vllm.pace import IDLE_S, Pace


class Turns(threading.Condition):
    """Seconds that pass only while somebody waits; `meanwhile` happens at every wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.meanwhile: Callable[[], None] = lambda: None

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        assert timeout > 0
        self.now += timeout
        self.meanwhile()
        return False


def pace_of(share: float) -> tuple[Pace, Turns]:
    turns = Turns()
    pace = Pace(share, 1 << 30, lambda: turns.now)
    pace._turn = turns
    return pace, turns


def waited(pace: Pace, turns: Turns, seconds: float) -> float:
    started = turns.now
    pace.copied(seconds)
    return turns.now - started


def test_beside_a_step_copies_take_their_share() -> None:
    pace, turns = pace_of(0.25)
    pace.step_begins()
    assert waited(pace, turns, 0.02) == pytest.approx(0.06)
    pace, turns = pace_of(1.0)
    pace.step_begins()
    assert waited(pace, turns, 0.5) == 0.0, "all of it is no pace at all"


def test_an_idle_engine_is_not_waited_for() -> None:
    pace, turns = pace_of(0.01)
    assert waited(pace, turns, 1.0) == 0.0, "it has not begun yet"
    pace.step_begins()
    pace.step_ends()
    found = waited(pace, turns, 1.0)
    assert found == pytest.approx(IDLE_S), "the next step of a burst would have begun"


def test_a_burst_is_one_thing() -> None:
    """Steps that follow at once are waited for as if they were one."""
    pace, turns = pace_of(0.01)
    pace.step_begins()

    def steps() -> None:
        pace.step_ends()
        turns.now += IDLE_S / 2
        pace.step_begins()

    turns.meanwhile = steps
    assert waited(pace, turns, 0.01) >= 0.99


def test_who_ends_is_in_a_hurry() -> None:
    pace, turns = pace_of(0.001)
    pace.step_begins()
    turns.meanwhile = pace.hurry
    assert waited(pace, turns, 1.0) <= IDLE_S, "of 999 s"
    assert waited(pace, turns, 1.0) == 0.0


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
