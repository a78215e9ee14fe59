"""Two copies of a block in RAM: the plain one for exact readers, and a progressive one."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kvtc_rigs import PART
from tests.move_rigs import IDENTITY, MoveRig, logs
from tests.stores import BLOCK, PAGE, Rig, chain, fill
from tierkv import calls, pairs
from tierkv.catalog import READY
from tierkv.codec import PROFILES, Profile
from tierkv.errors import TierKVError
from tierkv.fidelity import Fidelity
from tierkv.policies.lru import Lru
from tierkv.policy import Picked
from tierkv.reservation import GIVEN_UP, Reservation, Written
from tierkv.simulation.progressive import ARTIFACT, FAMILY, GATE
from tierkv.tier import RAM


def rows(rig: MoveRig, key: bytes) -> dict[str, int]:
    """Return a block's ready copies in RAM by the names of their profiles."""
    catalog = rig.catalog
    names = {profile.number: name for name, profile in PROFILES.items()}
    return {
        names[catalog.profile[row]]: row
        for row in catalog.copies(catalog.head(key, 0))
        if catalog.tier[row] == RAM and catalog.state[row] == READY
    }


def fidelities(rig: MoveRig, keys: list[bytes], least: Fidelity) -> list[int]:
    return [header.fidelity for header, _ in rig.get_blocks(keys, least)]


@pytest.fixture
def pair() -> MoveRig:
    """A rig whose chain 1 has a copy of each family in RAM."""
    rig = MoveRig([])
    rig.put_blocks(chain(1, 3), "kvtc@4x")
    rig.put_blocks(chain(1, 3), "raw", Fidelity.EXACT)
    return rig


def test_an_exact_copy_comes_beside_a_progressive_one(pair: MoveRig) -> None:
    for key in chain(1, 3):
        assert set(rows(pair, key)) == {"raw", "kvtc@4x"}
    for least in Fidelity.EXACT, Fidelity.SAFE:  # whoever asks, it loads quickest
        assert fidelities(pair, chain(1, 3), least) == [Fidelity.EXACT] * 3
    assert pair.offer(chain(1, 3), **pair.call_fields()) is None
    pair.sound()


