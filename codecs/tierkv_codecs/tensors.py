"""Tensors as bits: the checks and the views that every exact codec starts with.

Values travel as unsigned integers of their own width, so that no copy can change a NaN's payload
or the sign of a zero.
"""

import torch

from tierkv_codecs.codec import CodecError

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""What lossy codecs take, by the name that an identity has for it."""
INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
SUPPORTED = frozenset(
    {
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.uint8,
    }
)


def raw_bytes_of(block: torch.Tensor) -> int:
    """Return the bytes of a block's values. Raises: CodecError for an unsupported dtype."""
    if block.dtype not in SUPPORTED:
        known = ", ".join(sorted(str(dtype) for dtype in SUPPORTED))
        raise CodecError(f"{block.dtype} is not a KV dtype; use one of {known}")
    return block.numel() * block.itemsize


def bits_of(block: torch.Tensor) -> torch.Tensor:
    """Return the same memory and shape as integers of the same width."""
    return block.detach().view(INTEGER_OF_WIDTH[block.itemsize])


def bytes_of(block: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous block as a vector of bytes."""
    return bits_of(block).reshape(-1).view(torch.uint8)


def is_plain(block: torch.Tensor) -> bool:
    """Say whether the values lie in host memory, one after the other in order."""
    return block.device.type == "cpu" and block.is_contiguous()


def check_out(out: torch.Tensor, needed: int) -> None:
    """Refuse a buffer that a payload of `needed` bytes cannot be written to."""
    if out.dtype != torch.uint8 or out.dim() != 1 or not is_plain(out):
        raise CodecError("the buffer must be a contiguous uint8 vector in host memory")
    if out.numel() < needed:
        raise CodecError(f"the buffer has {out.numel()} bytes; the codec's bound is {needed}")


def check_payload(payload: torch.Tensor, segments: tuple[int, ...]) -> None:
    """Refuse a payload that is not one segment of bytes in host memory."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not is_plain(payload):
        raise CodecError("the payload must be a contiguous uint8 vector in host memory")
    if len(segments) != 1 or segments[0] != payload.numel():
        raise CodecError(
            f"the payload has {payload.numel()} bytes; its segments {segments} must be one of that"
        )
