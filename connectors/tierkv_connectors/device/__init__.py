"""Device: copies between blocks in host memory and an engine's memory, wherever that is.

`host` is the twin that defines what a copy gives, and what runs where the engine's memory is host
memory. `cuda` gives the same on a CUDA device and is the one place that imports CuPy.

On a device everything is queued and happens later, so a user of it has these rules to keep. A
*mark* is taken where the engine queues its work, behind what wrote the pages or last used them;
copies go behind it (`Lane.after`). What a copy reads or writes is in use until `Lane.wait`. Before
the engine may write to pages that a gather reads, it is made to wait too (`Lane.hold`).
"""

from collections import Counter
from typing import Protocol

import torch

from tierkv_connectors.views import Views

Mark = object
"""A point in what is queued; made and understood by one device."""


class Lane(Protocol):
    """Copies in the order in which they were begun, by one thread.

    Blocks are whole, canonical and contiguous, in host memory.
    """

    def after(self, mark: Mark) -> None:
        """Let later copies go behind what was queued before the mark."""

    def gather(self, views: Views, block: torch.Tensor) -> None:
        """Begin to copy an engine's tokens into a block; complete after `wait`."""

    def scatter(self, block: torch.Tensor, views: Views) -> None:
        """Begin to copy a block into an engine's memory; complete after `wait`."""

    def hold(self) -> None:
        """Let what the engine queues next go behind the reads of the gathers begun so far.

        Called by the thread that queues the engine's work, while no gather is being begun.
        """

    def wait(self) -> None:
        """Return once no copy is under way, after a failure too."""


class Device(Protocol):
    """Where an engine's memory is. `counters` are for the engine's metrics."""

    counters: Counter[str]

    def lane(self, block_bytes: int) -> Lane:
        """Return a lane for blocks of that size."""

    def mark(self) -> Mark:
        """Return a mark behind all that the engine has queued so far, in the calling thread."""

    def pin(self, arena: memoryview) -> None:
        """Begin to make copies from and to an arena fast; returns at once."""

    def unpin(self) -> None:
        """Let go of the arena; no copy of it is under way. Idempotent."""
