"""Puts: from offered blocks to reserved pages, and from written pages to visible blocks."""

import itertools
import logging
import secrets
from array import array

import numpy as np

from tierkv import frame, pairs, planner
from tierkv.calls import AbortCall, Beside, CommitCall, Done, PutCall, PutReply
from tierkv.catalog import LEAVING, NONE, READY, Column
from tierkv.codec import BY_NUMBER, Profile
from tierkv.errors import TierKVError, invalid
from tierkv.fidelity import FIDELITIES, Fidelity
from tierkv.key import KEY_BYTES
from tierkv.limits import check_hints, count_keys
from tierkv.moves import Moves
from tierkv.namespace import digest_of
from tierkv.offers import Offer, exact_offers, fallback_of
from tierkv.plan import PutPlan
from tierkv.reservation import GIVEN_UP, Written
from tierkv.sealing import Copies, Reserved, seal, written, written_beside
from tierkv.store import Store
from tierkv.tier import RAM
from tierkv.use import use_of
from tierkv.write_behind import WriteBehind

FINGERPRINT_BYTES = 32
BESIDE_SLACK = 1.5
"""Room for a progressive copy beside another one, over what its profile's ratio says: one that
needs more is not kept."""
UNUSED_FROM = 1000
"""Blocks stored without one hit on what was found at start before that is called a problem."""
_LOG = logging.getLogger("tierkv")
_KEY = np.dtype((np.void, KEY_BYTES))


