"""Moves: carrying out what a plan says about placements. Called under the store's lock.

What frees at once, a drop and a downgrade in RAM, is a change of memory and is done at once.
"""

from collections.abc import Iterable

from tierkv import frame, lineage, planner
from tierkv.catalog import ENDS, Rows
from tierkv.codec import BY_NUMBER
from tierkv.plan import Kind, Move
from tierkv.store import Store
from tierkv.tier import RAM


class Moves:
    """Makes room in RAM."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def make_room(self, need: int, *, beside: Rows = ()) -> None:
        """Free `need` bytes of RAM at once, or as many as can be beside some ready placements."""
        if need <= 0:
            return
        store = self._store
        store.catalog.hold(beside)
        plan = planner.plan_reclaim(
            store.policy, store.catalog, RAM, need, store.host.granule, at_once=True
        )
        store.counters["moves_refused"] += plan.refused
        self.at_once(plan.moves)
        store.unhold(beside)

    def at_once(self, moves: Iterable[Move]) -> None:
        """Carry out drops and downgrades in RAM, which were lawful when they were planned."""
        dropped: list[int] = []
        for move in moves:
            if move.kind is Kind.DOWNGRADE:
                self._downgrade(move)
            else:
                assert move.kind is Kind.DROP, f"{move.kind.name} frees nothing at once"
                dropped.append(move.row)
        self._store.drop(dropped)

    def _downgrade(self, move: Move) -> None:
        """Cut a frame short where it lies; nobody holds it, so nobody reads it."""
        store, catalog, row = self._store, self._store.catalog, move.row
        assert lineage.lawful(catalog, move), "a downgrade that may not be"
        levels, nbytes = BY_NUMBER[move.profile].levels, lineage.cut(catalog, row, move.profile)
        start = store.host.start(catalog.locator[row])
        view = store.host.view[start : start + frame.MAX_HEADER_BYTES]
        header = frame.parse(view)
        assert isinstance(header, frame.Header), "the frame in RAM is not one"
        shorter = frame.truncate(header, levels)
        assert shorter.frame_bytes == nbytes, "the frame in RAM has other segments"
        view[: header.header_bytes] = frame.pack(shorter)
        store.trim(row, nbytes)
        catalog.restate(row, profile=move.profile, **dict.fromkeys(ENDS[levels - 1 :], 0))
        store.counters["downgraded"] += 1
