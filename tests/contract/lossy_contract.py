"""What every lossy codec must pass as well as the contract of all codecs."""

import dataclasses
from typing import ClassVar

import pytest
import torch

from tests.contract.codec_contract import (
    BLOCKS,
    CodecContract,
    encoded,
    kv_like,
    place_of,
)
from tierkv_codecs import SINKS, Place, Unsuited
from tierkv_codecs.fixed import FixedRate
from tierkv_codecs.tensors import bits_of

HEADS = [64, 80, 96, 128, 192, 256, 576]
EXTREMES = [500.0, 449.0, 448.0, 65504.0, 3e38, -65504.0, 1e-42, 1e-7, -0.0]


class LossyCodecContract(CodecContract):
    """A subclass names the codec, its dtypes and its error bound."""

    codec: ClassVar[FixedRate]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16, torch.float32)
    shapes: ClassVar[list[tuple[int, ...]]] = BLOCKS

    def at(self, block: torch.Tensor, position: int) -> torch.Tensor:
        """Return the block decoded, which begins at that position of its sequence."""
        place = place_of(block, position)
        buffer = torch.empty(self.codec.bound(block.nbytes), dtype=torch.uint8)
        segments = self.codec.encode(block, buffer, place)
        out = torch.empty_like(block)
        self.codec.decode(buffer[: sum(segments)], segments, out, place)
        return out

    def unsuited(self, block: torch.Tensor, place: Place | None = None) -> str:
        """Return why a block is not taken."""
        buffer = torch.empty(self.codec.bound(block.nbytes), dtype=torch.uint8)
        with pytest.raises(Unsuited) as refused:
            self.codec.encode(block, buffer, place or place_of(block))
        return refused.value.reason

    def test_says_that_it_is_lossy(self) -> None:
        assert self.codec.lossy

    @pytest.mark.parametrize("dim", HEADS)
    @pytest.mark.parametrize("tokens", [1, 40])
    def test_head_sizes(self, dim: int, tokens: int) -> None:
        for dtype in self.dtypes:
            self.round_trip(kv_like((2, 2, tokens, 1, dim), dtype))

    @pytest.mark.parametrize("position", [0, 1, 3])
    @pytest.mark.parametrize("tokens", [1, 3, 40])
    def test_sinks_are_exact_wherever_the_block_begins(self, position: int, tokens: int) -> None:
        for dtype in self.dtypes:
            block = kv_like((2, 2, tokens, 2, 64), dtype)
            sinks = min(SINKS - position, tokens)
            out = self.at(block, position)
            assert torch.equal(bits_of(out[:, :, :sinks]), bits_of(block[:, :, :sinks]))
            self.check_close(out, block, position)

    def test_sinks_never_touch_the_range_of_others(self) -> None:
        block = kv_like((1, 2, 40, 1, 64), torch.float32)
        block[:, :, :SINKS] *= 1e6
        out = self.at(block, 0)
        behind = slice(SINKS, None)
        self.check_close(out[:, :, behind], block[:, :, behind], SINKS)

    def test_torch_alone_gives_the_same_bytes_and_values(self) -> None:
        """Torch defines the results, on any device; kernels only stand in for it."""
        twin = dataclasses.replace(self.codec, compiled=False)
        for dtype in self.dtypes:
            for shape in [*self.shapes, (1, 2, 40, 1, 576), (2, 2, 33, 2, 80)]:
                block = kv_like(shape, dtype)
                payload, segments = encoded(self.codec, block)
                alone, _ = encoded(twin, block)
                assert torch.equal(payload, alone)
                outs = torch.empty_like(block), torch.empty_like(block)
                self.codec.decode(payload, segments, outs[0], place_of(block))
                twin.decode(payload, segments, outs[1], place_of(block))
                assert torch.equal(bits_of(outs[0]), bits_of(outs[1]))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_values_that_are_not_finite_are_unsuited(self, value: float) -> None:
        for codec in (self.codec, dataclasses.replace(self.codec, compiled=False)):
            for side in (0, 1):
                block = kv_like((2, 2, 40, 2, 64), torch.bfloat16)
                block[1, side, 17, 1, 5] = value
                buffer = torch.empty(codec.bound(block.nbytes), dtype=torch.uint8)
                with pytest.raises(Unsuited, match="NaN or infinite"):
                    codec.encode(block, buffer, place_of(block))

    @pytest.mark.parametrize("value", EXTREMES)
    def test_r26_extreme_values_stay_finite_or_go_lossless(self, value: float) -> None:
        for dtype in self.dtypes:
            wide = kv_like((2, 2, 40, 2, 64), torch.float32).clamp(-100, 100)
            wide[1, :, 17, 1, 5] = value
            block = wide.to(dtype)
            if not block.float().isfinite().all():  # the dtype cannot hold it
                continue
            try:
                out = self.at(block, 1024)
            except Unsuited as refused:
                assert abs(value) > 30000, refused  # noqa: PT017 -- the others must be taken
                continue
            assert out.float().isfinite().all()
            self.check_close(out, block)

    @pytest.mark.parametrize("value", [0.0, 1.0, -3.75, 448.0, 500.0, 1e-7])
    def test_r26_constant_blocks(self, value: float) -> None:
        for dtype in self.dtypes:
            block = torch.full((2, 2, 40, 2, 64), value).to(dtype)
            if not block.float().isfinite().all():
                continue
            out = self.at(block, 1024)
            assert out.float().isfinite().all()
            self.check_close(out, block)

    def test_other_shapes_are_unsuited_with_a_reason(self) -> None:
        flat = kv_like((40, 64), torch.bfloat16)
        assert "[layer, K/V, token, head, dim]" in self.unsuited(flat)

    def test_batch_does_not_matter(self) -> None:
        """A block's values come back alike, whatever the layers beside it are."""
        block = kv_like((4, 2, 40, 2, 64), torch.bfloat16)
        whole = self.at(block, 64)
        for layer in range(4):
            assert torch.equal(self.at(block[layer : layer + 1], 64), whole[layer : layer + 1])

    def check_close(self, decoded: torch.Tensor, block: torch.Tensor, position: int = 1024) -> None:
        raise NotImplementedError
