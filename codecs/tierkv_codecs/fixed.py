"""What the fixed-rate codecs share: one payload layout around numbers of a known size.

Payload, all integers little-endian:

    u8   layout     0: the block's bytes as they are follow; 1: sinks, then coded tokens follow
    u8   itemsize   of the block's values
    u8   sinks      leading tokens that are stored exactly
    u8   zero
    u32  tokens     of the block
    layout 1: the sinks' bytes in order [layer, K/V, token, head, dim], then the codec's own bytes,
              whose length follows from shape, dtype and sinks alone

Layout 0 is for blocks that coding would not shrink: a single token, very narrow heads. It is exact.
Which of the two it is follows from shape, dtype and sinks, too.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch

from tierkv_codecs.bits import KERNEL_DTYPES, Bytes, Halves, Integers, kernel_bits
from tierkv_codecs.codec import NO_ARTIFACT, CodecError, Place, Unsuited
from tierkv_codecs.tensors import (
    bits_of,
    bytes_of,
    check_out,
    check_payload,
    raw_bytes_of,
)

HEADER = struct.Struct("<BBBBI")
STORED, CODED = 0, 1
AXES = 5

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
NOT_FINITE = "some values are NaN or infinite"
TOO_LARGE = "some values lie beyond the range of fp16, which scales have"


class Shape(NamedTuple):
    """Of a whole block, and how many of its tokens are sinks."""

    layers: int
    sides: int
    tokens: int
    heads: int
    dim: int
    sinks: int


class Sections(NamedTuple):
    """A codec's own bytes where keys and values have their own parameters and codes.

    Parameters that do not lie at an even address are a copy, which `finish` puts back.
    """

    key_parameters: Halves
    value_parameters: Halves
    key_codes: Bytes
    value_codes: Bytes

    @classmethod
    def of(cls, coded: Bytes, keys: int, values: int, key_codes: int) -> Self:
        """Cut `coded`: bytes of the parameters of each side, and of the codes of the keys."""
        middle = keys + values
        halves = coded[:middle].view(np.uint16)
        if not halves.flags.aligned:
            halves = halves.copy()
        return cls(
            halves[: keys // 2],
            halves[keys // 2 :],
            coded[middle : middle + key_codes],
            coded[middle + key_codes :],
        )

    def finish(self, coded: Bytes, results: Sequence[int]) -> int:
        """Write the parameters; return what `check` takes of what the kernels returned."""
        if not np.may_share_memory(self.key_parameters, coded):
            parameters = np.concatenate([self.key_parameters, self.value_parameters])
            coded[: parameters.nbytes] = parameters.view(np.uint8)
        # What is not finite is said before what is too large, as in torch.
        return 1 if 1 in results else max(results)


def shape_of(block: torch.Tensor, sinks: int) -> Shape:
    """Return the shape of a block of five axes."""
    layers, sides, tokens, heads, dim = block.shape
    return Shape(layers, sides, tokens, heads, dim, sinks)


def behind(shape: Shape) -> tuple[int, int, int, int, int]:
    """Return the shape of the tokens behind the sinks."""
    return shape.layers, shape.sides, shape.tokens - shape.sinks, shape.heads, shape.dim


@dataclass(frozen=True)
class FixedRate(ABC):
    """A lossy codec whose payload's size follows from the block's shape.

    A subclass says how many bytes the tokens behind the sinks take, and fills and reads those: in
    torch, which defines the results and runs on every device, and by kernels that give the same
    bytes in host memory.
    """

    id: int
    name: str
    lossy: bool = True
    artifact: bytes = NO_ARTIFACT
    compiled: bool = True
    """False: torch alone on a CPU, too, for tests of the kernels."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS

    def bound(self, raw_bytes: int) -> int:
        return HEADER.size + raw_bytes

    def encode(self, block: torch.Tensor, out: torch.Tensor, place: Place) -> tuple[int, ...]:
        size = raw_bytes_of(block)
        check_out(out, self.bound(size))
        if block.dtype not in self.dtypes:
            raise Unsuited(f"{block.dtype} has too few bits to be worth coding")
        if block.dim() != AXES:
            raise Unsuited("its shape is not [layer, K/V, token, head, dim]")
        plain = block.detach().contiguous()
        sinks = place.sinks(block.shape[2])
        layout, exact, coded = self._sizes(block, sinks)
        target, middle = out.numpy(), HEADER.size + exact
        header = HEADER.pack(layout, block.itemsize, sinks, 0, block.shape[2])
        target[: HEADER.size] = np.frombuffer(header, np.uint8)
        if exact:
            kept = plain if layout == STORED else plain[:, :, :sinks].contiguous()
            out[HEADER.size : middle].copy_(bytes_of(kept))
        if layout == CODED:
            into = target[middle : middle + coded]
            if self.compiled and plain.device.type == "cpu":
                source, by = kernel_bits(plain)
                check(self.code_compiled(source, by, shape_of(plain, sinks), place, into))
            else:
                self.code_in_torch(plain[:, :, sinks:].float(), _behind(place, sinks), into)
        return (middle + coded,)

    def decode(
        self, payload: torch.Tensor, segments: tuple[int, ...], out: torch.Tensor, place: Place
    ) -> None:
        check_payload(payload, segments)
        raw_bytes_of(out)
        if out.dtype not in self.dtypes or out.dim() != AXES:
            raise CodecError(f"{self.name} makes no payload for {out.dtype} {tuple(out.shape)}")
        sinks = place.sinks(out.shape[2])
        layout, exact, coded = self._sizes(out, sinks)
        header, source = HEADER.pack(layout, out.itemsize, sinks, 0, out.shape[2]), payload.numpy()
        if source[: HEADER.size].tobytes() != header:
            raise CodecError(f"the payload is not one of {self.name} for such a block")
        middle = HEADER.size + exact
        if payload.numel() != middle + coded:
            raise CodecError(
                f"{payload.numel()} bytes are not the {middle + coded} of such a block"
            )
        plain = (
            out
            if out.is_contiguous()
            else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        )
        if exact:
            kept = plain if layout == STORED else plain[:, :, :sinks]
            exactly = payload[HEADER.size : middle].clone().view(bits_of(kept).dtype)
            bits_of(kept).copy_(exactly.view(kept.shape))
        if layout == CODED:
            self._restore(source[middle:], sinks, place, plain)
        if plain is not out:
            bits_of(out).copy_(bits_of(plain))

    def _sizes(self, block: torch.Tensor, sinks: int) -> tuple[int, int, int]:
        """Return the layout, the bytes that are exact and those that are coded."""
        layers, sides, tokens, heads, dim = block.shape
        raw = block.numel() * block.itemsize
        exact = layers * sides * sinks * heads * dim * block.itemsize
        shape = (layers, sides, tokens - sinks, heads, dim)
        coded = self.coded_bytes(shape, block.itemsize)
        return (CODED, exact, coded) if raw and exact + coded < raw else (STORED, raw, 0)

    def _restore(self, coded: Bytes, sinks: int, place: Place, block: torch.Tensor) -> None:
        """Fill the tokens of a contiguous block that follow its sinks."""
        if not (self.compiled and block.device.type == "cpu"):
            into = block[:, :, sinks:]
            shape = (*into.shape,)
            values = self.restore_in_torch(coded, shape, _behind(place, sinks), block.device)
            into.copy_(within(values, block.dtype))
            return
        shape = shape_of(block, sinks)
        if block.dtype in KERNEL_DTYPES:
            self.restore_compiled(coded, *kernel_bits(block), shape, place)
            return
        wide = torch.empty(block.shape)
        self.restore_compiled(coded, *kernel_bits(wide), shape, place)
        block[:, :, sinks:].copy_(within(wide[:, :, sinks:], block.dtype))

    @abstractmethod
    def coded_bytes(self, shape: tuple[int, int, int, int, int], itemsize: int) -> int:
        """Return the bytes of the tokens behind the sinks. Raises: Unsuited for their shape."""

    @abstractmethod
    def code_in_torch(self, values: torch.Tensor, place: Place, coded: Bytes) -> None:
        """Fill `coded` from the float32 values of the tokens behind the sinks.

        Args:
            values: [layer, K/V, token, head, dim] on any device.
            place: of the first of these tokens.
            coded: as many bytes as `coded_bytes` says.

        Raises: Unsuited for values or a RoPE that the format cannot take.
        """

    @abstractmethod
    def restore_in_torch(
        self, coded: Bytes, shape: tuple[int, ...], place: Place, device: torch.device
    ) -> torch.Tensor:
        """Return the float32 values that `code_in_torch` was given, as near as they come back."""

    @abstractmethod
    def code_compiled(
        self, source: Integers, by: int, shape: Shape, place: Place, coded: Bytes
    ) -> int:
        """As `code_in_torch`, from the upper bits of a whole block; returns what `check` takes."""

    @abstractmethod
    def restore_compiled(
        self, coded: Bytes, target: Integers, by: int, shape: Shape, place: Place
    ) -> None:
        """Write the upper bits of the values behind the sinks into a whole block."""


def _behind(place: Place, sinks: int) -> Place:
    return place._replace(position=place.position + sinks)


def check(result: int) -> None:
    """Take what a kernel returned. Raises: Unsuited."""
    if result:
        raise Unsuited(NOT_FINITE if result == 1 else TOO_LARGE)


def within(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values that have no infinity in `dtype` where they are finite."""
    most = torch.finfo(dtype).max
    return values.clamp(-most, most)
