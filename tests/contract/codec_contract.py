"""The contract every codec keeps, as a suite to inherit.

    class TestLossless(CodecContract):
        codec = Lossless()

An exact codec gives every bit back. A lossy one (`lossy_contract`) overrides `check_close`, which
compares what was decoded with what was encoded, the dtypes and the shapes that it takes.
"""

import contextlib
import dataclasses
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.identity import LayerSpec, Rope
from tierkv.part import Part
from tierkv_codecs import CODECS, Codec, CodecError, Place, Unsuited
from tierkv_codecs.tensors import bits_of

GUARD = 0xA5

BLOCKS: list[tuple[int, ...]] = [
    (1, 2, 1, 1, 1),
    (3, 2, 1, 3, 64),
    (2, 2, 17, 3, 5),
    (2, 2, 300, 3, 64),
    (1, 2, 600, 3, 129),
    (4, 2, 0, 3, 64),
]
SHAPES: list[tuple[int, ...]] = [(0,), (1,), (7,), (), *BLOCKS]

# Run in a process of its own, and in this one, to compare the bytes.
DIGEST_SCRIPT = """
import sys, torch
from tests.contract.codec_contract import digest
from tierkv_codecs import CODECS
torch.set_num_threads(int(sys.argv[2]))
print(digest(CODECS.named(sys.argv[1])))
"""


