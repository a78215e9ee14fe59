"""What ARC and S3-FIFO have in common as policies: queues of rows for each tier, fed in one way."""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from tierkv.catalog import Catalog, Rows


class Queues(Protocol):
    """The queues of one tier."""

    def use(self, row: int) -> bool:
        """Note a use; returns False for a row that is new."""

    def enter(self, row: int, key: bytes, size: int) -> None:
        """Take in a new row of `size` bytes."""

    def forget(self, row: int) -> None:
        """Let a row go and remember its key; what is not known here is ignored."""


Q = TypeVar("Q", bound=Queues)


class ByTier(Generic[Q]):
    """Queues for each tier; chains are used from tail to head.

    Args:
        capacities: bytes of each tier.
        make: returns the queues of a tier of so many bytes.
    """

    def __init__(self, capacities: Sequence[int], make: Callable[[int], Q]) -> None:
        self._tiers = [make(capacity) for capacity in capacities]

    def touched(self, view: Catalog, rows: Rows) -> None:
        """Use a chain's placements from tail to head."""
        for row in reversed(rows):
            tier = self._tiers[view.tier[row]]
            if not tier.use(row):
                tier.enter(row, view.key(row), view.allocated[row])

    def forgot(self, rows: Rows) -> None:
        """Remember what is gone as ghosts."""
        for row in rows:
            for tier in self._tiers:
                tier.forget(row)
