"""Yardsticks: published 4-bit formats that ours are measured against, never stored.

`int4-token-g64` quantises keys (with RoPE) and values of each token in groups of 64 values of a
head, asymmetric with float16 ends. `nvfp4` is NVIDIA's: E2M1 in blocks of 16, a scale in E4M3 for
each and one in float32 for the tensor of a block's keys or values. Their ids lie beyond those of
formats, they are in no registry but the lab's, and they make the bytes they claim, sinks exact.
"""

from dataclasses import dataclass

import torch

from tierkv_codecs.codec import NO_ARTIFACT, Codec, CodecError, CodecRegistry, Place
from tierkv_codecs.tensors import bytes_of, check_out

LEVELS = 15
GROUP = 64
FP4_GROUP = 16
FP4_MAX = 6.0
FP8_MAX = 448.0

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of E2M1; the sign is the fourth bit."""


@dataclass(frozen=True)
class Int4Token:
    """Four bits a value, asymmetric, each token in groups of 64 channels of a head."""

    id: int = 65001
    name: str = "int4-token-g64"
    lossy: bool = True
    artifact: bytes = NO_ARTIFACT

    def bound(self, raw_bytes: int) -> int:
        return 2 * raw_bytes + 64

    def encode(self, block: torch.Tensor, out: torch.Tensor, place: Place) -> tuple[int, ...]:
        groups = _grouped(block, place, GROUP)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        low, high = low.half().float(), high.half().float()
        step = ((high - low) / LEVELS).clamp(min=1e-10)
        codes = ((groups - low) / step).round_().clamp_(0, LEVELS).to(torch.uint8)
        ends = torch.cat([low, high], -1).half()
        return _written(out, [_sinks(block, place), ends, _packed(codes)])

    def decode(
        self, payload: torch.Tensor, segments: tuple[int, ...], out: torch.Tensor, place: Place
    ) -> None:
        groups = _empty(out, place, GROUP)
        count = groups.shape[:-1].numel()
        cut = [_sinks(out, place).numel() * out.itemsize, 4 * count, groups.numel() // 2]
        sinks, ends, codes = _read(payload, segments, cut)
        low, high = ends.view(torch.float16).float().view(*groups.shape[:-1], 2).split(1, -1)
        values = _unpacked(codes).float().view(groups.shape) * ((high - low) / LEVELS) + low
        _restore(out, place, sinks, values)


@dataclass(frozen=True)
class Nvfp4:
    """E2M1 values in blocks of 16 with an E4M3 scale, and a float32 scale of the tensor."""

    id: int = 65002
    name: str = "nvfp4"
    lossy: bool = True
    artifact: bytes = NO_ARTIFACT

    def bound(self, raw_bytes: int) -> int:
        return 2 * raw_bytes + 64

    def encode(self, block: torch.Tensor, out: torch.Tensor, place: Place) -> tuple[int, ...]:
        groups = _grouped(block, place, FP4_GROUP)
        largest = groups.abs().amax(-1, keepdim=True)
        tensor = largest.amax((0, 2, 3, 4, 5), keepdim=True) / (FP4_MAX * FP8_MAX)
        tensor = tensor.clamp(min=1e-30)
        scale = (largest / (FP4_MAX * tensor)).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
        step = scale.float() * tensor
        scaled = torch.where(step > 0, groups / step.clamp(min=1e-38), 0.0).clamp_(-6, 6)
        middles = (_FP4[1:] + _FP4[:-1]) / 2
        codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8)
        codes += 8 * (scaled < 0).to(torch.uint8)
        return _written(out, [_sinks(block, place), tensor, scale, _packed(codes)])

    def decode(
        self, payload: torch.Tensor, segments: tuple[int, ...], out: torch.Tensor, place: Place
    ) -> None:
        groups = _empty(out, place, FP4_GROUP)
        count = groups.shape[:-1].numel()
        cut = [_sinks(out, place).numel() * out.itemsize, 8, count, groups.numel() // 2]
        sinks, tensor, scale, codes = _read(payload, segments, cut)
        shape = groups.shape
        found = _unpacked(codes).view(shape)
        values = _FP4[(found & 7).long()] * torch.where(found > 7, -1.0, 1.0)  # noqa: PLR2004
        step = scale.view(torch.float8_e4m3fn).float().view(*shape[:-1], 1)
        step = step * tensor.view(torch.float32).view(1, 2, 1, 1, 1, 1)
        _restore(out, place, sinks, values * step)


YARDSTICKS: tuple[Codec, ...] = (Int4Token(), Nvfp4())
REFERENCES = {"kvtc@8x": "int4", "kvtc@16x": Int4Token.name, "kvtc@32x": Nvfp4.name}
"""By profile: the fixed-rate format that it is to lose no more than, in a third of the bytes or
less."""


def registry_with(codecs: CodecRegistry, more: tuple[Codec, ...] = YARDSTICKS) -> CodecRegistry:
    """Return a registry of the codecs given and more."""
    return CodecRegistry([*codecs.all(), *more])


def _empty(out: torch.Tensor, place: Place, group: int) -> torch.Tensor:
    """Return uninitialised memory of the coded tokens, cut into groups."""
    layers, sides, tokens, heads, dim = out.shape
    coded = tokens - place.sinks(tokens)
    size = min(group, dim)
    if dim % size or size % 2:
        raise CodecError(f"heads of {dim} channels do not divide into groups of {size}")
    return torch.empty((layers, sides, coded, heads, dim // size, size))


def _grouped(block: torch.Tensor, place: Place, group: int) -> torch.Tensor:
    """Return the coded tokens in float32, [layer, K/V, token, head, group, channel]."""
    coded = block[:, :, place.sinks(block.shape[2]) :].float()
    return coded.reshape(_empty(block, place, group).shape)


def _sinks(block: torch.Tensor, place: Place) -> torch.Tensor:
    return block[:, :, : place.sinks(block.shape[2])].contiguous()


def _packed(codes: torch.Tensor) -> torch.Tensor:
    pairs = codes.view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes & 15, codes >> 4], -1).view(-1)


def _written(out: torch.Tensor, pieces: list[torch.Tensor]) -> tuple[int, ...]:
    data = torch.cat([bytes_of(piece.contiguous()).view(-1) for piece in pieces])
    check_out(out, data.numel())
    out[: data.numel()].copy_(data)
    return (data.numel(),)


def _read(payload: torch.Tensor, segments: tuple[int, ...], cut: list[int]) -> list[torch.Tensor]:
    if sum(cut) != payload.numel() or segments != (payload.numel(),):
        raise CodecError(f"a payload of {payload.numel()} bytes cannot be {cut}")
    return [piece.clone() for piece in payload.split(cut)]


def _restore(out: torch.Tensor, place: Place, sinks: torch.Tensor, values: torch.Tensor) -> None:
    exact = place.sinks(out.shape[2])
    first, rest = out[:, :, :exact], out[:, :, exact:]
    first.copy_(sinks.view(out.dtype).view(first.shape))
    rest.copy_(values.reshape(rest.shape))