def kv_like(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return normal values whose last axis has channels of very different scale, as keys have."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if shape and values.numel():
        values *= torch.exp2(torch.randint(-6, 6, shape[-1:], generator=generator).float())
    if dtype == torch.uint8:
        return (values * 8).round().clamp(-128, 127).to(torch.int16).add(128).to(torch.uint8)
    return values.to(dtype)


def random_bits(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return values with any bit pattern, NaNs and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    size = (count * torch.empty((), dtype=dtype).itemsize,)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


def place_of(block: torch.Tensor, position: int = 1024) -> Place:
    """Return a place for a block of any shape; a canonical one has a layer for each of its own."""
    layers, _, _, heads, dim = block.shape if block.dim() == 5 else (1, 2, 1, 1, 1)
    rope = Rope(kind="none", theta=0.0) if dim % 2 else Rope()  # it turns pairs
    spec = LayerSpec(kv_heads=heads, k_dim=dim, v_dim=dim, rope=rope)
    return Place((spec,) * layers, Part(0, 0, layers, 0, heads), position)


def encoded(codec: Codec, block: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Encode into a buffer with guard bytes around it; return payload and segments."""
    bound = codec.bound(block.numel() * block.itemsize)
    buffer = torch.full((bound + 128,), GUARD, dtype=torch.uint8)
    segments = codec.encode(block, buffer[64 : 64 + bound], place_of(block))
    length = sum(segments)
    assert all(segment >= 0 for segment in segments)
    assert length <= bound
    assert (buffer[:64] == GUARD).all()
    assert (buffer[64 + bound :] == GUARD).all()
    return buffer[64 : 64 + length].clone(), segments


def digest(codec: Codec) -> str:
    """Return a digest of payloads of several blocks, for comparison between processes."""
    found = hashlib.sha256()
    flat = (1, 2, 100, 1, 5) if codec.lossy else (1000,)
    for seed, shape in enumerate([(2, 2, 300, 3, 64), (3, 2, 1, 3, 64), flat]):
        payload, segments = encoded(codec, kv_like(shape, torch.bfloat16, seed))
        found.update(repr(segments).encode() + payload.numpy().tobytes())
    return found.hexdigest()


def layouts(block: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield tensors with the values of `block` and other strides."""
    if block.dim() < 2:
        return
    yield block.transpose(0, -1).contiguous().transpose(0, -1)
    wide = torch.zeros((*block.shape[:-1], block.shape[-1] * 2), dtype=block.dtype)
    bits_of(wide)[..., ::2] = bits_of(block)
    yield wide[..., ::2]
    offset = torch.zeros(block.numel() + 3, dtype=block.dtype)
    bits_of(offset)[3:] = bits_of(block).reshape(-1)
    yield offset[3:].view(block.shape)


def damaged(payload: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Yield payloads that were cut, lengthened or changed."""
    size = payload.numel()
    for length in {0, 1, 7, 8, 9, size // 2, size - 1} - {size}:
        if 0 <= length <= size:
            yield payload[:length].clone()
    yield torch.cat([payload, payload[:1]])
    yield torch.cat([payload, payload])
    generator = torch.Generator().manual_seed(seed)
    for position in [*range(min(size, 24)), *torch.randint(0, size, (40,), generator=generator)]:
        changed = payload.clone()
        changed[int(position)] ^= 1 << int(torch.randint(0, 8, (), generator=generator))
        yield changed
    yield torch.zeros_like(payload)
    yield torch.full_like(payload, 255)


class CodecContract:
    """What every codec must pass. A subclass names the codec."""

    codec: ClassVar[Codec]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint8,
    )

    shapes: ClassVar[list[tuple[int, ...]]] = SHAPES

    def check_close(self, decoded: torch.Tensor, block: torch.Tensor) -> None:
        assert torch.equal(bits_of(decoded), bits_of(block))

    def round_trip(self, block: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        before = bits_of(block).clone()
        payload, segments = encoded(self.codec, block)
        kept = payload.clone()
        if out is None:
            out = torch.empty(block.shape, dtype=block.dtype)
        self.codec.decode(payload, segments, out, place_of(out))
        assert torch.equal(bits_of(block), before), "encode changed its input"
        assert torch.equal(payload, kept), "decode changed its payload"
        assert out.shape == block.shape
        assert out.dtype == block.dtype
        self.check_close(out, block)
        return out

    def test_is_a_frozen_value_that_the_registry_finds(self) -> None:
        codec = self.codec
        assert dataclasses.is_dataclass(codec)
        assert hash(codec) == hash(dataclasses.replace(codec))
        with pytest.raises(dataclasses.FrozenInstanceError):
            codec.name = "other"
        assert CODECS.of_id(codec.id) == CODECS.named(codec.name) == codec

    def test_round_trip(self) -> None:
        for shape in self.shapes:
            for dtype in self.dtypes:
                self.round_trip(kv_like(shape, dtype))

    @pytest.mark.parametrize(
        "shape", [(2, 2, 33, 3, 64), (2, 2, 1, 1, 8), (1, 2, 5, 1, 3)], ids=str
    )
    def test_strides_do_not_matter(self, shape: tuple[int, ...]) -> None:
        for dtype in self.dtypes:
            block = kv_like(shape, dtype)
            plain = encoded(self.codec, block)
            for view in layouts(block):
                found = encoded(self.codec, view)
                assert found[1] == plain[1]
                assert torch.equal(found[0], plain[0])
                bits_of(view).fill_(1)
                self.round_trip(block, out=view)

    def test_only_the_view_is_written(self) -> None:
        for dtype in self.dtypes:
            block = kv_like((2, 2, 16, 2, 8), dtype)
            pages = torch.zeros((4, 2, 32, 2, 8), dtype=dtype)
            bits_of(pages).fill_(GUARD)
            self.round_trip(block, out=pages[1:3, :, 8:24])
            bits_of(pages)[1:3, :, 8:24] = GUARD
            assert (bits_of(pages) == GUARD).all()

    def test_unaligned_buffers(self) -> None:
        for dtype in self.dtypes:
            block = kv_like((2, 2, 9, 3, 7), dtype)
            source = block.transpose(0, 3)
            bound = self.codec.bound(source.numel() * source.itemsize)
            buffer = torch.zeros(bound + 3, dtype=torch.uint8)
            segments = self.codec.encode(source, buffer[3:], place_of(source))
            payload = buffer[3 : 3 + sum(segments)]
            out = torch.zeros_like(block).transpose(0, 3)
            self.codec.decode(payload, segments, out, place_of(out))
            self.check_close(out, source)

    @pytest.mark.timeout(400)
    def test_the_same_bytes_in_another_process_and_with_any_thread_count(self) -> None:
        expected = digest(self.codec)
        threads = torch.get_num_threads()
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                assert digest(self.codec) == expected
        finally:
            torch.set_num_threads(threads)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        for setting in ("1", "3"):
            command = [sys.executable, "-c", DIGEST_SCRIPT, self.codec.name, setting]
            run = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=180
            )
            assert run.returncode == 0, run.stderr
            assert run.stdout.strip() == expected

    def test_what_was_coded_before_does_not_matter(self) -> None:
        expected = digest(self.codec)
        noise = random_bits(300_000, torch.bfloat16).view(2, 2, 500, 1, 150)
        with contextlib.suppress(Unsuited):
            encoded(self.codec, noise)
        encoded(self.codec, torch.zeros_like(noise))
        assert digest(self.codec) == expected

    def test_threads_may_share_it(self) -> None:
        together = threading.Barrier(4)

        def work(seed: int) -> None:
            together.wait()
            for turn in range(8):
                block = kv_like((2, 2, 128, 3, 64), self.dtypes[0], seed * 100 + turn)
                self.round_trip(block)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))

    # The properties are inner functions, because hypothesis takes an inherited one for one test.
    def test_any_shape(self) -> None:
        least = 5 if self.codec.lossy else 0
        shapes = st.lists(st.integers(0, 9), min_size=least, max_size=5)

        @settings(deadline=None)  # the first call compiles
        @given(shapes, st.sampled_from(self.dtypes), st.integers(0, 99))
        def property_holds(shape: list[int], dtype: torch.dtype, seed: int) -> None:
            with contextlib.suppress(Unsuited):
                self.round_trip(kv_like(tuple(shape), dtype, seed))

        property_holds()

    def test_a_short_buffer_is_refused(self) -> None:
        block = kv_like((2, 2, 16, 3, 64), self.dtypes[0])
        bound = self.codec.bound(block.numel() * block.itemsize)
        for size in (0, 1, bound - 1):
            with pytest.raises(CodecError, match="bytes"):
                self.codec.encode(block, torch.empty(size, dtype=torch.uint8), place_of(block))

    def test_a_wrong_buffer_or_payload_is_refused(self) -> None:
        block = kv_like((2, 2, 16, 3, 64), self.dtypes[0])
        bound = self.codec.bound(block.numel() * block.itemsize)
        payload, segments = encoded(self.codec, block)
        wide = torch.zeros(2 * bound, dtype=torch.uint8)
        for out in (wide[::2], wide.view(2, -1), wide.to(torch.int16)):
            with pytest.raises(CodecError):
                self.codec.encode(block, out, place_of(block))
        for wrong in (payload.to(torch.int16), payload.repeat_interleave(2)[::2], payload[None]):
            with pytest.raises(CodecError):
                self.codec.decode(wrong, segments, torch.empty_like(block), place_of(block))

    def test_an_unsupported_dtype_is_refused(self) -> None:
        block = torch.zeros(4, dtype=torch.float64)
        with pytest.raises(CodecError, match="float64"):
            self.codec.encode(block, torch.zeros(99).byte(), place_of(block))
        payload, segments = encoded(self.codec, torch.zeros((1, 2, 2, 1, 1), dtype=self.dtypes[0]))
        with pytest.raises(CodecError, match="float64"):
            self.codec.decode(payload, segments, block, place_of(block))

    def test_segments_that_do_not_add_up_are_refused(self) -> None:
        block = kv_like((2, 2, 16, 3, 64), self.dtypes[0])
        payload, segments = encoded(self.codec, block)
        longer, shorter = (*segments[:-1], segments[-1] + 1), (*segments[:-1], segments[-1] - 1)
        for wrong in ((), longer, shorter, (-1, *segments), (payload.numel() + 1, -1)):
            with pytest.raises(CodecError):
                self.codec.decode(payload, wrong, torch.empty_like(block), place_of(block))

    def test_a_block_of_another_size_is_refused(self) -> None:
        block = kv_like((2, 2, 16, 3, 64), self.dtypes[0])
        payload, segments = encoded(self.codec, block)
        for shape in [(2, 2, 15, 3, 64), (2, 2, 17, 3, 64), (0,), (1,), (2, 2, 160, 3, 64)]:
            out = torch.empty(shape, dtype=block.dtype)
            with pytest.raises(CodecError):
                self.codec.decode(payload, segments, out, place_of(out))

    def test_damage_is_refused_or_decodes_to_something(self) -> None:
        """A payload may be damaged where only the frame's checksum can tell; it must not crash."""
        for dtype in self.dtypes:
            for shape in [(2, 2, 300, 3, 64), (1, 2, 1, 3, 64)]:
                payload, _ = encoded(self.codec, kv_like(shape, dtype))
                out = torch.empty(shape, dtype=dtype)
                for number, bad in enumerate(damaged(payload, seed=1)):
                    try:
                        self.codec.decode(bad, (bad.numel(),), out, place_of(out))
                    except CodecError:
                        continue
                    assert bad.numel() == payload.numel(), f"damage {number} changed the length"

    def test_any_bytes_are_refused_or_decode_to_something(self) -> None:
        @given(st.binary(max_size=200), st.sampled_from(self.dtypes), st.integers(0, 40))
        def property_holds(junk: bytes, dtype: torch.dtype, count: int) -> None:
            payload = torch.tensor(list(junk), dtype=torch.uint8)
            out = torch.empty(count, dtype=dtype)
            with contextlib.suppress(CodecError):
                self.codec.decode(payload, (len(junk),), out, place_of(out))

        property_holds()


class ExactCodecContract(CodecContract):
    """What a codec that loses nothing must pass as well."""

    def test_says_that_it_is_exact(self) -> None:
        assert not self.codec.lossy

    def test_every_bit_pattern_of_two_bytes(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            self.round_trip(torch.arange(-32768, 32768, dtype=torch.int32).short().view(dtype))

    @pytest.mark.parametrize("count", [1, 255, 4096, 70_001])
    def test_noise_and_nan_payloads(self, count: int) -> None:
        for dtype in self.dtypes:
            self.round_trip(random_bits(count, dtype, count))
            nans = bits_of(random_bits(count, dtype, count))
            if dtype == torch.float32:
                nans |= 0x7F800001
            elif dtype != torch.uint8:
                nans |= -0x8000 if dtype.itemsize == 2 else 0x7C
            self.round_trip(nans.view(dtype))

    def test_constant_blocks(self) -> None:
        for dtype in self.dtypes:
            for value in (0, 1, 0x7F):
                block = torch.zeros((2, 2, 300, 3, 64), dtype=dtype)
                bits_of(block).fill_(value)
                self.round_trip(block)
