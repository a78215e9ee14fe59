"""Rate, distortion and time of kvtc: `python -m bench.kvtc --artifact FILE [--model DIR] [--json]`.

On KV of the lab's evaluation texts, which the artifact has not seen. For each level of the stream:

- ratio: 16-bit bytes of the coded tokens over all bytes of their segments (128 tokens a block);
- error: squared error in the artifact's metric, in squared steps, of a token, both sides, where
  all tokens have the usual grade;
- apart: how many more bytes a prefix of such tokens takes than a plan of its own at that error:
  every component that is worth it with one step, its code as short as the entropy of what is coded
  (so no stream reaches it);
- zstd, deflate: bytes of the same indices, packed one byte each in the same order and compressed,
  over those of the stream;
- encode and decode: GB of raw bf16 per CPU second, one thread, and the share of the projection:
  all matrix products between features and coefficients, those of finer grades among them, and
  neither the guard's nor the drift's. ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 is a CPU without AMX.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zstandard

from bench.timing import machine
from tierkv_codecs.codec import Place
from tierkv_codecs.kvtc import LAYERS_AT_ONCE, Kvtc, codecs_of
from tierkv_codecs.kvtc_artifact import ANCHOR, USUAL, Artifact, project, read
from tierkv_codecs.kvtc_grades import coefficients_of, split
from tierkv_codecs.kvtc_measure import measure
from tierkv_codecs.kvtc_rans import NONE
from tierkv_codecs.kvtc_rows import rows_of
from tierkv_codecs.kvtc_stream import MOST
from tierkv_codecs.lab.texts import evaluation_texts
from tierkv_connectors.models import smollm2
from tierkv_connectors.subject import TransformersSubject

BLOCK, CONTEXT, POSITION = 128, 1024, 128
SLOPE = np.log(2) / 6
SPANISH = "spanish"


def blocks_of(model: Path, count: int) -> list[tuple[int, torch.Tensor]]:
    """Return positions and bf16 blocks of `count` texts, neither sinks nor tail."""
    subject, found = TransformersSubject(model), []
    texts = [text for text in evaluation_texts() if text.domain != SPANISH]
    for text in texts[:: max(len(texts) // count, 1)][:count]:
        ids = torch.tensor(subject.tokens(text.text)[:CONTEXT])[None]
        kv = [torch.stack([keys[0], values[0]]) for keys, values in subject.prefill(ids)]
        whole = torch.stack(kv).transpose(2, 3).bfloat16()
        found += [
            (at, whole[:, :, at : at + BLOCK].contiguous())
            for at in range(POSITION, CONTEXT - BLOCK, BLOCK)
        ]
    return found


def place_of(artifact: Artifact, position: int) -> Place:
    return Place(artifact.header.layers, artifact.part, position)


def sizes(codec: Kvtc, blocks: list[tuple[int, torch.Tensor]]) -> list[int]:
    """Return the bytes of each segment over all blocks."""
    total = [0] * codec.levels
    for position, block in blocks:
        out = torch.empty(codec.bound(block.numel() * 2), dtype=torch.uint8)
        segments = codec.encode(block, out, place_of(codec.artifact_file, position))
        total = [old + new for old, new in zip(total, segments, strict=True)]
    return total


def coefficients(artifact: Artifact, blocks: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
    """Return both sides' coefficients [components, tokens] in steps."""
    means, last = tuple(side.mean for side in artifact.sides), len(artifact.header.ratios)
    sides: list[list[torch.Tensor]] = [[], []]
    for position, block in blocks:
        rows = rows_of(block, artifact.header.layers, position, means)
        for side, of_side in enumerate(rows):
            sides[side].append(project(of_side, artifact.ready(side, last)))
    return [torch.cat(side, 1) for side in sides]


def ungraded(artifact: Artifact) -> Artifact:
    """Return an artifact that gives every token the usual grade."""
    header = msgspec.structs.replace(artifact.header, grades=(1,) * ANCHOR, cuts=(1e30,) * ANCHOR)
    return dataclasses.replace(artifact, header=header)


def errors(artifact: Artifact, found: list[torch.Tensor]) -> list[float]:
    """Return the squared error of a token inside the finest basis at each level."""
    out = []
    for level in range(len(artifact.header.ratios)):
        total = 0.0
        for side, values in enumerate(found):
            indices = values.round().clamp(-MOST, MOST).to(torch.int16).numpy()
            plan = artifact.plan(level, USUAL)
            restored = artifact.restored(side, plan, artifact.coarse(side, plan, indices))
            padded = torch.zeros_like(values)
            padded[: len(restored)] = restored
            total += float((values - padded).square().sum())
        out.append(total / found[0].shape[1])
    return out


def one_step_curve(found: list[torch.Tensor]) -> list[tuple[float, float]]:
    """Return (error, bits) of a token for plans of one step each, from fine to coarse."""
    curve = []
    for power in np.arange(-1, 7, 0.5):
        step, error, bits = 2.0**power, 0.0, 0.0
        for values in found:
            scaled = (values / step).numpy()
            of = measure(scaled, scaled)
            worth = of.error[:, NONE] - of.error[:, 0] > SLOPE * of.bits[:, 0]
            error += step**2 * float(np.where(worth, of.error[:, 0], of.error[:, NONE]).sum())
            bits += float(of.bits[worth, 0].sum())
        curve.append((error, bits))
    return curve


