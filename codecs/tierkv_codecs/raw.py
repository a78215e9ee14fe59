"""Codec `raw` (id 1): the block's values in order, little-endian, and nothing else."""

from dataclasses import dataclass

import torch

from tierkv_codecs.codec import NO_ARTIFACT, CodecError, Place
from tierkv_codecs.copies import copy
from tierkv_codecs.tensors import (
    bits_of,
    bytes_of,
    check_out,
    check_payload,
    raw_bytes_of,
)


@dataclass(frozen=True)
class Raw:
    """A copy. Contiguous blocks take one pass, no temporary."""

    id: int = 1
    name: str = "raw"
    lossy: bool = False
    artifact: bytes = NO_ARTIFACT

    def bound(self, raw_bytes: int) -> int:
        return raw_bytes

    def encode(
        self,
        block: torch.Tensor,
        out: torch.Tensor,
        place: Place,  # noqa: ARG002 -- exact wherever it stands
    ) -> tuple[int, ...]:
        size = raw_bytes_of(block)
        check_out(out, size)
        if block.is_contiguous():
            copy(out[:size], bytes_of(block))
        elif _aligned(out, block.itemsize):
            source = bits_of(block)
            copy(out[:size].view(source.dtype).view(source.shape), source)
        else:
            out[:size].copy_(bytes_of(block.contiguous()))
        return (size,)

    def decode(
        self,
        payload: torch.Tensor,
        segments: tuple[int, ...],
        out: torch.Tensor,
        place: Place,  # noqa: ARG002 -- exact wherever it stands
    ) -> None:
        check_payload(payload, segments)
        size = raw_bytes_of(out)
        if payload.numel() != size:
            raise CodecError(f"a raw payload of {payload.numel()} bytes cannot fill {size}")
        if out.is_contiguous():
            copy(bytes_of(out), payload)
            return
        source = payload if _aligned(payload, out.itemsize) else payload.clone()
        target = bits_of(out)
        copy(target, source.view(target.dtype).view(target.shape))


def _aligned(buffer: torch.Tensor, itemsize: int) -> bool:
    """Say whether torch can view the buffer as wider values where it lies."""
    return buffer.storage_offset() % itemsize == 0 and buffer.data_ptr() % itemsize == 0
