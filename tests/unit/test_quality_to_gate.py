"""From the lab to the store: what was measured is what a prefix cache may then use."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.lab_models import tiny_llama
from tierkv import gate
from tierkv.cache import TierKV
from tierkv.channel import EmbeddedChannel
from tierkv.client import Client
from tierkv.fidelity import Fidelity
from tierkv.gate import Gate
from tierkv.settings import Settings, StoreSettings
from tierkv.stat import from_wire
from tierkv.tiers.host import HostSettings
from tierkv_codecs import CODECS
from tierkv_codecs.lab import measures, results
from tierkv_codecs.lab.evaluate import Suite, evaluate
from tierkv_codecs.lab.texts import evaluation_texts
from tierkv_codecs.lab.yardsticks import registry_with
from tierkv_connectors.subject import TransformersSubject
from tierkv_connectors.transformers import PrefixCache, layers_of

TOKENS, CONTEXT = 64, 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model's directory with the gate that was measured on it, for an engine of fp32."""
    folder = tiny_llama(tmp_path_factory.mktemp("model"))
    subject = TransformersSubject(folder, "fp32", TOKENS)
    codecs = [CODECS.named("int8"), CODECS.named("int4")]
    suite = Suite("own", 4, CONTEXT, 16)
    found = evaluate(subject, codecs, registry_with(CODECS), evaluation_texts()[:2], suite)
    entries = results.storable(results.entries(found, subject.identity))
    (folder / "gate.json").write_bytes(gate.dump(Gate(entries=tuple(entries))))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def client(folder: Path, request: pytest.FixtureRequest) -> Iterator[Client]:
    named = str(folder / "gate.json") if getattr(request, "param", True) else ""
    store = TierKV.open(
        Settings(host=HostSettings(size_bytes=64 << 20), store=StoreSettings(gate=named))
    )
    client = Client(EmbeddedChannel(store, store.host.view, timeout_s=30.0))
    yield client
    client.close()
    store.close(0.0)


def prefix_cache(client: Client, model: Any, fidelity: Fidelity) -> PrefixCache:
    return PrefixCache(
        client,
        model,
        tokens_per_block=TOKENS,
        fidelity=fidelity,
        profiles=("int8", "lossless"),
    )


def stored(client: Client, model: Any, fidelity: Fidelity, length: int) -> torch.Tensor:
    """Store the KV of a prompt; return the prompt."""
    ids = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(length))
    kept, cache = prefix_cache(client, model, fidelity), DynamicCache()
    logits(model, kept, ids, cache)
    assert kept.store(ids, cache) == length // TOKENS
    return ids


@torch.inference_mode()
def logits(model: Any, kept: PrefixCache, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Return the log probabilities [token, vocabulary] behind a cache, which grows."""
    out = model(input_ids=ids, use_cache=True, **{kept._cache_argument: cache}).logits
    return torch.log_softmax(out[0], -1)


def stored_bytes(client: Client) -> int:
    found = client.stat()
    assert found is not None
    return from_wire(found).stored_bytes


def test_what_was_measured_is_used_and_loses_no_more_than_its_class(
    client: Client, model: Any, folder: Path
) -> None:
    (entry,) = (one for one in gate.load(folder / "gate.json").entries if one.profile == "int8")
    assert Gate(entries=(entry,)).verdict(entry).fidelity is not None
    ids = stored(client, model, Fidelity.ECONOMY, CONTEXT)
    raw = 3 * 2 * 2 * 32 * 4 * CONTEXT
    assert stored_bytes(client) < raw / 3
    kept = prefix_cache(client, model, Fidelity.ECONOMY)
    cache, reused = kept.load(ids)
    assert reused == CONTEXT - TOKENS
    exact = logits(model, kept, ids, DynamicCache())[reused:]
    found = logits(model, kept, ids[:, reused:], cache)
    loss = measures.compare(exact, found, exact.argmax(-1))
    assert 0 < loss.kl.mean() <= 0.05


def test_exact_readers_are_given_nothing_of_it(client: Client, model: Any) -> None:
    ids = stored(client, model, Fidelity.ECONOMY, CONTEXT)
    assert prefix_cache(client, model, Fidelity.EXACT).load(ids)[1] == 0


def test_exact_readers_own_blocks_are_never_coded_with_loss(client: Client, model: Any) -> None:
    ids = stored(client, model, Fidelity.EXACT, CONTEXT)
    kept, own = prefix_cache(client, model, Fidelity.EXACT), DynamicCache()
    cache, reused = kept.load(ids)
    logits(model, kept, ids, own)
    assert reused == CONTEXT - TOKENS
    for computed, loaded in zip(layers_of(own), layers_of(cache), strict=True):
        assert computed.keys is not None
        assert loaded.keys is not None
        assert torch.equal(computed.keys[:, :, :reused], loaded.keys)


def test_beyond_twice_the_measured_context_it_is_lossless(client: Client, model: Any) -> None:
    before = stored_bytes(client)
    stored(client, model, Fidelity.ECONOMY, 2 * CONTEXT + TOKENS)
    raw = 3 * 2 * 2 * 32 * 4 * (2 * CONTEXT + TOKENS)
    assert stored_bytes(client) - before > raw / 2


@pytest.mark.parametrize("client", [False], indirect=True)
def test_without_a_gate_file_nothing_is_lossy(client: Client, model: Any) -> None:
    ids = stored(client, model, Fidelity.ECONOMY, CONTEXT)
    assert stored_bytes(client) > 3 * 2 * 2 * 32 * 4 * CONTEXT / 2
    assert prefix_cache(client, model, Fidelity.ECONOMY).load(ids)[1] == CONTEXT - TOKENS
    found = client.stat()
    assert found is not None
    reasons = from_wire(found).profile_refusals
    assert reasons == {"int8: no gate file: [store] gate names none": 1}
