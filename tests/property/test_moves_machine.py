"""The store machine with Moves: copies are cut, sent down and encoded again at any time between.

What is served is then what was put, or what a lawful Move makes of it, at the class that it has.
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from tests.move_rigs import InProcess
from tests.property.store_machine import (
    LENGTHS,
    PAGES,
    PICKS,
    SESSIONS,
    SPACES,
    StoreMachine,
    unit_of,
)
from tests.property.store_model import Unit
from tests.property.test_store_machine import NvmeMachine
from tests.stores import BLOCK, ONE, PAGE, Rig, chain, fill, pattern
from tests.unit.test_gate import domain, entry
from tierkv import calls, frame, lineage
from tierkv.catalog import READY
from tierkv.codec import BY_NUMBER, KVTC, PROFILES, RAW, Profile
from tierkv.encoder import Encoded, Lost
from tierkv.fidelity import Fidelity
from tierkv.gate import Gate
from tierkv.identity import Identity, LayerSpec, Rope, to_wire
from tierkv.plan import Kind, Move
from tierkv.policies.lru import Lru
from tierkv.policy import Picked
from tierkv.reservation import Written
from tierkv.tiers.host import aligned

IDENTITY = Identity(
    model="machine", weights="0", kv_dtype="bf16", tokens_per_block=64,
    layers=(LayerSpec(kv_heads=2, k_dim=16, v_dim=16, rope=Rope()),) * 2,
)  # fmt: skip
FAMILY = IDENTITY.family
ARTIFACT = hashlib.sha256(b"artifact").digest()
CLASSES = {
    "kvtc@4x": Fidelity.NEAR_LOSSLESS, "kvtc@8x": Fidelity.NEAR_LOSSLESS,
    "kvtc@16x": Fidelity.SAFE, "kvtc@32x": Fidelity.SAFE, "int8": Fidelity.SAFE,
}  # fmt: skip
GATE = Gate(
    entries=tuple(
        entry(
            domain(kl_hi=0.005 if fidelity is Fidelity.SAFE else 0.0006),
            profile=name, family=FAMILY.hex(), context=1 << 20,
            artifact=ARTIFACT.hex() if name.startswith("kvtc") else "",
        )
        for name, fidelity in CLASSES.items()
    )
)  # fmt: skip
CUTS = st.sampled_from([(700, 5000, PAGE, PAGE), (PAGE, 10, 10, 10), (10, PAGE, PAGE, 10)])


def kept(nbytes: int, profile: Profile) -> list[int]:
    """Return where the segments end of what `Halves` makes: the finer, the nearer to half."""
    if not profile.levels:
        return [nbytes // 2]
    return [nbytes * level // 8 for level in range(1, profile.levels + 1)]


class Halves(InProcess):
    """Keeps half of what it gets, or less, by the level."""

    def encode(
        self, identity: Identity, header: frame.Header, runs: Sequence[tuple[int, int]],
        profile: Profile, artifact: bytes,
    ) -> Encoded | Lost:  # fmt: skip
        assert artifact == (ARTIFACT if profile.levels else frame.NO_ARTIFACT)
        data = b"".join(self.payload(header, runs))
        ends, start = kept(len(data), profile), frame.header_bytes(profile.segments)
        segments = [end - before for before, end in pairwise([0, *ends])]
        memory = aligned(start + ends[-1])
        memory[start : start + ends[-1]] = data[: ends[-1]]
        return Encoded(memory, (*segments, *(0,) * (profile.segments - len(segments))))


class Pairing(Lru):
    """Wants a progressive copy beside a plain one wherever both may be made."""

    def picks(self, keys: bytes, known: Sequence[bool], choices: Sequence[Profile]) -> Picked:
        if {RAW, KVTC[0]} <= set(choices):
            return Picked(RAW.number, KVTC[0].number)
        return super().picks(keys, known, choices)


class MovesMachine(StoreMachine):
    """Blocks of a progressive codec, exact ones that may be encoded again, pairs, and Moves."""

    put_fields: ClassVar[dict[str, Any]] = {
        "family": FAMILY, "artifacts": (frame.NO_ARTIFACT, ARTIFACT),
    }  # fmt: skip

    def open_rig(self, **fields: Any) -> Rig:
        rig = Rig(PAGES, [self.open_tier()], gate=GATE, **fields)
        rig.store.encode_with(Halves(rig.host.view, [ARTIFACT]))
        rig.store.introduce(1, calls.IdentityCall(identity=to_wire(IDENTITY)))
        rig.store._store.policy = Pairing(2)
        return rig

    def committed(self, space: str, unit: Unit, fidelity: int, data: bytes) -> None:
        super().committed(space, unit, fidelity, data)
        for name, measured in CLASSES.items() if fidelity < Fidelity.EXACT else ():
            end = kept(len(data), PROFILES[name])[-1]
            self.model.add(space, unit, (min(fidelity, measured), data[:end]))

    @rule(space=SPACES, session=SESSIONS, blocks=LENGTHS, cuts=CUTS)
    def put_progressive(self, space: str, session: int, blocks: int, cuts: tuple[int, ...]) -> None:
        keys = chain(session, blocks)
        held = self.rig.offer(
            keys, namespace=space, fidelity=2, raw=3 * PAGE, profiles=("kvtc@4x",),
            artifacts=(ARTIFACT,), family=FAMILY,
        )  # fmt: skip
        if held is None:
            return
        units = [unit_of(keys, ONE, unit) for unit in held.units]
        written = []
        for index, (key, part) in enumerate(units):
            text = b"%d" % next(self.model.serial)
            written.append(pattern(text + key + part, sum(cuts) + 32)[: sum(cuts)])
            fill(held.payload(index), written[-1])
        assert held.commit_written([Written(KVTC[0].number, cuts)] * len(units)) == len(units)
        for unit, data in zip(units, written, strict=True):
            for profile, end in zip(KVTC[::-1], accumulate(cuts), strict=True):
                self.model.add(space, unit, (CLASSES[profile.name], data[:end]))
        self.written.append((space, session, blocks, ONE, 2))

    @rule(
        space=SPACES, session=SESSIONS, blocks=LENGTHS, give_up=st.integers(0, 9),
        cuts=st.sampled_from([(100, 200, 300, 400), (10, 2000, 1, 3000), (2000, 4000, 8000, PAGE)]),
        which=st.integers(0, 4),
    )  # fmt: skip
    def put_pair(
        self, space: str, session: int, blocks: int, give_up: int, cuts: tuple[int, ...],
        which: int,
    ) -> None:  # fmt: skip
        """One progressive copy is missing, or all: of the last cuts, which find no room."""
        keys = chain(session, blocks)
        held = self.rig.offer(
            keys, namespace=space, fidelity=2, profiles=("raw", "kvtc@4x"),
            artifacts=(frame.NO_ARTIFACT, ARTIFACT), family=FAMILY,
        )  # fmt: skip
        if held is None:
            return
        assert held.beside is KVTC[0]
        fits = all(sum(cuts) <= sum(map(len, held.payload_beside(0))) for _ in held.units)
        made = []
        for index, unit in enumerate(held.units):
            text = b"%d" % next(self.model.serial) + keys[unit]
            data, small = pattern(text, BLOCK), pattern(text + b"small", sum(cuts) + 32)
            fill(held.payload(index), data if index != give_up else b"")
            fill(held.payload_beside(index), small[: sum(cuts)] if fits else b"")
            made.append((unit_of(keys, ONE, unit), data, small))
        units = [Written(RAW.number, (BLOCK,) if at != give_up else ()) for at in range(len(made))]
        beside = [Written(KVTC[0].number, cuts if at != which else ()) for at in range(len(made))]
        assert held.commit_written(units, beside=beside) == min(give_up, len(made))
        for at, (name_of, data, small) in enumerate(made[:give_up]):
            self.model.add(space, name_of, (Fidelity.EXACT, data))
            for name, measured in CLASSES.items():
                end = kept(len(data), PROFILES[name])[-1]
                self.model.add(space, name_of, (measured, data[:end]))
            for profile, end in zip(KVTC[::-1], accumulate(cuts), strict=True):
                if fits and at != which:
                    self.model.add(space, name_of, (CLASSES[profile.name], small[:end]))
        self.written.append((space, session, blocks, ONE, 2))

    @rule(pick=PICKS, which=PICKS)
    def move(self, pick: int, which: int) -> None:
        """Carry out any lawful Move of any placement but the loss of what is durable."""
        store, catalog = self.rig.store._store, self.rig.store._store.catalog
        rows = [row for row, state in enumerate(catalog.state) if state == READY]
        if not rows:
            return
        row = rows[pick % len(rows)]
        kinds = (Kind.DROP, Kind.DOWNGRADE, Kind.DEMOTE)
        moves = [
            move
            for move in (Move(*one) for one in product(kinds, (row,), (0, 1), BY_NUMBER))
            if lineage.lawful(catalog, move)
            and not (move.kind is Kind.DROP and (catalog.tier[row] or move.profile != 1))
        ]
        if not moves:
            return
        move = moves[which % len(moves)]
        with store.lock:
            freed = lineage.freed(catalog, move, PAGE if move.tier == 0 else 4096)
            held, before = catalog.holds[row], self.rig.host.space().free
            if move.kind is Kind.DEMOTE:
                self.rig.store._demotions.demote(move)
            else:
                self.rig.store._moves.at_once([move])
            after = self.rig.host.space().free
        if catalog.tier[row] == 0 and move.kind is not Kind.DEMOTE and not held:
            assert after - before == freed

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "rig"):
            assert self.rig.store._moves.going == 0


class MovesOnNvme(MovesMachine, NvmeMachine):
    """Where copies below are cut in place too."""


def test_moves_at_any_time_over_a_dict() -> None:
    run_state_machine_as_test(
        MovesMachine, settings=settings(max_examples=60, stateful_step_count=40)
    )


def test_moves_at_any_time_over_nvme() -> None:
    run_state_machine_as_test(
        MovesOnNvme, settings=settings(max_examples=25, stateful_step_count=40)
    )
