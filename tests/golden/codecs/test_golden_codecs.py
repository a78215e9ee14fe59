"""Payloads written by earlier versions decode to the same bits for ever."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.codec_contract import place_of
from tests.golden.codecs.make import FOLDER, MANIFEST, blocks, folder_of, main, make
from tierkv_codecs import CODECS
from tierkv_codecs.tensors import bytes_of

# Extended with every codec and every later layout; nothing is ever taken out.
WRITTEN = {"001-raw": 7, "002-lossless": 8, "003-int8": 7, "004-int4": 8, "005-fp8": 7}
WRITTEN |= {"002-lossless-exponents": 3}
MOST_BYTES = 200_000


def manifest_of(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def test_every_codec_has_its_folder_and_no_folder_is_gone() -> None:
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == set(WRITTEN)
    assert {folder_of(codec).name for codec in CODECS.all()} <= set(WRITTEN)


@pytest.mark.parametrize("name", WRITTEN)
def test_files_are_those_of_the_manifest(name: str) -> None:
    vectors = manifest_of(FOLDER / name)["vectors"]
    assert len(vectors) == WRITTEN[name]
    expected = {MANIFEST}
    for vector in vectors:
        expected |= {f"{vector['name']}.block", f"{vector['name']}.payload"}
    assert {path.name for path in (FOLDER / name).iterdir()} == expected


@pytest.mark.parametrize("name", WRITTEN)
def test_payloads_decode_to_their_blocks(name: str) -> None:
    manifest = manifest_of(FOLDER / name)
    codec = CODECS.of_id(manifest["id"])
    assert codec.name == manifest["codec"]
    for vector in manifest["vectors"]:
        values = (FOLDER / name / f"{vector['name']}.block").read_bytes()
        payload = (FOLDER / name / f"{vector['name']}.payload").read_bytes()
        assert hashlib.sha256(values).hexdigest() == vector["block_sha256"]
        assert hashlib.sha256(payload).hexdigest() == vector["payload_sha256"]
        out = torch.empty(vector["shape"], dtype=getattr(torch, vector["dtype"]))
        place = place_of(out, vector.get("position", 1024))
        buffer = torch.tensor(list(payload), dtype=torch.uint8)
        codec.decode(buffer, tuple(vector["segments"]), out, place)
        assert bytes_of(out).numpy().tobytes() == values, vector["name"]


def test_vectors_stay_small() -> None:
    sizes = [path.stat().st_size for name in WRITTEN for path in (FOLDER / name).iterdir()]
    assert sum(sizes) < MOST_BYTES


def test_the_maker_refuses_to_overwrite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 1
    assert "never made again" in capsys.readouterr().err
    with pytest.raises(FileExistsError):
        make(CODECS.of_id(1), folder_of(CODECS.of_id(1)), blocks())
