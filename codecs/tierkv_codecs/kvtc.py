"""Codec `kvtc` (id 6): all layers and heads of a token through one calibrated transform.

KVTC (arXiv 2511.01815) with a progressive stream. The features of a token (keys without RoPE, or
values, of all layers and heads of the part) become coefficients in a global basis; a nested
uniform quantiser makes them integers, finer ones for tokens whose errors cost more
(`kvtc_grades`); calibrated probabilities make these bytes. Segment 0 is the coarsest level, each
further one refines it, so any prefix of the segments is a payload. The first tokens of a sequence
are stored exactly, in segment 0. `docs/FORMAT.md` section 11 has the bytes.

A block that the calibration does not fit is refused (Unsuited), not ruined: the guard compares the
error of some of its values, in the metric of the basis, with what held-out text had.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv_codecs.codec import CodecError, Place, Unsuited
from tierkv_codecs.kvtc_artifact import ANCHOR, CODEC_ID, Artifact
from tierkv_codecs.kvtc_drift import features as drift_features
from tierkv_codecs.kvtc_drift import level as drift_level
from tierkv_codecs.kvtc_drift import losses_of, rounded, typical
from tierkv_codecs.kvtc_drift import tables as drift_tables
from tierkv_codecs.kvtc_grades import (
    Group,
    Restored,
    coefficients_of,
    empty_groups,
    order_of,
    packed,
    packed_bytes,
    unpacked,
)
from tierkv_codecs.kvtc_rans import LANES
from tierkv_codecs.kvtc_rows import rows_of, write_rows
from tierkv_codecs.kvtc_stream import Level, Stream, StreamError, Tables, decode, encode
from tierkv_codecs.tensors import FLOATS, bytes_of, check_out

STREAMS = 3
"""Keys, values, and the drift of the values; in segment 0 the anchors, too."""
HEAD = struct.Struct("<2I")
"""Words and escapes of a stream."""
STATES = 4 * LANES
BOUND_EXTRA = 1024
GUARD = 1.5
"""A block is refused when its values' error exceeds that of held-out text so many times; that of n
tokens may be larger by 1/n, for few tokens differ more."""
GUARD_TOKENS = 16
"""So many tokens, spread over the block, are looked at by the guard."""
LAYERS_AT_ONCE = 5
"""Layers are decoded in runs of so many, from the first."""
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Kvtc:
    """One artifact at one level; `levels` is how many segments are written."""

    artifact_file: Artifact
    levels: int
    name: str
    guard: float = GUARD
    id: int = CODEC_ID
    lossy: bool = True

    @property
    def artifact(self) -> bytes:
        return self.artifact_file.digest

    def bound(self, raw_bytes: int) -> int:
        return raw_bytes + BOUND_EXTRA

    def encode(self, block: torch.Tensor, out: torch.Tensor, place: Place) -> tuple[int, ...]:
        check_out(out, self.bound(block.numel() * block.itemsize))
        self._check(block, place)
        sinks = place.sinks(block.shape[2])
        exact = bytes_of(block[:, :, :sinks].cpu().contiguous()).numpy().tobytes()
        means = self._means(block.device)
        rows = rows_of(block[:, :, sinks:], place.layers, place.position + sinks, means)
        found = coefficients_of(self.artifact_file, rows, self.levels - 1)
        groups = found.groups(self.artifact_file, self.levels - 1)
        others = np.sort(np.concatenate([_NONE, *(group.tokens for group in typical(groups))]))
        few = min(GUARD_TOKENS, len(others))
        at = others[np.linspace(0, len(others) - 1, few).astype(np.int64)]
        errors, lost = losses_of(self.artifact_file, rows[1].exact, groups, self.levels, at)
        self._watch(errors, found.marks[at])
        anchors = torch.from_numpy(np.flatnonzero(found.marks == ANCHOR))
        apart = self.artifact_file.anchors.encode((rows[0].exact[anchors], rows[1].exact[anchors]))
        pieces = [
            self._segment(groups, lost[number], number, () if number else (apart,))
            for number in range(self.levels)
        ]
        pieces[0] = exact + packed(found.marks) + pieces[0]
        data = np.frombuffer(b"".join(pieces), np.uint8)
        if data.size > self.bound(block.numel() * block.itemsize):
            raise Unsuited("it does not shrink")
        out[: data.size].numpy()[:] = data
        return tuple(len(piece) for piece in pieces)

    def decode(
        self, payload: torch.Tensor, segments: tuple[int, ...], out: torch.Tensor, place: Place
    ) -> None:
        for _ in self.decode_layers(payload, segments, out, place):
            pass

    def decode_layers(
        self, payload: torch.Tensor, segments: tuple[int, ...], out: torch.Tensor, place: Place
    ) -> Iterator[int]:
        """Decode from the first layer on; yield how many are complete, as soon as they are.

        Raises: CodecError as `decode` does.
        """
        pieces = _cut(payload, segments, len(self.artifact_file.header.ratios))
        self._check(out, place)
        sinks = place.sinks(out.shape[2])
        exact = out[:, :, :sinks].numel() * out.itemsize
        tokens = out.shape[2] - sinks
        before = exact + packed_bytes(tokens)
        if len(pieces[0]) < before:
            raise CodecError(
                f"{len(pieces[0])} bytes cannot hold {sinks} exact tokens and {tokens} grades"
            )
        out[:, :, :sinks] = _exact(pieces[0][:exact], out[:, :, :sinks])
        marks, pieces[0] = unpacked(pieces[0][exact:before], tokens), pieces[0][before:]
        level = len(pieces) - 1
        streams = [_streams(piece, STREAMS + (number == 0)) for number, piece in enumerate(pieces)]
        groups = self._groups(streams, marks)
        drift = self._drift(streams[-1][2], level)
        anchors = self._anchors(streams[0][-1], int((marks == ANCHOR).sum()))
        anchors[1] -= drift
        sides = [
            Restored(self.artifact_file, groups, side, level, tokens, out.device) for side in (0, 1)
        ]
        order, anchors = order_of(marks), anchors.to(out.device)
        means = self._means(out.device)
        means = (means[0], means[1] + drift.to(out.device))
        width = means[0].numel() // len(place.layers)
        for start in range(0, len(place.layers), LAYERS_AT_ONCE):
            stop = min(start + LAYERS_AT_ONCE, len(place.layers))
            features = slice(start * width, stop * width)
            keys, values = (side.features(features) for side in sides)
            for rows, apart in zip((keys, values), anchors[:, :, features], strict=True):
                rows[tokens - len(apart) :] = apart
            write_rows(
                (keys, values),
                place.layers[start:stop],
                place.position + sinks,
                (means[0][features], means[1][features]),
                order,
                out[start:stop, :, sinks:],
            )
            yield stop

    def _check(self, block: torch.Tensor, place: Place) -> None:
        header = self.artifact_file.header
        part = self.artifact_file.part
        if block.dtype not in FLOATS.values():
            raise Unsuited(f"{str(block.dtype).removeprefix('torch.')} values are not coded")
        if tuple(place.part) != tuple(part) or place.layers != header.layers:
            raise Unsuited("its artifact is of other layers or heads")
        shape = (len(header.layers), 2, part.head_stop - part.head_start, header.layers[0].k_dim)
        if (*block.shape[:2], *block.shape[3:]) != shape or block.dim() != len(shape) + 1:
            raise Unsuited("its shape is not that of its part")

    def _means(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.artifact_file.sides
        return keys.mean.to(device), values.mean.to(device)

    def _watch(self, errors: NDArray[np.float64], grades: NDArray[np.uint8]) -> None:
        """Compare errors of values [tokens] with those of calibration. Raises: Unsuited."""
        if not len(grades):
            return
        plans = [self.artifact_file.plan(self.levels - 1, int(grade)) for grade in grades]
        expected = np.array([self.artifact_file.header.errors[plan][1] for plan in plans])
        if float((errors / expected).mean()) > self.guard * (1 + 1 / len(grades)):
            raise Unsuited("it is out of the artifact's domain")

    def _segment(
        self,
        groups: Sequence[Group[np.int16]],
        lost: torch.Tensor,
        number: int,
        more: Sequence[Stream],
    ) -> bytes:
        artifact, coded = self.artifact_file, []
        for side in (0, 1):
            parts = [
                (group.sides[side], artifact.level(side, number, group.grade)) for group in groups
            ]
            coded.append(encode(parts, artifact.tables[side]))
        drifted = rounded(lost, artifact.header.drift_steps[number])
        tables = drift_tables(artifact, number)
        coded.append(encode([(drifted, drift_level(len(drifted)))], tables))
        coded += more
        heads = [HEAD.pack(words.size, escapes.size) for _, words, escapes in coded]
        parts_of = [one[at].tobytes() for at in range(len(coded[0])) for one in coded]
        return b"".join(heads + parts_of)

    def _groups(
        self, segments: Sequence[Sequence[Stream]], marks: NDArray[np.uint8]
    ) -> list[Group[np.int32]]:
        """Return the tokens by grades with their indices at the last level. Raises: CodecError."""
        groups = empty_groups(self.artifact_file, marks, len(segments) - 1)
        for number, streams in enumerate(segments):
            for side, tables in enumerate(self.artifact_file.tables):
                parts = [
                    (group.sides[side], self.artifact_file.level(side, number, group.grade))
                    for group in groups
                ]
                _decode(parts, tables, streams[side])
        return groups

    def _anchors(self, stream: Stream, tokens: int) -> torch.Tensor:
        """Return the anchors' centred features, float32 [2, anchor, p]. Raises: CodecError."""
        try:
            return self.artifact_file.anchors.decode(stream, tokens)
        except StreamError:
            raise CodecError("the payload is not one of this artifact") from None

    def _drift(self, stream: Stream, level: int) -> torch.Tensor:
        """Return what the values of the block have on average lost. Raises: CodecError."""
        step, count = (
            self.artifact_file.header.drift_steps[level],
            self.artifact_file.drift.shape[1],
        )
        indices = np.zeros((count, 1), np.int32)
        _decode([(indices, drift_level(count))], drift_tables(self.artifact_file, level), stream)
        return drift_features(indices, step, self.artifact_file.sides[1])


