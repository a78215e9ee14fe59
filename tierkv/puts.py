"""Puts: from offered blocks to reserved pages, and from written pages to visible blocks."""

import itertools
import logging
import secrets
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierkv import frame, lineage, planner
from tierkv.calls import AbortCall, CommitCall, Done, PutCall, PutReply
from tierkv.catalog import LEAVING, NONE, READY, Column
from tierkv.client import Written
from tierkv.codec import BY_NUMBER, Profile
from tierkv.errors import TierKVError, invalid
from tierkv.fidelity import FIDELITIES
from tierkv.key import KEY_BYTES
from tierkv.limits import check_hints, count_keys
from tierkv.moves import Moves
from tierkv.namespace import digest_of
from tierkv.offers import Offer, exact_offers, fallback_of
from tierkv.plan import PutPlan
from tierkv.store import Store
from tierkv.tier import RAM
from tierkv.use import use_of
from tierkv.write_behind import WriteBehind

FINGERPRINT_BYTES = 32
UNUSED_FROM = 1000
"""Blocks stored without one hit on what was found at start before that is called a problem."""
_LOG = logging.getLogger("tierkv")
_KEY = np.dtype((np.void, KEY_BYTES))


@dataclass(slots=True)
class _Reservation:
    """The writer's hold: placements in `writing`, and what their headers will say."""

    owner: int
    rows: list[int]
    before: list[int]
    """Rows of the same chain, held so that no tail is written behind a head that is gone."""
    raw: list[int]
    fingerprint: bytes
    namespace: bytes
    tokens: int
    profile: Profile
    offers: dict[int, Offer]
    """By number: the profiles that its units may be of."""
    seal: bool

    @property
    def header_bytes(self) -> int:
        """Bytes before each payload."""
        return frame.header_bytes(self.profile.segments)


