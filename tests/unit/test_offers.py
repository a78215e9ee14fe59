"""The store and the gate: which profile a put may use, and whom a lossy copy may answer."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.memory_tier import MemoryTier
from tests.stores import Rig, chain
from tests.unit.test_gate import domain, entry
from tierkv import codec, frame, gate, identity
from tierkv.cache import TierKV
from tierkv.codec import KVTC, Profile
from tierkv.errors import TierKVError
from tierkv.fidelity import Fidelity
from tierkv.gate import Gate
from tierkv.identity import Identity, LayerSpec, Rope
from tierkv.offers import MAX_REASONS, OTHERS, Offers
from tierkv.settings import Settings, StoreSettings
from tierkv.stat import from_wire
from tierkv.tiers.host import HostSettings

FAMILY, ARTIFACT = (hashlib.sha256(name).digest() for name in (b"family", b"artifact"))
EXACT, SAFE, ECONOMY = Fidelity.EXACT, Fidelity.SAFE, Fidelity.ECONOMY
LOSSY = Profile(
    name="lossy", number=100, codec_id=900, lossy=True, ratio=8.0, decode_bps=float("inf")
)
CALIBRATED = Profile(
    name="calibrated", number=101, codec_id=901, lossy=True, ratio=9.0, decode_bps=float("inf")
)


@pytest.fixture(autouse=True)
def lossy_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (LOSSY, CALIBRATED):
        monkeypatch.setitem(codec.PROFILES, one.name, one)
        monkeypatch.setitem(codec.BY_NUMBER, one.number, one)
        monkeypatch.setitem(codec.BY_CODEC_ID, one.codec_id, one)


def gate_of(*entries: Any) -> Gate:
    return Gate(entries=entries or (measured("lossy"),))


def measured(profile: str, kl: float = 0.005, **fields: Any) -> Any:
    values: dict[str, Any] = {"profile": profile, "family": FAMILY.hex()}
    return entry(domain(kl_mean=kl, kl_hi=kl), **(values | fields))


def offered(**fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "profiles": ("raw", "lossy"), "family": FAMILY, "fidelity": int(SAFE),
    }  # fmt: skip
    return values | fields


@pytest.fixture
def open_rig() -> Iterator[Any]:
    rigs: list[Rig] = []

    def start(one: Gate | None = None, **fields: Any) -> Rig:
        rigs.append(Rig(gate=one, **fields))
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.idle()
        rig.store.close(0.0)


def profile_of(rig: Rig, **fields: Any) -> str:
    """Return the profile that a put is told to use."""
    held = rig.offer(chain(1, 2), **offered(**fields))
    assert held is not None
    held.abort()
    return held.profile


def test_a_passing_profile_is_used(open_rig: Any) -> None:
    assert profile_of(open_rig(gate_of())) == "lossy"


@pytest.mark.parametrize(
    ("one", "fields", "reason"),
    [
        (None, {}, "lossy: no gate file: [store] gate names none"),
        (gate_of(), {"fidelity": int(EXACT)}, "lossy: its readers ask for exact copies"),
        (gate_of(), {"family": b""}, "lossy: not measured for this model: run `tierkv eval`"),
        (
            gate_of(),
            {"family": ARTIFACT},
            "lossy: not measured for this model: run `tierkv eval`",
        ),
        (
            gate_of(),
            {"artifacts": (b"", ARTIFACT)},
            "lossy: measured with another artifact only",
        ),
        (
            gate_of(measured("lossy", kl=0.06)),
            {"fidelity": int(ECONOMY)},
            "lossy: prose: mean KL up to 0.06 > 0.05",
        ),
        (
            gate_of(measured("lossy", kl=0.02)),
            {},
            "lossy: it is economy, its readers ask for safe: prose: mean KL up to 0.02 > 0.01",
        ),
        (
            gate_of(measured("lossy", context=63)),
            {},
            "lossy: contexts above 2 x 63 tokens were not measured",
        ),
    ],
)
def test_a_profile_without_a_passing_entry_is_not_used_and_says_why(
    open_rig: Any, one: Gate | None, fields: dict[str, Any], reason: str
) -> None:
    rig = open_rig(one)
    assert profile_of(rig, **fields) == "raw"
    assert from_wire(rig.stat()).profile_refusals == {reason: 1}


def test_context_is_that_of_the_whole_chain(open_rig: Any) -> None:
    rig = open_rig(gate_of(measured("lossy", context=64)))
    assert profile_of(rig) == "lossy", "2 blocks of 64 tokens: twice what was measured"
    assert profile_of(rig, position=1) == "raw"
    held = rig.offer(chain(1, 3), **offered())
    assert held.profile == "raw"
    held.abort()


def test_only_lossy_profiles_and_none_allowed_stores_nothing(open_rig: Any) -> None:
    rig = open_rig(None)
    assert rig.offer(chain(1, 2), **offered(profiles=("lossy",))) is None
    assert from_wire(rig.stat()).counters["put_refused_gate"] == 2
    with pytest.raises(TierKVError, match="is known"):
        rig.offer(chain(1, 2), **offered(profiles=("of another release",)))
    with pytest.raises(TierKVError, match="has not 32 bytes"):
        rig.offer(chain(1, 2), **offered(artifacts=(b"short",)))


def test_an_exact_request_is_never_answered_by_a_lossy_copy(open_rig: Any) -> None:
    rig, keys = open_rig(gate_of()), chain(1, 3)
    assert rig.put(keys, **offered()) == 3
    assert len(rig.read(keys, fidelity=int(SAFE))) == 3
    assert len(rig.read(keys, fidelity=int(ECONOMY))) == 3
    assert rig.read(keys, fidelity=int(Fidelity.NEAR_LOSSLESS)) == []
    assert rig.read(keys) == []
    rig.flush(keys)
    rig.inline.drain()
    assert rig.read(keys) == [], "nor from below RAM"
    assert rig.put(keys, b"exact", fidelity=int(EXACT), profiles=("raw", "lossy")) == 3
    assert len(rig.read(keys)) == 3


def test_the_header_says_what_was_used(open_rig: Any) -> None:
    one = gate_of(measured("lossy"), measured("calibrated", artifact=ARTIFACT.hex()))
    rig, keys = open_rig(one), chain(1, 2)
    fields = offered(profiles=("raw", "lossy", "calibrated"), artifacts=(b"", b"", ARTIFACT))
    assert rig.put(keys, **fields) == 2
    call = rig.match_call(keys, fidelity=int(SAFE))
    with rig.transfer(rig.match(keys, fidelity=int(SAFE)), call) as transfer:
        for header in transfer.headers():
            assert header.codec_id == CALIBRATED.codec_id
            assert header.artifact == ARTIFACT
            assert header.fidelity is SAFE
            assert header.flags & frame.LOSSY
    rig.put(chain(2, 2), fidelity=int(EXACT))
    call = rig.match_call(chain(2, 2))
    with rig.transfer(rig.match(chain(2, 2)), call) as transfer:
        assert all(one.artifact == frame.NO_ARTIFACT for one in transfer.headers())


def test_without_its_entry_a_lossy_frame_below_is_left_alone(open_rig: Any) -> None:
    tier, keys = MemoryTier(), chain(1, 2)
    rig = open_rig(gate_of(), lower=[tier])
    rig.put(keys, **offered())
    rig.flush(keys)
    for one, expected in (
        (gate_of(), 2),
        (None, 0),
        (gate_of(measured("lossy", kl=1.0)), 0),
        (gate_of(measured("calibrated")), 0),
    ):
        again = open_rig(one, lower=[tier])
        assert len(again.read(keys, fidelity=int(SAFE))) == expected


def test_exact_frames_below_need_no_gate(open_rig: Any) -> None:
    tier, keys = MemoryTier(), chain(1, 2)
    rig = open_rig(None, lower=[tier])
    rig.put(keys, fidelity=int(SAFE))
    rig.flush(keys)
    assert len(open_rig(None, lower=[tier]).read(keys, fidelity=int(SAFE))) == 2


def test_the_loss_is_a_number(open_rig: Any) -> None:
    rig = open_rig(gate_of())
    exact, lossy = Offers(gate_of()).allowed(rig.put_call(chain(1, 2), **offered()))
    assert (exact.kl, exact.fidelity) == (0.0, EXACT)
    assert (lossy.kl, lossy.fidelity) == (0.005, SAFE)


def stamped(rig: Rig, keys: list[bytes], **fields: Any) -> list[tuple[int, Fidelity, int]]:
    """Put a chain for readers of the class economy; return codec, class and flags as read again."""
    assert rig.put(keys, **offered(fidelity=int(ECONOMY), **fields)) == len(keys)
    call = rig.match_call(keys, fidelity=int(ECONOMY))
    transfer = rig.transfer(rig.match(keys, fidelity=int(ECONOMY)), call)
    assert transfer is not None
    with transfer:
        return [(one.codec_id, one.fidelity, one.flags) for one in transfer.headers()]


def test_a_block_promises_what_was_measured_and_not_what_was_asked_for(open_rig: Any) -> None:
    near = gate_of(measured("lossy", kl=0.0005))
    one = open_rig(near)
    promised = (LOSSY.codec_id, Fidelity.NEAR_LOSSLESS, frame.LOSSY)
    assert stamped(one, chain(1, 2)) == [promised] * 2
    assert len(one.read(chain(1, 2), fidelity=int(Fidelity.NEAR_LOSSLESS))) == 2
    assert one.read(chain(1, 2)) == []
    assert stamped(one, chain(2, 2), profiles=("raw",)) == [(1, EXACT, 0)] * 2
    assert len(one.read(chain(2, 2))) == 2, "nothing of it was lost"


def test_what_stands_on_a_lossy_prefix_promises_no_more_than_that(open_rig: Any) -> None:
    one = open_rig(gate_of(measured("lossy", kl=0.0005)))
    derived = {"derived": True}
    of_lossy = (LOSSY.codec_id, ECONOMY, frame.LOSSY | frame.DERIVED)
    assert stamped(one, chain(1, 2), **derived) == [of_lossy] * 2
    of_raw = (1, ECONOMY, frame.DERIVED)
    assert stamped(one, chain(2, 2), profiles=("raw",), **derived) == [of_raw] * 2
    assert one.read(chain(2, 2), fidelity=int(SAFE)) == []


def test_what_a_block_may_become_names_the_artifact_that_its_client_decodes(open_rig: Any) -> None:
    keys, known = chain(1, 2), bytes([5]) * 32
    offers = Offers(gate_of(*(measured(one.name, artifact=known.hex()) for one in KVTC)))
    rig = open_rig(None)

    def allowance(*artifacts: bytes) -> dict[int, bytes]:
        call = rig.put_call(keys, **offered(profiles=("raw",), artifacts=artifacts))
        assert [one.profile.name for one in offers.allowed(call)] == ["raw"]
        return {number: one.artifact for number, one in offers.allowance(call).items()}

    assert allowance(frame.NO_ARTIFACT, known) == {one.number: known for one in KVTC}
    assert allowance() == {}, "who does not decode it cannot read it"
    assert allowance(frame.NO_ARTIFACT, bytes([6]) * 32) == {}
    assert allowance(frame.NO_ARTIFACT, known, bytes([6]) * 32) == {}, "which one?"
    with pytest.raises(TierKVError, match="32 bytes"):
        allowance(frame.NO_ARTIFACT, b"short")


def test_reasons_are_bounded(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = open_rig(None).put_call(chain(1, 2), **offered(profiles=("raw", "lossy", "calibrated")))
    monkeypatch.setattr("tierkv.offers.MAX_REASONS", 1)
    offers = Offers(None)
    for _ in range(3):
        offers.allowed(call)
    assert offers.refusals == {"lossy: no gate file: [store] gate names none": 3, OTHERS: 3}
    assert MAX_REASONS > 10


def test_stat_shows_what_is_allowed_and_why_not(open_rig: Any) -> None:
    one = gate_of(measured("lossy"), measured("calibrated", kl=1.0, artifact=ARTIFACT.hex()))
    found = from_wire(open_rig(one).stat())
    assert [(stat.profile, stat.fidelity_class, stat.kl) for stat in found.profiles] == [
        ("lossy", "safe", 0.005),
        ("calibrated", "rejected", 1.0),
    ]
    assert found.profiles[1].why == "prose: mean KL up to 1 > 0.05"
    assert found.profiles[1].artifact == ARTIFACT.hex()
    assert "lossy" in found.enabled["profiles"]
    assert "calibrated" not in found.enabled["profiles"]
    without = from_wire(open_rig(None).stat())
    assert without.profiles == ()
    assert without.enabled["profiles"] == "raw, lossless, no gate file"


def test_settings_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    path.write_bytes(gate.dump(gate_of()))
    host = HostSettings(size_bytes=1 << 20)
    store = TierKV.open(Settings(host=host, store=StoreSettings(gate=str(path))))
    assert store._store.offers.gate == gate_of()
    store.close(0.0)
    path.write_text("{}")
    with pytest.raises(TierKVError, match=r"gate\.json: .*format"):
        TierKV.open(Settings(host=host, store=StoreSettings(gate=str(path))))


def test_models_are_introduced_by_family_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.offers.MAX_MODELS", 2)
    layers = (LayerSpec(kv_heads=2, k_dim=64, v_dim=64, rope=Rope(rotary_dim=64)),) * 3
    models = [
        Identity(model=name, weights="0", kv_dtype="bf16", tokens_per_block=64, layers=layers)
        for name in ("one", "two", "three")
    ]
    offers = Offers(None)
    for model in models:
        told = identity.from_wire(identity.to_wire(model))
        assert told == model
        offers.introduce(told)
    assert [offers.knows(model.family) for model in models] == [False, True, True]
    for rubbish in (
        b"",
        b"\x80",
        identity.to_wire(models[0])[:-1],
        identity.to_wire(models[0]).replace(b"bf16", b"bf17"),
    ):
        with pytest.raises(TierKVError):
            identity.from_wire(rubbish)