def _decode(parts: Sequence[tuple[NDArray[np.int32], Level]], tables: Tables, of: Stream) -> None:
    try:
        decode(parts, tables, of)
    except StreamError:
        raise CodecError("the payload is not one of this artifact") from None


def codecs_of(artifact: Artifact, guard: float = GUARD) -> tuple[Kvtc, ...]:
    """Return the codecs of an artifact, from the coarsest: `kvtc@32x`, `kvtc@16x`, ..."""
    return tuple(
        Kvtc(artifact, number + 1, f"kvtc@{ratio:g}x", guard)
        for number, ratio in enumerate(artifact.header.ratios)
    )


def _cut(payload: torch.Tensor, segments: tuple[int, ...], most: int) -> list[bytes]:
    """Return the segments' bytes. Raises: CodecError."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise CodecError("the payload must be a contiguous uint8 vector in host memory")
    if payload.device.type != "cpu":
        raise CodecError("the payload must lie in host memory")
    if not 1 <= len(segments) <= most or min(segments) < 0 or sum(segments) != payload.numel():
        raise CodecError(
            f"the payload has {payload.numel()} bytes; its segments {segments} must be 1 to {most}"
            " that add up to that"
        )
    data, start, pieces = payload.numpy(), 0, []
    for length in segments:
        pieces.append(data[start : start + length].tobytes())
        start += length
    return pieces


def _exact(data: bytes, like: torch.Tensor) -> torch.Tensor:
    if not data:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return raw.view(like.dtype).view(like.shape).to(like.device)


def _streams(piece: bytes, count: int) -> list[Stream]:
    """Return states, words and escapes of the streams. Raises: CodecError."""
    start = count * (HEAD.size + STATES)
    if len(piece) < start:
        raise CodecError(f"a segment of {len(piece)} bytes is too short")
    head = np.frombuffer(piece, "<u4", 2 * count).tolist()
    if start + 2 * sum(head) != len(piece):
        raise CodecError(f"a segment of {len(piece)} bytes does not have the lengths it claims")
    states = np.frombuffer(piece, "<u4", count * LANES, count * HEAD.size).reshape(count, LANES)
    ends = np.cumsum([0, *head[::2], *head[1::2]])
    numbers = np.frombuffer(piece, "<u2", offset=start)
    parts = [numbers[a:b] for a, b in pairwise(ends)]
    return list(zip(states, parts[:count], parts[count:], strict=True))