@pytest.mark.parametrize("many", [1, 256], ids=["far", "near"])
def test_what_is_left_of_a_pair_answers_who_may_have_it(
    pair: MoveRig, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.store.MANY", many)
    keys = chain(1, 3)
    pair.store._store.drop([rows(pair, keys[1])["raw"]])
    assert fidelities(pair, keys, Fidelity.EXACT) == [Fidelity.EXACT]
    found = fidelities(pair, keys, Fidelity.SAFE)
    assert found == [Fidelity.EXACT, Fidelity.NEAR_LOSSLESS, Fidelity.EXACT]
    pair.store._store.drop([rows(pair, keys[0])["kvtc@4x"]])
    assert fidelities(pair, keys, Fidelity.SAFE) == found
    pair.idle()


@pytest.mark.parametrize("many", [1, 256], ids=["far", "near"])
def test_the_plain_one_answers_though_it_is_older(
    pair: MoveRig, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.store.MANY", many)
    store, found = pair.store._store, rows(pair, chain(1, 1)[0])
    store.drop([found["kvtc@4x"]])
    locator = store.host.reserve(PAGE)
    assert locator is not None
    number = PROFILES["kvtc@4x"].number
    store.catalog.commit([store.copy_of(found["raw"], RAM, locator, profile=number, nbytes=PAGE)])
    heads, space = store.heads(chain(1, 1)[0], [0]), store.catalog.namespace[found["raw"]]
    assert store.catalog.profile[int(heads[0])] == number
    assert store.look(heads, 1, space).tolist() == [found["raw"]]
    assert store.ready_in(RAM, int(heads[0]), 1, space) == found["raw"]


def test_a_pair_that_is_gone_gives_all_its_bytes_back(pair: MoveRig) -> None:
    every = [row for key in chain(1, 3) for row in rows(pair, key).values()]
    pair.store._store.drop(every)
    assert pair.host.space().free == pair.host.space().capacity
    pair.idle()


def test_a_copy_of_the_same_family_makes_way(pair: MoveRig) -> None:
    """A poorer one: two plain copies never stand side by side."""
    rig = MoveRig([])
    rig.put_blocks(chain(1, 2), "int8")
    rig.put_blocks(chain(1, 2), "raw", Fidelity.EXACT)
    assert [set(rows(rig, key)) for key in chain(1, 2)] == [{"raw"}] * 2
    rig.put_blocks(chain(2, 2), "kvtc@32x")
    rig.put_blocks(chain(2, 2), "kvtc@4x", Fidelity.NEAR_LOSSLESS)
    assert [set(rows(rig, key)) for key in chain(2, 2)] == [{"kvtc@4x"}] * 2
    rig.idle()


def put_beside(rig: MoveRig, name: str, least: Fidelity) -> Reservation:
    """Reserve chain 1 in a profile; nothing is written yet."""
    held = rig.offer(
        chain(1, 1), profiles=(name,), artifacts=rig.codecs.artifacts((name,)),
        family=IDENTITY.family, raw=64 * 1024, **rig.call_fields(least),
    )  # fmt: skip
    assert held is not None
    return held


def test_a_fallback_whose_place_was_taken_is_given_up(tmp_path: Path) -> None:
    """A progressive copy is being written, an exact one comes up, and the first turns out plain."""
    with logs(tmp_path / "log") as log:
        rig = MoveRig([log()])
        rig.put_blocks(chain(1, 1), "raw", Fidelity.EXACT)
        assert rig.flush(chain(1, 1), parts=(PART,)) == b"\1"
        rig.store._store.drop([*rows(rig, chain(1, 1)[0]).values()])
        rig.catalog.restate(rig.row(chain(1, 1)[0], 1), fidelity=int(Fidelity.ECONOMY))
        held = put_beside(rig, "kvtc@4x", Fidelity.SAFE)
        rig.catalog.restate(rig.row(chain(1, 1)[0], 1), fidelity=int(Fidelity.EXACT))
        assert fidelities(rig, chain(1, 1), Fidelity.EXACT) == [Fidelity.EXACT]
        assert held.commit_written([Written(PROFILES["lossless"].number, (5,))]) == 0
        assert set(rows(rig, chain(1, 1)[0])) == {"raw"}
        rig.idle()


def test_an_exact_copy_comes_up_beside_a_progressive_one(tmp_path: Path) -> None:
    with logs(tmp_path / "log") as log:
        rig = MoveRig([log()])
        keys = chain(1, 2)
        rig.put_blocks(keys, "raw", Fidelity.EXACT)
        assert rig.flush(keys, parts=(PART,)) == b"\1\1"
        rig.store._store.drop([row for key in keys for row in rows(rig, key).values()])
        for key in keys:  # as if another's readers could not have it
            rig.catalog.restate(rig.row(key, 1), fidelity=int(Fidelity.ECONOMY))
        rig.put_blocks(keys, "kvtc@4x")
        for key in keys:
            rig.catalog.restate(rig.row(key, 1), fidelity=int(Fidelity.EXACT))
        assert fidelities(rig, keys, Fidelity.SAFE) == [Fidelity.NEAR_LOSSLESS] * 2
        assert fidelities(rig, keys, Fidelity.EXACT) == [Fidelity.EXACT] * 2
        assert set(rows(rig, keys[0])) == {"raw", "kvtc@4x"}
        rig.idle()


def test_what_turns_out_to_be_like_what_is_there_is_a_miss_once(tmp_path: Path) -> None:
    """A probe cannot know a frame's profile: one that was read into the wrong place is let go."""
    with logs(tmp_path / "log") as log:
        rig = MoveRig([log()])
        keys = chain(1, 1)
        rig.put_blocks(keys, "kvtc@4x")
        assert rig.flush(keys, parts=(PART,)) == b"\1"
        rig.downgrade(keys, "kvtc@32x")
        rig.catalog.restate(rig.row(keys[0], 1), profile=1, fidelity=int(Fidelity.EXACT))
        assert fidelities(rig, keys, Fidelity.NEAR_LOSSLESS) == []
        rig.sound()
        assert fidelities(rig, keys, Fidelity.NEAR_LOSSLESS) == [Fidelity.NEAR_LOSSLESS]
        assert set(rows(rig, keys[0])) == {"kvtc@4x"}
        rig.idle()


def test_below_goes_the_one_that_all_readers_may_have(tmp_path: Path) -> None:
    """Exact readers put the plain one: it is what is written, though it is larger."""
    with logs(tmp_path / "log") as log:
        rig = MoveRig([log()])
        keys = chain(1, 2)
        rig.put_blocks(keys, "kvtc@4x")
        rig.put_blocks(keys, "raw", Fidelity.EXACT)
        for key in keys:
            assert pairs.down(rig.catalog, rows(rig, key)["kvtc@4x"]) == rows(rig, key)["raw"]
        assert rig.flush(keys, parts=(PART,)) == b"\1\1"
        rig.store._store.drop([row for key in keys for row in rows(rig, key).values()])
        assert fidelities(rig, keys, Fidelity.EXACT) == [Fidelity.EXACT] * 2
        rig.idle()


class Pairing(Lru):
    """Wants raw copies with kvtc beside them."""

    def picks(self, keys: bytes, known: Sequence[bool], choices: Sequence[Profile]) -> Picked:
        return Picked(PROFILES["raw"].number, PROFILES["kvtc@4x"].number)


def offer_pair(rig: Rig, **fields: Any) -> Reservation:
    """Reserve a chain of three, each block twice."""
    values: dict[str, Any] = {
        "profiles": ("raw", "kvtc@4x"), "artifacts": (b"", ARTIFACT), "family": FAMILY,
        "fidelity": int(Fidelity.ECONOMY),
    }  # fmt: skip
    rig.store._store.policy = Pairing(1 + len(rig.lower))
    held = rig.offer(chain(1, 3), **(values | fields))
    assert held is not None
    assert held.beside is not None
    return held


def write_pair(held: Reservation, cuts: tuple[int, ...] = (10, 20, 30, 40)) -> int:
    for index in range(3):
        fill(held.payload(index), b"%d" % index * BLOCK)
        fill(held.payload_beside(index), b"%d" % (index + 5) * sum(cuts))
    units = [Written(PROFILES["raw"].number, (BLOCK,))] * 3
    beside = [Written(PROFILES["kvtc@4x"].number, cuts)] * 3
    return held.commit_written(units, beside=beside)


def copies(rig: Rig, tier: int = RAM) -> list[str]:
    """Return the profiles of what is ready in a tier."""
    catalog = rig.store._store.catalog
    names = {profile.number: name for name, profile in PROFILES.items()}
    rows = catalog.select(tier, READY).tolist()
    return sorted(names[catalog.profile[row]] for row in rows)


@pytest.mark.parametrize("verify", ["always", "media"])
def test_a_put_makes_both_and_the_small_one_goes_down(verify: str) -> None:
    rig = Rig(16, gate=GATE, verify=verify)
    assert write_pair(offer_pair(rig)) == 3
    assert copies(rig) == ["kvtc@4x"] * 3 + ["raw"] * 3
    rig.inline.drain()
    assert copies(rig, 1) == ["kvtc@4x"] * 3
    for least in Fidelity.ECONOMY, Fidelity.EXACT:
        assert rig.read(chain(1, 3), fidelity=int(least)) == [b"%d" % n * BLOCK for n in range(3)]
    store = rig.store._store
    store.drop(store.catalog.select(RAM, READY).tolist())
    fields: dict[str, Any] = {"fidelity": int(Fidelity.ECONOMY)}
    assert rig.read(chain(1, 3), **fields) == [b"%d" % (n + 5) * 100 for n in range(3)]
    assert rig.read(chain(1, 3)) == []
    rig.idle()


def test_a_second_copy_may_be_given_up_alone_and_takes_no_room_then() -> None:
    rig = Rig(16, [], gate=GATE)
    held = offer_pair(rig)
    assert rig.host.space().free == 10 * PAGE, "a page each, where raw ones take one"
    fill(held.payload(0), b"0" * BLOCK)
    units = [Written(PROFILES["raw"].number, (BLOCK,))] * 3
    too_long, no = Written(PROFILES["kvtc@4x"].number, (PAGE,)), GIVEN_UP
    assert held.commit_written(units, beside=[no, too_long, no]) == 3
    assert copies(rig) == ["raw"] * 3
    assert rig.host.space().capacity - rig.host.space().free == 3 * PAGE
    rig.idle()


@pytest.mark.parametrize("end", ["abort", "owner", "give up", "clear", "old client"])
def test_a_pair_whose_put_ends_early_leaves_no_second_copies(end: str) -> None:
    rig = Rig(16, [], gate=GATE)
    held = offer_pair(rig)
    match end:
        case "abort":
            held.abort()
        case "owner":
            rig.store.disown(1)
        case "give up":
            beside = [Written(PROFILES["kvtc@4x"].number, (1, 2, 3, 4))] * 3
            assert held.commit_written([GIVEN_UP] * 3, beside=beside) == 0
        case "clear":
            rig.clear()
            assert write_pair(held) == 0
        case _:
            assert held.commit([BLOCK] * 3) == 3
    assert copies(rig) == (["raw"] * 3 if end == "old client" else [])
    left = 3 * PAGE if end == "old client" else 0
    assert rig.host.space().capacity - rig.host.space().free == left
    rig.idle()


@pytest.mark.parametrize("beside", [b"x", bytes(8 * 11), struct.pack("<12q", *[-1] * 12)])
def test_a_commit_that_names_no_such_copies_is_refused(beside: bytes) -> None:
    rig = Rig(16, [], gate=GATE)
    held = offer_pair(rig)
    call = calls.CommitCall(
        reservation=held.number, lengths=struct.pack("<3q", *[BLOCK] * 3), beside=beside
    )
    with pytest.raises(TierKVError):
        rig.store.commit(1, call)
    assert rig.host.space().free == rig.host.space().capacity
    rig.idle()
