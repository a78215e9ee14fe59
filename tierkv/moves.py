"""Moves: carrying out what a plan says about placements. Called under the store's lock.

Drops and downgrades take no I/O and are done at once. In RAM a downgrade writes a shorter header
and frees pages; in a log it only changes what the catalog says, and the tail becomes dead.
"""

from collections.abc import Iterable, Sequence

import msgspec

from tierkv import frame, lineage, pairs, planner
from tierkv.catalog import ENDS, NONE, Rows
from tierkv.codec import BY_NUMBER
from tierkv.fidelity import FIDELITIES
from tierkv.plan import Kind, Move
from tierkv.store import Store
from tierkv.tier import ALIGN, DONE, RAM, Item, Outcome, Status
from tierkv.tiers.host import aligned


def stamp(head: memoryview, header: frame.Header, fidelity: int) -> None:
    """Write a frame's header in place, promising no more than a class."""
    fidelity = min(header.fidelity, FIDELITIES[fidelity])
    lower = msgspec.structs.replace(header, fidelity=fidelity)
    head[: header.header_bytes] = frame.pack(lower)


def stamp_down(item: Item, fidelity: int) -> None:
    """Let a sound frame that was read promise no more than its placement does."""
    head = item.pieces[0]
    header = frame.parse(head[: frame.MAX_HEADER_BYTES])
    if isinstance(header, frame.Header) and header.fidelity > fidelity:
        stamp(head, header, fidelity)


def prefix(pieces: Sequence[memoryview], nbytes: int, fidelity: int) -> list[memoryview]:
    """Return the first `nbytes` of a frame in RAM as a frame, with a header of its own.

    The first 4096 bytes are a copy; everything behind them is the frame's own memory.
    """
    head = aligned(ALIGN)
    head[:] = pieces[0][:ALIGN]
    header = frame.parse(head)
    assert isinstance(header, frame.Header), "the frame in RAM is not one"
    shorter = frame.shortened(header, nbytes)
    assert shorter is not None, "no segment of the frame in RAM ends there"
    stamp(head, shorter, fidelity)
    return [head, *frame.cut(pieces, ALIGN, -(-max(nbytes - ALIGN, 0) // ALIGN) * ALIGN)]


class Moves:
    """Makes room without I/O."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.going = 0
        """Bytes of RAM that demotions under way will free."""

    def make_room(self, need: int, *, beside: Rows = ()) -> None:
        """Free `need` bytes of RAM at once, or as many as can be beside some ready placements."""
        if need > 0:
            self._store.catalog.hold(beside)
            self.at_once(self.plan(RAM, need, at_once=True))
            self._store.unhold(beside)

    def relieve(self, tier: int, need: int) -> None:
        """Let the policy give up what frees `need` bytes of a lower tier in the end."""
        self.at_once(self.plan(tier, need, at_once=False))

    def plan(self, tier: int, need: int, *, at_once: bool) -> list[Move]:
        """Return the lawful Moves that the policy asks for to free `need` bytes of a tier."""
        store = self._store
        granule = store.lower[tier - 1].tier.granule if tier else store.host.granule
        plan = planner.plan_reclaim(
            store.policy, store.catalog, tier, need, granule, at_once=at_once
        )
        if plan.refused:
            store.counters["moves_refused"] += plan.refused
        return plan.moves

    def at_once(self, moves: Iterable[Move]) -> None:
        """Carry out drops and downgrades, which were lawful when they were planned."""
        dropped: list[int] = []
        for move in moves:
            if move.kind is Kind.DOWNGRADE:
                self._downgrade(move)
            else:
                assert move.kind is Kind.DROP, f"{move.kind.name} frees nothing at once"
                dropped.append(move.row)
        self._store.drop(dropped)

    def describe(self, target: int, source: int, item: Item, context: int) -> Outcome:
        """Take over from the header of what was read up what neither probe nor index could know.

        Args:
            target: the copy in RAM.
            source: the copy that was read.
            item: as it was read.
            context: tokens of the sequence for which it was read.
        """
        store, catalog = self._store, self._store.catalog
        header = frame.parse(item.pieces[0][: frame.MAX_HEADER_BYTES])
        if isinstance(header, frame.Refusal) or header.codec_id not in store.offers.readable:
            return Outcome(Status.UNKNOWN, "a codec this release does not know")
        namespace = store.namespaces.digest(catalog.namespace[target])
        if (header.generation, header.namespace) != (catalog.generation[target], namespace):
            return Outcome(Status.CORRUPT, "another namespace or generation")
        profile = store.offers.profile_of(header)
        ends = lineage.ends(profile, header.header_bytes, header.segments)
        fidelity = min(header.fidelity, catalog.fidelity[source])
        if fidelity < header.fidelity:
            stamp(item.pieces[0], header, fidelity)
        allowance = catalog.allowance[source] or catalog.allowances.number(
            store.offers.allowance_of(header, context)
        )
        for row in (target, source):
            catalog.restate(
                row,
                profile=profile.number,
                fidelity=fidelity,
                flags=header.flags,
                position=header.position,
                allowance=allowance,
            )
            lineage.note_ends(catalog, row, ends)
        head = catalog.head(catalog.key(target), catalog.part[target])
        if pairs.place(catalog, head, profile.number, but=target) != NONE:
            return Outcome(Status.THROTTLED, "its place in RAM was taken by another copy")
        return DONE

    def _downgrade(self, move: Move) -> None:
        """Cut a frame short where it lies; nobody holds it, so nobody reads it."""
        store, catalog, row = self._store, self._store.catalog, move.row
        assert lineage.lawful(catalog, move), "a downgrade that may not be"
        levels, nbytes = BY_NUMBER[move.profile].levels, lineage.cut(catalog, row, move.profile)
        fidelity = lineage.fidelity(catalog, row, move.profile)
        if move.tier == RAM:
            self._shorten(row, nbytes, fidelity)
        else:
            place = store.lower[move.tier - 1].regions
            assert place is not None, "only a log cuts in place"
            allocated = -(-nbytes // place.granule) * place.granule
            place.truncate(catalog.locator[row], catalog.nbytes[row], nbytes)
            catalog.resize(row, nbytes, allocated, catalog.locator[row])
        gone = dict.fromkeys(ENDS[levels - 1 :], 0)
        catalog.restate(row, profile=move.profile, fidelity=fidelity, **gone)
        store.counters["downgraded"] += 1

    def _shorten(self, row: int, nbytes: int, fidelity: int) -> None:
        """Give a frame in RAM the header of its prefix and free the pages behind that."""
        store, catalog = self._store, self._store.catalog
        start = store.host.start(catalog.locator[row])
        view = store.host.view[start : start + frame.MAX_HEADER_BYTES]
        header = frame.parse(view)
        assert isinstance(header, frame.Header), "the frame in RAM is not one"
        shorter = frame.shortened(header, nbytes)
        assert shorter is not None, "the frame in RAM has other segments"
        stamp(view, shorter, fidelity)
        store.trim(row, nbytes)
