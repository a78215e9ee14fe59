"""Bytes written by earlier releases are read for ever, and the same content keeps its keys."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.golden import make_frames
from tests.golden.make_frames import FOLDER, MANIFEST, described, payload_of
from tierkv import frame
from tierkv.identity import Identity
from tierkv.key import chain_keys, root_key
from tierkv.part import Part

# Extended with every version; nothing is ever taken out.
WRITTEN = {"v1": 7}
MOST_BYTES = 60_000
NAMES = [
    "one-unsealed", "one-sealed", "five-sealed-safe", "two-derived", "lossy-derived-economy",
    "larger-than-raw", "most-segments",
]  # fmt: skip


@cache
def manifest_of(version: str) -> dict[str, Any]:
    """Read a manifest; without one the tests of its version fail."""
    text = (FOLDER.parent / version / MANIFEST).read_text(encoding="utf-8")
    manifest: dict[str, Any] = json.loads(text)
    return manifest


def vector(name: str) -> tuple[dict[str, Any], bytes]:
    entry = next(entry for entry in manifest_of("v1")["frames"] if entry["name"] == name)
    return entry, (FOLDER / f"{name}.frame").read_bytes()


def test_every_version_has_its_folder_and_no_folder_is_gone() -> None:
    assert {path.name for path in FOLDER.parent.iterdir()} == set(WRITTEN)
    assert f"v{frame.VERSION}" in WRITTEN


@pytest.mark.parametrize("version", WRITTEN)
def test_files_are_those_of_the_manifest(version: str) -> None:
    manifest, folder = manifest_of(version), FOLDER.parent / version
    assert manifest["count"] == len(manifest["frames"]) == WRITTEN[version]
    expected = {MANIFEST} | {f"{entry['name']}.frame" for entry in manifest["frames"]}
    assert {path.name for path in folder.iterdir()} == expected
    assert sum(path.stat().st_size for path in folder.iterdir()) < MOST_BYTES


def test_every_vector_is_looked_at() -> None:
    assert [entry["name"] for entry in manifest_of("v1")["frames"]] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_frames_are_read(name: str) -> None:
    entry, data = vector(name)
    assert hashlib.sha256(data).hexdigest() == entry["sha256"]
    header = frame.parse(data)
    assert isinstance(header, frame.Header)
    assert json.loads(json.dumps(described(header))) == entry["header"]
    assert data[header.header_bytes :] == payload_of(name, header.payload_bytes)
    assert frame.verify(header, [bytearray(data)]) is ("unsealed" not in name)


@pytest.mark.parametrize("name", NAMES)
def test_frames_are_still_written_the_same(name: str) -> None:
    _, data = vector(name)
    header = frame.parse(data)
    assert isinstance(header, frame.Header)
    assert frame.pack(header) == data[: header.header_bytes]
    unsealed = msgspec.structs.replace(header, checksums=())
    if header.checksums:
        assert frame.seal(unsealed, [bytearray(data)]) == header


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_counts(name: str) -> None:
    """A flipped bit in any byte that a reader looks at is noticed."""
    _, data = vector(name)
    for at in range(0, len(data), 7):
        broken = bytearray(data)
        broken[at] ^= 0x10
        header = frame.parse(broken)
        assert isinstance(header, frame.Refusal) or not frame.verify(header, [broken])


@pytest.mark.parametrize("number", [0, 1])
def test_identities_keep_their_fingerprint(number: int) -> None:
    entry = manifest_of("v1")["identities"][number]
    identity = msgspec.convert(entry["identity"], Identity)
    assert identity.fingerprint.hex() == entry["fingerprint"]
    assert [list(group) for group in identity.groups] == entry["groups"]
    for group, nbytes in enumerate(entry["raw_bytes"]):
        assert Part.whole(identity, group).raw_bytes(identity) == nbytes


def test_chains_keep_their_keys() -> None:
    manifest = manifest_of("v1")
    prints = {entry["name"]: entry for entry in manifest["identities"]}
    assert len(manifest["keys"]) == 12
    for entry in manifest["keys"]:
        identity = prints[entry["identity"]]
        extras = {name: bytes.fromhex(value) for name, value in entry["extras_hex"].items()}
        root = root_key(bytes.fromhex(identity["fingerprint"]), extras)
        assert root.hex() == entry["root"]
        blocks = {
            int(number): {name: bytes.fromhex(value) for name, value in extra.items()}
            for number, extra in entry["block_extras"].items()
        }
        step = identity["identity"]["tokens_per_block"]
        found = chain_keys(root, np.array(entry["tokens"], np.int32), step, blocks)
        assert found.hex() == "".join(entry["keys"])


def test_the_maker_refuses_to_overwrite(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_frames.main() == 1
    assert "never made again" in capsys.readouterr().err
    with pytest.raises(FileExistsError):
        make_frames.make()


def test_the_maker_makes_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_frames, "FOLDER", tmp_path / "v1")
    assert make_frames.main() == 0
    for path in FOLDER.iterdir():
        assert (tmp_path / "v1" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("loss", ["manifest", "frame", "count"])
def test_a_loss_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    monkeypatch.setattr(make_frames, "FOLDER", tmp_path / "v1")
    make_frames.main()
    monkeypatch.setattr(f"{__name__}.FOLDER", tmp_path / "v1")
    manifest_of.cache_clear()
    test_files_are_those_of_the_manifest("v1")
    manifest = tmp_path / "v1" / MANIFEST
    if loss == "manifest":
        manifest.unlink()
    elif loss == "frame":
        (tmp_path / "v1" / f"{NAMES[0]}.frame").unlink()
    else:
        manifest.write_text(manifest.read_text().replace('"count": 7', '"count": 6'))
    manifest_of.cache_clear()
    try:
        with pytest.raises((AssertionError, FileNotFoundError)):
            test_files_are_those_of_the_manifest("v1")
    finally:
        manifest_of.cache_clear()
