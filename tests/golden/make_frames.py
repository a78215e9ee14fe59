"""Make the golden vectors of a frame version: `python -m tests.golden.make_frames`.

A folder is one version of the bytes: keys, headers and whole frames, and a manifest that counts
them. It is written once, by the release that brought the version, and never changed or removed.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tierkv import frame
from tierkv.fidelity import Fidelity
from tierkv.identity import Identity, LayerSpec, Rope
from tierkv.key import KEY_BYTES, Extras, chain_keys, root_key
from tierkv.namespace import digest_of
from tierkv.part import Part

FOLDER = Path(__file__).resolve().parent / "frames" / f"v{frame.VERSION}"
MANIFEST = "manifest.json"

_ROPE = Rope(theta=500000.0, rotary_dim=8, scaling='{"factor":8.0,"rope_type":"llama3"}')
_FULL = LayerSpec(kv_heads=2, k_dim=8, v_dim=8, rope=_ROPE)
_WINDOW = LayerSpec(kv_heads=2, k_dim=8, v_dim=4, rope=Rope(kind="none"), window=16)
IDENTITIES = {
    "plain": Identity(
        model="org/plain", weights="hub:0123abc", kv_dtype="bf16", tokens_per_block=4,
        layers=(_FULL, _FULL),
    ),
    "mixed": Identity(
        model="org/mixed", weights="files:ffee", epoch=3, kv_dtype="fp8_e4m3",
        kv_scales="per-tensor:aa", tokens_per_block=2, layers=(_FULL, _WINDOW, _WINDOW, _FULL),
    ),
}  # fmt: skip
EXTRAS: dict[str, Extras] = {
    "none": {},
    "lora": {"lora": "name@1"},
    "salt and lora": {"salt": b"\x00\xff", "lora": "name@2"},
}
TOKENS = [0, 1, -1, 2**31 - 1, -(2**31), 128_000, 7, 8, 9]
BLOCK_EXTRAS: dict[int, Extras] = {1: {"image": b"\x01\x02\x03"}}


def identities() -> list[dict[str, Any]]:
    """Describe each identity with its fingerprint, KV groups and raw bytes of its parts."""
    return [
        {
            "name": name,
            "identity": msgspec.to_builtins(identity),
            "fingerprint": identity.fingerprint.hex(),
            "groups": [list(group) for group in identity.groups],
            "raw_bytes": [
                Part.whole(identity, group).raw_bytes(identity)
                for group in range(len(identity.groups))
            ],
        }
        for name, identity in IDENTITIES.items()
    ]


def keys() -> Iterator[dict[str, Any]]:
    """Describe the root and the keys of one prompt under each identity and extras."""
    for name, identity in IDENTITIES.items():
        for title, extras in EXTRAS.items():
            root = root_key(identity.fingerprint, extras)
            for blocks in ({}, BLOCK_EXTRAS):
                data = chain_keys(
                    root, np.array(TOKENS, np.int32), identity.tokens_per_block, blocks
                )
                yield {
                    "identity": name,
                    "extras": title,
                    "tokens": TOKENS,
                    "block_extras": {str(n): shown(extra) for n, extra in blocks.items()},
                    "extras_hex": shown(extras),
                    "root": root.hex(),
                    "keys": [data[at : at + KEY_BYTES].hex() for at in range(0, len(data), 32)],
                }


def shown(extras: Extras) -> dict[str, str]:
    """Return extras with their values in hex."""
    return {
        name: (value.encode() if isinstance(value, str) else bytes(value)).hex()
        for name, value in extras.items()
    }


def frames() -> Iterator[tuple[str, frame.Header, bytes]]:
    """Yield name, header and payload of each vector."""
    for name, segments, flags, fidelity, sealed in (
        ("one-unsealed", (512,), 0, Fidelity.EXACT, False),
        ("one-sealed", (512,), 0, Fidelity.EXACT, True),
        ("five-sealed-safe", (300, 0, 80, 1, 131), frame.LOSSY, Fidelity.SAFE, True),
        ("two-derived", (64, 448), frame.DERIVED, Fidelity.NEAR_LOSSLESS, True),
        ("lossy-derived-economy", (100,), frame.LOSSY | frame.DERIVED, Fidelity.ECONOMY, True),
        ("larger-than-raw", (512 + 8 + 4096,), 0, Fidelity.EXACT, True),
        ("most-segments", (4,) * frame.MAX_SEGMENTS, frame.LOSSY, Fidelity.SAFE, True),
    ):
        identity = IDENTITIES["plain"]
        root = root_key(identity.fingerprint)
        header = frame.Header(
            codec_id=2 if len(segments) == 1 else 700, flags=flags, fidelity=fidelity, tokens=4,
            position=4, generation=5, fingerprint=identity.fingerprint,
            key=chain_keys(root, np.array(TOKENS, np.int32), 4)[KEY_BYTES : 2 * KEY_BYTES],
            namespace=digest_of("golden"), artifact=hashlib.sha256(name.encode()).digest(),
            part=Part.whole(identity), raw_bytes=Part.whole(identity).raw_bytes(identity),
            epoch=0x0102030405060708, segments=segments,
        )  # fmt: skip
        payload = payload_of(name, header.payload_bytes)
        if sealed:
            header = frame.seal(header, [bytearray(frame.pack(header) + payload)])
        yield name, header, payload


def payload_of(name: str, nbytes: int) -> bytes:
    """Return bytes that no library has to make the same way again."""
    out = b""
    while len(out) < nbytes:
        out += hashlib.sha256(name.encode() + len(out).to_bytes(4, "little")).digest()
    return out[:nbytes]


def described(header: frame.Header) -> dict[str, Any]:
    """Return a header's fields as JSON holds them."""
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    fields["fidelity"] = header.fidelity.name
    fields["checksums"] = [checksum.hex() for checksum in header.checksums]
    return {
        name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()
    }


def make() -> int:
    """Write the folder; returns the count of files. Raises: FileExistsError when there is one."""
    FOLDER.mkdir(parents=True)
    entries = []
    for name, header, payload in frames():
        data = frame.pack(header) + payload
        (FOLDER / f"{name}.frame").write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        entries.append({"name": name, "sha256": digest, "header": described(header)})
    manifest = {
        "version": frame.VERSION,
        "count": len(entries),
        "frames": entries,
        "identities": identities(),
        "keys": list(keys()),
    }
    text = json.dumps(manifest, indent=1, default=list) + "\n"
    (FOLDER / MANIFEST).write_text(text, encoding="utf-8")
    return len(entries)


def main() -> int:
    """Make what is missing; refuse when it is there, since a vector that exists never changes."""
    if FOLDER.exists():
        sys.stderr.write(f"{FOLDER} is there; vectors are never made again\n")
        return 1
    sys.stdout.write(f"{make()} frames in {FOLDER}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
