"""vLLM's KV tensors, made up in every arrangement: the layout finds the KV, or says why it cannot.

Each arrangement is written as an engine writes it, one vector of one token and head at a time.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm_layouts import (
    AMX,
    BLOCKS,
    DIM,
    FLASH,
    HEADS,
    LAYERS,
    MAKE,
    TOKENS,
    VEC,
    Engine,
    FullAttentionSpec,
    MLAAttentionSpec,
    apart,
    one_storage,
    pattern,
    put_amx,
    put_fused,
    put_transposed,
)
from tierkv.errors import ErrorKind, TierKVError
from tierkv_connectors.device.host import HostDevice, HostLane
from tierkv_connectors.views import gather, scatter
from tierkv_connectors.vllm.layout import Attention, Layout
from tierkv_connectors.vllm.selftest import attention_of, self_test

IDS = ([4, 1, 2, 5], [3], [1, 2, 3, 4])


@pytest.fixture(params=list(MAKE))
def engine(request: pytest.FixtureRequest) -> Engine:
    return MAKE[request.param]()


@pytest.mark.parametrize("block_ids", IDS, ids=str)
def test_gather_gives_what_the_engine_wrote(engine: Engine, block_ids: list[int]) -> None:
    written = pattern(len(block_ids))
    engine.write(block_ids, written)
    found = torch.empty_like(written)
    gather(engine.layout().views(block_ids), found)
    assert torch.equal(found, written)


@pytest.mark.parametrize("block_ids", IDS, ids=str)
def test_scatter_leaves_what_the_engine_would_write(engine: Engine, block_ids: list[int]) -> None:
    everything = list(range(1, BLOCKS))
    engine.write(everything, pattern(len(everything)))
    block = pattern(len(block_ids), seed=1)
    before = [tensor.clone() for tensor in engine.tensors]
    engine.write(block_ids, block)
    wanted = [tensor.clone() for tensor in engine.tensors]
    for tensor, old in zip(engine.tensors, before, strict=True):
        tensor.copy_(old)
    scatter(block, engine.layout().views(block_ids))
    assert all(map(torch.equal, engine.tensors, wanted))


def test_geometry_is_the_config_s(engine: Engine) -> None:
    layout = engine.layout()
    assert layout.layer_names == tuple(engine.names)
    assert (layout.layers, layout.block_tokens, layout.blocks) == (LAYERS, TOKENS, BLOCKS)
    assert (layout.heads, layout.dim, layout.dtype) == (HEADS, DIM, torch.bfloat16)


@pytest.mark.parametrize(("block_ids", "runs"), [([4, 1, 5], 3), ([2, 3, 4], 1), ([4, 5, 1], 2)])
def test_layers_of_one_storage_are_one_piece(block_ids: list[int], runs: int) -> None:
    assert len(MAKE["cpu"]().layout().views(block_ids)) == runs
    assert len(MAKE["BLHNC"]().layout().views(block_ids)) == runs
    assert len(MAKE["cpu apart"]().layout().views(block_ids)) == runs * LAYERS


def test_a_view_of_too_few_blocks_is_not_a_block() -> None:
    views = MAKE["cpu"]().layout().views([1, 2])
    with pytest.raises(AssertionError, match="whole"):
        gather(views, pattern(3))


def test_what_is_skipped_of_a_block_stays_as_it_is() -> None:
    engine = MAKE["cpu"]()
    layout = engine.layout()
    before, block = torch.empty_like(pattern(2)), pattern(2)
    gather(layout.views([1, 2]), before)
    scatter(block, layout.views([2], skip=1))
    found = torch.empty_like(block)
    gather(layout.views([1, 2]), found)
    assert torch.equal(found[:, :, :TOKENS], before[:, :, :TOKENS])
    assert torch.equal(found[:, :, TOKENS:], block[:, :, TOKENS:])


@pytest.mark.parametrize("block_ids", [[0], [1, BLOCKS], [-1]], ids=str)
def test_blocks_of_nobody_are_refused(block_ids: list[int]) -> None:
    with pytest.raises(TierKVError, match="block ids"):
        MAKE["cpu"]().layout().views(block_ids)


def with_spec(spec: FullAttentionSpec) -> Engine:
    return Engine(one_storage("LBHNC"), put_fused, FLASH, spec=spec)


def with_tensors(tensors: list[torch.Tensor], attention: Attention = FLASH) -> Engine:
    return Engine(tensors, put_fused, attention)


def not_registered() -> Engine:
    engine = MAKE["cpu"]()
    del engine.caches[engine.names[1]]
    return engine


def of_two_blocks() -> Engine:
    engine = with_tensors(apart(2, 2, TOKENS, HEADS, DIM))
    engine.config.num_blocks = 2
    return engine


REFUSED: dict[str, tuple[Callable[[], Engine], str]] = {
    "MLA": (lambda: with_spec(MLAAttentionSpec()), "kind MLAAttentionSpec"),
    "MLA shape": (lambda: with_tensors(apart(BLOCKS, TOKENS, 576)), "fits 0"),
    "tensor missing": (not_registered, "NoneType"),
    "other dtype": (lambda: with_spec(FullAttentionSpec(dtype=torch.float16)), "its spec says"),
    "fp8": (
        lambda: Engine(
            [kv.to(torch.float8_e4m3fn) for kv in one_storage("LBHNC")],
            put_fused,
            FLASH,
            spec=FullAttentionSpec(dtype=torch.float8_e4m3fn),
        ),
        "float8_e4m3fn is not supported",
    ),
    "scales inside": (lambda: with_spec(FullAttentionSpec(kv_quant_mode=2)), "kv_quant_mode 2"),
    "other V dim": (lambda: with_spec(FullAttentionSpec(head_size_v=8)), "head_size_v 8"),
    "packed heads": (lambda: with_spec(FullAttentionSpec(num_head_slots=1)), "num_head_slots 1"),
    "compressed": (lambda: with_spec(FullAttentionSpec(tokens_per_state=4)), "tokens_per_state 4"),
    "other heads": (lambda: with_spec(FullAttentionSpec(num_kv_heads=4)), "fits 0"),
    "other tokens": (lambda: with_spec(FullAttentionSpec(block_size=48)), "fits 0"),
    "other blocks": (lambda: with_tensors(one_storage("LBHNC", B=BLOCKS + 1)), "fits 0"),
    "either way": (of_two_blocks, "fits 2"),
    "unknown isa": (lambda: with_tensors(one_storage("LBHNC"), Attention("CPU_ATTN", "x")), "'x'"),
    "unknown kind": (lambda: with_tensors(one_storage("LBHNC"), Attention("ROCM_ATTN")), "ROCM"),
    "cpu not dense": (lambda: with_tensors(one_storage("LBNHC"), VEC), "one run of memory"),
    "layers differ": (
        lambda: with_tensors([*one_storage("LBHNC")[:2], *one_storage("LBNHC")[2:]]),
        "arranged otherwise",
    ),
    "layers shared": (lambda: with_tensors(one_storage("LBHNC")[:1] * LAYERS), "share one"),
    "amx of fp32": (
        lambda: Engine(
            [kv.float() for kv in one_storage("LBHNC")],
            put_amx,
            AMX,
            spec=FullAttentionSpec(dtype=torch.float32),
        ),
        "AMX tiles",
    ),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_known_is_refused(make: Callable[[], Engine], reason: str) -> None:
    with pytest.raises(TierKVError, match=reason) as refusal:
        make().layout()
    assert refusal.value.kind is ErrorKind.INVALID


def checked(engine: Engine, layout: Layout | None = None) -> None:
    layers = engine.attention_layers()
    assert attention_of(layers, engine.names) == engine.attention
    self_test(layout or engine.layout(), engine.caches, layers, HostDevice())


def test_self_test_holds_and_leaves_the_cache_as_it_was(engine: Engine) -> None:
    everything = list(range(BLOCKS))
    engine.write(everything, pattern(BLOCKS))
    before = [tensor.clone() for tensor in engine.tensors]
    checked(engine)
    assert all(map(torch.equal, engine.tensors, before))


def swapped(kv: torch.Tensor, row: int, token: int, head: int, k: Any, v: Any) -> None:
    put_transposed(kv, row, token, head, v, k)


def test_self_test_sees_keys_and_values_swapped() -> None:
    engine = Engine(one_storage("LBHNC"), swapped, VEC)
    with pytest.raises(TierKVError, match=r"keys of model.layers.0.* are not where we look"):
        checked(engine)


def test_self_test_sees_keys_that_are_not_transposed() -> None:
    engine = Engine(one_storage("LBHNC"), put_fused, VEC)
    with pytest.raises(TierKVError, match="keys of"):
        checked(engine)


def test_self_test_sees_layers_in_another_order() -> None:
    engine = MAKE["cpu"]()
    layout = engine.layout()
    engine.caches = dict(zip(engine.names, engine.tensors[::-1], strict=True))
    with pytest.raises(TierKVError, match="keys of"):
        checked(engine, layout)


def test_self_test_sees_layers_that_overlap() -> None:
    whole = torch.zeros(2 * BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=torch.bfloat16)
    engine = Engine([whole[at : at + BLOCKS] for at in (0, 2, 4)], put_fused, FLASH)
    with pytest.raises(TierKVError, match="are not where we look"):
        checked(engine)


def test_self_test_sees_what_scatter_gets_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostLane, "scatter", lambda _, block, views: scatter(block.flip(0), views))
    with pytest.raises(TierKVError, match="scattered into"):
        checked(MAKE["cpu"]())


def test_a_failed_self_test_leaves_the_cache_as_it_was() -> None:
    engine = Engine(one_storage("LBHNC"), put_fused, VEC)
    engine.write([1, 2, 5], pattern(3))
    before = [tensor.clone() for tensor in engine.tensors]
    with pytest.raises(TierKVError):
        checked(engine)
    assert all(map(torch.equal, engine.tensors, before))


def test_self_test_refuses_what_it_cannot_write() -> None:
    engine = MAKE["cpu"]()
    layers = engine.attention_layers()
    for layer in layers.values():
        layer.impl = object()
    with pytest.raises(TierKVError, match="no call that writes"):
        self_test(engine.layout(), engine.caches, layers, HostDevice())


def test_self_test_needs_two_spare_blocks() -> None:
    engine = Engine(one_storage("LBHNC", B=2), put_transposed, VEC)
    engine.config.num_blocks = 2
    with pytest.raises(TierKVError, match="too small"):
        checked(engine)


def test_attention_has_one_kind() -> None:
    engine = MAKE["cpu"]()
    layers = engine.attention_layers()
    layers[engine.names[2]] = SimpleNamespace(
        attn_backend=layers[engine.names[0]].attn_backend, impl=SimpleNamespace(isa="amx")
    )
    with pytest.raises(TierKVError, match="not one kind"):
        attention_of(layers, engine.names)
    del layers[engine.names[2]]
    with pytest.raises(TierKVError, match="no attention"):
        attention_of(layers, engine.names)
