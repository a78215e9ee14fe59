"""Media: names what stands in place of tokens in a prompt, by the engine's own hashes of it.

An image's placeholder tokens are the same for every image, so a block that holds any of them has
the image's hash, and where it lies, among the extras of its key. vLLM hashes content together with
what the processor was told; a name that a client gave instead may stand for anything, and is not
trusted beyond its engine.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tierkv.key import Extras

Foreign = Any
"""An object of vLLM's own."""

_HASH = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")


def is_named(features: Sequence[Foreign]) -> bool:
    """Return whether every item has a hash of its content; clients' own names do not look so."""
    return all(
        _HASH.fullmatch(str(getattr(item, "mm_hash", None) or item.identifier)) is not None
        for item in features
    )


def media_extras(
    features: Sequence[Foreign], tokens: int, first: int, stop: int
) -> Mapping[int, Extras]:
    """Return the extras of those blocks from `first` up to `stop` that hold a part of any item.

    Args:
        features: vLLM's, of a request.
        tokens: of a block.
        first: number of the block that has number 0 in the answer.
        stop: the block after the last one.
    """
    found: dict[int, dict[str, str]] = {}
    for item in features:
        start, end = item.mm_position.offset, item.mm_position.offset + item.mm_position.length
        for block in range(max(start // tokens, first), min(-(-end // tokens), stop)):
            extras = found.setdefault(block - first, {})
            # Where it starts, as seen from this block, and which of the block's items it is.
            where = f"{start - block * tokens}+{end - start}"
            extras[f"media{len(extras)}"] = f"{item.modality}:{item.identifier}@{where}"
    return found
