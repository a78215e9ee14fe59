"""Clock: the only source of time for decisions; the simulator turns it by hand."""

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds that never go back; `time.monotonic` in the service."""
