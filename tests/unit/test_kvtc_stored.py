"""KVTC through the store: an artifact's profiles, their segments, and what falls back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tests.kvtc_rigs import (
    DIM,
    HEADS,
    LAYERS,
    PART,
    SPEC,
    artifact,
    calibration_rows,
    foreign,
    header,
    text_like,
)
from tests.unit.test_gate import domain, entry
from tierkv import frame, gate
from tierkv.cache import TierKV
from tierkv.channel import EmbeddedChannel
from tierkv.client import Client
from tierkv.codec import BY_CODEC_ID, KVTC, PROFILES, RAW
from tierkv.errors import TierKVError
from tierkv.fidelity import Fidelity
from tierkv.gate import Gate
from tierkv.identity import Identity
from tierkv.policy import Picked
from tierkv.settings import Settings, StoreSettings
from tierkv.stat import from_wire
from tierkv.tiers.host import HostSettings
from tierkv_codecs import CODECS, CodecRegistry
from tierkv_codecs.kvtc import codecs_of
from tierkv_codecs.kvtc_calibrate import calibrate
from tierkv_connectors.calibrated import codecs_with
from tierkv_connectors.transformers import PrefixCache, identity_of

BLOCK = 64
TEXT = list(range(1, 3 * BLOCK + 2))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=DIM,
    )
    made = LlamaForCausalLM(config)
    torch.nn.Module.to(made, torch.bfloat16).eval()
    return made


@pytest.fixture
def client(tmp_path: Any, model: LlamaForCausalLM) -> Iterator[Client]:
    family = identity_of(model, BLOCK, "random").family.hex()
    entries = tuple(
        entry(domain(), profile=name, family=family, artifact=artifact().digest.hex())
        for name in ("kvtc@8x", "kvtc@4x")
    )
    entries += (entry(domain(), profile="int8", family=family),)
    path = tmp_path / "gate.json"
    path.write_bytes(gate.dump(Gate(entries=entries)))
    settings = Settings(host=HostSettings(size_bytes=16 << 20), store=StoreSettings(gate=str(path)))
    store = TierKV.open(settings)
    made = Client(EmbeddedChannel(store, store.host.view, timeout_s=30.0))
    yield made
    made.close()
    store.close(0.0)


def prefix_cache(client: Client, model: LlamaForCausalLM, *profiles: str) -> PrefixCache:
    codecs = CodecRegistry([*CODECS.all(), *codecs_of(artifact())])
    return PrefixCache(
        client, model, tokens_per_block=BLOCK, profiles=profiles, fidelity=Fidelity.SAFE,
        weights="random", codecs=codecs,
    )  # fmt: skip


def cache_of(model: LlamaForCausalLM, block: torch.Tensor) -> DynamicCache:
    """Return a cache with the keys and values of a canonical block."""
    cache = DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate(block.transpose(2, 3)):
        cache.update(keys[None], values[None], layer)
    return cache


def headers(ours: PrefixCache) -> list[frame.Header]:
    tokens = np.array(TEXT[: 3 * BLOCK], np.int32)
    reply = ours._client.match(ours._match_call(tokens, 5.0))
    transfer = ours._client.get(reply.match, reply.blocks)
    assert transfer is not None
    with transfer:
        return transfer.headers()


@pytest.mark.parametrize(
    ("profile", "levels", "most"), [("kvtc@8x", 2, 0.12), ("kvtc@4x", 3, 0.06)]
)
def test_what_was_stored_comes_back_near(
    client: Client, model: LlamaForCausalLM, profile: str, levels: int, most: float
) -> None:
    block = text_like(3 * BLOCK, 1)
    ours = prefix_cache(client, model, profile)
    assert ours.store(TEXT, cache_of(model, block)) == 3
    found = headers(ours)
    assert {header.codec_id for header in found} == {6}
    assert {header.artifact for header in found} == {artifact().digest}
    assert [sum(map(bool, header.segments)) for header in found] == [levels] * 3
    loaded, reused = ours.load(TEXT)
    assert reused == 3 * BLOCK
    back = torch.stack([torch.stack([k[0], v[0]]) for k, v, _ in loaded]).transpose(2, 3)
    assert torch.equal(back[:, :, :4], block[:, :, :4])
    error = (back.float() - block.float()).norm() / block.float().norm()
    assert 0 < error < most
    assert sum(header.payload_bytes for header in found) < block.nbytes / 2


def test_a_second_copy_is_made_of_what_the_artifact_fits(
    client: Client, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both at once, from the same values: raw is served, and kvtc when the raw copies are gone."""
    picked = Picked(RAW.number, KVTC[0].number)
    monkeypatch.setattr("tierkv.policies.joint.Joint.picks", lambda *_: picked)
    block = text_like(3 * BLOCK, 1)
    block[:, :, 2 * BLOCK :] = foreign(BLOCK, 2)
    ours = prefix_cache(client, model, "raw", "kvtc@4x")
    assert ours.store(TEXT, cache_of(model, block)) == 3
    assert [header.codec_id for header in headers(ours)] == [1, 1, 1]
    assert isinstance(client._channel, EmbeddedChannel)
    store = client._channel._control._store  # type: ignore[attr-defined]
    assert store.counters["put_beside"] == 2
    raw = [row for row in range(len(store.catalog)) if store.catalog.profile[row] == RAW.number]
    store.drop(raw)
    assert [header.codec_id for header in headers(ours)] == [6, 6]
    loaded, reused = ours.load(TEXT)
    assert reused == 2 * BLOCK
    back = torch.stack([torch.stack([k[0], v[0]]) for k, v, _ in loaded]).transpose(2, 3)
    block = block[:, :, : 2 * BLOCK]
    assert torch.equal(back[:, :, :4], block[:, :, :4])
    assert 0 < (back.float() - block.float()).norm() / block.float().norm() < 0.06


