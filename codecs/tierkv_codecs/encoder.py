"""Encoding again: a block of an exact frame in another profile, for demotions.

The shape of the block follows from the identity of its model; what is not as it says is refused.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tierkv import frame
from tierkv.codec import Profile
from tierkv.errors import TierKVError
from tierkv.identity import Identity
from tierkv_codecs import CODECS, CodecRegistry, Place
from tierkv_codecs.tensors import FLOATS


class _Shape(NamedTuple):
    """What a part's blocks look like: [layer, K/V, token, head, dim]."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    place: Place


@torch.no_grad()
def encode_again(
    identity: Identity,
    header: frame.Header,
    payload: Sequence[memoryview],
    profile: Profile,
    out: memoryview,
    codecs: CodecRegistry = CODECS,
) -> tuple[int, ...]:
    """Write the payload that a frame's block has in another profile.

    Args:
        identity: of the block's model.
        header: of the frame, which is exact.
        payload: of the frame, in pieces.
        profile: wanted.
        out: writable memory of at least `raw_bytes + profile.bound_extra`.
        codecs: by name, as profiles are named.

    Returns: the bytes of its segments; none where no codec can take the block, or it is not what
        the identity says.
    """
    shape = _shape(identity, header)
    if shape is None:
        return ()
    block = torch.empty(shape.sizes, dtype=shape.dtype)
    if block.nbytes != header.raw_bytes:
        return ()
    data = torch.frombuffer(bytearray().join(payload), dtype=torch.uint8)
    segments = tuple(length for length in header.segments if length)
    try:
        codecs.of_id(header.codec_id).decode(data, segments, block, shape.place)
        target = torch.frombuffer(out, dtype=torch.uint8)
        return codecs.named(profile.name).encode(block, target, shape.place)
    except TierKVError:  # a codec's refusal, or no such codec
        return ()


def _shape(identity: Identity, header: frame.Header) -> _Shape | None:
    """Return the shape of a frame's block, None where it is not a regular one of the identity."""
    part = header.part
    if identity.kv_dtype not in FLOATS or part.group >= len(identity.groups):
        return None
    numbers = identity.groups[part.group][part.layer_start : part.layer_stop]
    layers = tuple(identity.layers[number] for number in numbers)
    if not layers or layers[0].k_dim != layers[0].v_dim:
        return None
    heads = part.head_stop - part.head_start
    sizes = (len(layers), 2, header.tokens, heads, layers[0].k_dim)
    return _Shape(sizes, FLOATS[identity.kv_dtype], Place(layers, part, header.position))
