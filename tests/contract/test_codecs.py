"""Every codec against the contract, and what `lossless` is for: fewer bytes on real KV."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import bench.codecs
from tests.contract.codec_contract import (
    ExactCodecContract,
    encoded,
    kv_like,
    place_of,
    random_bits,
)
from tierkv.codec import BY_CODEC_ID
from tierkv.errors import ErrorKind, TierKVError
from tierkv_codecs import CODECS, CodecError, CodecRegistry, Lossless, Raw
from tierkv_codecs.lossless import HEADER, PIECE_MAX, PLANES, STORED

PROMPT_TOKENS = 256
LEAST_RATIO = 1.44


class TestRaw(ExactCodecContract):
    codec = Raw()

    def test_payload_is_the_memory_of_the_block(self) -> None:
        block = kv_like((2, 2, 5, 3, 7), torch.bfloat16)
        payload, segments = encoded(self.codec, block)
        assert segments == (block.numel() * 2,)
        assert torch.equal(payload.view(torch.bfloat16).view(block.shape), block)


class TestLossless(ExactCodecContract):
    codec = Lossless()

    def test_noise_is_stored(self) -> None:
        block = random_bits(100_000, torch.bfloat16)
        payload, segments = encoded(self.codec, block)
        assert segments == (HEADER.size + 200_000,)
        assert payload[0] == STORED
        assert torch.equal(
            payload[HEADER.size :].view(torch.bfloat16).view(torch.int16), block.view(torch.int16)
        )

    def test_a_plane_that_does_not_shrink_is_stored_beside_one_that_does(self) -> None:
        block = kv_like((2, 2, 300, 3, 64), torch.float16)
        payload, _ = encoded(self.codec, block)
        lengths = payload[HEADER.size : HEADER.size + 4 * 8].numpy().view("<u4").tolist()
        assert payload[0] == PLANES
        assert lengths[::2] == [57_600] * 4
        assert max(lengths[1::2]) < 57_600 * 0.9

    def test_lower_planes_are_coded_where_they_shrink(self) -> None:
        block = kv_like((2, 2, 300, 3, 64), torch.bfloat16)
        wide, _ = encoded(self.codec, block.float())
        assert wide.numel() < block.numel() * block.itemsize

    def test_a_slice_above_the_piece_limit_is_cut(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            block = kv_like((1, 2, 1000, 4, 64), dtype)
            payload, _ = encoded(self.codec, block)
            piece = HEADER.unpack(payload[: HEADER.size].numpy().tobytes())[3]
            assert piece == 128_000 <= PIECE_MAX
            self.round_trip(block)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("piece", [0, 1, 4095, 2**32 - 1])
    def test_a_piece_size_that_is_never_written_is_refused(
        self, piece: int, dtype: torch.dtype
    ) -> None:
        block = kv_like((2, 2, 300, 3, 64), dtype)
        payload, segments = encoded(self.codec, block)
        payload[4:8] = torch.tensor(list(piece.to_bytes(4, "little")), dtype=torch.uint8)
        with pytest.raises(CodecError):
            self.codec.decode(payload, segments, torch.empty_like(block), place_of(block))

    def test_a_frame_that_claims_more_than_its_piece_is_refused(self) -> None:
        """The claim is what zstd would allocate; here it is 2**62 bytes."""
        block = kv_like((4096,), torch.uint8)
        payload, segments = encoded(self.codec, block)
        frame = HEADER.size + 4
        payload[frame + 4] = 0xE0
        payload[frame + 5 : frame + 13] = torch.tensor([0] * 7 + [64], dtype=torch.uint8)
        with pytest.raises(CodecError, match="does not hold"):
            self.codec.decode(payload, segments, torch.empty_like(block), place_of(block))

    def test_real_kv_shrinks(self, real_kv: torch.Tensor) -> None:
        for tokens in (PROMPT_TOKENS, 64):
            block = real_kv[:, :, :tokens]
            payload, _ = encoded(self.codec, block)
            ratio = block.numel() * 2 / payload.numel()
            assert ratio >= LEAST_RATIO, f"{tokens} tokens: {ratio:.3f}"
            self.round_trip(block)


@pytest.fixture(scope="module")
def real_kv(model_dir: Path) -> torch.Tensor:
    return bench.codecs.real_kv(model_dir, PROMPT_TOKENS)


@dataclass(frozen=True)
class Named(Raw):
    """A codec of any name and id, for the registry."""

    id: int = 77
    name: str = "named"


def test_registry_refuses_a_taken_name_and_a_taken_id() -> None:
    registry = CodecRegistry()
    registry.add(Named())
    with pytest.raises(TierKVError, match="name 'named' is taken"):
        registry.add(Named(id=78))
    with pytest.raises(TierKVError, match="id 77 is taken by 'named'"):
        registry.add(Named(name="other"))
    assert registry.all() == (Named(),)


def test_registry_tells_calibrations_of_one_format_apart() -> None:
    one, other = bytes([1] * 32), bytes([2] * 32)
    registry = CodecRegistry([Named(name="a@8x", artifact=one), Named(name="a@16x", artifact=one)])
    assert registry.of_id(77, one).name == "a@8x"
    with pytest.raises(TierKVError, match="id 77 with artifact 0202020202020202 is not known"):
        registry.of_id(77, other)
    with pytest.raises(TierKVError, match="id 77 is not known"):
        registry.of_id(77)
    registry.add(Named(name="b@8x", artifact=other))
    assert registry.of_id(77, other).name == "b@8x"
    with pytest.raises(TierKVError, match="id 77 is taken by 'a@8x'"):
        registry.add(Named(name="fixed"))


def test_registry_names_the_known_codecs_when_it_is_asked_for_another() -> None:
    with pytest.raises(TierKVError, match=r"use one of .*lossless, raw") as by_name:
        CODECS.named("kivi")
    assert by_name.value.kind is ErrorKind.INVALID
    with pytest.raises(TierKVError, match="reads 1, 2, ") as by_id:
        CODECS.of_id(200)
    assert by_id.value.kind is ErrorKind.INCOMPATIBLE


def test_profiles_of_the_core_fit_the_codecs() -> None:
    for codec in CODECS.all():
        profile = BY_CODEC_ID[codec.id]
        assert profile.name == codec.name
        for size in (0, 1, 4096, 1 << 30):
            assert codec.bound(size) <= size + profile.bound_extra
