"""Exponents as codes: every byte against the twin in torch, and what is no payload of theirs."""

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.contract import exponents_twin as twin
from tests.contract.codec_contract import encoded, kv_like, place_of, random_bits
from tierkv_codecs import CodecError, Lossless, exponents, lanes
from tierkv_codecs.bits import kernel
from tierkv_codecs.lossless import EXPONENTS, HEADER, PLANES, STORED
from tierkv_codecs.tensors import bits_of

CODEC = Lossless()
SHAPES = [
    (2, 2, 300, 3, 64),
    (1, 2, 33, 1, 80),
    (2, 2, 32, 1, 5),
    (1, 1, 400, 1, 1),
    (1, 2, 600, 3, 129),
    (3, 2, 1, 3, 64),
    (30, 2, 1, 1, 5),
    (2, 2, 31, 2, 8),
    (1, 1, 1, 40, 4000),
    (300,),
    (256,),
    (1000, 3),
]


def odd(block: torch.Tensor, share: float, seed: int = 3) -> torch.Tensor:
    """Return a block some of whose values have any bits at all."""
    generator = torch.Generator().manual_seed(seed)
    noise = random_bits(block.numel(), torch.bfloat16, seed).view(block.shape)
    return torch.where(torch.rand(block.shape, generator=generator) < share, noise, block)


def blocks() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    for shape in SHAPES:
        block = kv_like(shape, torch.bfloat16)
        if exponents.shape_of(shape)[1] == 1:  # one base for all: channels of one scale
            block = torch.randn(shape, generator=generator).bfloat16()
        for share in (0.0, 0.02):
            yield odd(block, share)
    wide = kv_like((1, 2, 64, 1, 64), torch.float32)
    far = torch.where(torch.arange(64) % 16 == 0, 2.0**-60, 1.0)
    yield (wide * far).bfloat16()  # bases too far apart for four bits
    yield (wide * 2.0**123).bfloat16()  # infinities
    yield (wide * 2.0**-123).bfloat16()  # zeros and denormals: exponents on both sides of zero


def test_bytes_and_values_are_those_of_the_twin() -> None:
    for block in blocks():
        payload, segments = encoded(CODEC, block)
        layout, _, _, piece = HEADER.unpack(payload[: HEADER.size].numpy().tobytes())
        columns = exponents.shape_of(block.shape)[1]
        assert layout == EXPONENTS, block.shape
        data = payload[HEADER.size :].numpy().tobytes()
        assert data == twin.coded(block, piece, columns), block.shape
        assert torch.equal(twin.restored(data, block.numel(), piece), bits_of(block).flatten())
        out = torch.full_like(block, 7.0)
        CODEC.decode(payload, segments, out, place_of(block))
        assert torch.equal(bits_of(out), bits_of(block))


def test_values_in_order_are_written_past_caches_and_beside_them() -> None:
    """Whole lines of the target go past the caches only where it begins with one."""
    block = kv_like((4, 2, 131, 2, 64), torch.bfloat16)  # 268,288 bytes
    payload, segments = encoded(CODEC, block)
    memory = torch.zeros(block.numel() + 64, dtype=torch.bfloat16)
    for offset in (0, 1, 16, 32, 33):
        out = memory[offset : offset + block.numel()].view(block.shape)
        CODEC.decode(payload, segments, out, place_of(block))
        assert torch.equal(bits_of(out), bits_of(block))
        assert not memory[:offset].any()
        assert not memory[offset + block.numel() :].any()
        memory.zero_()


def test_bits_are_moved_alike_with_and_without_an_instruction() -> None:
    @kernel
    def moved(word: np.uint64, mask: np.uint64) -> tuple[np.uint64, ...]:
        return (
            lanes.deposit(word, mask),
            lanes.deposit_slowly(word, mask),
            lanes.extract(word, mask),
            lanes.extract_slowly(word, mask),
        )

    words = random_bits(64, torch.uint8).numpy().view(np.uint64)
    for word in words:
        for mask in (*words, np.uint64(0), np.uint64(2**64 - 1)):
            fast, slow, gathered, slowly = moved(word, mask)
            assert fast == slow
            assert gathered == slowly
            places = [at for at in range(64) if int(mask) >> at & 1]
            assert fast == sum((int(word) >> i & 1) << at for i, at in enumerate(places))
            assert gathered == sum((int(word) >> at & 1) << i for i, at in enumerate(places))


def test_what_does_not_suit_is_coded_as_before() -> None:
    few = kv_like((1, 1, 25, 1, 5), torch.bfloat16)
    constant = torch.ones((2, 2, 300, 3, 64), dtype=torch.bfloat16)
    half = kv_like((2, 2, 300, 3, 64), torch.float16)
    for block in (few, constant, half):
        assert encoded(CODEC, block)[0][0] == PLANES
    assert encoded(CODEC, random_bits(100_000, torch.bfloat16))[0][0] == STORED
    torn = odd(kv_like((2, 2, 300, 3, 64), torch.bfloat16), 0.2)
    assert encoded(CODEC, torn)[0][0] == PLANES


@pytest.mark.parametrize(
    ("field", "number"), [(8, 0), (8, 191), (8, 384), (8, 2**32 - 1), (12, 0), (12, 2**32 - 1)]
)
def test_columns_and_counts_that_are_never_written_are_refused(field: int, number: int) -> None:
    block = kv_like((2, 2, 300, 3, 64), torch.bfloat16)
    payload, segments = encoded(CODEC, block)
    payload[field : field + 4] = torch.tensor(list(number.to_bytes(4, "little"))).byte()
    with pytest.raises(CodecError):
        CODEC.decode(payload, segments, torch.empty_like(block), place_of(block))


@pytest.mark.parametrize("more", [-1, 1])
def test_values_of_a_second_level_must_be_as_many_as_said(more: int) -> None:
    block = kv_like((2, 2, 300, 3, 64), torch.bfloat16)
    payload, segments = encoded(CODEC, block)
    seconds = payload[12:16].numpy().view("<u4")
    seconds += np.int32(more).astype(np.uint32)
    with pytest.raises(CodecError):
        CODEC.decode(payload, segments, torch.empty_like(block), place_of(block))


def test_only_two_bytes_have_exponents() -> None:
    block = kv_like((2, 2, 300, 3, 64), torch.bfloat16)
    payload, segments = encoded(CODEC, block)
    payload[1] = 4
    out = torch.empty((2, 2, 300, 3, 64), dtype=torch.float32)
    with pytest.raises(CodecError, match="two bytes"):
        CODEC.decode(payload, segments, out, place_of(out))


def test_no_payload_is_read_beyond_its_end() -> None:
    """Behind the payload lies memory that nobody may read."""
    block = odd(kv_like((1, 2, 40, 3, 64), torch.bfloat16), 0.02)
    payload, _ = encoded(CODEC, block)
    size, page = payload.numel(), mmap.PAGESIZE
    room = -(-size // page) * page
    with mmap.mmap(-1, room + page) as memory:
        first = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(first)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(address + room), page, 0) == 0
        last = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=room - size)
        out, generator = torch.empty_like(block), torch.Generator().manual_seed(1)
        refused = 0
        for turn in range(300):
            last.copy_(payload)
            if turn:
                at = torch.randint(0, size if turn % 2 else 1000, (8,), generator=generator)
                last[at] = torch.randint(0, 256, (8,), generator=generator).byte()
            try:
                CODEC.decode(last, (size,), out, place_of(block))
            except CodecError:
                refused += 1
        assert 0 < refused < 300
        del first, last
        libc.mprotect(ctypes.c_void_p(address + room), page, 3)