class Puts:
    """Open reservations. Called under the store's lock."""

    def __init__(self, store: Store, moves: Moves, write_behind: WriteBehind) -> None:
        self._store = store
        self._moves = moves
        self._write_behind = write_behind
        self.open: dict[int, Reserved] = {}
        self._next = secrets.randbits(48)

    def put(self, owner: int, call: PutCall) -> PutReply:
        """Plan a put and reserve what it may write. Raises: TierKVError (invalid)."""
        store, catalog = self._store, self._store.catalog
        parts = store.parts_of(call.parts)
        check_hints(call)
        raw = _raw_bytes(call, len(parts), count_keys(call.keys, len(parts)))
        namespace = store.namespaces.number(digest_of(call.namespace))
        found = store.heads(call.keys, parts)
        heads = found.tolist()
        skipped = call.start * len(parts)
        if not all(self._has(head, 0, namespace) for head in heads[:skipped]):
            return self._refuse("gap", len(heads) - skipped)
        known = [True] * skipped
        known += [
            head != NONE and self._known(head, call.fidelity, namespace) for head in heads[skipped:]
        ]
        offers = {offer.profile.number: offer for offer in store.offers.allowed(call)}
        if not offers:
            return self._refuse("gate", known.count(False))
        store.policy.used(catalog, use_of(call, parts, sum(raw), store.clock()))
        profile, second = self._profiles(call.keys, known, offers)
        sizes = [_bounds(raw, profile), _bounds(raw, second, BESIDE_SLACK) if second else []]
        before = self._before(heads, known)
        plan = self._plan(call.keys, known, sizes, profile)
        plan_known = plan.known - skipped
        self._count(plan, plan_known)
        if not plan.units:
            return self._nothing(call, parts, before, plan_known, plan.refused)
        self._moves.at_once(plan.moves)
        beside = None
        if second:
            beside = Copies(self._begin(call, parts, plan.units, sizes[1], second), second)
        copies = Copies(self._begin(call, parts, plan.units, sizes[0], profile), profile)
        if plan.refused:
            found = store.heads(call.keys, parts)
        else:
            found[plan.units] = copies.rows  # which lead to all that is left of their units
        store.look(found, call.fidelity, namespace)
        store.check()
        number, self._next = self._next, self._next + 1
        self.open[number] = held = Reserved(
            owner, copies, beside, before, [raw[unit % len(parts)] for unit in plan.units],
            call.fingerprint, store.namespaces.digest(namespace), call.tokens_per_block,
            exact_offers(call) | offers, store.settings.verify == "always",
        )  # fmt: skip
        counts, runs = store.runs_of(copies.rows)
        return PutReply(
            reservation=number,
            profile=profile.name,
            known=plan_known,
            refused=plan.refused,
            units=array("I", plan.units).tobytes(),
            header_bytes=copies.header_bytes,
            run_counts=counts,
            runs=runs,
            seal=held.seal,
            fallback=fallback_of(offers.values(), profile).name,
            stranger=bool(catalog.encodes and call.family) and not store.offers.knows(call.family),
            beside=self._reply_beside(beside),
        )

    def _nothing(
        self, call: PutCall, parts: list[int], before: list[int], known: int, refused: int
    ) -> PutReply:
        """Answer that there is nothing to write."""
        store, namespace = self._store, self._store.namespaces.number(digest_of(call.namespace))
        store.unhold(before)
        # A copy that made way for one that then found no room is gone.
        store.look(store.heads(call.keys, parts), call.fidelity, namespace)
        return PutReply(reservation=0, known=known, refused=refused)

    def _reply_beside(self, copies: Copies | None) -> Beside | None:
        if copies is None:
            return None
        counts, runs = self._store.runs_of(copies.rows)
        return Beside(
            profile=copies.profile.name,
            header_bytes=copies.header_bytes,
            run_counts=counts,
            runs=runs,
        )

    def _profiles(
        self, keys: bytes, known: list[bool], offers: dict[int, Offer]
    ) -> tuple[Profile, Profile | None]:
        """Return the profiles of new blocks and of copies beside them: policy's, or planner's."""
        store, choice = self._store, [offer.profile for offer in offers.values()]
        picked = store.policy.picks(keys, known, choice)
        if picked.profile:
            return BY_NUMBER[picked.profile], BY_NUMBER.get(picked.beside)
        return planner.plan_profile(choice, [low.io.rates for low in store.lower]), None

    def _count(self, plan: PutPlan, known: int) -> None:
        store = self._store
        store.totals["known_units"] += known
        store.counters["put_refused_full"] += plan.refused - plan.declined
        store.counters["put_declined"] += plan.declined

    def _refuse(self, why: str, units: int) -> PutReply:
        self._store.counters[f"put_refused_{why}"] += units
        return PutReply(reservation=0, refused=units)

    def commit(self, owner: int, call: CommitCall) -> Done:
        """Write headers and make units visible. Raises: TierKVError (invalid)."""
        reservation = self._take(owner, call.reservation)
        if reservation is None:
            return Done()
        store, catalog, copies = self._store, self._store.catalog, reservation.copies
        rows, beside = copies.rows, reservation.beside
        try:
            units = written(call, reservation)
            small = written_beside(call, reservation)
        except TierKVError:
            store.abort(reservation.rows)
            raise
        room = -copies.header_bytes
        whole = [
            0 < unit.length <= catalog.nbytes[row] + room and self._has_place(row, unit.profile)
            for unit, row in zip(units, rows, strict=True)
        ]
        stop = whole.index(False) if False in whole else len(rows)
        if catalog.generation[rows[0]] < store.namespaces.minimum[catalog.namespace[rows[0]]]:
            stop = 0  # cleared since
        done, units = rows[:stop], units[:stop]
        store.abort(rows[stop:])  # and all behind what was given up: no reader could reach them
        seal(store, reservation, copies, units, call.checksums if reservation.seal else b"")
        stored = sum(unit.length for unit in units)
        store.totals["stored_bytes"] += stored
        store.host_rates = store.host_rates.with_told("write", stored, call.copied_s)
        store.counters["put_fallback"] += sum(
            unit.profile != copies.profile.number for unit in units
        )
        catalog.commit(done)
        if beside is not None:
            sums = call.beside_checksums if reservation.seal else b""
            self._commit_beside(reservation, beside, small[:stop], sums)
        store.totals["put_units"] += len(done)
        self._look_for_reuse()
        store.check()
        self._write_behind.offer(done)
        return Done(units=len(done))

    def _commit_beside(
        self, held: Reserved, copies: Copies, units: list[Written], checksums: bytes
    ) -> None:
        """Make the second copies visible that were written; each is of use without the others."""
        store, room = self._store, self._store.catalog.allocated
        units = [
            unit if unit.length + copies.header_bytes <= room[row] else GIVEN_UP
            for unit, row in zip(units, copies.rows, strict=False)
        ]
        done = [row for unit, row in zip(units, copies.rows, strict=False) if unit.length]
        seal(store, held, copies, units, checksums)
        store.abort(sorted({*copies.rows} - {*done}))
        store.totals["stored_bytes"] += sum(unit.length for unit in units)
        store.counters["put_beside"] += len(done)
        store.catalog.commit(done)

    def _has_place(self, row: int, profile: int) -> bool:
        """Return whether a unit may be of a profile that was not reserved: no other is like it."""
        catalog = self._store.catalog
        if profile == catalog.profile[row]:
            return True
        head = catalog.head(catalog.key(row), catalog.part[row])
        return pairs.place(catalog, head, profile, but=row) == NONE

    def abort(self, owner: int, call: AbortCall) -> Done:
        """Give a reservation up."""
        reservation = self._take(owner, call.reservation)
        if reservation is not None:
            self._store.abort(reservation.rows)
        return Done()

    def holds(self, owner: int) -> bool:
        """Return whether an owner has a reservation."""
        return any(held.owner == owner for held in self.open.values())

    def disown(self, owner: int) -> None:
        """Give up everything of an owner that is gone."""
        for number in [n for n, held in self.open.items() if held.owner == owner]:
            self.abort(owner, AbortCall(reservation=number))

    def _look_for_reuse(self) -> None:
        """Say once when much is stored and nothing that was found at start is ever asked for.

        Then the runs before this one named the same content differently: another identity, other
        extras, or a connector that does not hash alike in every process.
        """
        store = self._store
        found = store.totals["recovered"]
        lower = sum(store.hits[low.name] for low in store.lower)
        if found and not lower and store.totals["put_units"] >= UNUSED_FROM:
            if not store.counters["no_reuse_across_restarts"]:
                _LOG.warning(
                    "%d blocks were stored and none of the %d found at start was ever asked for: "
                    "compare model, weights, dtype, extras and tokens per block of the two runs",
                    store.totals["put_units"],
                    found,
                )
            store.counters["no_reuse_across_restarts"] = 1

    def _take(self, owner: int, number: int) -> Reserved | None:
        found = self.open.get(number)
        if found is None or found.owner != owner:
            return None
        self._store.unhold(found.before)
        return self.open.pop(number)

    def _has(self, head: int, fidelity: int, namespace: int) -> bool:
        """Return whether some tier has a unit that readers can use, or will have it."""
        store, state = self._store, self._store.catalog.state
        return any(
            state[row] != LEAVING and store.answers(row, fidelity, namespace)
            for row in store.catalog.copies(head)
        )

    def _known(self, head: int, fidelity: int, namespace: int) -> bool:
        """Return whether a unit needs no copy: one is there or coming, or the way is not free.

        RAM copies that cannot answer this put's readers make way, unless somebody holds them. Where
        readers are exact the new copy is plain: a progressive one that others can use may stay.
        """
        store, catalog = self._store, self._store.catalog
        if self._has(head, fidelity, namespace):
            return True
        poor = [
            row
            for row in catalog.copies(head)
            if catalog.tier[row] == RAM
            and not (
                fidelity == Fidelity.EXACT
                and catalog.profile[row] in pairs.PROGRESSIVE
                and catalog.state[row] == READY
                and store.answers(row, 0, namespace)
            )
        ]
        if any(catalog.state[row] != READY or catalog.holds[row] for row in poor):
            return True
        store.drop(poor)
        return False

    def _before(self, heads: list[int], known: list[bool]) -> list[int]:
        """Hold one copy of each of the chain's own blocks: they make no room for its tail.

        Those in RAM, or others where that has none. Returns them.
        """
        catalog, mine = self._store.catalog, list[int]()
        for head in itertools.compress(heads, known):
            ready = [row for row in catalog.copies(head) if catalog.state[row] == READY]
            if ready:
                mine.append(min(ready, key=catalog.tier.__getitem__))
        catalog.hold(mine)
        return mine

    def _plan(
        self, keys: bytes, known: list[bool], bounds: list[list[int]], profile: Profile
    ) -> PutPlan:
        store, catalog = self._store, self._store.catalog
        page = store.host.page_bytes
        pages = [[-(-size // page) * page for size in sizes] for sizes in bounds if sizes]
        sizes = [sum(each) for each in zip(*pages, strict=True)]
        free = store.host.space().free
        return planner.plan_put(store.policy, catalog, keys, known, sizes, profile, free, page)

    def _begin(
        self, call: PutCall, parts: list[int], every: list[int], bounds: list[int], profile: Profile
    ) -> list[int]:
        """Take space for a copy of each unit of a plan and begin its placements."""
        store = self._store
        namespace = store.namespaces.number(digest_of(call.namespace))
        page = store.host.page_bytes
        allowance = store.catalog.allowances.number(store.offers.allowance(call))
        units, rows = np.array(every), np.empty(len(every), np.int32)
        for index, (part, nbytes) in enumerate(zip(parts, bounds, strict=True)):
            mine = np.flatnonzero(units % len(parts) == index)
            if not len(mine):
                continue
            blocks = units[mine] // len(parts)
            locators = store.host.reserve_all(nbytes, len(mine))
            assert locators is not None, "the plan promised room"
            columns: dict[str, Column] = {
                "profile": profile.number,
                "fidelity": call.fidelity,
                "flags": frame.DERIVED if call.derived else 0,
                "nbytes": nbytes,
                "allocated": -(-nbytes // page) * page,
                "locator": np.array(locators),
                "namespace": namespace,
                "generation": store.namespaces.minimum[namespace],
                "position": call.position + blocks * call.tokens_per_block,
                "allowance": allowance,
            }
            keys = np.frombuffer(call.keys, _KEY)[blocks].tobytes()
            rows[mine] = store.catalog.begin_alike(RAM, part, keys, columns)
        return rows.tolist()


def _bounds(raw: list[int], profile: Profile, slack: float = 0.0) -> list[int]:
    """Return the most bytes of a frame of each part; with `slack`: over what is expected."""
    header = frame.header_bytes(profile.segments)
    if slack:
        return [header + int(size / profile.ratio * slack) for size in raw]
    return [header + size + profile.bound_extra for size in raw]


def _raw_bytes(call: PutCall, parts: int, blocks: int) -> list[int]:
    """Return the raw bytes of each part, after a look at the call's other numbers."""
    sizes = array("q", call.raw_bytes) if len(call.raw_bytes) == 8 * parts else array("q")
    if not sizes or min(sizes) <= 0 or max(sizes) > frame.MAX_PAYLOAD_BYTES // 2:
        raise invalid(f"a put gives raw bytes above 0 for each of its {parts} parts")
    if not (0 <= call.start <= blocks and len(call.fingerprint) == FINGERPRINT_BYTES):
        raise invalid("a put starts inside its chain and names a 32-byte fingerprint")
    if call.fidelity not in FIDELITIES:
        raise invalid(f"fidelity {call.fidelity} is not known")
    last = call.position + blocks * call.tokens_per_block
    if not (0 <= call.position <= last < 1 << 31 and call.tokens_per_block > 0):
        raise invalid("positions lie between 0 and 2^31 and a block has tokens")
    return list(sizes)
