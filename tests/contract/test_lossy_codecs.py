"""The fixed-rate codecs against the contract, each with the error bound that it states."""

import dataclasses
from typing import ClassVar

import pytest
import torch

from tests.contract.codec_contract import encoded, kv_like, place_of
from tests.contract.lossy_contract import LossyCodecContract
from tierkv.codec import BY_CODEC_ID
from tierkv.identity import LayerSpec, Rope
from tierkv.part import Part
from tierkv_codecs import CODECS, Fp8, Int4, Int8, Place
from tierkv_codecs.fixed import HEADER
from tierkv_codecs.rope import rope, unrope

TINY = 2.0**-24
"""Half a step of the smallest float16 numbers, twice."""


def rounding(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what the rounding to the block's dtype may add."""
    about = torch.finfo(dtype)
    return values.abs() * about.eps + about.smallest_normal * about.eps


def of_groups(values: torch.Tensor, axis: int, size: int, share: float) -> torch.Tensor:
    """Return the bound of each value: a share of its group's span, and fp16's rounding of it."""
    bounds = []
    for part in values.split(size, axis):
        if part.shape[axis]:
            low, high = part.amin(axis, keepdim=True), part.amax(axis, keepdim=True)
            ends = 2.0**-10 * torch.maximum(low.abs(), high.abs()) + TINY
            bounds.append(((high - low) * share + ends).expand(part.shape))
    return torch.cat(bounds, axis) if bounds else values.clone()


class TestInt8(LossyCodecContract):
    codec = Int8()

    def check_close(self, decoded: torch.Tensor, block: torch.Tensor, position: int = 1024) -> None:
        if block.numel():
            sinks = place_of(block, position).sinks(block.shape[2])
            wide, found = block[:, :, sinks:].float(), decoded[:, :, sinks:].float()
            keys = of_groups(wide[:, :1], 2, 128, 1 / 500)
            values = of_groups(wide[:, 1:], 4, block.shape[4], 1 / 500)
            bound = torch.cat([keys, values], 1) + rounding(found, block.dtype)
            assert ((found - wide).abs() <= bound).all()

    def test_ratio(self) -> None:
        block = kv_like((30, 2, 128, 3, 64), torch.bfloat16)
        payload, _ = encoded(self.codec, block)
        assert block.nbytes / (payload.numel() + 256) >= 1.88

    @pytest.mark.parametrize("shape", [(1, 0, 1, 3, 0), (1, 0, 1, 3, 4), (1, 2, 1, 3, 0)])
    def test_a_block_of_nothing(self, shape: tuple[int, ...]) -> None:
        self.round_trip(kv_like(shape, torch.bfloat16))

    def test_keys_and_values_in_one_plane(self) -> None:
        for codec in (self.codec, dataclasses.replace(self.codec, compiled=False)):
            block = kv_like((3, 1, 40, 1, 576), torch.bfloat16)
            buffer = torch.empty(codec.bound(block.nbytes), dtype=torch.uint8)
            segments = codec.encode(block, buffer, place_of(block))
            assert sum(segments) < block.nbytes / 1.5
            out = torch.empty_like(block)
            codec.decode(buffer[: sum(segments)], segments, out, place_of(block))
            self.check_close(out, block)

    def test_any_rope_is_taken(self) -> None:
        block = kv_like((1, 2, 40, 1, 64), torch.bfloat16)
        buffer = torch.empty(self.codec.bound(block.nbytes), dtype=torch.uint8)
        assert self.codec.encode(block, buffer, place_with(Rope(kind="mrope"), block))


class TestFp8(LossyCodecContract):
    codec = Fp8()

    def check_close(self, decoded: torch.Tensor, block: torch.Tensor, position: int = 1024) -> None:
        wide = block.float()
        greatest = wide.abs().amax(4, keepdim=True) if block.shape[4] else wide
        bound = (
            wide.abs() * (1 / 16 + 2.0**-9)
            + greatest / 448 / 1024
            + TINY
            + rounding(decoded.float(), block.dtype)
        )
        assert ((decoded.float() - wide).abs() <= bound).all()

    def test_ratio(self) -> None:
        block = kv_like((30, 2, 128, 3, 64), torch.bfloat16)
        payload, _ = encoded(self.codec, block)
        assert block.nbytes / (payload.numel() + 256) >= 1.93

    def test_r26_saturates_and_never_makes_a_nan(self) -> None:
        block = torch.linspace(-500, 500, 64).repeat(1, 2, 40, 1, 1).bfloat16()
        codes = encoded(self.codec, block)[0][-block.numel() :]
        assert ((codes & 0x7F) <= 0x7E).all()


class TestInt4(LossyCodecContract):
    codec = Int4()
    dtypes: ClassVar[tuple[torch.dtype, ...]] = Int4.dtypes

    def check_close(self, decoded: torch.Tensor, block: torch.Tensor, position: int = 1024) -> None:
        if not block.numel():
            return
        sinks = place_of(block, position).sinks(block.shape[2])
        place = place_of(block, position + sinks)
        wide, found = block[:, :, sinks:].float(), decoded[:, :, sinks:].float()
        values = of_groups(wide[:, 1], 3, 32, 1 / 29) + rounding(found[:, 1], block.dtype)
        assert ((found[:, 1] - wide[:, 1]).abs() <= values).all()
        plain = unrope(wide[:, 0], place.layers, place.position)
        back = unrope(found[:, 0], place.layers, place.position)
        largest = found[:, 0].abs().amax(-1, keepdim=True)
        keys = of_groups(plain, 1, 32, 1 / 29) + 2 * rounding(largest, block.dtype) + 1e-6
        assert ((back - plain).abs() <= keys).all()

    def test_ratio(self) -> None:
        block = kv_like((30, 2, 128, 3, 64), torch.bfloat16)
        payload, _ = encoded(self.codec, block)
        assert block.nbytes / (payload.numel() + 256) >= 3.19

    def test_unknown_rope_and_fused_keys_and_values_are_unsuited(self) -> None:
        block = kv_like((1, 2, 40, 1, 64), torch.bfloat16)
        reason = self.unsuited(block, place_with(Rope(kind="longrope"), block))
        assert "longrope" in reason
        assert "keys and values are one" in self.unsuited(block[:, :1])

    @pytest.mark.parametrize(
        "other",
        [
            Rope(kind="none", theta=0.0),
            Rope(rotary_dim=32),
            Rope(interleaved=True),
            Rope(interleaved=True, rotary_dim=32),
            Rope(kind="linear", scaling='{"factor":4.0}'),
        ],
        ids=["none", "partial", "interleaved", "interleaved-partial", "scaled"],
    )
    def test_layers_of_several_ropes(self, other: Rope) -> None:
        """Keys that are smooth without RoPE come back well only when the right one is taken out."""
        block = torch.zeros(3, 2, 64, 2, 64)
        plain = torch.randn(1, 1, 2, 64).expand(3, 64, 2, 64) + torch.randn(3, 64, 2, 64) / 100
        one = place_with(other, block)
        place = one._replace(layers=(one.layers[0], place_of(block).layers[0], one.layers[0]))
        block[:, 0] = rope(plain, place.layers, 1024)
        buffer = torch.empty(self.codec.bound(block.nbytes), dtype=torch.uint8)
        segments = self.codec.encode(block, buffer, place)
        out = torch.empty_like(block)
        self.codec.decode(buffer[: sum(segments)], segments, out, place)
        assert (out[:, 0] - block[:, 0]).abs().max() < 0.01


def place_with(other: Rope, block: torch.Tensor) -> Place:
    heads, dim = block.shape[3:]
    spec = LayerSpec(kv_heads=heads, k_dim=dim, v_dim=dim, rope=other)
    return Place((spec,) * block.shape[0], Part(0, 0, block.shape[0], 0, heads), 1024)


@pytest.mark.parametrize("codec", [Int8(), Int4(), Fp8()], ids=lambda codec: codec.name)
def test_r26_outlier_channels_keep_attention(codec: Int8) -> None:
    """Two key channels at 50 times the rest: attention must survive, not only the mean error."""
    torch.manual_seed(26)
    keys, values = torch.randn(128, 128), torch.randn(128, 128)
    keys[:, [7, 90]] *= 50
    spec = LayerSpec(kv_heads=1, k_dim=128, v_dim=128, rope=Rope(kind="none", theta=0.0))
    place = Place((spec,), Part(0, 0, 1, 0, 1), 1024)
    block = torch.stack([keys, values])[None, :, :, None].bfloat16()
    buffer = torch.empty(codec.bound(block.nbytes), dtype=torch.uint8)
    segments = codec.encode(block, buffer, place)
    out = torch.empty_like(block)
    codec.decode(buffer[: sum(segments)], segments, out, place)
    queries = torch.randn(64, 128)
    queries[:, [7, 90]] /= 50  # such models have learnt to look past these channels

    def attention(of: torch.Tensor) -> torch.Tensor:
        wide = of[0, :, :, 0].float()
        return torch.softmax(queries @ wide[0].T / 128**0.5, -1) @ wide[1]

    exact, found = attention(block), attention(out)
    error = (found - exact).norm() / exact.norm()
    assert error < {"int8": 0.01, "int4": 0.15, "fp8": 0.05}[codec.name], float(error)


def test_a_token_alone_is_stored_as_it_is() -> None:
    """Coding it along the token axis would take more than its 16 bits a value."""
    block = kv_like((2, 2, 1, 2, 64), torch.bfloat16)
    payload, _ = encoded(Int4(), block)
    assert payload[0] == 0
    assert payload.numel() == HEADER.size + block.nbytes


def test_fp8_kv_of_an_engine_is_not_coded_to_as_many_bits() -> None:
    block = kv_like((2, 2, 40, 2, 64), torch.float8_e4m3fn)
    for codec in (TestInt8(), TestFp8()):
        assert "too few bits" in codec.unsuited(block)


def test_lossy_profiles_of_the_core_say_so() -> None:
    for codec in CODECS.all():
        assert BY_CODEC_ID[codec.id].lossy == codec.lossy
