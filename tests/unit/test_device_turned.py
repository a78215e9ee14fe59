"""Copies that turn squares give what torch's own copies give, bit for bit, and leave the rest."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tierkv_connectors.device.host import HostDevice
from tierkv_connectors.device.turned import copy, turn_of
from tierkv_connectors.views import Piece, gather, scatter

LAYERS, ROWS, HEADS = 2, 3, 2
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
Make = Callable[[torch.dtype, int, int], torch.Tensor]


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return all kinds of bits, NaN with payloads too."""
    draw = torch.Generator().manual_seed(3)
    whole = torch.iinfo(BITS[dtype])
    bits = torch.randint(whole.min, whole.max, shape, dtype=torch.int64, generator=draw)
    return bits.to(BITS[dtype]).view(dtype)


def vec(dtype: torch.dtype, tokens: int, dim: int) -> torch.Tensor:
    """Return keys of the CPU's attention, as [layer, row, token, head, dim]."""
    memory = noise(dtype, LAYERS, ROWS, HEADS, 2, tokens * dim)
    return memory[:, :, :, 0].view(LAYERS, ROWS, HEADS, dim, tokens).permute(0, 1, 4, 2, 3)


def amx(dtype: torch.dtype, tokens: int, dim: int) -> torch.Tensor:
    """Return keys as tiles, in which pairs along the dim stay together."""
    memory = noise(dtype, LAYERS, ROWS, HEADS, 2, tokens * dim)[:, :, :, 0]
    tiles = memory.view(LAYERS, ROWS, HEADS, tokens // 16, dim // 2, 16, 2)
    return tiles.permute(0, 1, 3, 5, 2, 4, 6)


def plain(dtype: torch.dtype, tokens: int, dim: int) -> torch.Tensor:
    """Return what is in order already."""
    return noise(dtype, LAYERS, ROWS, tokens, HEADS, dim)


TURNED = [
    (vec, torch.float32, 32, 64), (vec, torch.float32, 128, 16), (vec, torch.bfloat16, 32, 64),
    (vec, torch.float16, 16, 128), (amx, torch.bfloat16, 32, 64), (amx, torch.float16, 16, 32),
]  # fmt: skip
LEFT_TO_TORCH = [
    (plain, torch.float32, 32, 64), (vec, torch.float32, 8, 64), (vec, torch.bfloat16, 32, 40),
    (amx, torch.bfloat16, 32, 16),
]  # fmt: skip


@pytest.mark.parametrize(("make", "dtype", "tokens", "dim"), TURNED + LEFT_TO_TORCH)
def test_both_ways_are_torch_s(make: Make, dtype: torch.dtype, tokens: int, dim: int) -> None:
    keys = make(dtype, tokens, dim)
    shape = (LAYERS, 2, ROWS * tokens, HEADS, dim)
    views = [Piece(slice(0, LAYERS), slice(0, ROWS * tokens), keys, keys.clone())]
    wanted, found = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    lane = HostDevice().lane(found.nbytes)
    gather(views, wanted)
    lane.gather(views, found)
    assert torch.equal(found.view(BITS[dtype]), wanted.view(BITS[dtype]))
    block = noise(dtype, *shape).flip(2)
    memories = []
    for write in (scatter, lane.scatter):
        memory = make(dtype, tokens, dim)
        write(block, [Piece(slice(0, LAYERS), slice(0, ROWS * tokens), memory, memory.clone())])
        storage = torch.empty(0, dtype=dtype).set_(memory.untyped_storage())
        memories.append(storage.view(BITS[dtype]))
    assert torch.equal(*memories), "nothing but keys is written"


@pytest.mark.parametrize(("make", "dtype", "tokens", "dim"), TURNED)
def test_what_the_cpu_s_attention_has_is_turned(
    make: Make, dtype: torch.dtype, tokens: int, dim: int
) -> None:
    keys = make(dtype, tokens, dim)
    place = torch.empty(keys.shape, dtype=dtype)
    assert turn_of(place, keys) is not None
    assert turn_of(keys, place) is not None


@pytest.mark.parametrize(("make", "dtype", "tokens", "dim"), LEFT_TO_TORCH)
def test_what_is_in_order_or_no_whole_squares_is_not(
    make: Make, dtype: torch.dtype, tokens: int, dim: int
) -> None:
    keys = make(dtype, tokens, dim)
    assert turn_of(torch.empty(keys.shape, dtype=dtype), keys) is None


def test_pairs_that_begin_in_the_middle_of_four_bytes() -> None:
    memory = noise(torch.bfloat16, 1 + 16 * 16 * 2)[1:]
    pairs = memory.view(16, 16, 2).transpose(0, 1)
    found = torch.empty(pairs.shape, dtype=pairs.dtype)
    assert turn_of(found, pairs) is not None
    copy(found, pairs)
    assert torch.equal(found.view(torch.int16), pairs.contiguous().view(torch.int16))


@pytest.mark.parametrize("offset", [0, 1, 15])
def test_rows_that_begin_within_a_line_are_turned_too(offset: int) -> None:
    keys = vec(torch.float32, 32, 64)
    memory = torch.zeros(keys.numel() + 32)
    place = memory[offset : offset + keys.numel()].view(keys.shape)
    turn = turn_of(place, keys)
    assert turn is not None
    assert (turn.element.dtype == np.int32) == (offset == 0), "only whole lines pass the caches"
    copy(place, keys)
    assert torch.equal(place.view(torch.int32), keys.view(torch.int32))
    assert not memory[:offset].any()
    assert not memory[offset + keys.numel() :].any()
