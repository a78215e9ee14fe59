"""Work: what an act does, in numbers that no load of the machine changes."""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple


class Work(NamedTuple):
    """Calls of functions, Python's and C's, and the most bytes that were taken meanwhile.

    A loop over placements makes calls; an array over them takes memory.
    """

    calls: int
    nbytes: int


def work_of(act: Callable[[], object]) -> Work:
    """Do something and return how much work it was."""
    calls = 0

    def count(_frame: FrameType, event: str, _of: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    tracemalloc.start()
    try:
        sys.setprofile(count)
        act()
        sys.setprofile(None)
        return Work(calls, tracemalloc.get_traced_memory()[1])
    finally:
        sys.setprofile(None)
        tracemalloc.stop()