class Puts:
    """Open reservations. Called under the store's lock."""

    def __init__(self, store: Store, moves: Moves, write_behind: WriteBehind) -> None:
        self._store = store
        self._moves = moves
        self._write_behind = write_behind
        self.open: dict[int, _Reservation] = {}
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
        profile = self._profile(call.keys, known, offers)
        before = self._before(heads, known)
        plan = self._plan(call.keys, known, raw, profile)
        plan_known = plan.known - skipped
        self._count(plan, plan_known)
        if not plan.units:
            store.unhold(before)
            if plan.refused:  # a copy that made way for one that then found no room is gone
                found = store.heads(call.keys, parts)
            store.look(found, call.fidelity, namespace)
            return PutReply(reservation=0, known=plan_known, refused=plan.refused)
        self._moves.at_once(plan.moves)
        rows = self._begin(call, parts, plan, raw)
        if plan.refused:
            found = store.heads(call.keys, parts)
        else:
            found[plan.units] = rows  # all that had to make way led to one of these units
        store.look(found, call.fidelity, namespace)
        store.check()
        number, self._next = self._next, self._next + 1
        seal = store.settings.verify == "always"
        self.open[number] = _Reservation(
            owner, rows, before, [raw[unit % len(parts)] for unit in plan.units], call.fingerprint,
            store.namespaces.digest(namespace), call.tokens_per_block, profile,
            exact_offers(call) | offers, seal,
        )  # fmt: skip
        counts, runs = store.runs_of(rows)
        return PutReply(
            reservation=number,
            profile=profile.name,
            known=plan_known,
            refused=plan.refused,
            units=array("I", plan.units).tobytes(),
            header_bytes=self.open[number].header_bytes,
            run_counts=counts,
            runs=runs,
            seal=seal,
            fallback=fallback_of(offers.values(), profile).name,
            stranger=bool(catalog.encodes and call.family) and not store.offers.knows(call.family),
        )

    def _profile(self, keys: bytes, known: list[bool], offers: dict[int, Offer]) -> Profile:
        """Return the profile of a put's new blocks: the policy's, or else the planner's."""
        store, choice = self._store, [offer.profile for offer in offers.values()]
        number = store.policy.picks(keys, known, choice)
        if number:
            return BY_NUMBER[number]
        return planner.plan_profile(choice, [low.io.rates for low in store.lower])

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
        store, catalog, rows = self._store, self._store.catalog, reservation.rows
        try:
            units = _written(call, reservation)
        except TierKVError:
            store.abort(rows)
            raise
        room = -reservation.header_bytes
        written = [
            0 < unit.length <= catalog.nbytes[row] + room
            for unit, row in zip(units, rows, strict=True)
        ]
        stop = written.index(False) if False in written else len(rows)
        if catalog.generation[rows[0]] < store.namespaces.minimum[catalog.namespace[rows[0]]]:
            stop = 0  # cleared since
        done, units = rows[:stop], units[:stop]
        store.abort(rows[stop:])  # and all behind what was given up: no reader could reach them
        self._seal(reservation, units, call.checksums if reservation.seal else b"")
        stored = sum(unit.length for unit in units)
        store.totals["stored_bytes"] += stored
        store.host_rates = store.host_rates.with_told("write", stored, call.copied_s)
        store.counters["put_fallback"] += sum(
            unit.profile != reservation.profile.number for unit in units
        )
        catalog.commit(done)
        store.totals["put_units"] += len(done)
        self._look_for_reuse()
        store.check()
        self._write_behind.offer(done)
        return Done(units=len(done))

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
        found, lower = store.totals["recovered"], sum(store.hits.values()) - store.hits["host"]
        if found and not lower and store.totals["put_units"] >= UNUSED_FROM:
            if not store.counters["no_reuse_across_restarts"]:
                _LOG.warning(
                    "%d blocks were stored and none of the %d found at start was ever asked for: "
                    "compare model, weights, dtype, extras and tokens per block of the two runs",
                    store.totals["put_units"],
                    found,
                )
            store.counters["no_reuse_across_restarts"] = 1

    def _take(self, owner: int, number: int) -> _Reservation | None:
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

        A RAM copy that cannot answer this put's readers makes way, unless somebody holds it.
        """
        store, catalog = self._store, self._store.catalog
        if self._has(head, fidelity, namespace):
            return True
        row = catalog.in_tier(head, RAM)
        if row == NONE:
            return False
        if catalog.state[row] != READY or catalog.holds[row]:
            return True
        store.drop([row])
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

    def _plan(self, keys: bytes, known: list[bool], raw: list[int], profile: Profile) -> PutPlan:
        store, catalog = self._store, self._store.catalog
        page = store.host.page_bytes
        extra = frame.header_bytes(profile.segments) + profile.bound_extra
        sizes = [-(-(size + extra) // page) * page for size in raw]
        free = store.host.space().free
        return planner.plan_put(store.policy, catalog, keys, known, sizes, profile, free, page)

    def _begin(self, call: PutCall, parts: list[int], plan: PutPlan, raw: list[int]) -> list[int]:
        """Take space for the units of a plan and begin their placements."""
        store, profile = self._store, plan.profile
        namespace = store.namespaces.number(digest_of(call.namespace))
        page = store.host.page_bytes
        allowance = store.catalog.allowances.number(store.offers.allowance(call))
        units, rows = np.array(plan.units), np.empty(len(plan.units), np.int32)
        for index, (part, size) in enumerate(zip(parts, raw, strict=True)):
            mine = np.flatnonzero(units % len(parts) == index)
            if not len(mine):
                continue
            blocks = units[mine] // len(parts)
            nbytes = frame.header_bytes(profile.segments) + size + profile.bound_extra
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

    def _seal(self, held: _Reservation, units: Sequence[Written], checksums: bytes) -> None:
        """Trim the first frames, which are written, to their sizes and write their headers."""
        catalog, host, most = self._store.catalog, self._store.host, held.profile.segments
        parts = {
            number: catalog.part_at(number).pack()
            for number in {catalog.part[row] for row in held.rows}
        }
        stamps = {
            number: frame.Stamp(self._header(held, held.offers[number], sealed=bool(checksums)))
            for number in {unit.profile for unit in units}
        }
        for index, (row, unit) in enumerate(zip(held.rows, units, strict=False)):
            if held.header_bytes + unit.length != catalog.nbytes[row]:
                self._store.trim(row, held.header_bytes + unit.length)
            fidelity = held.offers[unit.profile].fidelity
            catalog.restate(row, profile=unit.profile, fidelity=fidelity)
            if BY_NUMBER[unit.profile].levels:
                self._note_ends(row, held, unit)
            header = stamps[unit.profile].pack(
                catalog.key(row), parts[catalog.part[row]], catalog.position[row],
                held.raw[index], unit.segments, checksums[index * 16 * most :][: 16 * most],
            )  # fmt: skip
            start = host.start(catalog.locator[row])
            host.view[start : start + held.header_bytes] = header

    def _note_ends(self, row: int, held: _Reservation, unit: Written) -> None:
        """Note what the prefixes of a progressive frame are."""
        ends = lineage.ends(BY_NUMBER[unit.profile], held.header_bytes, unit.segments)
        lineage.note_ends(self._store.catalog, row, ends)
        if any(ends):
            self._store.offers.note_levels(held.offers[unit.profile].artifact)

    def _header(self, held: _Reservation, offer: Offer, *, sealed: bool) -> frame.Header:
        """Return a header of a reservation's frames of one profile, which differ from it little."""
        catalog, row, most = self._store.catalog, held.rows[0], held.profile.segments
        lossy = frame.LOSSY if offer.profile.lossy else 0
        return frame.Header(
            codec_id=offer.profile.codec_id,
            flags=catalog.flags[row] | lossy,
            fidelity=offer.fidelity,
            tokens=held.tokens,
            position=catalog.position[row],
            generation=catalog.generation[row],
            fingerprint=held.fingerprint,
            key=catalog.key(row),
            namespace=held.namespace,
            artifact=offer.artifact,
            part=catalog.part_of(row),
            raw_bytes=held.raw[0],
            epoch=self._store.host.epoch,
            segments=(1,) * most,
            checksums=(bytes(16),) * most if sealed else (),
        )


def _written(call: CommitCall, held: _Reservation) -> list[Written]:
    """Return what a commit says of each unit. Raises: TierKVError (invalid)."""
    count, most = len(held.rows), held.profile.segments
    lengths = call.lengths if most == 1 else call.segments
    whole = struct.unpack(f"<{len(lengths) // 8}q", lengths) if len(lengths) % 8 == 0 else ()
    sums = 16 * count * most if held.seal else 0
    if len(whole) != count * most or (held.seal and len(call.checksums) != sums):
        raise invalid(f"commit names {len(whole)} lengths for {count} units of {most} segments")
    profiles = call.profiles or bytes([held.profile.number]) * count
    units = [
        Written(number, whole[at * most : (at + 1) * most]) for at, number in enumerate(profiles)
    ]
    if len(units) != count or any(min(unit.segments) < 0 for unit in units):
        raise invalid(f"commit names {len(profiles)} profiles for {count} units, or negative bytes")
    odd = {unit.profile for unit in units if unit.length} - held.offers.keys()
    if odd:
        raise invalid(f"profiles {sorted(odd)} are not among those that the put may use")
    return units


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
