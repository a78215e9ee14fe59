"""The calibration artifact of `kvtc`: one file that says how to turn KV of one model into indices.

A safetensors file (docs/FORMAT.md, section 11). Its digest, the SHA-256 of the file, is written in
every frame that was made with it, and a frame is never read with another artifact.
"""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from tierkv.codec import ARTIFACT_FORMAT
from tierkv.errors import incompatible, invalid
from tierkv.identity import Identity, LayerSpec
from tierkv.part import Part
from tierkv_codecs.kvtc_anchors import Anchors, are_probabilities, sound
from tierkv_codecs.kvtc_cells import CENTRES, Cells, restore
from tierkv_codecs.kvtc_rans import FIRST_SYMBOLS, NONE, SHIFTS, TOTAL
from tierkv_codecs.kvtc_rows import Rows
from tierkv_codecs.kvtc_stream import Level, Tables, coarsened

CODEC_ID = 6
MOST_LEVELS = 8
GRADES = 4
USUAL, FINER, ANCHOR = 1, 2, 3
"""Grades are 0 to 3: tokens of 0 are coded more coarsely than most, of 2 more finely; those of 3
are anchors (`kvtc_anchors`)."""
HEEDED = 256
"""So many leading coefficients of each side say a token's grade."""
SIDES = ("k", "v")
WIDE = 64.0
"""Components of a larger standard deviation, in steps, are computed in float32: bf16 has 8 bits."""


class ArtifactHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an artifact was made for and from.

    `ratios` are the nominal ratios of the levels, from the coarsest; `realised` those that the
    plans expect of held-out rows; `errors` is the mean squared error of a held-out token by each
    plan, in squared steps, per side. `drift_steps`: see `kvtc_drift`. `grades` says
    how many plans the grades below that of anchors are ahead of grade 0, `cuts` where the scores of
    a higher one begin.
    """

    format: int
    model: str
    weights: str
    part: tuple[int, ...]
    layers: tuple[LayerSpec, ...]
    ratios: tuple[float, ...]
    realised: tuple[float, ...]
    errors: tuple[tuple[float, float], ...]
    step: float
    drift_steps: tuple[float, ...]
    grades: tuple[int, ...]
    cuts: tuple[float, ...]
    tokens: int
    text: str


class Side(NamedTuple):
    """Keys or values of a part: p features (layer, head, dim), r components, n plans.

    mean: float32 [p]. basis: bfloat16 [r, p], rows that give coefficients in steps. wide: float32
    [w, p], its first rows in full.
    root: float32 [layers x heads, d, d], symmetric: features are root x their weighted form.
    deviation: float32 [r], of coefficients in steps.
    shifts: int8 [n, r], from the coarsest plan on. start: int8 [r].
    centres: uint8 [n, r, CENTRES]: where in its cell a reconstruction lies, in 1/255.
    first, refine: int16, see `kvtc_stream.Tables`.
    """

    mean: torch.Tensor
    basis: torch.Tensor
    wide: torch.Tensor
    root: torch.Tensor
    deviation: torch.Tensor
    shifts: torch.Tensor
    start: torch.Tensor
    centres: torch.Tensor
    first: torch.Tensor
    refine: torch.Tensor


class Ready(NamedTuple):
    """A side by one plan, as encoding and decoding need it: its first `rank` components.

    wide: float32 [w, p], the first rows of the basis. synthesis: bfloat16 [p, 2w + rank]: makes
    features of coefficients as `kvtc_grades.split` gives them: w columns are the first ones, w hold
    what bf16 has lost of them, then all follow. Features stand first because a product is fastest
    where the large matrix is the left one, row by row.
    """

    rank: int
    basis: torch.Tensor
    wide: torch.Tensor
    synthesis: torch.Tensor


@dataclass(frozen=True, eq=False)
class Artifact:
    """A calibration: its header, the sides K and V, and the digest of its file.

    drift: int16 [levels, p, FIRST_SYMBOLS], probabilities of the drift of values. heed: float32
    [2, h], makes of a token's first h coefficients of each side the score that says its grade.
    anchors: how tokens of the highest grade are coded.
    """

    header: ArtifactHeader
    sides: tuple[Side, Side]
    drift: torch.Tensor
    heed: torch.Tensor
    anchors: Anchors
    digest: bytes

    @property
    def part(self) -> Part:
        """The part that it codes."""
        return Part(*self.header.part)

    def check(self, identity: Identity, part: Part) -> None:
        """Refuse another model or shard; weights updated in place (its epoch) keep an artifact.

        Raises: TierKVError (incompatible) naming what differs.
        """
        ours = (self.header.model, self.header.weights)
        theirs = (identity.model, identity.weights)
        if ours != theirs:
            raise incompatible(
                f"the artifact was calibrated for {ours}, not for {theirs}: run `tierkv calibrate`"
            )
        if tuple(self.header.part) != tuple(part):
            raise incompatible(f"the artifact codes {self.part}, not {part}: calibrate this shard")
        numbers = identity.groups[part.group][part.layer_start : part.layer_stop]
        if self.header.layers != tuple(identity.layers[number] for number in numbers):
            raise incompatible("the artifact's layers or their RoPE differ from the model's")

    @functools.cached_property
    def tables(self) -> tuple[Tables, Tables]:
        """The probabilities of both sides."""
        first, second = (
            Tables(_u16(side.first), _u16(side.refine.reshape(-1, SHIFTS, 4)))
            for side in self.sides
        )
        return first, second

    def plan(self, level: int, grade: int) -> int:
        """Return the plan by which tokens of a grade are coded at a level; anchors have none."""
        return min(level + self.header.grades[grade], len(self.header.ratios))

    def grades(self, leading: tuple[torch.Tensor, torch.Tensor]) -> NDArray[np.uint8]:
        """Return the grade of each token from both sides' first h coefficients [h, tokens]."""
        pairs = zip(self.heed, leading, strict=True)
        score = sum(of.to(side.device) @ side for of, side in pairs)
        cuts = torch.tensor(self.header.cuts, device=leading[0].device)
        found: NDArray[np.uint8] = torch.bucketize(score, cuts).to(torch.uint8).cpu().numpy()
        return found

    def level(self, side: int, number: int, grade: int) -> Level:
        """Return what segment `number` does to a side's tokens of a grade."""
        of = self.sides[side]
        shifts, after = of.shifts.numpy(), self.plan(number, grade)
        before = np.full(shifts.shape[1], NONE, np.int8)
        if number:
            before = shifts[self.plan(number - 1, grade)]
        return Level(before, shifts[after], of.start.numpy())

    def coarse(self, side: int, plan: int, indices: NDArray[np.int16]) -> NDArray[np.int32]:
        """Return a side's finest indices as they are by a plan."""
        return coarsened(indices, self.sides[side].shifts[plan].numpy()[: len(indices)])

    def restored(self, side: int, plan: int, coarse: NDArray[np.int32]) -> torch.Tensor:
        """Return the coefficients float32 [rank, tokens] that indices by a plan stand for."""
        values = np.empty((self.ready(side, plan).rank, coarse.shape[1]), np.float32)
        restore(coarse, np.arange(coarse.shape[1]), self.cells(side, plan), values)
        return torch.from_numpy(values)

    def cells(self, side: int, plan: int) -> Cells:
        """Return the cells of a side's components by a plan."""
        of = self.sides[side]
        return Cells(of.shifts[plan].numpy(), of.centres[plan].numpy())

    @functools.cached_property
    def wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Those first rows of each basis that are needed in full, by the finest plan."""
        found = []
        for of in self.sides:
            least = WIDE * 2 ** int(of.shifts[-1].min())
            found.append(of.wide[: max(int((of.deviation > least).sum()), 1)])
        return found[0], found[1]

    @functools.cached_property
    def synthesis(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of both sides: see `Ready`, for all components."""
        found = []
        for of, wide in zip(self.sides, self.wide, strict=True):
            narrow = _features(of.basis, of.root).bfloat16()
            first = narrow[: len(wide)]
            lost = (_features(wide, of.root) - first.float()).bfloat16()
            found.append(torch.cat([first, lost, narrow]).T.contiguous())
        return found[0], found[1]

    @functools.cached_property
    def inverse(self) -> torch.Tensor:
        """The inverse of the values' root: from features to their weighted form."""
        found: torch.Tensor = torch.linalg.inv(self.sides[1].root)
        return found

    @functools.lru_cache(16)  # noqa: B019 - an artifact lives as long as its process
    def ready(self, side: int, plan: int) -> Ready:
        """Return a side as `plan` needs it."""
        of, wide = self.sides[side], self.wide[side]
        coded = (of.shifts[plan] < NONE).nonzero()
        last = int(coded.max()) + 1 if len(coded) else 1
        # Tokens of every grade have the same first coefficients.
        rank = max(last, self.heed.shape[1], len(wide))
        synthesis = self.synthesis[side][:, : 2 * len(wide) + rank]
        return Ready(rank, of.basis[:rank], wide, synthesis)


