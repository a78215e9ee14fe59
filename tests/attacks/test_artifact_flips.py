"""A calibration artifact with one changed bit: refused, or another one that nothing uses."""

import contextlib
import hashlib
import random

import pytest
import torch

from tests import kvtc_rigs as rigs
from tests.unit.test_gate import domain, entry
from tierkv.errors import TierKVError
from tierkv.gate import Gate
from tierkv_codecs import CODECS, CodecRegistry
from tierkv_codecs.codec import CodecError
from tierkv_codecs.kvtc import codecs_of
from tierkv_codecs.kvtc_artifact import Artifact, unpack
from tierkv_codecs.kvtc_calibrate import calibrate

FAMILY = hashlib.sha256(b"family").digest()
PROFILE = "kvtc@8x"
HEADER_FLIPS, FLIPS = 200, 100


@pytest.fixture(scope="module")
def data() -> bytes:
    return calibrate(rigs.calibration_rows(), rigs.header(), lambda _name, _share: None)


def flipped(data: bytes, count: int, stop: int) -> list[Artifact]:
    """Return what of files with one changed bit before `stop` is still an artifact."""
    draw, found = random.Random(20), []
    for _ in range(count):
        changed = bytearray(data)
        changed[draw.randrange(stop)] ^= 1 << draw.randrange(8)
        with contextlib.suppress(TierKVError):
            found.append(unpack(bytes(changed)))
    return found


def test_the_header_is_refused_or_makes_another_artifact(data: bytes) -> None:
    size = 8 + int.from_bytes(data[:8], "little")
    digest = hashlib.sha256(data).digest()
    found = flipped(data, HEADER_FLIPS, size)
    assert len(found) < HEADER_FLIPS / 2, "most of it is structure"
    assert all(one.digest != digest for one in found)


def test_another_artifact_is_neither_allowed_nor_read_with(data: bytes) -> None:
    sound = unpack(data)
    codec = next(one for one in codecs_of(sound) if one.name == PROFILE)
    block = rigs.text_like(64, seed=3)
    out = torch.empty(codec.bound(block.numel() * 2), dtype=torch.uint8)
    codec.encode(block, out, rigs.place_at(0))
    measured = entry(
        domain(kl_mean=1e-4, kl_hi=1e-4), profile=PROFILE, family=FAMILY.hex(),
        artifact=sound.digest.hex(),
    )  # fmt: skip
    gate = Gate(entries=(measured,))
    assert gate.look(FAMILY, PROFILE, sound.digest, 64).fidelity is not None
    found = flipped(data, FLIPS, len(data))
    assert found, "values of the basis are numbers like any others"
    for one in found:
        verdict = gate.look(FAMILY, PROFILE, one.digest, 64)
        assert verdict.fidelity is None
        assert verdict.why == "measured with another artifact only"
        registry = CodecRegistry([*CODECS.all(), *codecs_of(one)])
        with pytest.raises((CodecError, TierKVError)):
            registry.of_id(codec.id, sound.digest)
