"""A reader written from docs/FORMAT.md alone: it imports nothing of tierkv."""

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash

FOLDER = Path(__file__).parent / "frames" / "v1"
FORMAT = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text(encoding="utf-8")
MANIFEST: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def tagged(fields: list[tuple[str, bytes]]) -> bytes:
    out = b""
    for tag, value in fields:
        name = tag.encode()
        out += struct.pack("<H", len(name)) + name + struct.pack("<I", len(value)) + value
    return out


def layer_fields(layer: dict[str, Any]) -> bytes:
    rope, window = layer["rope"], layer["window"]
    return tagged(
        [
            *((name, u64(layer[name])) for name in ("kv_heads", "k_dim", "v_dim")),
            ("window", b"" if window is None else u64(window)),
            ("rope", rope["kind"].encode()),
            ("theta", struct.pack("<d", rope["theta"])),
            ("rotary_dim", u64(rope["rotary_dim"])),
            ("interleaved", bytes([rope["interleaved"]])),
            ("scaling", rope["scaling"].encode()),
        ]
    )


def fingerprint(identity: dict[str, Any]) -> bytes:
    fields = [
        ("format", b"tierkv.identity.1"),
        ("model", identity["model"].encode()),
        ("weights", identity["weights"].encode()),
        ("epoch", u64(identity["epoch"])),
        ("kv_dtype", identity["kv_dtype"].encode()),
        ("kv_scales", identity["kv_scales"].encode()),
        ("tokens_per_block", u64(identity["tokens_per_block"])),
    ]
    fields += [("layer", layer_fields(layer)) for layer in identity["layers"]]
    return hashlib.sha256(tagged(fields)).digest()


def extras_of(extras: dict[str, str]) -> list[tuple[str, bytes]]:
    return [(name, bytes.fromhex(extras[name])) for name in sorted(extras)]


def refusal(data: bytes) -> str:
    """Return why a header is refused, in the order of section 4; empty when it is sound."""
    if len(data) < 208 or data[:4] != b"TKVF":
        return "corrupt"
    version, size, _, _, fidelity, zero, segments = struct.unpack_from("<HHHHBBH", data, 4)
    if version != 1:
        return "unknown"
    fits = (208 + 24 * segments + 63) // 64 * 64
    if not 1 <= segments <= 128 or size != fits or size > len(data):
        return "corrupt"
    plain = data[:200] + bytes(8) + data[208:size]
    if struct.pack("<Q", xxhash.xxh3_64_intdigest(plain)) != data[200:208] or zero:
        return "corrupt"
    return "" if 1 <= fidelity <= 4 else "unknown"


def read(data: bytes) -> dict[str, Any] | str:
    """Return a frame's fields, or the kind of its refusal."""
    refused = refusal(data)
    if refused:
        return refused
    _, size, codec, flags, fidelity, _, segments = struct.unpack_from("<HHHHBBH", data, 4)
    raw, payload = struct.unpack_from("<QQ", data, 160)
    rows = [struct.unpack_from("<Q16s", data, 208 + 24 * number) for number in range(segments)]
    if payload > min(raw + raw // 64 + 4096, 2**30) or sum(row[0] for row in rows) != payload:
        return "corrupt"
    at = size
    for length, checksum in rows:
        segment = data[at : at + length]
        if flags & 4 and (len(segment), xxhash.xxh3_128(segment).digest()) != (length, checksum):
            return "corrupt"
        at += length
    tokens, position, generation = struct.unpack_from("<IIQ", data, 16)
    return {
        "codec_id": codec, "flags": flags & ~4, "fidelity": fidelity, "tokens": tokens,
        "position": position, "generation": generation, "fingerprint": data[32:64].hex(),
        "key": data[64:96].hex(), "namespace": data[96:112].hex(), "artifact": data[112:144].hex(),
        "part": list(struct.unpack_from("<5H", data, 144)), "raw_bytes": raw,
        "epoch": struct.unpack_from("<Q", data, 192)[0], "segments": [row[0] for row in rows],
        "checksums": [row[1].hex() for row in rows] if flags & 4 else [],
    }  # fmt: skip


CLASSES = {1: "ECONOMY", 2: "SAFE", 3: "NEAR_LOSSLESS", 4: "EXACT"}


@pytest.mark.parametrize("entry", MANIFEST["frames"], ids=lambda entry: str(entry["name"]))
def test_a_stranger_reads_our_frames(entry: dict[str, Any]) -> None:
    data = (FOLDER / f"{entry['name']}.frame").read_bytes()
    found = read(data)
    assert isinstance(found, dict)
    found["fidelity"] = CLASSES[found["fidelity"]]
    assert found == entry["header"]
    for at in range(0, len(data), 11):
        broken = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        assert isinstance(read(broken), str) or "unsealed" in entry["name"]


@pytest.mark.parametrize("entry", MANIFEST["identities"], ids=lambda entry: str(entry["name"]))
def test_a_stranger_makes_our_fingerprints(entry: dict[str, Any]) -> None:
    assert fingerprint(entry["identity"]).hex() == entry["fingerprint"]


def test_a_stranger_makes_our_keys() -> None:
    prints = {entry["name"]: entry for entry in MANIFEST["identities"]}
    for entry in MANIFEST["keys"]:
        identity = prints[entry["identity"]]
        head = [("format", b"tierkv.key.1"), ("identity", bytes.fromhex(identity["fingerprint"]))]
        key = hashlib.sha256(tagged(head + extras_of(entry["extras_hex"]))).digest()
        assert key.hex() == entry["root"]
        step = identity["identity"]["tokens_per_block"]
        for number, expected in enumerate(entry["keys"]):
            tokens = entry["tokens"][number * step : (number + 1) * step]
            extras = tagged(extras_of(entry["block_extras"].get(str(number), {})))
            key = hashlib.sha256(key + struct.pack(f"<{step}i", *tokens) + extras).digest()
            assert key.hex() == expected


def test_the_worked_example_is_the_golden_one() -> None:
    example = MANIFEST["keys"][0]
    values = [MANIFEST["identities"][0]["fingerprint"], example["root"], *example["keys"]]
    places = [FORMAT.index(value) for value in values]
    assert places == sorted(places)
    root = "0600666f726d61740c000000746965726b762e6b65792e310800 6964656e7469747920000000"
    shown = "".join(re.findall(r"[0-9a-f]+", FORMAT[FORMAT.index("0600 666f") :][:140]))
    assert shown.startswith(root.replace(" ", ""))


def test_namespaces_are_as_written() -> None:
    digest = hashlib.sha256(b"tierkv.namespace.1" + b"golden").hexdigest()[:32]
    assert {entry["header"]["namespace"] for entry in MANIFEST["frames"]} == {digest}
