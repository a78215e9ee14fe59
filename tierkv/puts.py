"""Puts: from offered blocks to reserved pages, and from written pages to visible blocks."""

from dataclasses import dataclass

import numpy as np

from tierkv import frame, planner
from tierkv.calls import AbortCall, CommitCall, Done, PutCall, PutReply
from tierkv.catalog import NONE, Bools, Rows, Sizes, State
from tierkv.codec import BY_NUMBER, PROFILES, Profile
from tierkv.errors import invalid
from tierkv.fidelity import Fidelity
from tierkv.namespace import digest_of
from tierkv.plan import PutPlan
from tierkv.store import RAM, Store, in_state, keys_of
from tierkv.write_behind import WriteBehind

HEADER_BYTES = frame.header_bytes(1)
_NO_ARTIFACT = bytes(32)


@dataclass(slots=True)
class _Reservation:
    """The writer's hold: placements in `writing`, and what their headers will say."""

    owner: int
    rows: Rows
    raw: list[int]
    fingerprint: bytes
    namespace: bytes
    tokens: int
    seal: bool


class Puts:
    """Open reservations. Called under the store's lock."""

    def __init__(self, store: Store, write_behind: WriteBehind) -> None:
        self._store = store
        self._write_behind = write_behind
        self.open: dict[int, _Reservation] = {}
        self._next = 1

    def put(self, owner: int, call: PutCall) -> PutReply:
        """Plan a put and reserve what it may write. Raises: TierKVError (invalid)."""
        store, catalog = self._store, self._store.catalog
        parts = store.parts_of(call.parts)
        keys = keys_of(call.keys, len(parts))
        namespace = store.namespaces.number(digest_of(call.namespace))
        raw = _raw_bytes(call, len(parts), len(keys))
        heads = store.heads(keys, parts)
        self._clear_the_way(heads, call.fidelity, namespace)
        heads = store.heads(keys, parts)
        known = self._known(heads, call.fidelity, namespace)
        known[: call.start * len(parts)] = True
        profile = planner.plan_profile(_profiles(call), [low.io.rates for low in store.lower])
        plan = self._plan(heads, known, raw, profile, len(parts))
        offered = (len(keys) - call.start) * len(parts)
        plan_known = plan.known - call.start * len(parts)
        store.totals["known_units"] += plan_known
        store.counters["put_refused_full"] += plan.refused
        if not len(plan.units):
            store.touch(heads)
            return PutReply(reservation=0, known=plan_known, refused=offered - plan_known)
        store.drop(plan.drops)
        rows = self._begin(call, keys, parts, plan, raw)
        store.touch(store.heads(keys, parts))
        store.check()
        number, self._next = self._next, self._next + 1
        seal = store.settings.verify == "always"
        self.open[number] = _Reservation(
            owner, rows, raw[plan.units].tolist(), call.fingerprint,
            digest_of(call.namespace), call.tokens_per_block, seal,
        )  # fmt: skip
        counts, runs = store.runs_of(rows)
        return PutReply(
            reservation=number,
            profile=profile.name,
            known=plan_known,
            refused=plan.refused,
            units=plan.units.astype("<u4").tobytes(),
            header_bytes=HEADER_BYTES,
            run_counts=counts,
            runs=runs,
            seal=seal,
        )

    def commit(self, owner: int, call: CommitCall) -> Done:
        """Write headers and make units visible. Raises: TierKVError (invalid)."""
        reservation = self._take(owner, call.reservation)
        if reservation is None:
            return Done()
        store, catalog, rows = self._store, self._store.catalog, reservation.rows
        lengths = np.frombuffer(call.lengths, "<i8")
        sums = call.checksums
        bounds = np.array([frame.payload_bound(raw) for raw in reservation.raw])
        if len(lengths) != len(rows) or (reservation.seal and len(sums) != len(rows) * 16):
            store.abort(rows)
            raise invalid(f"commit names {len(lengths)} lengths for {len(rows)} units")
        current = catalog.generation[rows] >= store.namespaces.minimum[catalog.namespace[rows]]
        keep = (lengths > 0) & (lengths <= bounds) & current
        for index in np.flatnonzero(keep).tolist():
            checksum = sums[index * 16 : index * 16 + 16] if reservation.seal else b""
            self._seal(int(rows[index]), reservation, index, int(lengths[index]), checksum)
        store.abort(rows[~keep])
        done = rows[keep]
        catalog.commit(done)
        store.totals["put_units"] += len(done)
        store.totals["stored_bytes"] += int(lengths[keep].sum())
        store.check()
        self._write_behind.offer(done)
        return Done(units=len(done))

    def abort(self, owner: int, call: AbortCall) -> Done:
        """Give a reservation up."""
        reservation = self._take(owner, call.reservation)
        if reservation is not None:
            self._store.abort(reservation.rows)
        return Done()

    def disown(self, owner: int) -> None:
        """Give up everything of an owner that is gone."""
        for number in [n for n, held in self.open.items() if held.owner == owner]:
            self.abort(owner, AbortCall(reservation=number))

    def _take(self, owner: int, number: int) -> _Reservation | None:
        found = self.open.get(number)
        if found is None or found.owner != owner:
            return None
        return self.open.pop(number)

    def _clear_the_way(self, heads: Rows, fidelity: int, namespace: int) -> None:
        """Drop RAM copies that cannot answer this put's readers, where nobody holds them."""
        store = self._store
        rows = store.catalog.in_tier(heads, RAM)
        poor = in_state(store.catalog, rows, State.READY)
        poor &= ~store.usable_copies(rows, fidelity, namespace)
        store.drop(rows[poor])

    def _known(self, heads: Rows, fidelity: int, namespace: int) -> Bools:
        """Return which units need no copy: one is there, coming, or in the way until a hold ends."""
        store, catalog = self._store, self._store.catalog
        known = catalog.in_tier(heads, RAM) != NONE
        for rows in catalog.siblings(heads):
            known |= store.usable_copies(rows, fidelity, namespace) & in_state(
                catalog, rows, State.WRITING, State.READY
            )
        return known

    def _plan(self, heads: Rows, known: Bools, raw: Sizes, profile: Profile, parts: int) -> PutPlan:
        """Plan with the chain's own blocks protected from making room for its tail."""
        store, catalog = self._store, self._store.catalog
        rows = catalog.in_tier(heads, RAM)
        rows = rows[in_state(catalog, rows, State.READY)]
        catalog.hold(rows)
        page = store.host.page_bytes
        sizes = (HEADER_BYTES + raw + profile.bound_extra + page - 1) // page * page
        try:
            return planner.plan_put(
                store.policy, catalog, known, sizes, profile, store.host.space().free, parts
            )
        finally:
            store.unhold(rows)

    def _begin(self, call: PutCall, keys: list[bytes], parts: list[int], plan: PutPlan, raw: Sizes) -> Rows:
        store = self._store
        namespace = store.namespaces.number(digest_of(call.namespace))
        rows = np.empty(len(plan.units), np.int32)
        page = store.host.page_bytes
        for index, part in enumerate(parts):
            mine = np.flatnonzero(plan.units % len(parts) == index)
            blocks = plan.units[mine] // len(parts)
            nbytes = HEADER_BYTES + raw[plan.units[mine]] + plan.profile.bound_extra
            locators = [store.host.reserve(size) for size in nbytes.tolist()]
            assert None not in locators, "the plan promised room"
            rows[mine] = store.catalog.begin(
                RAM,
                [keys[block] for block in blocks.tolist()],
                part,
                profile=plan.profile.number,
                fidelity=min(call.fidelity, plan.profile.fidelity),
                flags=frame.DERIVED if call.derived else 0,
                nbytes=nbytes,
                allocated=-(-nbytes // page) * page,
                locator=locators,
                namespace=namespace,
                generation=store.namespaces.minimum[namespace],
                position=call.position + blocks * call.tokens_per_block,
            )
        return rows

    def _seal(self, row: int, held: _Reservation, index: int, length: int, checksum: bytes) -> None:
        """Trim a written frame to its size and write its header."""
        store, catalog = self._store, self._store.catalog
        nbytes = HEADER_BYTES + length
        page = store.host.page_bytes
        locator = store.host.truncate(int(catalog.locator[row]), nbytes)
        catalog.resize(row, nbytes, -(-nbytes // page) * page, locator)
        profile = BY_NUMBER[int(catalog.profile[row])]
        fidelity = Fidelity(int(catalog.fidelity[row]))
        lossy = frame.LOSSY if fidelity < Fidelity.EXACT else 0
        header = frame.Header(
            codec_id=profile.codec_id,
            flags=int(catalog.flags[row]) | lossy,
            fidelity=fidelity,
            tokens=held.tokens,
            position=int(catalog.position[row]),
            generation=int(catalog.generation[row]),
            fingerprint=held.fingerprint,
            key=catalog.keys[row],
            namespace=held.namespace,
            artifact=_NO_ARTIFACT,
            part=catalog.part_of(row),
            raw_bytes=held.raw[index],
            epoch=store.host.epoch,
            segments=(length,),
            checksums=(checksum,) if checksum else (),
        )
        store.host.pieces(locator)[0][:HEADER_BYTES] = frame.pack(header)


def _raw_bytes(call: PutCall, parts: int, blocks: int) -> Sizes:
    sizes = np.frombuffer(call.raw_bytes, "<i8")
    if len(sizes) != parts or (sizes <= 0).any() or (sizes > frame.MAX_PAYLOAD_BYTES // 2).any():
        raise invalid(f"a put gives raw bytes above 0 for each of its {parts} parts")
    if not (0 <= call.start <= blocks and len(call.fingerprint) == 32):
        raise invalid("a put starts inside its chain and names a 32-byte fingerprint")
    if call.fidelity not in Fidelity.__members__.values():
        raise invalid(f"fidelity {call.fidelity} is not known")
    return np.tile(sizes, blocks)


def _profiles(call: PutCall) -> list[Profile]:
    known = [PROFILES[name] for name in call.profiles if name in PROFILES]
    if not known:
        raise invalid(f"none of the profiles {call.profiles} is known; offer one of {list(PROFILES)}")
    return known
