"""Subject: the model that a codec's loss is measured on, as the lab needs it.

Whoever runs models gives one (`tierkv_connectors.subject`); the lab itself knows tensors only.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from tierkv.identity import Identity


class LayerKv(NamedTuple):
    """Keys (with RoPE) and values of one layer, each [sequence, head, token, dim]."""

    keys: torch.Tensor
    values: torch.Tensor


Kv = Sequence[LayerKv]
"""Of every layer of the model, in order."""


class Attention(Protocol):
    """What attention did in a continuation over exact KV, to be done again over other KV."""

    def outputs(self, kv: Kv) -> Iterator[torch.Tensor]:
        """Yield each layer's attention output, in order, for the same queries over a prefix's KV.

        [sequence, token, head, dim], in float32. The continuation's own KV stays as it was.
        """
        ...


class Subject(Protocol):
    """A model in float32. Batches have no padding: token i of each sequence has position i."""

    @property
    def identity(self) -> Identity:
        """What its KV is stored under, in the KV dtype of the engine that is measured for."""
        ...

    def tokens(self, text: str) -> list[int]:
        """Return the ids of a text, nothing added."""
        ...

    def prefill(self, ids: torch.Tensor) -> Kv:
        """Return the KV of prefixes, ids [sequence, token], in float32."""
        ...

    def proceed(self, kv: Kv, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [sequence, token, vocabulary] of tokens that follow the prefixes."""
        ...

    def watch(self, kv: Kv, ids: torch.Tensor) -> tuple[torch.Tensor, Attention]:
        """Return what `proceed` does, and what attention did meanwhile."""
        ...
