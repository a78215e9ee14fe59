"""Anchors: the few tokens that draw most of the attention, coded by head and finely.

One token in a hundred has nearly all of what errors cost, in heads that hardly look at any other,
so the metric and the basis of all tokens do not fit it. Anchors have a mean, a metric and principal
components of each head of their own, one step for all of these, and are whole in the first segment.
Nothing of them is cut off, so their error does not depend on what they hold, and no guard looks at
them.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tierkv_codecs.kvtc_cells import CENTRES, restore_whole
from tierkv_codecs.kvtc_rans import FIRST_SYMBOLS, NONE, SHIFTS, TOTAL
from tierkv_codecs.kvtc_stream import MOST, Level, Stream, Tables, decode, encode


@dataclass(frozen=True, eq=False)
class Anchors:
    """How anchors of a part are coded, p features of each side: c = 2p components, keys first.

    offset: float32 [2, p], of their mean from that of all tokens. root: float32 [2, layers x heads,
    d, d], from coefficients in steps to features. start: int8 [c], the shift of first indices.
    centres: uint8 [c, CENTRES]. first: int16 [c, FIRST_SYMBOLS], refine: int16 [c, SHIFTS x 4]:
    see `kvtc_stream.Tables`.
    """

    offset: torch.Tensor
    root: torch.Tensor
    start: torch.Tensor
    centres: torch.Tensor
    first: torch.Tensor
    refine: torch.Tensor

    @functools.cached_property
    def inverse(self) -> torch.Tensor:
        """The inverse of the root: from features to coefficients in steps."""
        found: torch.Tensor = torch.linalg.inv(self.root)
        return found

    def encode(self, rows: tuple[torch.Tensor, torch.Tensor]) -> Stream:
        """Return the stream of rows [token, p] of both sides, centred on all tokens' means."""
        whole = self.coefficients(rows).round_().clamp_(-MOST, MOST)
        indices = np.ascontiguousarray(whole.to(torch.int16).numpy())
        return encode([(indices, self._level)], self._tables)

    def decode(self, stream: Stream, tokens: int) -> torch.Tensor:
        """Return float32 [2, token, p], the rows that a stream holds. Raises: StreamError."""
        indices = np.zeros((len(self.start), tokens), np.int32)
        decode([(indices, self._level)], self._tables, stream)
        values = restore_whole(indices, self.centres.numpy())
        apart = torch.from_numpy(values).view(2, *self.root.shape[1:3], tokens)
        rows = (self.root @ apart).flatten(1, 2).transpose(1, 2)
        return rows + self.offset[:, None]

    def coefficients(self, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return coefficients float32 [c, token], in steps."""
        centred = torch.stack([side.float().cpu() for side in rows]) - self.offset[:, None]
        apart = centred.transpose(1, 2).reshape(*self.root.shape[:3], centred.shape[1])
        return (self.inverse @ apart).flatten(0, 2)

    @functools.cached_property
    def _level(self) -> Level:
        none = np.full(len(self.start), NONE, np.int8)
        return Level(none, np.zeros(len(self.start), np.int8), self.start.numpy())

    @functools.cached_property
    def _tables(self) -> Tables:
        first, refine = (
            part.contiguous().numpy().view(np.uint16) for part in (self.first, self.refine)
        )
        return Tables(first, refine.reshape(-1, SHIFTS, 4))


def sound(tensors: Mapping[str, torch.Tensor], blocks: int, dim: int) -> Anchors:
    """Return anchors of tensors by field. Raises: ValueError for shapes or types of others."""
    features = blocks * dim
    expected = {
        "offset": ((2, features), torch.float32),
        "root": ((2, blocks, dim, dim), torch.float32),
        "start": ((2 * features,), torch.int8),
        "centres": ((2 * features, CENTRES), torch.uint8),
        "first": ((2 * features, FIRST_SYMBOLS), torch.int16),
        "refine": ((2 * features, SHIFTS * 4), torch.int16),
    }
    for field, (shape, dtype) in expected.items():
        found = tensors[field]
        if tuple(found.shape) != shape or found.dtype != dtype:
            raise ValueError(f"anchors' {field} is {found.dtype} {tuple(found.shape)}")
    start = tensors["start"]
    finite = all(bool(tensors[field].isfinite().all()) for field in ("offset", "root"))
    if not finite or start.min() < 0 or start.max() >= SHIFTS:
        raise ValueError("its anchors are not sound")
    if not are_probabilities(tensors["first"], tensors["refine"].view(-1, SHIFTS, 4)):
        raise ValueError("the probabilities of its anchors are not sound")
    return Anchors(**tensors)


def are_probabilities(first: torch.Tensor, refine: torch.Tensor) -> bool:
    """Say whether every symbol has a share of TOTAL, so that decoding cannot leave its ranges."""
    zero, negative, one, more = refine.to(torch.int32).unbind(-1)
    return bool(
        (first.min() >= 1)
        and (first.to(torch.int32).sum(-1) == TOTAL).all()
        and (refine.min() >= 1)
        and (zero + negative < TOTAL).all()
        and (torch.maximum(one, more) < TOTAL).all()
    )
