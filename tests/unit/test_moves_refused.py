"""Moves that may not be, or cannot: by the gate, for exact readers, of an unknown model."""

import pytest
import torch

from tests.move_rigs import KEYS, NVME, Logs, MoveRig, gate_of, is_prefix, used
from tests.stores import chain
from tierkv import lineage
from tierkv.catalog import NONE
from tierkv.codec import INT8, LOSSLESS, PROFILES, RAW
from tierkv.fidelity import Fidelity
from tierkv.plan import Kind
from tierkv.policies.steps import Steps
from tierkv.tier import RAM
from tierkv_codecs import CODECS

pytestmark = pytest.mark.usefixtures("always_short")


def test_what_the_gate_does_not_allow_is_not_made(opened: Logs) -> None:
    rig = MoveRig([opened()], gate=gate_of("kvtc@4x", "kvtc@16x"))
    rig.encode()
    stored = rig.put_blocks(KEYS, "kvtc@4x")
    raws = chain(2, 1)
    rig.put_blocks(raws, "raw")
    before = used(rig, RAM)
    rig.downgrade(KEYS, "kvtc@8x")
    rig.order(Kind.DEMOTE, raws, NVME, RAM, "int8")
    rig.order(Kind.DEMOTE, KEYS, NVME, RAM, "int8")
    rig.relieve()
    rig.inline.drain()
    assert rig.count("moves_refused") == 5
    assert (used(rig, RAM), used(rig, NVME)) == (before, 0)
    is_prefix(rig, stored, 4)
    rig.downgrade(KEYS, "kvtc@16x")
    is_prefix(rig, stored, 2)


def test_blocks_of_exact_readers_are_never_made_worse(opened: Logs) -> None:
    rig = MoveRig([opened()])
    rig.encode()
    (stored, *_) = rig.put_blocks(KEYS, "raw", Fidelity.EXACT)
    rig.order(Kind.DEMOTE, KEYS, NVME, RAM, "int8")
    rig.relieve()
    rig.inline.drain()
    assert rig.count("moves_refused") == 2
    assert all(rig.row(key, NVME) == NONE for key in KEYS)
    rig.order(Kind.DEMOTE, KEYS, NVME, RAM, "lossless")
    rig.relieve()
    rig.inline.drain()
    ((header, block), _) = rig.get_blocks(KEYS, Fidelity.EXACT)
    assert header.codec_id == LOSSLESS.codec_id
    assert torch.equal(block, stored.block)


@pytest.mark.parametrize("knows", [True, False], ids=["unknown model", "no encoder"])
def test_what_cannot_be_encoded_stays_in_ram(opened: Logs, knows: bool) -> None:
    rig = MoveRig([opened()])
    if knows:
        rig.encode(knows=False)
    rig.put_blocks(KEYS, "raw")
    before = used(rig, RAM)
    rig.order(Kind.DEMOTE, KEYS, NVME, RAM, "int8")
    rig.relieve()
    rig.inline.drain()
    assert rig.count("encode_refused" if knows else "moves_refused") == 2
    assert (used(rig, RAM), used(rig, NVME), rig.store._moves.going) == (before, 0, 0)
    assert len(rig.get_blocks(KEYS)) == 2
    rig.idle()


def test_what_could_not_be_encoded_is_not_chosen_again(opened: Logs) -> None:
    rig = MoveRig([opened()])
    rig.encode(knows=False)
    rig.put_blocks(KEYS, "raw")
    rows, catalog = [rig.row(key, RAM) for key in KEYS], rig.catalog
    steps = Steps(rig.store._store.rates())
    smaller = [INT8.number, LOSSLESS.number]
    before = steps.allowed(catalog, rows[0])
    assert all(lineage.makes(catalog, row, one) for row in rows for one in smaller)
    rig.order(Kind.DEMOTE, KEYS[:1], NVME, RAM, "int8")
    rig.relieve()
    rig.inline.drain()
    assert not any(lineage.makes(catalog, rows[0], one) for one in smaller)
    assert lineage.makes(catalog, rows[0], RAW.number), "as it is, it may go"
    assert all(lineage.makes(catalog, rows[1], one) for one in smaller)
    assert steps.allowed(catalog, rows[0]) & ~before == 0
    assert steps.allowed(catalog, rows[0]) < steps.allowed(catalog, rows[1]) == before
    rig.store._store.drop(rows)
    again = rig.put_blocks(KEYS, "raw")
    assert lineage.makes(catalog, rig.row(KEYS[0], RAM), INT8.number), "another block in the row"
    assert len(again) == 2


def test_what_no_calibration_fits_goes_down_otherwise(
    opened: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = MoveRig([opened()])
    rig.encode()
    rig.put_blocks(KEYS, "raw")
    monkeypatch.setattr("tests.move_rigs.registry", lambda: CODECS)
    rig.order(Kind.DEMOTE, KEYS, NVME, RAM, "kvtc@8x")
    rig.relieve()
    rig.inline.drain()
    rows = [rig.row(key, RAM) for key in KEYS]
    assert rig.count("encode_refused") == 2
    assert not any(lineage.makes(rig.catalog, row, PROFILES["kvtc@8x"].number) for row in rows)
    rig.order(Kind.DEMOTE, KEYS, NVME, RAM, "int8")
    rig.relieve()
    rig.inline.drain()
    assert {rig.catalog.profile[rig.row(key, NVME)] for key in KEYS} == {INT8.number}