def test_what_the_artifact_does_not_fit_is_stored_losslessly(
    client: Client, model: LlamaForCausalLM
) -> None:
    block = text_like(3 * BLOCK, 1)
    block[:, :, BLOCK : 2 * BLOCK] = foreign(BLOCK, 2)
    ours = prefix_cache(client, model, "kvtc@8x")
    assert ours.store(TEXT, cache_of(model, block)) == 3
    found = headers(ours)
    assert [header.codec_id for header in found] == [6, 2, 6]
    assert found[1].artifact == bytes(32)
    loaded, _ = ours.load(TEXT)
    back = torch.stack([torch.stack([k[0], v[0]]) for k, v, _ in loaded]).transpose(2, 3)
    assert torch.equal(back[:, :, BLOCK : 2 * BLOCK], block[:, :, BLOCK : 2 * BLOCK])
    stat = client.stat()
    assert stat is not None
    assert from_wire(stat).counters["put_fallback"] == 1


def test_what_the_artifact_does_not_fit_takes_the_best_fixed_profile(
    client: Client, model: LlamaForCausalLM
) -> None:
    """int4 has no entry in the gate, and a block with an infinity can only be lossless."""
    block = text_like(3 * BLOCK, 1)
    block[:, :, BLOCK : 3 * BLOCK] = foreign(2 * BLOCK, 2)
    block[0, 1, -1, 0, 0] = float("inf")
    ours = prefix_cache(client, model, "kvtc@8x", "int4", "int8")
    assert ours.store(TEXT, cache_of(model, block)) == 3
    assert [header.codec_id for header in headers(ours)] == [6, 3, 2]
    assert {reason.split(":")[0] for reason in ours._copier.unsuited} == {"kvtc@8x", "int8"}


def test_a_reader_without_the_artifact_has_a_miss(client: Client, model: LlamaForCausalLM) -> None:
    prefix_cache(client, model, "kvtc@8x").store(TEXT, cache_of(model, text_like(3 * BLOCK, 1)))
    other = PrefixCache(
        client, model, tokens_per_block=BLOCK, fidelity=Fidelity.SAFE, weights="random"
    )
    assert other.load(TEXT)[1] == 0
    assert not other.edge.failures


def test_the_core_knows_the_profiles_of_the_usual_ratios() -> None:
    assert BY_CODEC_ID[6].name == "kvtc@4x"
    assert {name for name in PROFILES if name.startswith("kvtc")} == {
        "kvtc@4x", "kvtc@8x", "kvtc@16x", "kvtc@32x",
    }  # fmt: skip
    for codec in codecs_of(artifact()):
        profile = PROFILES[codec.name]
        assert profile.codec_id == codec.id
        assert codec.levels <= profile.segments
        assert codec.bound(4096) <= 4096 + profile.bound_extra


def test_an_engine_has_the_codecs_of_its_own_artifact_only(tmp_path: Path) -> None:
    file = tmp_path / "synthetic.kvtc"
    file.write_bytes(calibrate(calibration_rows(), header(), lambda _name, _share: None))
    identity = Identity(
        model="synthetic", weights="seed 7", kv_dtype="bf16", tokens_per_block=BLOCK,
        layers=(SPEC,) * LAYERS,
    )  # fmt: skip
    names = {codec.name for codec in codecs_with(file, identity, PART).all()}
    assert {"raw", "int8", "kvtc@4x", "kvtc@8x"} <= names
    assert codecs_with("", identity, PART) is CODECS
    other = msgspec.structs.replace(identity, weights="seed 8")
    with pytest.raises(TierKVError, match="calibrated for"):
        codecs_with(file, other, PART)
    with pytest.raises(TierKVError, match="cannot be read"):
        codecs_with(tmp_path / "none.kvtc", identity, PART)
