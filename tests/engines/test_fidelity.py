"""A prefix cache with lossy profiles on the real model: fewer bytes, a small loss, never for exact.

The gate here is written by hand: it lets everything through, so that what a class promises is
looked at, not what the gate decides.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tests.redis_server import RedisServer
from tests.sidecars import until
from tierkv import frame, gate
from tierkv.cache import TierKV
from tierkv.channel import EmbeddedChannel
from tierkv.client import Client
from tierkv.fidelity import Fidelity
from tierkv.gate import Domain, Entry, Gate
from tierkv.identity import Identity
from tierkv.settings import Settings, StoreSettings
from tierkv.stat import StoreStat, from_wire
from tierkv.tiers.endpoint import RedisSettings
from tierkv.tiers.host import HostSettings
from tierkv.tiers.nvme import NvmeSettings
from tierkv_connectors.transformers import PrefixCache, identity_of

BLOCK = 64
LOSSY = {"int8": (3.6, 3e-4), "int4": (5.5, 0.02), "fp8": (3.7, 0.01)}
"""By profile: least ratio of what is stored to float32, most KL of what follows."""


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def text(model_dir: Path) -> list[int]:
    from pydoc_data.topics import topics

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return list(tokenizer(topics["assignment"])["input_ids"])[:400]


def permissive(identity: Identity, kl: float = 1e-4) -> Gate:
    """Return a gate that lets every lossy profile be near lossless."""
    domain = Domain(
        domain="prose", sequences=8, tokens=1024, kl_mean=kl, kl_lo=kl, kl_hi=kl,
        kl_p99=kl, kl_p99_hi=kl, top1=1.0, top1_lo=1.0, dnll=0.0,
    )  # fmt: skip
    return Gate(
        entries=tuple(
            Entry(
                model="test",
                family=identity.family.hex(),
                kv_dtype=identity.kv_dtype,
                profile=name,
                artifact="",
                context=1024,
                ratio=2.0,
                domains=(domain,),
            )
            for name in LOSSY
        )
    )


@pytest.fixture
def settings(tmp_path: Path, model: Any, redis_server: RedisServer) -> Settings:
    path = tmp_path / "gate.json"
    path.write_bytes(gate.dump(permissive(identity_of(model, BLOCK))))
    return Settings(
        host=HostSettings(size_bytes=64 << 20),
        nvme=NvmeSettings(path=str(tmp_path / "disk"), size_bytes=256 << 20),
        redis=RedisSettings(url=redis_server.unix_url, prefix=tmp_path.name[-40:]),
        store=StoreSettings(gate=str(path)),
    )


@pytest.fixture
def store(settings: Settings) -> Iterator[TierKV]:
    opened = TierKV.open(settings)
    yield opened
    opened.close(5.0)


def client_of(store: TierKV) -> Client:
    return Client(EmbeddedChannel(store, store.host.view, timeout_s=30.0))


def prefix_cache(store: TierKV, model: Any, *profiles: str, fidelity: Fidelity) -> PrefixCache:
    return PrefixCache(
        client_of(store), model, tokens_per_block=BLOCK, profiles=profiles, fidelity=fidelity
    )


def computed(model: Any, tokens: list[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True)
    return cache


def follows(model: Any, cache: DynamicCache, tokens: list[int]) -> torch.Tensor:
    """Return the log probabilities of what follows a cache and these tokens."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True).logits
    return torch.log_softmax(logits[0].double(), -1)


def stat_of(store: TierKV) -> StoreStat:
    found = client_of(store).stat()
    assert found is not None
    return from_wire(found)


def written(store: TierKV) -> None:
    """Wait until every lower tier has what was stored."""
    assert until(lambda: not stat_of(store).write_behind.queued_frames)


def layers_of(cache: DynamicCache) -> list[Any]:
    """Return the layers, whose declared types have some without keys."""
    return list(cache.layers)


