"""kvtc: prefixes, error, sinks, refusals, determinism and hostile payloads on a synthetic model."""

import dataclasses
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from tests.kvtc_rigs import (
    DIM,
    LAYERS,
    PART,
    RATIOS,
    SPEC,
    artifact,
    foreign,
    packed,
    place_at,
    text_like,
)
from tierkv.errors import ErrorKind, TierKVError
from tierkv.identity import Identity
from tierkv_codecs.codec import CodecError, Place, Unsuited
from tierkv_codecs.kvtc import Kvtc, codecs_of
from tierkv_codecs.kvtc_artifact import pack, unpack
from tierkv_codecs.tensors import bits_of

POSITION = 512
GUARD_BYTE = 0xA5
ERRORS = (0.045, 0.03, 0.015)
"""Relative error that each level stays below on text like that of its calibration."""

DIGEST_SCRIPT = """
import sys, torch
from pathlib import Path
from tests.unit.test_kvtc import digest
from tierkv_codecs.kvtc import codecs_of
from tierkv_codecs.kvtc_artifact import read
torch.set_num_threads(int(sys.argv[1]))
print(digest(codecs_of(read(Path(sys.argv[2])))[-1]))
"""


def finest() -> Kvtc:
    return codecs_of(artifact())[-1]


def encoded(codec: Kvtc, block: torch.Tensor, place: Place) -> tuple[torch.Tensor, tuple[int, ...]]:
    bound = codec.bound(block.numel() * block.itemsize)
    buffer = torch.full((bound + 128,), GUARD_BYTE, dtype=torch.uint8)
    segments = codec.encode(block, buffer[64 : 64 + bound], place)
    assert (buffer[:64] == GUARD_BYTE).all()
    assert (buffer[64 + bound :] == GUARD_BYTE).all()
    return buffer[64 : 64 + sum(segments)].clone(), segments


def decoded(
    codec: Kvtc, payload: torch.Tensor, segments: tuple[int, ...], like: torch.Tensor, place: Place
) -> torch.Tensor:
    out = torch.full_like(like, float("nan"))
    codec.decode(payload, segments, out, place)
    return out


def error(found: torch.Tensor, block: torch.Tensor) -> float:
    return float((found.float() - block.float()).norm() / block.float().norm())


def digest(codec: Kvtc) -> str:
    found = hashlib.sha256()
    for tokens, seed in ((128, 1), (1, 2), (37, 3)):
        block = text_like(tokens, seed, POSITION)
        payload, segments = encoded(codec, block, place_at(POSITION))
        found.update(repr(segments).encode() + payload.numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 64, 128, 200])
def test_error_stays_below_that_of_the_level(tokens: int, dtype: torch.dtype) -> None:
    block, place = text_like(tokens, 9, POSITION, dtype), place_at(POSITION)
    for codec, most in zip(codecs_of(artifact()), ERRORS, strict=True):
        payload, segments = encoded(codec, block, place)
        assert len(segments) == codec.levels
        found = decoded(codec, payload, segments, block, place)
        assert found.isfinite().all()
        # One token may be an unusual one; many are as calibrated.
        assert error(found, block) < (most if tokens >= 64 else 2 * most)


def test_levels_realise_more_than_their_nominal_ratio() -> None:
    block = text_like(128, 9, POSITION)
    for codec, ratio in zip(codecs_of(artifact()), RATIOS, strict=True):
        payload, _ = encoded(codec, block, place_at(POSITION))
        assert block.numel() * 2 / payload.numel() > 1.1 * ratio


def test_every_prefix_decodes_with_the_error_of_its_own_level() -> None:
    block, place = text_like(128, 9, POSITION), place_at(POSITION)
    payload, segments = encoded(finest(), block, place)
    for number, codec in enumerate(codecs_of(artifact())):
        cut = segments[: number + 1]
        prefix = payload[: sum(cut)]
        found = decoded(finest(), prefix, cut, block, place)
        alone = decoded(codec, *encoded(codec, block, place), block, place)
        assert error(found, block) < ERRORS[number]
        assert error(found, block) == pytest.approx(error(alone, block), rel=0.02)
        assert prefix.numel() == pytest.approx(sum(encoded(codec, block, place)[1]), rel=0.01)


def test_errors_fall_with_every_segment() -> None:
    block, place = text_like(128, 9, POSITION), place_at(POSITION)
    payload, segments = encoded(finest(), block, place)
    errors = []
    for count in range(1, len(segments) + 1):
        cut = segments[:count]
        found = decoded(finest(), payload[: sum(cut)], cut, block, place)
        errors.append(error(found, block))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 2