def others(artifact: Artifact, found: list[torch.Tensor], level: int) -> dict[str, int]:
    """Return bytes of the level's indices, a byte each, component by component, compressed."""
    packed = []
    for side, values in enumerate(found):
        indices = values.round().clamp(-MOST, MOST).to(torch.int16).numpy()
        coarse = artifact.coarse(side, artifact.plan(level, USUAL), indices)
        coarse = coarse[artifact.level(side, level, USUAL).after < NONE]
        blocks = coarse.reshape(len(coarse), -1, BLOCK).transpose(1, 0, 2)
        packed.append(np.clip(blocks, -128, 127).astype(np.int8).reshape(len(blocks), -1))
    parts = [np.concatenate(pair).tobytes() for pair in zip(*packed, strict=True)]
    return {
        "zstd": sum(len(zstandard.ZstdCompressor(3).compress(part)) for part in parts),
        "deflate": sum(len(zlib.compress(part, 6)) for part in parts),
    }


def products(
    codec: Kvtc, block: torch.Tensor, place: Place
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what does the projections of encode and of decode alone: every matrix product."""
    artifact, level = codec.artifact_file, codec.levels - 1
    means = tuple(side.mean for side in artifact.sides)
    rows = rows_of(block, place.layers, place.position, means)
    found = coefficients_of(artifact, rows, level)
    forward: list[tuple[torch.Tensor, torch.Tensor]] = []
    backward: list[tuple[torch.Tensor, torch.Tensor]] = []
    width = means[0].numel() // len(place.layers) * LAYERS_AT_ONCE
    for side, of_side in enumerate(rows):
        ready = artifact.ready(side, artifact.plan(level, USUAL))
        narrow = of_side.narrow
        others = narrow[torch.from_numpy(found.marks < ANCHOR)]
        forward += [(ready.basis, narrow.T), (ready.wide, of_side.exact.T)]
        values = torch.randn(ready.rank, len(narrow))
        made = [(ready.synthesis, split(values, len(ready.wide)))]
        done = ready
        for grade in range(USUAL + 1, ANCHOR):
            ready, some = (
                artifact.ready(side, artifact.plan(level, grade)),
                found.marks[found.marks < ANCHOR] >= grade,
            )
            if some.any() and ready.rank > done.rank:
                forward.append((ready.basis[done.rank :], others[torch.from_numpy(some)].T))
                rest = ready.synthesis[:, done.synthesis.shape[1] :]
                made.append((rest, torch.randn(rest.shape[1], int(some.sum())).bfloat16()))
                done = ready
        for matrix, values in made:
            backward += [(part, values) for part in matrix.split(width)]

    def run(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for one, other in pairs:
            _ = one @ other

    return functools.partial(run, forward), functools.partial(run, backward)


def speed(codec: Kvtc, blocks: list[tuple[int, torch.Tensor]]) -> dict[str, float]:
    """Return GB/s of encode and decode, and the projection's share of each: medians of blocks."""
    artifact = codec.artifact_file
    spans: list[tuple[float, ...]] = []
    clock = time.process_time
    for turn, (position, block) in enumerate(blocks[:9]):
        place = place_of(artifact, position)
        # Memory that is there, as a store's is.
        out = torch.zeros(codec.bound(block.numel() * 2), dtype=torch.uint8)
        back = torch.zeros_like(block)
        forward, backward = products(codec, block, place)
        forward(), backward()
        times = [clock()]
        segments = codec.encode(block, out, place)
        times.append(clock())
        codec.decode(out[: sum(segments)], segments, back, place)
        times.append(clock())
        forward()
        times.append(clock())
        backward()
        times.append(clock())
        if turn:
            spans.append(tuple(b - a for a, b in pairwise(times)))
    encode, decode, projected, remade = (statistics.median(of) for of in zip(*spans, strict=True))
    raw = blocks[0][1].numel() * 2
    return {
        "encode_gbps": raw / encode / 1e9,
        "decode_gbps": raw / decode / 1e9,
        "encode_projection": projected / encode,
        "decode_projection": remade / decode,
    }


def table(artifact: Artifact, blocks: list[tuple[int, torch.Tensor]]) -> list[dict[str, Any]]:
    codecs = codecs_of(artifact, guard=float("inf"))
    segments = np.cumsum(sizes(codecs[-1], blocks))
    plain = codecs_of(ungraded(artifact), guard=float("inf"))
    alike = np.cumsum(sizes(plain[-1], blocks))
    found = coefficients(artifact, blocks)
    curve = one_step_curve(found)
    tokens, rows = found[0].shape[1], []
    for level, (codec, error) in enumerate(zip(codecs, errors(artifact, found), strict=True)):
        logs = np.log([part for part, _ in curve])
        alone = float(np.interp(np.log(error), logs, [bits for _, bits in curve])) * tokens / 8
        coded, usual = int(segments[level]), int(alike[level])
        rows.append(
            {
                "profile": codec.name,
                "ratio": sum(block.numel() * 2 for _, block in blocks) / coded,
                "error": error,
                "apart": usual / alone,
                **{name: size / usual for name, size in others(artifact, found, level).items()},
                **speed(codec, blocks),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    artifact = read(options.artifact)
    rows = table(artifact, blocks_of(options.model or smollm2(), options.texts))
    if options.json:
        about = {"machine": machine(), "tokens": artifact.header.tokens, "rows": rows}
        sys.stdout.write(json.dumps(about, indent=1) + "\n")
        return 0
    print(" ".join(f"{name:>18}" for name in rows[0]))
    for row in rows:
        print(
            " ".join(
                f"{cell:>18.4g}" if isinstance(cell, float) else f"{cell:>18}"
                for cell in row.values()
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