@pytest.mark.parametrize("profile", LOSSY)
def test_fewer_bytes_in_every_tier_and_a_small_loss(
    store: TierKV, model: Any, text: list[int], profile: str
) -> None:
    least_ratio, most_kl = LOSSY[profile]
    ours = prefix_cache(store, model, profile, fidelity=Fidelity.NEAR_LOSSLESS)
    exact = computed(model, text)
    blocks = len(text) // BLOCK
    assert ours.store(text, exact) == blocks
    written(store)
    raw = blocks * ours.part.raw_bytes(ours.identity)
    tiers = {one.name: one for one in stat_of(store).tiers}
    assert set(tiers) == {"host", "nvme", "redis"}
    for name in ("host", "redis"):
        assert tiers[name].placements == blocks
        assert raw / tiers[name].used_bytes >= least_ratio, name
    assert raw / tiers["nvme"].written_bytes >= least_ratio
    loaded, reused = ours.load(text)
    assert reused == (len(text) - 1) // BLOCK * BLOCK
    for one, other in zip(layers_of(loaded), layers_of(exact), strict=True):
        assert torch.equal(one.keys[:, :, :4], other.keys[:, :, :4])
        assert not torch.equal(one.keys, other.keys[:, :, :reused])
    expected = follows(model, computed(model, text[:reused]), text[reused:])
    found = follows(model, loaded, text[reused:])
    kl = (expected.exp() * (expected - found)).sum(-1).mean()
    assert 0 < kl < most_kl
    assert not ours.edge.failures


def test_an_exact_request_is_never_answered_by_a_lossy_copy(
    store: TierKV, model: Any, text: list[int]
) -> None:
    lossy = prefix_cache(store, model, "int4", fidelity=Fidelity.SAFE)
    exact = prefix_cache(store, model, "int4", "lossless", fidelity=Fidelity.EXACT)
    cache = computed(model, text)
    assert lossy.store(text, cache) == len(text) // BLOCK
    assert exact.load(text)[1] == 0
    written(store)
    assert exact.store(text, cache) == len(text) // BLOCK
    loaded, reused = exact.load(text)
    assert reused
    for one, other in zip(layers_of(loaded), layers_of(cache), strict=True):
        assert torch.equal(one.keys, other.keys[:, :, :reused])
    assert lossy.load(text)[1] == reused, "a lossy reader takes exact copies, too"


def test_a_chain_of_several_profiles_and_what_is_computed_on_it_is_derived(
    store: TierKV, model: Any, text: list[int]
) -> None:
    first = prefix_cache(store, model, "int8", fidelity=Fidelity.SAFE)
    first.store(text[: 3 * BLOCK], computed(model, text[: 3 * BLOCK]))
    second = prefix_cache(store, model, "lossless", fidelity=Fidelity.SAFE)
    cache, reused = second.load(text)
    assert reused == 3 * BLOCK
    follows(model, cache, text[reused:])
    assert second.store(text, cache) == len(text) // BLOCK - 3
    headers = read_headers(second, text)
    assert [header.codec_id for header in headers[:3]] == [3, 3, 3]
    assert [header.codec_id for header in headers[3:]] == [2] * (len(text) // BLOCK - 3)
    assert all(header.flags == frame.LOSSY for header in headers[:3])
    assert all(header.flags == frame.DERIVED for header in headers[3:])
    assert second.load(text)[1] == (len(text) - 1) // BLOCK * BLOCK


def read_headers(ours: PrefixCache, text: list[int]) -> list[frame.Header]:
    import numpy as np

    call = ours._match_call(np.array(text[: len(text) // BLOCK * BLOCK], np.int32), 5.0)
    reply = ours._client.match(call)
    transfer = ours._client.get(reply.match, reply.blocks)
    assert transfer is not None
    with transfer:
        return transfer.headers()


def test_values_that_are_not_finite_are_kept_losslessly_and_counted(
    store: TierKV, model: Any, text: list[int]
) -> None:
    ours = prefix_cache(store, model, "int4", fidelity=Fidelity.SAFE)
    cache = computed(model, text)
    layers_of(cache)[7].keys[0, 1, BLOCK + 5, 3] = float("nan")
    assert ours.store(text, cache) == len(text) // BLOCK
    headers = read_headers(ours, text)
    assert [header.codec_id for header in headers[:3]] == [4, 2, 4]
    assert stat_of(store).counters["put_fallback"] == 1
    loaded, reused = ours.load(text)
    assert reused == (len(text) - 1) // BLOCK * BLOCK
    assert layers_of(loaded)[7].keys[0, 1, BLOCK + 5, 3].isnan()


def test_without_a_gate_a_lossy_profile_is_not_used(model: Any, text: list[int]) -> None:
    opened = TierKV.open(Settings(host=HostSettings(size_bytes=64 << 20)))
    try:
        cache = computed(model, text)
        alone = prefix_cache(opened, model, "int8", fidelity=Fidelity.SAFE)
        assert alone.store(text, cache) == 0
        both = prefix_cache(opened, model, "int8", "lossless", fidelity=Fidelity.SAFE)
        assert both.store(text, cache) == len(text) // BLOCK
        assert {header.codec_id for header in read_headers(both, text)} == {2}
    finally:
        opened.close(0.0)
