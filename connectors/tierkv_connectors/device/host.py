"""Host: an engine's memory in host memory. Copies are over when they return, so nothing waits."""

from collections import Counter

import torch

from tierkv_codecs.copies import compile_ahead
from tierkv_connectors.device import Mark
from tierkv_connectors.device.entered import Entered
from tierkv_connectors.device.turned import copy
from tierkv_connectors.views import Views, are_whole, halves


class HostLane:
    """Copies at once. Works, at the pace of torch, for any device that torch copies from and to."""

    def __init__(self) -> None:
        compile_ahead()

    def after(self, mark: Mark) -> None:
        """Do nothing: all that was queued is over."""

    def gather(self, views: Views, block: torch.Tensor) -> None:
        """Do what `views.gather` says."""
        assert are_whole(views, block), "not a whole block"
        for tensor, place in halves(views, block):
            copy(place, tensor)

    def scatter(self, block: torch.Tensor, views: Views) -> None:
        """Do what `views.scatter` says."""
        for tensor, place in halves(views, block):
            copy(tensor, place)

    def hold(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""


class HostDevice:
    """The device of an engine that runs on the CPU."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.entered = Entered()

    def lane(self, block_bytes: int) -> HostLane:
        """Return a lane."""
        del block_bytes
        return HostLane()

    def mark(self) -> Mark:
        """Return nothing in particular."""
        return None

    def pin(self, arena: memoryview) -> None:
        """Begin to enter the arena into this process's page table."""
        self.entered.begin(arena)

    def unpin(self) -> None:
        """Let go of the arena."""
        self.entered.end()
