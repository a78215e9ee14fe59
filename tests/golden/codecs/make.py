"""Make the golden vectors of codecs that have none: `python -m tests.golden.codecs.make`.

A folder is one codec, or a layout that it was given later: pairs of a payload and the block that it
decodes to, and a manifest. It is written once, by the version that brought the codec or the layout,
and is never changed or removed: its payloads must decode for ever.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.contract.codec_contract import place_of
from tierkv_codecs import CODECS, Codec, Unsuited
from tierkv_codecs.tensors import bytes_of

FOLDER = Path(__file__).resolve().parent
MANIFEST = "manifest.json"
AT_START = ("start-bf16",)
"""Blocks at the start of their sequence, of which lossy codecs keep the sinks."""


LAYOUTS = {"002-lossless-exponents": 2}
"""Folders of later layouts, and the codec of each."""


def folder_of(codec: Codec) -> Path:
    return FOLDER / f"{codec.id:03}-{codec.name}"


def blocks() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the blocks: the usual shape, one token, noise, wide, narrow, and several pieces."""
    generator = torch.Generator().manual_seed(20)
    scales = torch.exp2(torch.randint(-6, 6, (16,), generator=generator).float())
    usual = torch.randn((2, 2, 8, 2, 16), generator=generator) * scales
    yield "usual-bf16", usual.bfloat16()
    yield "usual-fp16", usual[:1, :, :5].half()
    yield "wide-fp32", usual[:1, :, :4].contiguous()
    yield "one-token-bf16", usual[:, :, :1].bfloat16()
    yield "fp8", usual[:, :, :6].to(torch.float8_e4m3fn)
    noise = torch.randint(0, 256, (502,), generator=generator, dtype=torch.uint8)
    yield "noise-bf16", noise.view(torch.bfloat16)
    yield "empty-bf16", torch.zeros((2, 2, 0, 2, 16), dtype=torch.bfloat16)
    few = torch.randint(0, 16, (22, 1, 1, 1, 3000), generator=generator)
    groups = torch.randn((1, 2, 40, 1, 40), generator=generator) + 3
    yield "groups-bf16", groups.bfloat16()
    yield "start-bf16", groups[:, :, :9].bfloat16()
    yield "pieces-uint8", torch.where(few == 0, 3, 0).to(torch.uint8)


def blocks_of_exponents() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield blocks with a base for each channel, with one for all, and with any bits among them."""
    generator = torch.Generator().manual_seed(21)
    scales = torch.exp2(torch.randint(-6, 6, (2, 11), generator=generator).float())
    rows = (torch.randn((1, 2, 40, 2, 11), generator=generator) * scales).bfloat16()
    yield "rows-bf16", rows
    yield "few-tokens-bf16", torch.randn((3, 2, 2, 2, 40), generator=generator).bfloat16()
    noise = torch.randint(0, 256, (2 * rows.numel(),), generator=generator, dtype=torch.uint8)
    some = torch.rand(rows.shape, generator=generator) < 0.03
    yield "odd-bf16", torch.where(some, noise.view(torch.bfloat16).view(rows.shape), rows)


def make(codec: Codec, folder: Path, found: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write a folder. Raises: FileExistsError when there is one."""
    folder.mkdir()
    entries: list[dict[str, Any]] = []
    for name, block in found:
        if not codec.lossy and name in {"groups-bf16", "start-bf16"}:
            continue
        if codec.id == 1 and name == "pieces-uint8":
            continue
        buffer = torch.empty(codec.bound(block.numel() * block.itemsize), dtype=torch.uint8)
        place = place_of(block, 0 if name in AT_START else 1024)
        try:
            segments = codec.encode(block, buffer, place)
        except Unsuited:
            continue
        decoded = torch.empty(block.shape, dtype=block.dtype)
        codec.decode(buffer[: sum(segments)], segments, decoded, place)
        values = bytes_of(decoded).numpy().tobytes()
        payload = buffer[: sum(segments)].numpy().tobytes()
        (folder / f"{name}.block").write_bytes(values)
        (folder / f"{name}.payload").write_bytes(payload)
        entries.append(
            {
                "name": name,
                "dtype": str(block.dtype).removeprefix("torch."),
                "shape": list(block.shape),
                **({"position": 0} if name in AT_START and codec.lossy else {}),
                "segments": list(segments),
                "block_sha256": hashlib.sha256(values).hexdigest(),
                "payload_sha256": hashlib.sha256(payload).hexdigest(),
            }
        )
    manifest = {"codec": codec.name, "id": codec.id, "vectors": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Make what is missing; refuse when nothing is, since a vector that exists never changes."""
    wanted = {folder_of(codec): (codec, blocks()) for codec in CODECS.all()}
    for name, codec_id in LAYOUTS.items():
        wanted[FOLDER / name] = CODECS.of_id(codec_id), blocks_of_exponents()
    missing = [folder for folder in wanted if not folder.exists()]
    if not missing:
        sys.stderr.write("every codec has its vectors; they are never made again\n")
        return 1
    for folder in missing:
        make(wanted[folder][0], folder, wanted[folder][1])
        sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
