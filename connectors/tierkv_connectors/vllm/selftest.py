"""Self-test: does the engine keep KV where our layout says? Asked before the first real block.

vLLM's attention itself writes a pattern into two spare blocks of every layer; gathering it through
the layout, by the device that will copy blocks, has to give the same bits. Then another pattern is
scattered through the layout; the memory of the blocks has to be bit for bit what the attention
makes of that pattern. A wrong guess of any kind (K and V swapped, K not transposed, layers out of
order or sharing memory) shows as a difference. What the blocks held before is put back.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from tierkv.errors import invalid
from tierkv_connectors.device import Device
from tierkv_connectors.vllm.layout import Attention, Layout


class AttentionLayer(Protocol):
    """What of vLLM's attention layer is used: `static_forward_context` has one for each name."""

    attn_backend: type
    impl: object


def attention_of(layers: Mapping[str, AttentionLayer], names: Sequence[str]) -> Attention:
    """Return what these layers say of how they pack KV.

    Raises: TierKVError (invalid) when one is missing, or they do not agree.
    """
    found = {_attention(layers, name) for name in names}
    if len(found) != 1:
        raise invalid(f"the layers have not one kind of attention but {sorted(map(str, found))}")
    return found.pop()


def _attention(layers: Mapping[str, AttentionLayer], name: str) -> Attention:
    layer = layers.get(name)
    get_name = getattr(getattr(layer, "attn_backend", None), "get_name", None)
    if get_name is None:
        raise invalid(f"{name} has no attention that could be asked how it packs KV")
    isa = getattr(layer, "isa", None) or getattr(getattr(layer, "impl", None), "isa", None)
    return Attention(get_name(), isa)


@torch.no_grad()
def self_test(
    layout: Layout,
    kv_caches: Mapping[str, torch.Tensor],
    layers: Mapping[str, AttentionLayer],
    device: Device,
) -> None:
    """Prove the layout, and the device's copies, against the engine's own writing.

    Args:
        layout: what `layout_of` found for these tensors.
        kv_caches: as vLLM registered them; nothing else may use the first and the last block.
        layers: vLLM's attention layers by name.
        device: where the tensors are.

    Raises: TierKVError (invalid) with the reason when it does not hold or cannot be tested.
    """
    if layout.blocks < 3:  # noqa: PLR2004 -- block 0 is nobody's, and two are compared
        raise invalid(f"a KV cache of {layout.blocks} blocks is too small to be tested")
    blocks = (layout.blocks - 1, 1)
    tensors = [kv_caches[name] for name in layout.layer_names]
    written, scattered = _patterns(layout)
    lane = device.lane(written.nbytes)
    with _kept(layout, tensors, blocks):
        _write(layout, tensors, layers, blocks, scattered)
        wanted = _memory(layout, tensors, blocks)
        _write(layout, tensors, layers, blocks, written)
        found = torch.empty_like(written)
        lane.after(device.mark())
        lane.gather(layout.views(blocks), found)
        lane.wait()
        _compare(layout, found, written)
        lane.scatter(scattered, layout.views(blocks))
        lane.wait()
        for name, memory, want in zip(
            layout.layer_names, _memory(layout, tensors, blocks), wanted, strict=True
        ):
            if not torch.equal(_bits(memory), _bits(want)):
                raise invalid(f"what is scattered into {name} is not what its attention writes")


def _patterns(layout: Layout) -> list[torch.Tensor]:
    """Return two blocks in host memory, each over two engine blocks.

    The engine's own random state is not used.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (layout.layers, 2, 2 * layout.block_tokens, layout.heads, layout.dim)
    return [torch.randn(shape, generator=generator).to(layout.dtype) for _ in range(2)]


def _write(
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    layers: Mapping[str, AttentionLayer],
    blocks: Sequence[int],
    pattern: torch.Tensor,
) -> None:
    """Let the engine's attention write a pattern as it writes new KV."""
    offsets = torch.arange(layout.block_tokens)
    slots = torch.cat([block * layout.block_tokens + offsets for block in blocks])
    slots, pattern = slots.to(layout.device), pattern.to(layout.device)
    for name, tensor, (keys, values) in zip(layout.layer_names, tensors, pattern, strict=True):
        layer = layers.get(name)
        write = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
        if write is None:
            raise invalid(f"the attention of {name} has no call that writes KV: cannot be tested")
        write(layer, keys, values, tensor, slots)


def _compare(layout: Layout, found: torch.Tensor, written: torch.Tensor) -> None:
    for name, got, want in zip(layout.layer_names, found, written, strict=True):
        for half, (left, right) in enumerate(zip(got, want, strict=True)):
            if not torch.equal(_bits(left), _bits(right)):
                raise invalid(f"{('keys', 'values')[half]} of {name} are not where we look")


@contextmanager
def _kept(layout: Layout, tensors: Sequence[torch.Tensor], blocks: Sequence[int]) -> Iterator[None]:
    before = _memory(layout, tensors, blocks)
    try:
        yield
    finally:
        for tensor, memory in zip(tensors, before, strict=True):
            for block, content in zip(blocks, memory, strict=True):
                layout.memory(tensor, block).copy_(content)


def _memory(
    layout: Layout, tensors: Sequence[torch.Tensor], blocks: Sequence[int]
) -> list[torch.Tensor]:
    """Return a copy of the blocks as they lie in each tensor: [block, ...]."""
    return [torch.stack([layout.memory(tensor, block) for block in blocks]) for tensor in tensors]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