@pytest.mark.parametrize("position", [0, 2, 3])
def test_sinks_are_exact_whatever_they_hold(position: int) -> None:
    block, place = text_like(20, 4, position), place_at(position)
    sinks = 4 - position
    block[:, :, :sinks] = 1e30
    bits_of(block)[0, 0, 0, 0, 0] = 0x7FC1  # a NaN with a payload
    payload, segments = encoded(finest(), block, place)
    found = decoded(finest(), payload, segments, block, place)
    assert torch.equal(bits_of(found)[:, :, :sinks], bits_of(block)[:, :, :sinks])
    assert error(found[:, :, sinks:], block[:, :, sinks:]) < 2 * ERRORS[-1]
    assert not torch.equal(found[:, :, sinks:], block[:, :, sinks:])


def test_a_block_of_sinks_alone_and_an_empty_one() -> None:
    for tokens in (0, 3):
        block, place = text_like(tokens, 4), place_at(0)
        payload, segments = encoded(finest(), block, place)
        found = decoded(finest(), payload, segments, block, place)
        assert torch.equal(bits_of(found), bits_of(block))


def test_layers_come_one_run_after_the_other() -> None:
    block, place = text_like(128, 9, POSITION), place_at(POSITION)
    payload, segments = encoded(finest(), block, place)
    whole = decoded(finest(), payload, segments, block, place)
    out = torch.zeros_like(block)
    done = 0
    for count in finest().decode_layers(payload, segments, out, place):
        assert torch.equal(out[:count], whole[:count])
        assert not out[count:].any()
        assert count > done
        done = count
    assert done == LAYERS


def test_strides_do_not_matter_and_only_the_view_is_written() -> None:
    block, place = text_like(40, 9, POSITION), place_at(POSITION)
    payload, segments = encoded(finest(), block, place)
    other = block.transpose(0, 3).contiguous().transpose(0, 3)
    again = encoded(finest(), other, place)
    assert again[1] == segments
    assert torch.equal(again[0], payload)
    pages = torch.zeros((LAYERS, 2, 2, 64, DIM), dtype=torch.bfloat16).transpose(2, 3)
    finest().decode(payload, segments, pages[:, :, 8:48], place)
    assert torch.equal(pages[:, :, 8:48], decoded(finest(), payload, segments, block, place))
    assert not pages[:, :, :8].any()
    assert not pages[:, :, 48:].any()


