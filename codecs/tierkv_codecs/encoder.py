"""The encoder of demotions, in this process: `tierkv.encoder.Encoder` over the codecs.

It knows the shape of what it encodes from the identities it is told of; a block of any other model
is left as it is.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from tierkv import frame
from tierkv.codec import Profile
from tierkv.identity import Identity
from tierkv.part import Part
from tierkv_codecs import CODECS, CodecError, CodecRegistry, Place
from tierkv_codecs.tensors import FLOATS


class _Shape(NamedTuple):
    """What a part's blocks look like: [layer, K/V, token, head, dim]."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    place: Place


class BlockEncoder:
    """Decodes an exact frame and encodes its block.

    Args:
        identities: by fingerprint; may grow meanwhile.
        codecs: by name, as profiles are named.
    """

    def __init__(
        self, identities: Mapping[bytes, Identity], codecs: CodecRegistry = CODECS
    ) -> None:
        self._identities = identities
        self._codecs = codecs

    @torch.no_grad()
    def encode(
        self,
        header: frame.Header,
        payload: Sequence[memoryview],
        profile: Profile,
        out: memoryview,
    ) -> int:
        """See `tierkv.encoder.Encoder`."""
        shape = self._shape(header)
        if shape is None:
            return 0
        block = torch.empty(shape.sizes, dtype=shape.dtype)
        if block.nbytes != header.raw_bytes:
            return 0
        data = torch.cat([torch.frombuffer(piece, dtype=torch.uint8) for piece in payload])
        segments = tuple(length for length in header.segments if length)
        try:
            old = self._codecs.of_id(header.codec_id)
            old.decode(data, segments, block, shape.place)
            new = self._codecs.named(profile.name)
            target = torch.frombuffer(out, dtype=torch.uint8)
            return sum(new.encode(block, target, shape.place))
        except CodecError:
            return 0

    def _shape(self, header: frame.Header) -> _Shape | None:
        """Return the shape of a frame's block, None where it is not known or not regular."""
        identity = self._identities.get(header.fingerprint)
        part: Part = header.part
        if identity is None or identity.kv_dtype not in FLOATS:
            return None
        if part.group >= len(identity.groups):
            return None
        numbers = identity.groups[part.group][part.layer_start : part.layer_stop]
        layers = tuple(identity.layers[number] for number in numbers)
        if not layers or layers[0].k_dim != layers[0].v_dim:
            return None
        heads = part.head_stop - part.head_start
        sizes = (len(layers), 2, header.tokens, heads, layers[0].k_dim)
        place = Place(layers, part, header.position)
        return _Shape(sizes, FLOATS[identity.kv_dtype], place)
