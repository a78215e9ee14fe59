"""Round trip: KV of a prefix through the frames that a store would keep, and what they weigh.

Blocks are cut as the store cuts them, encoded, put into sealed frames, and read back from the
frames' bytes alone. Every block that reaches into the tail, the last tokens of a prefix, is stored
losslessly: 128 tokens by the literature's protocol; none, as a store does it. A block that a codec
cannot take goes to another one, or losslessly, and is counted.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tierkv import frame
from tierkv.errors import invalid
from tierkv.fidelity import Fidelity
from tierkv.identity import DTYPE_BYTES, Identity
from tierkv.part import Part
from tierkv_codecs.codec import SINKS, Codec, CodecRegistry, Place, Unsuited
from tierkv_codecs.lab.subject import Kv, LayerKv
from tierkv_codecs.lossless import Lossless
from tierkv_codecs.tensors import FLOATS

HALF = 2
"""Bytes of a 16-bit value, which all ratios count against."""


@dataclass
class Weight:
    """Bytes and seconds of the prefixes of a domain; ratios are against 16-bit values."""

    coded_raw: int = 0
    """16-bit bytes of the coded tokens: neither sinks nor tail."""
    coded: int = 0
    """Bytes of the frames that hold them, headers included, less what the exact sinks take."""
    total_raw: int = 0
    total: int = 0
    encode_bytes: int = 0
    """Bytes of blocks, as the engine holds them, that went through the codec in the seconds."""
    encode_s: float = 0.0
    decode_s: float = 0.0
    blocks: int = 0
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Coded blocks that another codec took, by reason and that codec's name."""

    def add(self, other: "Weight") -> None:
        """Add what other prefixes weigh."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def ratio_payload(self) -> float:
        """Ratio of the coded tokens, everything of their frames counted."""
        return self.coded_raw / self.coded if self.coded else 0.0

    @property
    def ratio_total(self) -> float:
        """Ratio of all tokens, exact ones too."""
        return self.total_raw / self.total if self.total else 0.0


class Cutter:
    """Cuts KV into blocks and sends them through a codec; `tail` tokens at the end stay exact.

    Raises: TierKVError (invalid): keys and values differ in size, which blocks cannot hold yet, or
        the prefix is no whole number of blocks.
    """

    def __init__(self, identity: Identity, context: int, tail: int = 0) -> None:
        size = identity.tokens_per_block
        if context % size or not 0 <= tail <= context - size:
            raise invalid(
                f"a context of {context} tokens is no multiple of {size} with a block or more"
                f" before its exact tail of {tail}"
            )
        if any(layer.k_dim != layer.v_dim for layer in identity.layers):
            raise invalid("layers whose keys and values differ in size are not supported yet")
        if identity.kv_dtype not in FLOATS:
            known = ", ".join(FLOATS)
            raise invalid(f"KV dtype {identity.kv_dtype} cannot be evaluated; use one of {known}")
        self._identity = identity
        self._context = context
        self._coded = (context - tail) // size * size
        self._dtype = FLOATS[identity.kv_dtype]
        self.parts = [Part.whole(identity, group) for group in range(len(identity.groups))]

    def rounded(self, kv: Kv) -> Kv:
        """Return float32 KV with the values that an engine of the identity's dtype would hold."""
        return [
            LayerKv(*(side.to(self._dtype).to(torch.float32) for side in layer)) for layer in kv
        ]

    def coded(self) -> slice:
        """Return the tokens that a lossy codec may change: neither sinks nor tail."""
        return slice(SINKS, self._coded)

    def through(
        self,
        kv: Kv,
        codec: Codec,
        registry: CodecRegistry,
        weight: Weight,
        fallback: Codec | None = None,
    ) -> Kv:
        """Return KV restored from frames, float32, and add to `weight`.

        Args:
            kv: rounded, of one or more sequences.
            codec: to encode with.
            registry: to find the decoder in, by what the frames say.
            weight: of the domain.
            fallback: takes the blocks that `codec` cannot; lossless takes what it cannot either.
        """
        lossless = Lossless()
        coders = (codec, lossless) if fallback is None else (codec, fallback, lossless)
        restored = [LayerKv(torch.empty_like(k), torch.empty_like(v)) for k, v in kv]
        for sequence in range(kv[0].keys.shape[0]):
            for part, layers in zip(self.parts, self._identity.groups, strict=True):
                trip = _Trip(self._identity, part, coders, registry, weight)
                for start in range(0, self._context, self._identity.tokens_per_block):
                    block = self._gather(kv, sequence, layers, start)
                    found = trip.run(block, start, exact=start >= self._coded)
                    self._scatter(found, restored, sequence, layers, start)
        return restored

    def _gather(self, kv: Kv, sequence: int, layers: tuple[int, ...], start: int) -> torch.Tensor:
        """Return a canonical block [layer, K/V, token, head, dim] in the engine's dtype."""
        span = slice(start, start + self._identity.tokens_per_block)
        sides = [[side[sequence, :, span] for side in kv[layer]] for layer in layers]
        block = torch.stack([torch.stack(pair) for pair in sides]).transpose(2, 3)
        return block.to(self._dtype).contiguous()

    def _scatter(
        self,
        block: torch.Tensor,
        kv: list[LayerKv],
        sequence: int,
        layers: tuple[int, ...],
        start: int,
    ) -> None:
        span = slice(start, start + block.shape[2])
        for row, layer in zip(block.transpose(2, 3), layers, strict=True):
            for values, side in zip(row, kv[layer], strict=True):
                side[sequence, :, span].copy_(values)


