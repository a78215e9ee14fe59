"""Policy: which placements a tier gives up first. Sees access history and sizes, never bytes or clocks.

Rows are the Catalog's; the policy keeps its own columns beside them. Implementations live in
`tierkv/policies/`, one file each, and inherit `tests/contract/policy_contract.py`.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierkv.catalog import Rows



class View(Protocol):
    """What a policy may look at: columns by row number."""

    tier: npt.NDArray[np.int64]
    state: npt.NDArray[np.int64]
    holds: npt.NDArray[np.int64]
    allocated: npt.NDArray[np.int64]
    locator: npt.NDArray[np.int64]


class Policy(Protocol):
    """Told what is used; asked what to give up."""

    name: str

    def touched(self, view: View, rows: Rows) -> None:
        """Placements of one chain were used, head first; called once per request and chain."""

    def forgot(self, rows: Rows) -> None:
        """Placements are gone; their row numbers may come back as others."""

    def victims(self, view: View, tier: int, need: int) -> Rows:
        """Return ready, unheld placements worth least, enough to free `need` bytes or all there are.

        Never a block whose descendants (touched with it, behind it) stay.
        """

    def keeps(self, view: View, tier: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which rows of a tier are worth writing again when their region is reclaimed."""

    def oldest(self, rows: Rows) -> Rows:
        """Return the rows in the order they would be given up."""
