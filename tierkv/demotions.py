"""Demotions: copies that leave RAM for a lower tier before somebody waits for their room.

When free RAM falls below the low water, the policy is asked for Moves, and its demotions are begun:
what it drops or cuts short takes no I/O and can wait until the room is wanted. It is asked when
bytes have come into RAM since the last time, the more of them the less came of it: where nothing
has changed it has no other answer.

A demotion goes to the write-behind queue as it is or as a prefix, or is encoded again first, by an
encoder that the `encode` lane waits for. A copy that the encoder lost is marked, and the policy
does not think of encoding it any more; one that only a calibration does not fit may still take
another profile. The copy in RAM is held until the one below can be read, so
a kill at any time loses nothing that was durable.
"""

from functools import partial
from itertools import compress

import msgspec

from tierkv import frame, lineage
from tierkv.catalog import NONE, READY, Rows
from tierkv.codec import BY_NUMBER
from tierkv.encoder import Encoded, Lost
from tierkv.moves import Moves, stamp
from tierkv.plan import Kind, Move
from tierkv.policy import ServicePolicy
from tierkv.store import Store
from tierkv.tier import RAM
from tierkv.write_behind import WriteBehind

LOW_WATER = 1 / 32
"""Share of RAM that is made free ahead of puts, by a policy that would."""
STEP = 1 / 256
"""Share of RAM that comes in before the policy is asked again: a search takes a millisecond."""
MOST_STEP = 1 / 8
"""The same where it had nothing to demote, again and again."""
ENCODES = 8
"""Frames that may wait for the encoder: nobody can give them up meanwhile."""
LANE = "encode"


class Demotions:
    """Keeps RAM above its low water. Called under the store's lock."""

    def __init__(self, store: Store, moves: Moves, write_behind: WriteBehind) -> None:
        self._store = store
        self._moves = moves
        self._write_behind = write_behind
        self._encoding = 0
        self._more = False
        """Whether the encoder had no time for what was wanted."""
        self._asked: ServicePolicy | None = None
        self._step = STEP
        self._ask_from = 0.0
        """Bytes that have come into RAM when the policy is asked again."""

    def relieve(self) -> None:
        """Begin the demotions that the policy asks for up to the low water."""
        store, space = self._store, self._store.host.space()
        need = int(space.capacity * LOW_WATER) - space.free - self._moves.going
        came = store.totals["stored_bytes"] + store.totals["promoted_bytes"]
        new = self._asked is not store.policy
        if need <= 0 or not (new or came >= self._ask_from):
            return
        self._asked = store.policy
        moves = self._moves.plan(RAM, need, at_once=False)
        found = [move for move in moves if move.kind is Kind.DEMOTE]
        self._step = STEP if found or new else min(2 * self._step, MOST_STEP)
        self._ask_from = came + max(self._step * space.capacity, 1)
        for move in found:
            self.demote(move)

    def seen(self, rows: Rows) -> None:
        """Offer RAM placements that were asked for again, where a lower tier lacks them."""
        catalog, lower = self._store.catalog, self._store.lower
        heads = [catalog.head(catalog.key(row), catalog.part[row]) for row in rows]
        lacks = [any(catalog.in_tier(head, low.number) == NONE for low in lower) for head in heads]
        self._write_behind.offer(list(compress(rows, lacks)))

    def demote(self, move: Move) -> None:
        """Start a lawful demotion; one for which the encoder has no time now is left out."""
        store, catalog, row = self._store, self._store.catalog, move.row
        as_it_is = lineage.size(catalog, row, move.profile)
        if not as_it_is and not self._has_time(move.tier):
            self._more = True
            return
        catalog.hold([row])
        self._moves.going += catalog.allocated[row]
        if as_it_is:
            self._write_behind.demote(move)
        else:
            self._encoding += 1
            store.executor.submit(LANE, partial(self._encode, move))

    def _has_time(self, tier: int) -> bool:
        """Return whether a frame may be encoded: what was and waits to be written takes memory."""
        limit = self._store.settings.write_behind_bytes
        return self._encoding < ENCODES and self._write_behind.queues[tier - 1].nbytes <= limit

    def _encode(self, move: Move) -> None:
        """Have a frame encoded that is held; a job of the encode lane."""
        store, catalog, row = self._store, self._store.catalog, move.row
        with store.lock:
            runs = store.host.runs(catalog.locator[row])
            gone = catalog.state[row] != READY
            fidelity = lineage.fidelity(catalog, row, move.profile)
            allowed = catalog.allowed(row).get(move.profile)
            artifact = allowed.artifact if allowed else frame.NO_ARTIFACT
        made = Lost.DOWN if gone else self._made(move, runs, fidelity, artifact)
        with store.lock:
            self._encoding -= 1
            if self._more:
                self._more, self._ask_from = False, 0.0
            if isinstance(made, Encoded):
                store.counters["encoded"] += 1
                self._write_behind.demote(move, made)
                return
            if not gone:
                store.counters[made.value] += 1
                if made is not Lost.DOWN:
                    calibrated = made is Lost.REFUSED and artifact != frame.NO_ARTIFACT
                    lost = lineage.NO_CALIBRATED if calibrated else lineage.NOTHING
                    catalog.restate(row, fixed=max(lost, catalog.fixed[row]))
            self._moves.going -= catalog.allocated[row]
            store.unhold([row])

    def _made(
        self, move: Move, pages: list[tuple[int, int]], fidelity: int, artifact: bytes
    ) -> Encoded | Lost:
        """Return the frame of a block in another profile, with its header."""
        store, profile = self._store, BY_NUMBER[move.profile]
        assert store.encoder is not None, "a demotion that may not be"
        page = store.host.page_bytes
        runs = [(first * page, count * page) for first, count in pages]
        start = runs[0][0]
        header = frame.parse(bytes(store.host.view[start : start + frame.MAX_HEADER_BYTES]))
        identity = None
        if isinstance(header, frame.Header):
            identity = store.offers.identity_of(header)
        if isinstance(header, frame.Refusal) or identity is None:
            return Lost.REFUSED
        made = store.encoder.encode(identity, header, runs, profile, artifact)
        if isinstance(made, Encoded):
            new = msgspec.structs.replace(
                header,
                codec_id=profile.codec_id,
                flags=header.flags | (frame.LOSSY if profile.lossy else 0),
                segments=made.segments,
                checksums=(),
                artifact=artifact,
            )
            stamp(made.memory, new, fidelity)
        return made
