"""Sealing: from the payloads that a client has written to frames that readers may be given."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv import frame, lineage
from tierkv.calls import CommitCall
from tierkv.codec import BY_NUMBER, Profile
from tierkv.errors import invalid
from tierkv.offers import Offer
from tierkv.reservation import Written
from tierkv.store import Store


@dataclass(slots=True)
class Copies:
    """Placements in `writing`, one of each unit, with room for a header of a profile."""

    rows: list[int]
    profile: Profile

    @property
    def header_bytes(self) -> int:
        """Bytes before each payload."""
        return frame.header_bytes(self.profile.segments)


@dataclass(slots=True)
class Reserved:
    """What the store knows of a reservation: its placements, and what their headers will say."""

    owner: int
    copies: Copies
    beside: Copies | None
    """Of the same units, progressive ones."""
    before: list[int]
    """Rows of the same chain, held so that no tail is written behind a head that is gone."""
    raw: list[int]
    fingerprint: bytes
    namespace: bytes
    tokens: int
    offers: dict[int, Offer]
    """By number: the profiles that its units may be of."""
    seal: bool

    @property
    def rows(self) -> list[int]:
        """All its placements."""
        return self.copies.rows + (self.beside.rows if self.beside else [])


def written(call: CommitCall, held: Reserved) -> list[Written]:
    """Return what a commit says of each unit. Raises: TierKVError (invalid)."""
    copies = held.copies
    count, most = len(copies.rows), copies.profile.segments
    lengths = call.lengths if most == 1 else call.segments
    whole = _numbers(lengths, call.checksums, held, copies)
    profiles = call.profiles or bytes([copies.profile.number]) * count
    units = [
        Written(number, whole[at * most : (at + 1) * most]) for at, number in enumerate(profiles)
    ]
    if len(units) != count or any(min(unit.segments) < 0 for unit in units):
        raise invalid(f"commit names {len(profiles)} profiles for {count} units, or negative bytes")
    odd = {unit.profile for unit in units if unit.length} - held.offers.keys()
    if odd:
        raise invalid(f"profiles {sorted(odd)} are not among those that the put may use")
    return units


def written_beside(call: CommitCall, held: Reserved) -> list[Written]:
    """As `written`, of the copies beside them: none where the commit names none."""
    copies = held.beside
    if copies is None or not call.beside:
        return []
    most, number = copies.profile.segments, copies.profile.number
    whole = _numbers(call.beside, call.beside_checksums, held, copies)
    if min(whole) < 0:
        raise invalid("commit names negative bytes")
    return [Written(number, whole[at : at + most]) for at in range(0, len(whole), most)]


def _numbers(packed: bytes, checksums: bytes, held: Reserved, copies: Copies) -> tuple[int, ...]:
    """Return the bytes of each segment of copies. Raises: TierKVError (invalid)."""
    count, most = len(copies.rows), copies.profile.segments
    whole = struct.unpack(f"<{len(packed) // 8}q", packed) if len(packed) % 8 == 0 else ()
    if len(whole) != count * most or (held.seal and len(checksums) != 16 * count * most):
        raise invalid(f"commit names {len(whole)} lengths for {count} units of {most} segments")
    return whole


def seal(
    store: Store, held: Reserved, copies: Copies, units: Sequence[Written], checksums: bytes
) -> None:
    """Trim the first frames of copies, but for those given up, and write their headers."""
    catalog, host, most = store.catalog, store.host, copies.profile.segments
    parts = {
        number: catalog.part_at(number).pack()
        for number in {catalog.part[row] for row in copies.rows}
    }
    stamps = {
        number: frame.Stamp(
            _header(store, held, copies, held.offers[number], sealed=bool(checksums))
        )
        for number in {unit.profile for unit in units if unit.length}
    }
    for index, (row, unit) in enumerate(zip(copies.rows, units, strict=False)):
        if not unit.length:
            continue
        if copies.header_bytes + unit.length != catalog.nbytes[row]:
            store.trim(row, copies.header_bytes + unit.length)
        offer = held.offers[unit.profile]
        catalog.restate(row, profile=unit.profile, fidelity=offer.fidelity)
        if offer.profile.levels:
            ends = lineage.ends(BY_NUMBER[unit.profile], copies.header_bytes, unit.segments)
            lineage.note_ends(catalog, row, ends)
            if any(ends):
                store.offers.note_levels(offer.artifact)
        header = stamps[unit.profile].pack(
            catalog.key(row), parts[catalog.part[row]], catalog.position[row],
            held.raw[index], unit.segments, checksums[index * 16 * most :][: 16 * most],
        )  # fmt: skip
        start = host.start(catalog.locator[row])
        host.view[start : start + copies.header_bytes] = header


def _header(
    store: Store, held: Reserved, copies: Copies, offer: Offer, *, sealed: bool
) -> frame.Header:
    """Return a header of the frames of one profile, which differ from it little."""
    catalog, row, most = store.catalog, copies.rows[0], copies.profile.segments
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
        epoch=store.host.epoch,
        segments=(1,) * most,
        checksums=(bytes(16),) * most if sealed else (),
    )
