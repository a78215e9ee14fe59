"""An artifact and payloads written by earlier versions mean the same for ever.

The folder is one format of artifact (3) and of payload (codec 6); `make` writes it once. Values are
compared within the rounding of the matrix products, which differs between machines.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kvtc_rigs import artifact, place_at, text_like
from tierkv_codecs.kvtc import codecs_of
from tierkv_codecs.kvtc_artifact import pack, read
from tierkv_codecs.tensors import bytes_of

FOLDER = Path(__file__).parent / "3"
MANIFEST, ARTIFACT = "manifest.json", "synthetic.kvtc"
BLOCKS = (("middle", 24, 512), ("sinks", 9, 1), ("one-token", 1, 77))
MOST_BYTES = 180_000


def make() -> None:
    """Write the folder. Raises: FileExistsError when there is one: vectors never change."""
    FOLDER.mkdir()
    made = artifact((16.0, 8.0), graded=True)
    parts = (made.header, made.sides, made.drift, made.heed, made.anchors)
    (FOLDER / ARTIFACT).write_bytes(pack(*parts))
    entries = []
    for name, tokens, position in BLOCKS:
        block, codec = text_like(tokens, 3, position), codecs_of(made)[-1]
        out = torch.empty(codec.bound(block.numel() * 2), dtype=torch.uint8)
        segments = codec.encode(block, out, place_at(position))
        back = torch.empty_like(block)
        codec.decode(out[: sum(segments)], segments, back, place_at(position))
        (FOLDER / f"{name}.payload").write_bytes(out[: sum(segments)].numpy().tobytes())
        (FOLDER / f"{name}.decoded").write_bytes(bytes_of(back).numpy().tobytes())
        entries.append(
            {"name": name, "tokens": tokens, "position": position, "segments": list(segments)}
        )
    text = {"digest": made.digest.hex(), "vectors": entries}
    (FOLDER / MANIFEST).write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def manifest() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / MANIFEST).read_text(encoding="utf-8"))
    return found


def test_files_are_those_of_the_manifest_and_small() -> None:
    names = [vector["name"] for vector in manifest()["vectors"]]
    assert names == [name for name, _, _ in BLOCKS]
    expected = {MANIFEST, ARTIFACT}
    expected |= {f"{name}.{kind}" for name in names for kind in ("payload", "decoded")}
    assert {path.name for path in FOLDER.iterdir()} == expected
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MOST_BYTES


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_payloads_decode_to_what_they_meant(number: int) -> None:
    found = read(FOLDER / ARTIFACT)
    assert found.digest.hex() == manifest()["digest"]
    vector = manifest()["vectors"][number]
    payload = torch.tensor(list((FOLDER / f"{vector['name']}.payload").read_bytes())).byte()
    place = place_at(vector["position"])
    like = text_like(vector["tokens"], 3, vector["position"])
    out, segments = torch.empty_like(like), tuple(vector["segments"])
    codecs_of(found)[-1].decode(payload, segments, out, place)
    raw = bytearray((FOLDER / f"{vector['name']}.decoded").read_bytes())
    expected = torch.frombuffer(raw, dtype=torch.bfloat16).view(like.shape)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    sinks = place.sinks(vector["tokens"])
    assert torch.equal(out[:, :, :sinks], expected[:, :, :sinks])


def test_the_maker_refuses_to_overwrite() -> None:
    with pytest.raises(FileExistsError):
        make()
