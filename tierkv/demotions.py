"""Demotions: copies that leave RAM for a lower tier before somebody waits for their room.

When free RAM falls below the low water, the policy is asked for Moves, and its demotions are begun:
what it drops or cuts short takes no I/O and can wait until the room is wanted. A demotion goes to
the write-behind queue as it is or as a prefix, or is encoded again on the `encode` lane first. The
copy in RAM is held until the one below can be read, so a kill at any time loses nothing that was
durable.
"""

from functools import partial

import msgspec

from tierkv import frame, lineage
from tierkv.catalog import READY
from tierkv.codec import BY_NUMBER, Profile
from tierkv.encoder import Encoder
from tierkv.moves import Encoded, Moves, stamp
from tierkv.plan import Kind, Move
from tierkv.store import Store
from tierkv.tier import RAM
from tierkv.tiers.host import aligned
from tierkv.write_behind import WriteBehind

LOW_WATER = 1 / 32
"""Share of RAM that is made free ahead of puts, by a policy that would."""
ASK_S = 0.05
"""The policy is not asked more often: a search takes a millisecond."""
LANE = "encode"


class Demotions:
    """Keeps RAM above its low water. Called under the store's lock.

    `encoder` makes other profiles; with None copies are demoted as they are, or cut short.
    """

    def __init__(self, store: Store, moves: Moves, write_behind: WriteBehind) -> None:
        self._store = store
        self._moves = moves
        self._write_behind = write_behind
        self.encoder: Encoder | None = None
        self._asked = float("-inf")

    def relieve(self) -> None:
        """Begin the demotions that the policy asks for up to the low water."""
        space, now = self._store.host.space(), self._store.clock()
        need = int(space.capacity * LOW_WATER) - space.free - self._moves.going
        if need <= 0 or now - self._asked < ASK_S:
            return
        self._asked = now
        for move in self._moves.plan(RAM, need, at_once=False):
            if move.kind is Kind.DEMOTE:
                self.demote(move)

    def demote(self, move: Move) -> None:
        """Start a lawful demotion."""
        store, catalog, row = self._store, self._store.catalog, move.row
        as_it_is = lineage.size(catalog, row, move.profile)
        assert as_it_is or self.encoder is not None, "a demotion that may not be"
        catalog.hold([row])
        self._moves.going += catalog.allocated[row]
        if as_it_is:
            self._write_behind.demote(move)
        else:
            store.executor.submit(LANE, partial(self._encode, move))

    def _encode(self, move: Move) -> None:
        """Encode a frame that is held; a job of the encode lane."""
        store, catalog, encoder = self._store, self._store.catalog, self.encoder
        assert encoder is not None
        with store.lock:
            pieces = store.host.pieces(catalog.locator[move.row])
            gone = catalog.state[move.row] != READY
            fidelity = lineage.fidelity(catalog, move.row, move.profile)
        made = None if gone else _encoded(encoder, pieces, BY_NUMBER[move.profile], fidelity)
        with store.lock:
            if made is not None:
                self._write_behind.demote(move, made)
                return
            if not gone:
                store.counters["encode_refused"] += 1
            self._moves.going -= catalog.allocated[move.row]
            store.unhold([move.row])


def _encoded(
    encoder: Encoder, pieces: list[memoryview], profile: Profile, fidelity: int
) -> Encoded | None:
    """Return the frame of a block in another profile, None where it cannot be made."""
    header = frame.parse(bytes(pieces[0][: frame.MAX_HEADER_BYTES]))
    if isinstance(header, frame.Refusal):
        return None
    start = frame.header_bytes(1)
    memory = aligned(start + header.raw_bytes + profile.bound_extra)
    payload = frame.cut(pieces, header.header_bytes, header.payload_bytes)
    length = encoder.encode(header, payload, profile, memory[start:])
    if not 0 < length <= frame.payload_bound(header.raw_bytes):
        return None
    new = msgspec.structs.replace(
        header,
        codec_id=profile.codec_id,
        flags=header.flags | (frame.LOSSY if profile.lossy else 0),
        segments=(length,),
        checksums=(),
        artifact=frame.NO_ARTIFACT,
    )
    stamp(memory, new, fidelity)
    return Encoded(memory, start + length)
