"""Part: the slice of a block that one frame holds."""

import functools
import struct
from typing import NamedTuple, Self

from tierkv.errors import invalid
from tierkv.identity import Identity

_PACKED = struct.Struct("<5H")
PACKED_BYTES = _PACKED.size


class Part(NamedTuple):
    """(KV group, layer range, head range); ranges are half open.

    Layers count within the group, heads within a layer, so ranks and parallel sizes never enter a
    key: a rank writes and reads the parts it owns.
    """

    group: int
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int

    def pack(self) -> bytes:
        """Return the 10 bytes that frames and the wire carry."""
        return _PACKED.pack(*self)

    @classmethod
    @functools.lru_cache(4096)
    def unpack(cls, data: bytes) -> Self:
        """Read the 10 bytes of `pack`; there are few parts and many frames, so they are kept."""
        return cls(*_PACKED.unpack(data))

    @classmethod
    def whole(cls, identity: Identity, group: int = 0) -> Self:
        """Return the part that holds all layers and heads of a group."""
        layers = identity.groups[group]
        return cls(group, 0, len(layers), 0, identity.layers[layers[0]].kv_heads)

    def raw_bytes(self, identity: Identity) -> int:
        """Bytes of this part of one block before any codec.

        Raises: TierKVError (invalid) when the part does not lie inside the identity.
        """
        groups = identity.groups
        if self.group >= len(groups):
            raise invalid(f"part names KV group {self.group}; the identity has {len(groups)}")
        layers = groups[self.group]
        spec = identity.layers[layers[0]]
        layers_fit = 0 <= self.layer_start < self.layer_stop <= len(layers)
        heads_fit = 0 <= self.head_start < self.head_stop <= spec.kv_heads
        if not (layers_fit and heads_fit):
            raise invalid(f"{self} does not lie in {len(layers)} layers of {spec.kv_heads} heads")
        values = (self.head_stop - self.head_start) * (spec.k_dim + spec.v_dim)
        per_token = (self.layer_stop - self.layer_start) * values * identity.value_bytes
        return per_token * identity.tokens_per_block