def test_the_same_bytes_in_another_process_and_with_any_thread_count(tmp_path: Path) -> None:
    expected = digest(finest())
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert digest(finest()) == expected
    finally:
        torch.set_num_threads(threads)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    path = tmp_path / "synthetic.kvtc"
    path.write_bytes(packed(artifact()))
    run = subprocess.run(
        [sys.executable, "-c", DIGEST_SCRIPT, "2", str(path)],
        env=environment, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == expected


def test_the_guard_refuses_other_statistics() -> None:
    for codec in codecs_of(artifact()):
        with pytest.raises(Unsuited) as refused:
            encoded(codec, foreign(128, 5), place_at(0))
        assert refused.value.reason == "it is out of the artifact's domain"


def test_without_its_guard_a_foreign_block_comes_back_finite_or_does_not_shrink() -> None:
    block = foreign(128, 5)
    coarse, *_, fine = (
        dataclasses.replace(codec, guard=float("inf")) for codec in codecs_of(artifact())
    )
    payload, segments = encoded(coarse, block, place_at(0))
    assert decoded(coarse, payload, segments, block, place_at(0)).isfinite().all()
    with pytest.raises(Unsuited, match="shrink"):  # twice as loud: more than a hair too long
        encoded(fine, 2 * block, place_at(0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    block = text_like(64, 9, POSITION)
    for at in ((0, 0, 0, 0, 0), (3, 1, 63, 1, 15), (2, 0, 31, 0, 7)):
        bad = block.clone()
        bad[at] = value
        with pytest.raises(Unsuited, match="not finite"):
            encoded(finest(), bad, place_at(POSITION))


def test_another_shape_dtype_or_shard_is_refused() -> None:
    block = text_like(16, 9)
    other_layer = msgspec.structs.replace(SPEC, window=512)
    places = [
        place_at(0)._replace(part=PART._replace(head_start=1)),
        place_at(0)._replace(layers=(other_layer,) * LAYERS),
    ]
    for place in places:
        with pytest.raises(Unsuited, match="other layers or heads"):
            encoded(finest(), block, place)
    for wrong in (block[:2], block[..., :8], block[:, :, :, :1], block[0]):
        with pytest.raises(Unsuited, match="shape"):
            encoded(finest(), wrong, place_at(0))
    with pytest.raises(Unsuited, match="float8"):
        encoded(finest(), block.to(torch.float8_e4m3fn), place_at(0))


def test_wrong_buffers_and_segments_are_refused() -> None:
    block, place = text_like(64, 9, POSITION), place_at(POSITION)
    payload, segments = encoded(finest(), block, place)
    with pytest.raises(CodecError, match="bytes"):
        finest().encode(block, torch.empty(100, dtype=torch.uint8), place)
    wrong = [(), (*segments, 0), (-1, *segments[1:]), (segments[0] + 1, *segments[1:])]
    wrong.append((segments[1], segments[0], segments[2]))
    for lengths in wrong:
        with pytest.raises(CodecError):
            decoded(finest(), payload, lengths, block, place)
    for other in (text_like(63, 9, POSITION), text_like(65, 9, POSITION)):
        with pytest.raises(CodecError):
            decoded(finest(), payload, segments, other, place)


def test_damage_is_refused_or_decodes_to_finite_values() -> None:
    block, place = text_like(64, 9, 2), place_at(2)
    payload, segments = encoded(finest(), block, place)
    generator = torch.Generator().manual_seed(1)
    exact = 2 * block[:, :, :1].numel() * block.itemsize
    for position in [
        *range(exact, exact + 60),
        *torch.randint(0, len(payload), (60,), generator=generator),
    ]:
        bad = payload.clone()
        bad[int(position)] ^= 1 << int(torch.randint(0, 8, (), generator=generator))
        try:
            found = decoded(finest(), bad, segments, block, place)
        except CodecError:
            continue
        assert found[:, :, 2:].isfinite().all()
    for junk in (torch.zeros_like(payload), torch.full_like(payload, 255)):
        with pytest.raises(CodecError):
            decoded(finest(), junk, segments, block, place)


def test_another_artifact_is_another_digest_and_is_refused() -> None:
    other = artifact((8.0, 4.0))
    assert other.digest != artifact().digest
    identity = Identity(
        model="synthetic", weights="seed 7", kv_dtype="bf16", tokens_per_block=64,
        layers=(SPEC,) * LAYERS,
    )  # fmt: skip
    artifact().check(identity, PART)
    wrong = [
        msgspec.structs.replace(identity, weights="seed 8"),
        msgspec.structs.replace(
            identity,
            layers=(
                msgspec.structs.replace(SPEC, rope=msgspec.structs.replace(SPEC.rope, theta=1e6)),
            )
            * LAYERS,
        ),
    ]
    for one in wrong:
        with pytest.raises(TierKVError) as refused:
            artifact().check(one, PART)
        assert refused.value.kind is ErrorKind.INCOMPATIBLE
    with pytest.raises(TierKVError, match="shard"):
        artifact().check(identity, PART._replace(head_stop=1))


def test_an_artifact_that_is_not_sound_is_refused() -> None:
    good = artifact()
    rest = (good.drift, good.heed, good.anchors)
    data = pack(good.header, good.sides, *rest)
    assert unpack(data).digest == good.digest
    for bad in (b"", data[:100], data[:-1], b"\xff" * 64):
        with pytest.raises(TierKVError, match="not a calibration artifact"):
            unpack(bad)
    older = msgspec.structs.replace(good.header, format=2)
    with pytest.raises(TierKVError) as refused:
        unpack(pack(older, good.sides, *rest))
    assert refused.value.kind is ErrorKind.INCOMPATIBLE
    for heed in (good.heed[:1], good.heed.double(), good.heed * float("inf"), torch.zeros(2, 999)):
        with pytest.raises(TierKVError, match="not a calibration artifact"):
            unpack(pack(good.header, good.sides, good.drift, heed, good.anchors))
    keys, values = good.sides
    unsound = [
        keys._replace(first=keys.first + 1),
        keys._replace(refine=torch.zeros_like(keys.refine)),
        keys._replace(shifts=keys.shifts.flip(0)),
        keys._replace(start=torch.zeros_like(keys.start)),
        keys._replace(basis=keys.basis[:-1]),
        keys._replace(mean=keys.mean * float("nan")),
    ]
    for side in unsound:
        with pytest.raises(TierKVError, match="not a calibration artifact"):
            unpack(pack(good.header, (side, values), *rest))
    anchors = good.anchors
    for wrong in (
        dataclasses.replace(anchors, offset=anchors.offset * float("nan")),
        dataclasses.replace(anchors, root=anchors.root[:, :-1]),
        dataclasses.replace(anchors, start=anchors.start + 100),
        dataclasses.replace(anchors, first=anchors.first + 1),
        dataclasses.replace(anchors, refine=torch.zeros_like(anchors.refine)),
    ):
        with pytest.raises(TierKVError, match="not a calibration artifact"):
            unpack(pack(good.header, good.sides, good.drift, good.heed, wrong))


def test_a_registry_takes_the_levels_and_finds_the_artifact() -> None:
    from tierkv_codecs.codec import CodecRegistry

    registry = CodecRegistry(codecs_of(artifact()))
    assert registry.named("kvtc@8x").levels == 2  # type: ignore[attr-defined]
    assert registry.of_id(6, artifact().digest).artifact == artifact().digest
    with pytest.raises(TierKVError):
        registry.of_id(6, bytes(32))
