"""A small synthetic model's KV and an artifact of it, for tests of `kvtc`."""

import functools
from typing import Any

import msgspec
import torch

from tierkv.identity import LayerSpec, Rope
from tierkv.part import Part
from tierkv_codecs.codec import Place
from tierkv_codecs.kvtc_artifact import ANCHOR, Artifact, ArtifactHeader, pack, unpack
from tierkv_codecs.kvtc_calibrate import Rows, calibrate
from tierkv_codecs.kvtc_rows import plain_rows_of
from tierkv_codecs.rope import rope

LAYERS, HEADS, DIM = 4, 2, 16
FEATURES = LAYERS * HEADS * DIM
RATIOS = (16.0, 8.0, 4.0)
SPEC = LayerSpec(kv_heads=HEADS, k_dim=DIM, v_dim=DIM, rope=Rope(theta=1e4, rotary_dim=DIM))
PART = Part(0, 0, LAYERS, 0, HEADS)


def place_at(position: int) -> Place:
    return Place((SPEC,) * LAYERS, PART, position)


def text_like(
    tokens: int, seed: int, position: int = 0, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return a block [layer, K/V, token, head, dim] whose features depend on few hidden ones."""
    mix = torch.randn((2, 24, FEATURES), generator=torch.Generator().manual_seed(7))
    mix *= torch.exp2(-torch.arange(24) / 4)[:, None]
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((2, tokens, 24), generator=generator) @ mix
    rows += 0.05 * torch.randn((2, tokens, FEATURES), generator=generator) + 1.0
    block = rows.view(2, tokens, LAYERS, HEADS, DIM).permute(2, 0, 1, 3, 4).contiguous()
    block[:, 0] = rope(block[:, 0], (SPEC,) * LAYERS, position)
    return block.to(dtype)


def foreign(tokens: int, seed: int) -> torch.Tensor:
    """Return a block of the same energy that depends on other hidden features."""
    block = text_like(tokens, seed)
    order = torch.randperm(LAYERS * HEADS * DIM, generator=torch.Generator().manual_seed(3))
    flat = block.permute(1, 2, 0, 3, 4).reshape(2, tokens, -1)[..., order]
    return flat.view(2, tokens, LAYERS, HEADS, DIM).permute(2, 0, 1, 3, 4).contiguous()


def header(ratios: tuple[float, ...] = RATIOS) -> ArtifactHeader:
    return ArtifactHeader(
        format=3,
        model="synthetic",
        weights="seed 7",
        part=tuple(PART),
        layers=(SPEC,) * LAYERS,
        ratios=ratios,
        realised=(1.0,) * len(ratios),
        errors=((1.0, 1.0),) * (len(ratios) + 1),
        step=1.0,
        drift_steps=(1.0,) * len(ratios),
        grades=(0,) * ANCHOR,
        cuts=(0.0,) * ANCHOR,
        tokens=0,
        text="0" * 64,
    )


def calibration_rows(count: int = 16, tokens: int = 256, *, graded: bool = False) -> Rows:
    """Return rows whose errors cost alike, or (graded) what the first feature says."""
    zero = torch.zeros(FEATURES)
    blocks = [text_like(tokens, 100 + number) for number in range(count)]
    pairs = [plain_rows_of(block, (SPEC,) * LAYERS, 0, (zero, zero)) for block in blocks]
    keys, values = (
        torch.cat([of.exact for of in side]).half() for side in zip(*pairs, strict=True)
    )
    generator = torch.Generator().manual_seed(5)
    roots = torch.randn((2, LAYERS * HEADS, DIM, DIM), generator=generator)
    held = torch.arange(len(keys)) // tokens % 8 == 7
    metrics = roots @ roots.transpose(2, 3)
    costs = (keys[:, 0].float() * (2 if graded else 0)).exp()
    pair = (metrics[0], metrics[1])
    return Rows(keys, values, pair, pair, held, costs)


def packed(of: Artifact, **changed: Any) -> bytes:
    """Return the file of an artifact, with other fields of its header."""
    header = msgspec.structs.replace(of.header, **changed)
    return pack(header, of.sides, of.drift, of.heed, of.anchors)


@functools.cache
def artifact(ratios: tuple[float, ...] = RATIOS, *, graded: bool = False) -> Artifact:
    rows = calibration_rows(graded=graded)
    return unpack(calibrate(rows, header(ratios), lambda _name, _share: None))
