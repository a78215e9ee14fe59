"""Pages: between an engine's KV tensors and the bytes of a block in the arena.

Between pages and a raw payload in one piece every byte is copied by the engine's device alone, in
host memory once. All else passes through one scratch block in host memory, where codecs run, and
through a scratch payload when the frame lies in several pieces.
"""

import logging
from collections import Counter
from collections.abc import Sequence

import torch

from tierkv import frame
from tierkv.client import Transfer
from tierkv.codec import BY_CODEC_ID, LOSSLESS, RAW, Profile
from tierkv.errors import TierKVError, invalid
from tierkv.identity import Identity
from tierkv.part import Part
from tierkv.reservation import GIVEN_UP, Pieces, Written
from tierkv_codecs import CODECS, CodecRegistry, Place, Unsuited
from tierkv_codecs.tensors import FLOATS
from tierkv_connectors.device import Lane
from tierkv_connectors.views import Views

Profiles = Sequence[Profile]
"""In the order in which they are tried."""

_LOG = logging.getLogger("tierkv")

DTYPES = {
    **FLOATS,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class UnitCopier:
    """Copies units of one part between an engine's memory and the arena, by one lane.

    One at a time: the scratch memory is reused from unit to unit. `codecs` has the calibrated ones
    too that may be read or written.
    """

    def __init__(
        self,
        identity: Identity,
        part: Part,
        lane: Lane,
        codecs: CodecRegistry = CODECS,
    ) -> None:
        layers = tuple(identity.layers[number] for number in identity.groups[part.group])
        spec = layers[0]
        if spec.k_dim != spec.v_dim:
            raise invalid(f"keys of {spec.k_dim} and values of {spec.v_dim} are not supported yet")
        self.dtype = DTYPES[identity.kv_dtype]
        self.shape = (
            part.layer_stop - part.layer_start,
            2,
            identity.tokens_per_block,
            part.head_stop - part.head_start,
            spec.k_dim,
        )
        self._raw_bytes = part.raw_bytes(identity)
        self._place = Place(layers[part.layer_start : part.layer_stop], part, 0)
        self._codecs = codecs
        self.unsuited: Counter[str] = Counter()
        self._lane = lane
        self._block: torch.Tensor | None = None
        self._payload: torch.Tensor | None = None

    @torch.no_grad()
    def take(self, views: Views, profiles: Profiles, pieces: Pieces) -> torch.Tensor:
        """Begin to write: from then on only the lane has still to read the views.

        Returns: the block for `encode`, which comes before any other `take`.
        """
        block = self._target(profiles[0], pieces)
        self._lane.gather(views, block)
        return block

    @torch.no_grad()
    def encode(
        self, block: torch.Tensor, profiles: Profiles, pieces: Pieces, position: int
    ) -> Written:
        """Encode what `take` began with the same pieces, whose first token has `position`.

        A block that the first profile's codec cannot take is stored with the next, and at last
        losslessly; that is counted in `unsuited` by profile and reason, and said once for each.

        Returns: what was written; `GIVEN_UP` when it does not fit.
        """
        self._lane.wait()
        if block is not self._block:
            return Written(RAW.number, (self._raw_bytes,))
        for profile in profiles:
            try:
                return self._encode(block, profile, pieces, position)
            except Unsuited as refused:
                self._count(f"{profile.name}: {refused.reason}")
        return self._encode(block, LOSSLESS, pieces, position)

    @torch.no_grad()
    def encode_beside(
        self, block: torch.Tensor, profile: Profile, pieces: Pieces, position: int
    ) -> Written:
        """Encode what `encode` was last given once more; `GIVEN_UP` where that cannot be."""
        try:
            return self._encode(block, profile, pieces, position)
        except Unsuited as refused:
            self.unsuited[f"{profile.name}: {refused.reason}"] += 1
            return GIVEN_UP

    def _count(self, reason: str) -> None:
        self.unsuited[reason] += 1
        if self.unsuited[reason] == 1:
            _LOG.warning("blocks are stored with another profile that %s", reason)

    def _encode(
        self, block: torch.Tensor, profile: Profile, pieces: Pieces, position: int
    ) -> Written:
        codec = self._codecs.named(profile.name)
        place = self._place._replace(position=position)
        bound = codec.bound(self._raw_bytes)
        if len(pieces) == 1 and len(pieces[0]) >= bound:
            out = torch.frombuffer(pieces[0], dtype=torch.uint8)
            return Written(profile.number, codec.encode(block, out, place))
        payload = self._scratch_payload(bound)
        written = Written(profile.number, codec.encode(block, payload, place))
        if written.length > sum(map(len, pieces)):
            return GIVEN_UP
        _spread(payload[: written.length], pieces)
        return written

    @torch.no_grad()
    def read(self, transfer: Transfer, unit: int, header: frame.Header, views: Views) -> bool:
        """Decode a unit of a transfer into the views.

        Returns: whether the views hold what the header promises, once the lane was waited for, if
            `transfer.intact` says so afterwards. When not, what they hold is not KV: the engine
            must not see it.
        """
        if (
            header.raw_bytes != self._raw_bytes
            or header.tokens != self.shape[2]
            or header.codec_id not in BY_CODEC_ID
        ):
            return False
        pieces = transfer.payload(unit, header)
        if sum(map(len, pieces)) != header.payload_bytes:
            return False
        try:
            self._decode(header, pieces, views)
        except TierKVError:  # not the codec's payload, or another calibration's
            return False
        return True

    def _decode(self, header: frame.Header, pieces: Pieces, views: Views) -> None:
        raw = header.codec_id == RAW.codec_id and header.payload_bytes == self._raw_bytes
        if raw and self._in_place(pieces):
            self._lane.scatter(self._as_block(pieces[0]), views)
            return
        self._lane.wait()  # for the scratch block's last use
        block = self._scratch_block()
        codec = self._codecs.of_id(header.codec_id, header.artifact)
        place = self._place._replace(position=header.position)
        segments = tuple(length for length in header.segments if length)
        codec.decode(self._collect(pieces, header.payload_bytes), segments, block, place)
        self._lane.scatter(block, views)

    def _target(self, profile: Profile, pieces: Pieces) -> torch.Tensor:
        if profile.codec_id == RAW.codec_id and self._in_place(pieces):
            return self._as_block(pieces[0])
        return self._scratch_block()

    def _in_place(self, pieces: Pieces) -> bool:
        """Whether a raw block is copied between arena and engine directly."""
        return bool(pieces) and len(pieces[0]) >= self._raw_bytes

    def _as_block(self, piece: memoryview) -> torch.Tensor:
        flat = torch.frombuffer(piece, dtype=torch.uint8, count=self._raw_bytes)
        return flat.view(self.dtype).view(self.shape)

    def _collect(self, pieces: Pieces, length: int) -> torch.Tensor:
        """Return the payload in one run: a view of the arena when it lies so."""
        if len(pieces) == 1:
            return torch.frombuffer(pieces[0], dtype=torch.uint8)
        payload = self._scratch_payload(length)
        start = 0
        for piece in pieces:
            payload[start : start + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))
            start += len(piece)
        return payload

    def _scratch_block(self) -> torch.Tensor:
        if self._block is None:
            self._block = torch.empty(self.shape, dtype=self.dtype)
        return self._block

    def _scratch_payload(self, length: int) -> torch.Tensor:
        if self._payload is None or len(self._payload) < length:
            self._payload = torch.empty(length, dtype=torch.uint8)
        return self._payload[:length]


def _spread(payload: torch.Tensor, pieces: Pieces) -> None:
    start = 0
    for piece in pieces:
        part = payload[start : start + len(piece)]
        if len(part):
            torch.frombuffer(piece, dtype=torch.uint8, count=len(part)).copy_(part)
        start += len(piece)