def project(rows: Rows, ready: Ready) -> torch.Tensor:
    """Return coefficients float32 [rank, tokens], in steps."""
    basis, wide = ready.basis.to(rows.exact.device), ready.wide.to(rows.exact.device)
    coefficients = (basis @ rows.narrow.T).float()
    coefficients[: len(wide)] = wide @ rows.exact.T
    return coefficients


def _u16(tensor: torch.Tensor) -> NDArray[np.uint16]:
    array: NDArray[np.uint16] = tensor.contiguous().numpy().view(np.uint16)
    return array


def _features(rows: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """Return float32 [n, p]: what one step along each row of a basis means in features."""
    return _weighted(_weighted(rows, root), root)


def _weighted(rows: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """Return rows [n, p] times a symmetric root, head by head, float32."""
    heads, dim, _ = root.shape
    apart = rows.float().view(-1, heads, dim).transpose(0, 1)
    return torch.bmm(apart, root).transpose(0, 1).reshape(len(rows), -1)


def pack(
    header: ArtifactHeader,
    sides: tuple[Side, Side],
    drift: torch.Tensor,
    heed: torch.Tensor,
    anchors: Anchors,
) -> bytes:
    """Return the file of an artifact; the same content gives the same bytes."""
    tensors = {
        f"{name}.{field}": tensor.contiguous()
        for name, side in zip(SIDES, sides, strict=True)
        for field, tensor in side._asdict().items()
    }
    of_anchors = {one.name: getattr(anchors, one.name) for one in fields(anchors)}
    tensors |= {f"anchors.{field}": of.contiguous() for field, of in of_anchors.items()}
    tensors |= {"v.drift": drift.contiguous(), "heed": heed.contiguous()}
    return save(tensors, {"tierkv.kvtc": msgspec.json.encode(header).decode()})


def read(path: Path) -> Artifact:
    """Read an artifact. Raises: TierKVError (invalid or incompatible) saying what is wrong."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise invalid(f"the artifact {path} cannot be read ({error.strerror})") from error
    return unpack(data, str(path))


def unpack(data: bytes, name: str = "artifact") -> Artifact:
    """Return the artifact in a file's bytes. Raises: TierKVError (invalid or incompatible)."""
    try:
        size = int.from_bytes(data[:8], "little")
        text = msgspec.json.decode(data[8 : 8 + size])["__metadata__"]["tierkv.kvtc"]
        number = msgspec.json.decode(text)["format"]
        if number != ARTIFACT_FORMAT:
            raise incompatible(
                f"{name} has artifact format {number}; this version reads {ARTIFACT_FORMAT}"
            )
        header = msgspec.json.decode(text, type=ArtifactHeader)
        tensors = load(data)
        sides = _sides(tensors, header)
        drift = _drift(tensors["v.drift"], header, sides[1])
        heed = _heed(tensors["heed"], sides)
        anchors = _anchors(tensors, header)
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError, SafetensorError) as error:
        raise invalid(
            f"{name} is not a calibration artifact ({error}): make one with `tierkv calibrate`"
        ) from error
    return Artifact(header, sides, drift, heed, anchors, hashlib.sha256(data).digest())


def _sides(tensors: Mapping[str, torch.Tensor], header: ArtifactHeader) -> tuple[Side, Side]:
    """Return both sides. Raises: ValueError for tensors of other shapes than the header's."""
    part = Part(*header.part)
    blocks = len(header.layers) * (part.head_stop - part.head_start)
    levels = len(header.ratios)
    counts = (len(header.realised), len(header.errors) - 1)
    if not 1 <= levels <= MOST_LEVELS or counts != (levels, levels):
        raise ValueError(f"{levels} levels")
    graded = len(header.grades) == len(header.cuts) == ANCHOR
    rising = list(header.grades) == sorted(header.grades) and min(header.grades) >= 0
    if not graded or not rising or list(header.cuts) != sorted(header.cuts):
        raise ValueError(f"grades {header.grades}, cuts {header.cuts}")
    first, second = (
        _side(
            {field: tensors[f"{name}.{field}"] for field in Side._fields}, blocks, dim, levels + 1
        )
        for name, dim in zip(SIDES, (header.layers[0].k_dim, header.layers[0].v_dim), strict=True)
    )
    return first, second


def _side(tensors: Mapping[str, torch.Tensor], blocks: int, dim: int, plans: int) -> Side:
    rank = len(tensors["basis"])
    expected = {
        "mean": ((blocks * dim,), torch.float32),
        "basis": ((rank, blocks * dim), torch.bfloat16),
        "wide": ((len(tensors["wide"]), blocks * dim), torch.float32),
        "root": ((blocks, dim, dim), torch.float32),
        "deviation": ((rank,), torch.float32),
        "shifts": ((plans, rank), torch.int8),
        "start": ((rank,), torch.int8),
        "centres": ((plans, rank, CENTRES), torch.uint8),
        "first": ((rank, FIRST_SYMBOLS), torch.int16),
        "refine": ((rank, SHIFTS * 4), torch.int16),
    }
    for field, (shape, dtype) in expected.items():
        found = tensors[field]
        if tuple(found.shape) != shape or found.dtype != dtype or not rank:
            raise ValueError(f"{field} is {found.dtype} {tuple(found.shape)}, not {dtype} {shape}")
    shifts, start = tensors["shifts"], tensors["start"]
    coded = shifts[-1] < NONE
    sound = [
        1 <= len(tensors["wide"]) <= rank,
        shifts.min() >= 0 and shifts.max() <= NONE and start.min() >= 0,
        bool((shifts[1:] <= shifts[:-1]).all()),
        bool((start[coded] < SHIFTS).all()),
        # A component starts no finer than the first plan that codes it.
        bool((start >= torch.where(shifts < NONE, shifts, 0).amax(0))[coded].all()),
        are_probabilities(tensors["first"], tensors["refine"].view(-1, SHIFTS, 4)),
        all(bool(tensors[field].isfinite().all()) for field in ("mean", "basis", "wide", "root")),
    ]
    if not all(sound):
        raise ValueError("its plan or its probabilities are not sound")
    return Side(**tensors)


def _anchors(tensors: Mapping[str, torch.Tensor], header: ArtifactHeader) -> Anchors:
    """Return the anchors' part. Raises: ValueError where it is not of this header."""
    part = Part(*header.part)
    blocks = len(header.layers) * (part.head_stop - part.head_start)
    found = {one.name: tensors[f"anchors.{one.name}"] for one in fields(Anchors)}
    return sound(found, blocks, header.layers[0].k_dim)


def _heed(heed: torch.Tensor, sides: tuple[Side, Side]) -> torch.Tensor:
    """Return what grades are made from. Raises: ValueError where it is not of these sides."""
    least, shape = min(len(side.basis) for side in sides), tuple(heed.shape)
    if shape not in {(len(sides), h) for h in range(least + 1)} or heed.dtype != torch.float32:
        raise ValueError(f"heed is {heed.dtype} {shape}")
    if not bool(heed.isfinite().all()):
        raise ValueError("heed is not finite")
    return heed


def _drift(drift: torch.Tensor, header: ArtifactHeader, values: Side) -> torch.Tensor:
    """Return the drift's probabilities. Raises: ValueError for others than can be decoded."""
    shape = (len(header.ratios), len(values.mean), FIRST_SYMBOLS)
    steps = torch.tensor(header.drift_steps)
    if tuple(drift.shape) != shape or drift.dtype != torch.int16 or len(steps) != shape[0]:
        raise ValueError(f"drift is {drift.dtype} {tuple(drift.shape)}, not int16 {shape}")
    whole = (drift.to(torch.int32).sum(-1) == TOTAL).all() and drift.min() >= 1
    if not (whole and bool((steps > 0).all()) and bool(steps.isfinite().all())):
        raise ValueError("the probabilities of its drift are not sound")
    return drift
