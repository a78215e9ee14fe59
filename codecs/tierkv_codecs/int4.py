"""Codec `int4` (id 4): four bits a value along KIVI's axes (arXiv 2402.02750, section 3).

Keys are coded without RoPE, each channel in groups of 32 tokens; values as they are, each token in
groups of 32 channels of a head. A group is shorter where its axis ends.

The codec's own bytes (see `fixed`), of the tokens behind the sinks; the first group begins there:

    u16  shift, span       float16 (see `affine`), of keys: [layer, group, head, shift/span, dim]
    u16  shift, span       float16, of values: [layer, token, head, shift/span, group]
    u8   codes             of keys: [layer, token, head, ceil(dim / 2)]
    u8   codes             of values: [layer, token, head, ceil(dim / 2)]

Byte j of a head's codes has channel j in its low half and channel j + ceil(dim / 2), if there is
one, in its high half.

Error: at most span / 30 of a key without RoPE or of a value, plus the float16 rounding of the
group's ends and the rounding to the block's dtype.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from tierkv_codecs.affine import Coded, quantised, restored
from tierkv_codecs.bits import Bytes, Integers
from tierkv_codecs.codec import Place, Unsuited
from tierkv_codecs.fixed import FLOATS, FixedRate, Sections, Shape, behind
from tierkv_codecs.int4_kernels import (
    GROUP,
    LEVELS,
    code_keys,
    code_values,
    restore_keys,
    restore_values,
)
from tierkv_codecs.rope import Turn, rope, turns, unrope

SIDES = 2


@dataclass(frozen=True)
class Int4(FixedRate):
    """3.2 times smaller than 16 bits at heads that are a multiple of 32."""

    id: int = 4
    name: str = "int4"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        *FLOATS,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )

    def coded_bytes(self, shape: tuple[int, int, int, int, int], itemsize: int) -> int:  # noqa: ARG002
        if shape[1] != SIDES:
            raise Unsuited("keys and values are one, and int4 codes them along different axes")
        keys, values, codes = _sizes(shape)
        return keys + values + 2 * codes

    def code_in_torch(self, values: torch.Tensor, place: Place, coded: Bytes) -> None:
        keys = unrope(values[:, 0], place.layers, place.position)
        found = [quantised(part, 1, LEVELS) for part in keys.split(GROUP, 1)]
        key_parameters = [torch.stack([one.shift, one.span], 3) for one in found]
        sides = [quantised(part, 3, LEVELS) for part in values[:, 1].split(GROUP, 3)]
        value_parameters = [torch.stack([one.shift, one.span], 3) for one in sides]
        parts = [
            torch.cat(key_parameters, 1).view(torch.uint8),
            torch.cat(value_parameters, 4).view(torch.uint8),
            _packed(torch.cat([one.codes for one in found], 1)),
            _packed(torch.cat([one.codes for one in sides], 3)),
        ]
        coded[:] = torch.cat([part.flatten() for part in parts]).cpu().numpy()

    def restore_in_torch(
        self, coded: Bytes, shape: tuple[int, ...], place: Place, device: torch.device
    ) -> torch.Tensor:
        layers, _, tokens, heads, dim = shape
        sections = [torch.from_numpy(part).to(device) for part in _split(coded, shape)]
        pairs = sections[0].view(torch.float16).view(layers, -1, heads, 2, dim)
        codes = _unpacked(sections[2].view(layers, tokens, heads, -1), dim)
        keys = [
            restored(Coded(part, pairs[:, at : at + 1, :, 0], pairs[:, at : at + 1, :, 1]), LEVELS)
            for at, part in enumerate(codes.split(GROUP, 1))
        ]
        pairs = sections[1].view(torch.float16).view(layers, tokens, heads, 2, -1)
        codes = _unpacked(sections[3].view(layers, tokens, heads, -1), dim)
        values = [
            restored(Coded(part, pairs[..., 0, at : at + 1], pairs[..., 1, at : at + 1]), LEVELS)
            for at, part in enumerate(codes.split(GROUP, 3))
        ]
        turned = rope(torch.cat(keys, 1), place.layers, place.position)
        return torch.stack([turned, torch.cat(values, 3)], 1)

    def code_compiled(
        self, source: Integers, by: int, shape: Shape, place: Place, coded: Bytes
    ) -> int:
        sections = _split(coded, behind(shape))
        results = [code_values(source, by, shape, sections.value_parameters, sections.value_codes)]
        results += [
            code_keys(source, by, shape, turn, sections.key_parameters, sections.key_codes)
            for turn in _turns(place, shape, inverse=True)
        ]
        return sections.finish(coded, results)

    def restore_compiled(
        self, coded: Bytes, target: Integers, by: int, shape: Shape, place: Place
    ) -> None:
        sections = _split(coded, behind(shape))
        restore_values(target, by, shape, sections.value_parameters, sections.value_codes)
        for turn in _turns(place, shape, inverse=False):
            restore_keys(target, by, shape, turn, sections.key_parameters, sections.key_codes)


def _sizes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the bytes of the parameters of keys and of values, and of the codes of either."""
    layers, _, tokens, heads, dim = shape
    keys = layers * -(-tokens // GROUP) * heads * dim * 4
    values = layers * tokens * heads * -(-dim // GROUP) * 4
    return keys, values, layers * tokens * heads * -(-dim // 2)


def _split(coded: Bytes, shape: tuple[int, ...]) -> Sections:
    keys, values, codes = _sizes(shape)
    return Sections.of(coded, keys, values, codes)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Return two codes of [..., dim] in a byte: the first half of them below the second."""
    width = -(-codes.shape[-1] // 2)
    whole = torch.nn.functional.pad(codes, (0, 2 * width - codes.shape[-1]))
    return whole[..., :width] | (whole[..., width:] << 4)


def _unpacked(codes: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([codes & 15, codes >> 4], -1)[..., :dim]


def _turns(place: Place, shape: Shape, *, inverse: bool) -> Iterator[Turn]:
    """Return `rope.turns` of the tokens behind the sinks."""
    position, tokens = place.position + shape.sinks, shape.tokens - shape.sinks
    return turns(place.layers, shape.dim, position, tokens, inverse=inverse)
