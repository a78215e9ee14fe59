"""Pages against a fake store: every layout and both codecs give the same KV; doubt ends a load."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tests.dict_store import DictStore
from tierkv import frame
from tierkv.calls import MatchCall, ReleaseCall
from tierkv.client import Client
from tierkv.errors import TierKVError
from tierkv.fidelity import Fidelity
from tierkv_connectors.transformers import PrefixCache
from tierkv_connectors.views import Piece, gather, scatter

BLOCK = 8
PROMPT = list(range(3, 3 + 5 * BLOCK + 2))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    made = LlamaForCausalLM(config)
    torch.nn.Module.to(made, request.param).eval()
    return made


def prefix_cache(
    store: DictStore, model: LlamaForCausalLM, profiles: tuple[str, ...] = ("raw",)
) -> PrefixCache:
    return PrefixCache(
        Client(store), model, tokens_per_block=BLOCK, profiles=profiles, weights="random-7"
    )


def computed(model: LlamaForCausalLM, tokens: list[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True)
    return cache


def tensors(cache: DynamicCache) -> list[torch.Tensor]:
    """Return keys and values of the layers in turn."""
    return [tensor for keys, values, _ in cache for tensor in (keys, values)]


def assert_prefix(loaded: DynamicCache, whole: DynamicCache, tokens: int) -> None:
    assert loaded.get_seq_length() == tokens
    for part, full in zip(tensors(loaded), tensors(whole), strict=True):
        assert part.dtype == full.dtype
        assert torch.equal(part, full[:, :, :tokens])


@pytest.mark.parametrize("run_bytes", [1 << 30, 1536, 300], ids=["whole", "runs", "odd"])
@pytest.mark.parametrize("profile", ["raw", "lossless"])
def test_load_gives_the_very_bits_that_were_stored(
    model: LlamaForCausalLM, profile: str, run_bytes: int
) -> None:
    store = DictStore(run_bytes=run_bytes)
    cache = computed(model, PROMPT)
    assert prefix_cache(store, model, (profile,)).store(PROMPT, cache) == 5
    loaded, reused = prefix_cache(store, model, (profile,)).load(torch.tensor([PROMPT]))
    assert reused == 5 * BLOCK
    assert_prefix(loaded, cache, reused)
    assert (store.held, store.borrowed) == (0, 0)


def test_bits_of_special_values_survive(model: LlamaForCausalLM) -> None:
    width = 16 if model.dtype == torch.bfloat16 else 32
    integers = torch.int16 if width == 16 else torch.int32
    bits = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1), (1, 2, BLOCK + 1, 16))
    cache = DynamicCache(config=model.config)
    for number in range(2):
        cache.update(
            bits.to(integers).view(model.dtype), bits.to(integers).view(model.dtype), number
        )
    store = DictStore()
    ours = prefix_cache(store, model, ("lossless",))
    assert ours.store(PROMPT, cache) == 1
    loaded, reused = ours.load(PROMPT)
    assert reused == BLOCK
    keys = tensors(loaded)[2]
    assert torch.equal(keys.view(integers), bits.to(integers)[:, :, :BLOCK])


def test_canonical_order_is_layer_kv_token_head_dim(model: LlamaForCausalLM) -> None:
    store = DictStore()
    cache = computed(model, PROMPT)
    prefix_cache(store, model).store(PROMPT, cache)
    payload = bytearray(store.bytes_of(1)[frame.header_bytes(1) :])
    block = torch.frombuffer(payload, dtype=model.dtype).view(2, 2, BLOCK, 2, 16)
    assert torch.equal(block[1, 1, 3, 1], tensors(cache)[3][0, 1, BLOCK + 3])


def test_gather_undoes_scatter() -> None:
    block = torch.randn(3, 2, BLOCK, 2, 4)
    whole = slice(0, BLOCK)
    views = [
        Piece(
            slice(layer, layer + 1),
            whole,
            torch.zeros(1, 2, BLOCK, 4).transpose(1, 2),
            torch.zeros(1, BLOCK, 2, 4),
        )
        for layer in range(3)
    ]
    scatter(block, views)
    back = torch.empty_like(block)
    gather(views, back)
    assert torch.equal(back, block)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(5 * BLOCK, 4), (5 * BLOCK - 1, 4), (5 * BLOCK + 1, 5), (BLOCK, 0), (BLOCK + 1, 1), (1, 0)],
)
def test_r10_one_token_is_always_left_to_compute(
    model: LlamaForCausalLM, tokens: int, expected: int
) -> None:
    store = DictStore()
    ours = prefix_cache(store, model)
    ours.store(PROMPT, computed(model, PROMPT))
    loaded, reused = ours.load(PROMPT[:tokens])
    assert reused == expected * BLOCK == loaded.get_seq_length()
    asked = [call for call in store.log if isinstance(call, MatchCall)]
    assert all(len(call.keys) // 32 == expected for call in asked)


@pytest.mark.parametrize("held", [1, 7, 8, 9, 15, 16, 17, 24])
def test_r09_only_whole_blocks_are_stored_and_loaded(model: LlamaForCausalLM, held: int) -> None:
    store = DictStore()
    ours = prefix_cache(store, model)
    cache = computed(model, PROMPT[:held])
    assert ours.store(PROMPT, cache) == held // BLOCK
    _, reused = ours.load(PROMPT)
    assert reused == held // BLOCK * BLOCK


def test_a_second_store_writes_only_what_is_new(model: LlamaForCausalLM) -> None:
    store = DictStore()
    ours = prefix_cache(store, model)
    cache = computed(model, PROMPT)
    assert ours.store(PROMPT[: 2 * BLOCK], cache) == 2
    assert ours.store(PROMPT, cache) == 3
    assert ours.store(PROMPT, cache) == 0
    assert store.borrowed == 0


def other_key(data: memoryview) -> None:
    data[80] ^= 1


def other_checksum(data: memoryview) -> None:
    data[frame._CHECKSUM_AT] ^= 1


def zeros(data: memoryview) -> None:
    data[: frame.header_bytes(1)] = bytes(frame.header_bytes(1))


def repacked(**changes: object) -> Callable[[memoryview], None]:
    def change(data: memoryview) -> None:
        header = frame.parse(data)
        assert isinstance(header, frame.Header)
        fields = {name: getattr(header, name) for name in header.__struct_fields__} | changes
        packed = frame.pack(frame.Header(**fields))
        data[: len(packed)] = packed

    return change


DAMAGE = {
    "key": other_key,
    "checksum": other_checksum,
    "zeros": zeros,
    "tokens": repacked(tokens=BLOCK - 1),
    "raw bytes": repacked(raw_bytes=64, segments=(64,)),
    "codec": repacked(codec_id=99),
    "raw codec of other length": repacked(segments=(64,)),
    "other codec": repacked(codec_id=2),
    "lower fidelity": repacked(fidelity=Fidelity.SAFE),
    "identity": repacked(fingerprint=bytes(32)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_r11_a_doubtful_frame_ends_the_load_there(
    model: LlamaForCausalLM, damage: Callable[[memoryview], None]
) -> None:
    store = DictStore()
    ours = prefix_cache(store, model)
    cache = computed(model, PROMPT)
    ours.store(PROMPT, cache)
    damage(store.bytes_of(3))
    loaded, reused = ours.load(PROMPT)
    assert reused == 3 * BLOCK
    assert_prefix(loaded, cache, reused)
    assert (store.held, store.borrowed) == (0, 0)
    damage(store.bytes_of(0))
    assert ours.load(PROMPT)[1] == 0


def test_a_frame_that_changes_while_it_is_copied_is_not_used(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DictStore()
    ours = prefix_cache(store, model)
    ours.store(PROMPT, computed(model, PROMPT))
    decode = ours._copier._decode

    def change_after(*args: object) -> None:
        decode(*args)  # type: ignore[arg-type]
        other_key(store.bytes_of(0))

    monkeypatch.setattr(ours._copier, "_decode", change_after)
    assert ours.load(PROMPT)[1] == 0


def test_a_damaged_lossless_payload_is_a_miss(model: LlamaForCausalLM) -> None:
    store = DictStore()
    ours = prefix_cache(store, model, ("lossless",))
    ours.store(PROMPT, computed(model, PROMPT))
    start = frame.header_bytes(1)
    store.bytes_of(2)[start : start + 64] = os.urandom(64)
    assert ours.load(PROMPT)[1] == 2 * BLOCK


def test_generation_goes_on_when_the_store_is_gone(model: LlamaForCausalLM) -> None:
    store = DictStore()
    ours = prefix_cache(store, model)
    cold = ours.generate(PROMPT, 6)
    assert (cold.reused, cold.stored) == (0, 5)
    hit = ours.generate(PROMPT, 6)
    assert (hit.reused, hit.sources) == (5 * BLOCK, {"host": 5 * BLOCK})
    store.gone = True
    alone = ours.generate(PROMPT, 6)
    assert (alone.reused, alone.stored) == (0, 0)
    if model.dtype == torch.float32:
        assert cold.tokens == hit.tokens == alone.tokens


def test_an_error_of_ours_does_not_reach_the_engine(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DictStore()
    ours = prefix_cache(store, model)
    ours.store(PROMPT, computed(model, PROMPT))

    def broken(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ours._copier, "read", broken)
    monkeypatch.setattr(ours._copier, "take", broken)
    loaded, reused = ours.load(PROMPT)
    assert (loaded.get_seq_length(), reused) == (0, 0)
    longer = [*PROMPT, *range(20)]
    assert ours.store(longer, computed(model, longer)) == 0
    assert ours.edge.failures == {"load": 1, "store": 1}
    assert (store.held, store.borrowed) == (0, 0)


def test_generated_tokens_are_kept_for_the_next_turn(model: LlamaForCausalLM) -> None:
    store = DictStore()
    ours = prefix_cache(store, model)
    first = ours.generate(PROMPT, 2 * BLOCK)
    conversation = [*PROMPT, *first.tokens, 5, 6, 7]
    # The last generated token was never run through the model.
    assert ours.load(conversation)[1] == (len(PROMPT) + 2 * BLOCK - 1) // BLOCK * BLOCK


def test_a_pending_match_is_waited_for(model: LlamaForCausalLM) -> None:
    store = DictStore()
    ours = prefix_cache(store, model)
    ours.store(PROMPT, computed(model, PROMPT))
    store.pending = True
    assert ours.load(PROMPT)[1] == 5 * BLOCK
    assert ours.tokens_by_tier == {"nvme": 5 * BLOCK}


def test_a_load_past_its_deadline_stops_and_ends_its_lease(model: LlamaForCausalLM) -> None:
    store = DictStore()
    ours = prefix_cache(store, model)
    ours.store(PROMPT, computed(model, PROMPT))
    ours.deadline_s = 0.0
    assert ours.load(PROMPT)[1] == 0
    assert any(isinstance(call, ReleaseCall) and call.transfer for call in store.log)
    assert (store.held, store.borrowed) == (0, 0)


def test_lossy_classes_mark_what_is_computed_on_top(model: LlamaForCausalLM) -> None:
    store = DictStore()
    lossy = PrefixCache(
        Client(store),
        model,
        tokens_per_block=BLOCK,
        fidelity=Fidelity.SAFE,
        profiles=("raw",),
        weights="random-7",
    )
    lossy.store(PROMPT, computed(model, PROMPT))
    assert lossy.load(PROMPT)[1] == 5 * BLOCK
    assert prefix_cache(store, model).load(PROMPT)[1] == 0, "exact is asked for"


@pytest.mark.parametrize("ids", [[[1, 2], [3, 4]], [1.5, 2.5], [-1], [1 << 31]])
def test_wrong_arguments_do_raise(model: LlamaForCausalLM, ids: list[int]) -> None:
    with pytest.raises(TierKVError, match="ids"):
        prefix_cache(DictStore(), model).load(ids)


def test_a_cache_of_another_model_is_not_stored(model: LlamaForCausalLM) -> None:
    store = DictStore()
    ours = prefix_cache(store, model)
    cache = DynamicCache(config=model.config)
    for number in range(2):
        cache.update(torch.zeros(1, 1, 20, 16), torch.zeros(1, 1, 20, 16), number)
    assert ours.store(PROMPT, cache) == 0
    assert ours.edge.failures["store"] == 1
    assert not store.frames


def test_files_name_the_weights(model: LlamaForCausalLM, tmp_path: Path) -> None:
    store = DictStore()
    caches = []
    for name in ("one", "elsewhere"):
        model.save_pretrained(tmp_path / name)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / name, dtype=model.dtype)
        caches.append(PrefixCache(Client(store), loaded, tokens_per_block=BLOCK))
    caches[0].store(PROMPT, computed(model, PROMPT))
    assert caches[1].load(PROMPT)[1] == 5 * BLOCK, "the same files in another directory"
