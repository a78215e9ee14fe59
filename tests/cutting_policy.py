"""A policy for a real sidecar in a test: exact copies go down as kvtc@4x, and are cut there later.

`evicpress` takes the coarsest level that readers allow at once, and never cuts what it made.
"""

from itertools import pairwise

from tierkv import store
from tierkv.catalog import READY, Catalog
from tierkv.codec import KVTC
from tierkv.lineage import lawful
from tierkv.plan import Kind, Move
from tierkv.policies.choice import Opening
from tierkv.policies.lru import Lru
from tierkv.tier import RAM

BELOW = 1


class Cutting(Lru):
    """LRU in RAM, which sends down what it gives up; below, the finest copies lose a level."""

    def reclaim(self, view: Catalog, tier: int, need: int, *, at_once: bool) -> list[Move]:
        if tier == RAM and at_once:
            return super().reclaim(view, tier, need, at_once=at_once)
        if tier == RAM:
            rows = self.victims(view, tier, need)
            moves = [Move(Kind.DEMOTE, row, BELOW, KVTC[0].number) for row in rows]
        else:
            rows = view.select(tier, READY).tolist()
            moves = [
                Move(Kind.DOWNGRADE, row, tier, coarser.number)
                for finer, coarser in pairwise(KVTC)
                for row in rows
                if view.profile[row] == finer.number
            ]
        return [move for move in moves if lawful(view, move)]


def install() -> None:
    """Let every store of this process run it."""

    def make(opening: Opening) -> Cutting:
        return Cutting(len(opening.rates))

    vars(store)["make_policy"] = make
