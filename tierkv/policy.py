"""Policy: what may enter a tier, and which placements it gives up first.

Sees access history and sizes, never bytes or clocks.

Rows are the Catalog's; the policy keeps its own columns beside them. What the service can run lives
in `tierkv/policies/`, one file each; what it is compared with in `tierkv/simulation/`. All inherit
`tests/contract/policy_contract.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tierkv.catalog import Catalog, Rows
from tierkv.codec import Profile
from tierkv.cost import Rates
from tierkv.explain import Explainer
from tierkv.plan import Move
from tierkv.use import Use


class Picked(NamedTuple):
    """Numbers of the profiles of a chain's new units; a `profile` of 0 leaves it to the planner."""

    profile: int = 0
    beside: int = 0
    """Progressive: of a second copy of each in RAM, beside a plain one; 0: there is to be none."""


class Policy(Protocol):
    """Told what is used; asked what to give up. Reads the catalog's columns and changes nothing."""

    name: str

    def touched(self, view: Catalog, rows: Rows) -> None:
        """Placements of one chain were used, head first; called once per request and chain."""

    def forgot(self, rows: Rows) -> None:
        """Placements are gone; their row numbers may come back as others."""

    def offered(self, view: Catalog, tier: int, keys: Sequence[bytes]) -> int:
        """Blocks of one chain, head first, that a tier lacks are to be written to it.

        Told once, before room is made. Returns how many of them, from the first on, are worth it.
        """

    def victims(self, view: Catalog, tier: int, need: int) -> list[int]:
        """Return ready, unheld placements worth least that free `need` bytes, or all of them."""


class Reclaimer(Protocol):
    """What a plan that makes room asks."""

    def offered(self, view: Catalog, tier: int, keys: Sequence[bytes]) -> int:
        """As `Policy`."""

    def reclaim(self, view: Catalog, tier: int, need: int, *, at_once: bool) -> list[Move]:
        """Return Moves that free `need` bytes of a tier, or all there are, what costs least first.

        At most one for each placement, on ready ones that nobody holds. Who waits for the room
        (`at_once`) cannot wait for I/O: drops and downgrades only.
        """


class ServicePolicy(Policy, Reclaimer, Explainer, Protocol):
    """A policy for chains and logs: no victim has descendants (touched with it) that stay."""

    def keeps(self, view: Catalog, tier: int, rows: Rows) -> list[bool]:
        """Return which rows of a tier are worth writing again when their region is reclaimed."""

    def stranded(self, view: Catalog, rows: Rows) -> list[int]:
        """Return the ready placements, in any tier, that nobody can reach once `rows` are gone."""

    def oldest(self, rows: Rows) -> list[int]:
        """Return the rows in the order they would be given up."""

    def used(self, view: Catalog, use: Use) -> None:
        """A chain was asked for or is being put; `touched` follows with its placements."""

    def measured(self, view: Catalog, rates: Sequence[Rates]) -> None:
        """What is known of the tiers by now, nearest first; a good time to catch up on work."""

    def found(self, view: Catalog, rows: Rows) -> None:
        """Placements were there at start, heads before tails: nothing else is known of them."""

    def picks(self, keys: bytes, known: Sequence[bool], choices: Sequence[Profile]) -> Picked:
        """Return the profiles for a chain's new units.

        `known` says of each unit, block-major, whether it is there. `offered` follows, about the
        blocks that are new.
        """

    def admits(self, view: Catalog, tier: int, rows: Rows) -> list[bool]:
        """Return which RAM placements are worth a copy in a lower tier, behind their put."""