class _Trip:
    """One part's blocks of one sequence on their way through frames."""

    def __init__(
        self,
        identity: Identity,
        part: Part,
        coders: Sequence[Codec],
        registry: CodecRegistry,
        weight: Weight,
    ) -> None:
        self._identity = identity
        self._layers = tuple(identity.layers[number] for number in identity.groups[part.group])
        self._part = part
        self._coders = coders
        self._registry = registry
        self._weight = weight
        self._raw = part.raw_bytes(identity)
        self._half = self._raw // DTYPE_BYTES[identity.kv_dtype] * HALF

    def run(self, block: torch.Tensor, position: int, *, exact: bool) -> torch.Tensor:
        """Return the block as a reader would have it."""
        place = Place(self._layers, self._part, position)
        weight = self._weight
        started = time.perf_counter()
        codec, payload, segments = self._encoded(block, place, exact=exact)
        encoded = time.perf_counter() - started
        data = self._frame(codec, payload, segments, position)
        header, body = _opened(data)
        out = torch.empty_like(block)
        started = time.perf_counter()
        reader = self._registry.of_id(header.codec_id, header.artifact)
        reader.decode(body, header.segments, out, place)
        decoded = time.perf_counter() - started
        weight.total += len(data)
        weight.total_raw += self._half
        if not exact:
            sinks = place.sinks(block.shape[2])
            tokens = block.shape[2]
            weight.blocks += 1
            weight.coded += len(data) - self._raw * sinks // tokens
            weight.coded_raw += self._half * (tokens - sinks) // tokens
            weight.encode_bytes += self._raw
            weight.encode_s += encoded
            weight.decode_s += decoded
        return out

    def _encoded(
        self, block: torch.Tensor, place: Place, *, exact: bool
    ) -> tuple[Codec, torch.Tensor, tuple[int, ...]]:
        """Return the first codec that takes a block, its payload and segments."""
        reason, *others, lossless = "", *self._coders
        for codec in () if exact else others:
            try:
                payload, segments = _encoded(codec, block, place)
            except Unsuited as unsuited:
                reason = reason or unsuited.reason
                continue
            if reason:
                self._weight.fallbacks[reason, codec.name] += 1
            return codec, payload, segments
        if reason:
            self._weight.fallbacks[reason, lossless.name] += 1
        return lossless, *_encoded(lossless, block, place)

    def _frame(
        self, codec: Codec, payload: torch.Tensor, segments: tuple[int, ...], position: int
    ) -> bytearray:
        """Return the sealed frame of a payload, byte for byte as a tier would keep it."""
        header = frame.Header(
            codec_id=codec.id,
            flags=frame.LOSSY if codec.lossy else 0,
            fidelity=Fidelity.ECONOMY if codec.lossy else Fidelity.EXACT,
            tokens=self._identity.tokens_per_block,
            position=position,
            generation=0,
            fingerprint=self._identity.fingerprint,
            key=bytes(32),
            namespace=bytes(16),
            artifact=codec.artifact,
            part=self._part,
            raw_bytes=self._raw,
            epoch=0,
            segments=segments,
        )
        data = bytearray(header.frame_bytes)
        data[header.header_bytes :] = payload.numpy().data
        data[: header.header_bytes] = frame.pack(frame.seal(header, [data]))
        return data


def _encoded(
    codec: Codec, block: torch.Tensor, place: Place
) -> tuple[torch.Tensor, tuple[int, ...]]:
    out = torch.empty(codec.bound(block.numel() * block.itemsize), dtype=torch.uint8)
    segments = codec.encode(block, out, place)
    return out[: sum(segments)], segments


def _opened(data: bytearray) -> tuple[frame.Header, torch.Tensor]:
    """Read a frame as somebody who has its bytes alone."""
    header = frame.parse(data)
    assert isinstance(header, frame.Header), "the lab wrote a frame that cannot be read"
    assert frame.verify(header, [data]), "the lab wrote a frame that is not sound"
    body = torch.frombuffer(data, dtype=torch.uint8, offset=header.header_bytes)
    return header, body[: header.payload_bytes]


def changed(kv: Kv, other: Kv) -> Iterator[bool]:
    """Yield for each layer whether any value differs, NaN counted as equal to itself."""
    for exact, restored in zip(kv, other, strict=True):
        yield not all(
            torch.equal(one.view(torch.int32), two.view(torch.int32))
            for one, two in zip(exact, restored, strict=True)
        )
