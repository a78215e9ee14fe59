"""Identity: what makes the KV of two processes interchangeable.

An Identity names the model, its weights and everything that changes the values of KV: dtype, heads,
head sizes, RoPE and window of every layer, tokens per block. It says nothing of the engine, tensor
layout, rank or parallel size. Its fingerprint is the SHA-256 of a tagged, length-prefixed encoding
(docs/FORMAT.md section 1), so no two different identities encode alike.
"""

import functools
import hashlib
import struct
from collections.abc import Iterable

import msgspec

from tierkv.errors import invalid

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}

MAX_LAYERS = 4096
MAX_TOKENS_PER_BLOCK = 4096


def tagged(fields: Iterable[tuple[str, bytes]]) -> bytes:
    """Encode (tag, value) pairs so that different pairs never give the same bytes.

    Each field is u16 tag length, tag, u32 value length, value; little endian.
    """
    out = bytearray()
    for tag, value in fields:
        name = tag.encode()
        out += struct.pack("<H", len(name)) + name + struct.pack("<I", len(value)) + value
    return bytes(out)


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding of one layer; `kind` is "none" for a layer without it.

    `scaling` is the canonical text (sorted JSON) of every further parameter that moves an angle.
    """

    kind: str = "default"
    theta: float = 10000.0
    rotary_dim: int = 0
    interleaved: bool = False
    scaling: str = ""


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and positions of one layer's KV; `window` is in tokens, None for full attention."""

    kv_heads: int
    k_dim: int
    v_dim: int
    rope: Rope
    window: int | None = None


class Identity(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything two processes must agree on before one may read the other's KV."""

    model: str
    weights: str
    epoch: int = 0
    kv_dtype: str
    kv_scales: str = ""
    tokens_per_block: int
    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        """Refuse what could not be stored. Raises: TierKVError (invalid)."""
        if self.kv_dtype not in DTYPE_BYTES:
            known = ", ".join(sorted(DTYPE_BYTES))
            raise invalid(f"KV dtype {self.kv_dtype!r} is not known; use one of {known}")
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise invalid(f"an identity has 1 to {MAX_LAYERS} layers, not {len(self.layers)}")
        if not 1 <= self.tokens_per_block <= MAX_TOKENS_PER_BLOCK:
            raise invalid(
                f"tokens per block is 1 to {MAX_TOKENS_PER_BLOCK}, not {self.tokens_per_block}"
            )

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that differ whenever any field differs."""
        return self._digest(self.epoch)

    @functools.cached_property
    def family(self) -> bytes:
        """32 bytes that differ whenever any field but the epoch differs.

        It names what a quality report was made for: weights updated in place keep it, because a
        report for every epoch would come after that epoch is over.
        """
        return self._digest(0)

    def _digest(self, epoch: int) -> bytes:
        fields = [
            ("format", b"tierkv.identity.1"),
            ("model", self.model.encode()),
            ("weights", self.weights.encode()),
            ("epoch", _u64(epoch)),
            ("kv_dtype", self.kv_dtype.encode()),
            ("kv_scales", self.kv_scales.encode()),
            ("tokens_per_block", _u64(self.tokens_per_block)),
        ]
        fields += [("layer", _encode_layer(layer)) for layer in self.layers]
        return hashlib.sha256(tagged(fields)).digest()

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Layer numbers of each KV group, in order of first appearance.

        Layers share a group when they share a hit rule and a shape: same window, heads and sizes.
        """
        found: dict[tuple[int | None, int, int, int], list[int]] = {}
        for number, layer in enumerate(self.layers):
            kind = (layer.window, layer.kv_heads, layer.k_dim, layer.v_dim)
            found.setdefault(kind, []).append(number)
        return tuple(tuple(numbers) for numbers in found.values())

    @property
    def value_bytes(self) -> int:
        """Bytes of one stored value."""
        return DTYPE_BYTES[self.kv_dtype]


def to_wire(identity: Identity) -> bytes:
    """Return an identity in msgpack."""
    return msgspec.msgpack.encode(identity)


def from_wire(data: bytes) -> Identity:
    """Read what `to_wire` wrote. Raises: TierKVError (invalid): it is no identity."""
    try:
        return msgspec.msgpack.decode(data, type=Identity)
    except msgspec.MsgspecError as error:
        raise invalid(f"not an identity: {error}") from error


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def _encode_layer(layer: LayerSpec) -> bytes:
    rope = layer.rope
    return tagged(
        [
            ("kv_heads", _u64(layer.kv_heads)),
            ("k_dim", _u64(layer.k_dim)),
            ("v_dim", _u64(layer.v_dim)),
            ("window", b"" if layer.window is None else _u64(layer.window)),
            ("rope", rope.kind.encode()),
            ("theta", struct.pack("<d", rope.theta)),
            ("rotary_dim", _u64(rope.rotary_dim)),
            ("interleaved", bytes([rope.interleaved])),
            ("scaling", rope.scaling.encode()),
        ]
    )
