"""Asymmetric quantisation with float16 parameters (KIVI, arXiv 2402.02750, section 3.1), in torch.

    shift = fp16(least)    span = fp16(greatest - shift)
    code = floor(clip((x - shift) * (levels / span), 0, levels) + 1/2)
    x' = shift + code * (span / levels)

in float32, with the rounded parameters, so that a reader has the very numbers that the codes were
chosen for. A group of equal values has span 0 and codes 0. The span is stored, not the step,
because float16 keeps its precision down to 2**-14 only. These functions define the results of
every kernel that stands in for them.
"""

from typing import NamedTuple

import torch

from tierkv_codecs.codec import Unsuited
from tierkv_codecs.fixed import NOT_FINITE, TOO_LARGE


class Coded(NamedTuple):
    """Codes (uint8), and shift and span (float16) with the axis of a group kept as 1."""

    codes: torch.Tensor
    shift: torch.Tensor
    span: torch.Tensor


def quantised(values: torch.Tensor, axis: int, levels: int) -> Coded:
    """Return float32 values coded in groups that are all of `axis`.

    Raises: Unsuited for values that are not finite, or too large for float16.
    """
    if not values.isfinite().all():
        raise Unsuited(NOT_FINITE)
    shift = (values.amin(axis, keepdim=True) + 0.0).half()  # never -0.0
    above = values.amax(axis, keepdim=True) - shift.float()
    span = (above.clamp(min=0.0) + 0.0).half()
    if not (shift.isfinite().all() and span.isfinite().all()):
        raise Unsuited(TOO_LARGE)
    # Tensor by tensor: torch turns a division of or by a number into a reciprocal, rounded twice.
    inverse = torch.where(span > 0, torch.full_like(span, levels).float() / span.float(), 0.0)
    codes = ((values - shift.float()) * inverse).clamp(0.0, levels).add(0.5).to(torch.uint8)
    return Coded(codes, shift, span)


def restored(coded: Coded, levels: int) -> torch.Tensor:
    """Return the float32 values of codes."""
    step = coded.span.float() / torch.full_like(coded.span, levels).float()
    return coded.shift.float() + coded.codes.float() * step
