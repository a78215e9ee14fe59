"""Commits of units in segments and of several profiles, on a real store."""

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tests.stores import BLOCK, Rig, chain, fill, pattern, payload_of
from tests.unit.test_gate import domain, entry
from tierkv import calls, codec, frame
from tierkv.codec import INT8, LOSSLESS, RAW, Profile
from tierkv.errors import TierKVError
from tierkv.fidelity import Fidelity
from tierkv.gate import Gate
from tierkv.reservation import GIVEN_UP, Reservation, Written

FAMILY = b"f" * 32
PROGRESSIVE = Profile(
    name="progressive", number=100, codec_id=900, lossy=True, ratio=8.0, decode_bps=1e9, segments=4
)
LOSSY_PUT: dict[str, Any] = {"family": FAMILY, "fidelity": int(Fidelity.SAFE)}


@pytest.fixture(autouse=True)
def progressive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codec.PROFILES, PROGRESSIVE.name, PROGRESSIVE)
    monkeypatch.setitem(codec.BY_NUMBER, PROGRESSIVE.number, PROGRESSIVE)
    monkeypatch.setitem(codec.BY_CODEC_ID, PROGRESSIVE.codec_id, PROGRESSIVE)


@pytest.fixture(params=["trusting", "always"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    names = (PROGRESSIVE.name, INT8.name)
    gate = Gate(entries=tuple(entry(profile=name, family=FAMILY.hex()) for name in names))
    settings: dict[str, Any] = {"verify": "always"} if request.param == "always" else {}
    made = Rig(gate=gate, **settings)
    yield made
    made.idle()
    made.store.close(0.0)


def offered(rig: Rig, *profiles: str, blocks: int = 3) -> Reservation:
    held = rig.offer(chain(1, blocks), profiles=profiles, **LOSSY_PUT)
    assert held is not None
    assert held.profile == profiles[0]
    return held


def headers(rig: Rig, blocks: int = 3) -> list[frame.Header]:
    call = rig.match_call(chain(1, blocks), fidelity=int(Fidelity.SAFE))
    reply = rig.match(chain(1, blocks), fidelity=int(Fidelity.SAFE))
    transfer = rig.transfer(reply, call)
    assert transfer is not None
    with transfer:
        found = transfer.headers()
        for unit, header in enumerate(found):
            assert payload_of(transfer, unit) == pattern(bytes([unit]), header.payload_bytes)
        return found


def test_segments_come_back_as_they_were_written(rig: Rig) -> None:
    held = offered(rig, "progressive")
    cuts = [(100, 200, 300, 400), (1000,), (7, 0, 9)]
    for unit, cut in enumerate(cuts):
        fill(held.payload(unit), pattern(bytes([unit]), sum(cut)))
    assert held.commit_written([Written(PROGRESSIVE.number, cut) for cut in cuts]) == 3
    found = headers(rig)
    assert [header.segments for header in found] == [
        (100, 200, 300, 400),
        (1000, 0, 0, 0),
        (7, 0, 9, 0),
    ]
    assert {header.flags for header in found} == {frame.LOSSY}
    assert {header.codec_id for header in found} == {900}


def test_a_prefix_of_the_segments_is_a_frame_that_verifies(rig: Rig) -> None:
    held = offered(rig, "progressive", blocks=1)
    fill(held.payload(0), pattern(b"\0", 600))
    held.commit_written([Written(PROGRESSIVE.number, (100, 200, 300))])
    (header,) = headers(rig, blocks=1)
    payload = bytearray(pattern(b"\0", 600))
    whole = bytearray(frame.pack(header)) + payload
    sealed = frame.seal(header, [whole])
    cut = frame.truncate(sealed, 2)
    assert cut.payload_bytes == 300
    assert frame.verify(cut, [bytearray(frame.pack(cut)) + payload[:300]])


def test_units_of_other_profiles_say_what_they_are(rig: Rig) -> None:
    held = offered(rig, "int8", "lossless")
    for unit in range(3):
        fill(held.payload(unit), pattern(bytes([unit]), 500 + unit))
    numbers = (INT8.number, LOSSLESS.number, RAW.number)
    units = [Written(number, (500 + unit,)) for unit, number in enumerate(numbers)]
    assert held.commit_written(units) == 3
    found = headers(rig)
    assert [header.codec_id for header in found] == [3, 2, 1]
    assert [header.flags for header in found] == [frame.LOSSY, 0, 0]
    assert [header.fidelity for header in found] == [
        Fidelity.NEAR_LOSSLESS,
        Fidelity.EXACT,
        Fidelity.EXACT,
    ]
    assert rig.stat()["counters"]["put_fallback"] == 2


def test_what_is_given_up_ends_the_chain(rig: Rig) -> None:
    held = offered(rig, "progressive")
    fill(held.payload(0), pattern(b"\0", 10))
    one = Written(PROGRESSIVE.number, (10,))
    assert held.commit_written([one, GIVEN_UP, one]) == 1
    assert len(headers(rig)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"profiles": bytes([INT8.number] * 2)},
        {"profiles": bytes([PROGRESSIVE.number] * 3)},
        {"profiles": bytes([250] * 3)},
        {"profiles": bytes([INT8.number] * 4)},
        {"lengths": struct.pack("<3q", 5, -1, 5)},
        {"lengths": struct.pack("<2q", 5, 5)},
        {"lengths": b"123"},
    ],
    ids=["too-few", "not-offered", "unknown", "too-many", "negative", "short", "odd"],
)
def test_a_commit_that_says_wrong_things_is_refused_whole(
    rig: Rig, changes: dict[str, bytes]
) -> None:
    held = offered(rig, "int8")
    values: dict[str, Any] = {"reservation": held.number, "lengths": struct.pack("<3q", 5, 5, 5)}
    if rig.store._store.settings.verify == "always":
        values["checksums"] = bytes(16 * 3)
    with pytest.raises(TierKVError, match=r"commit names|not among"):
        rig.store.commit(1, calls.CommitCall(**(values | changes)))
    assert not rig.read(chain(1, 3), fidelity=int(Fidelity.SAFE))


def test_a_lossy_frame_takes_no_more_ram_than_its_bytes() -> None:
    gate = Gate(entries=(entry(domain(), profile="int8", family=FAMILY.hex()),))
    made = Rig(pages=64, gate=gate)
    held = made.offer(chain(1, 3), profiles=("int8",), raw=4 * BLOCK, **LOSSY_PUT)
    assert held is not None
    held.commit_written([Written(INT8.number, (2 * BLOCK,))] * 3)
    host = next(one for one in made.stat()["tiers"] if one["name"] == "host")
    assert host["used_bytes"] == 3 * 2 * (16 << 10)
    made.idle()
    made.store.close(0.0)
