"""Blocks through frames: what stays exact, what is counted, and what the yardsticks lose."""

from dataclasses import dataclass

import pytest
import torch

from tierkv.errors import TierKVError
from tierkv.identity import Identity, LayerSpec, Rope
from tierkv_codecs import CODECS, SINKS, CodecRegistry, Lossless, Place, Unsuited
from tierkv_codecs.lab.roundtrip import Cutter, Weight, changed
from tierkv_codecs.lab.subject import LayerKv
from tierkv_codecs.lab.yardsticks import YARDSTICKS, Int4Token, Nvfp4, registry_with

BLOCK, CONTEXT, TAIL, HEADS, DIM = 64, 320, 128, 2, 64
HEADER = 256


def identity(kv_dtype: str = "bf16", windows: tuple[int | None, ...] = (None, None)) -> Identity:
    layers = tuple(
        LayerSpec(kv_heads=HEADS, k_dim=DIM, v_dim=DIM, rope=Rope(), window=window)
        for window in windows
    )
    return Identity(
        model="m", weights="w", kv_dtype=kv_dtype, tokens_per_block=BLOCK, layers=layers
    )


def random_kv(layers: int = 2, sequences: int = 2) -> list[LayerKv]:
    draw = torch.Generator().manual_seed(0)
    shape = (sequences, HEADS, CONTEXT, DIM)
    return [
        LayerKv(torch.randn(shape, generator=draw), 3 * torch.randn(shape, generator=draw))
        for _ in range(layers)
    ]


@dataclass(frozen=True)
class Picky(Int4Token):
    """Refuses the second block of a sequence."""

    def encode(self, block: torch.Tensor, out: torch.Tensor, place: Place) -> tuple[int, ...]:
        if place.position == BLOCK:
            raise Unsuited("I do not like it")
        return super().encode(block, out, place)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("windows", [(None, None), (None, 128)])
def test_exact_codecs_give_back_what_the_engine_held(
    kv_dtype: str, windows: tuple[int | None, ...]
) -> None:
    cutter = Cutter(identity(kv_dtype, windows), CONTEXT, TAIL)
    kv = cutter.rounded(random_kv())
    for name in ("raw", "lossless"):
        weight = Weight()
        assert not any(changed(kv, cutter.through(kv, CODECS.named(name), CODECS, weight)))
        assert weight.blocks == 2 * 3 * len(set(windows))
        assert not weight.fallbacks
    assert any(changed(random_kv(), kv)) == (kv_dtype != "fp32")


@pytest.mark.parametrize("codec", YARDSTICKS, ids=lambda codec: codec.name)
def test_sinks_and_tail_are_exact_and_the_rest_is_not(codec: Int4Token | Nvfp4) -> None:
    cutter = Cutter(identity(), CONTEXT, TAIL)
    kv = cutter.rounded(random_kv())
    restored = cutter.through(kv, codec, registry_with(CODECS), Weight())
    coded = cutter.coded()
    assert (coded.start, coded.stop) == (SINKS, CONTEXT - TAIL)
    for exact, found in zip(kv, restored, strict=True):
        for one, other in zip(exact, found, strict=True):
            assert torch.equal(one[:, :, : coded.start], other[:, :, : coded.start])
            assert torch.equal(one[:, :, coded.stop :], other[:, :, coded.stop :])
            error = (one[:, :, coded] - other[:, :, coded]).norm() / one[:, :, coded].norm()
            assert 0.05 < float(error) < 0.15


def test_without_a_tail_all_but_the_sinks_is_coded() -> None:
    cutter = Cutter(identity(), CONTEXT)
    kv, weight = cutter.rounded(random_kv()), Weight()
    restored = cutter.through(kv, Nvfp4(), registry_with(CODECS), weight)
    assert (cutter.coded().stop, weight.blocks) == (CONTEXT, 2 * CONTEXT // BLOCK)
    assert not torch.equal(kv[0].values[:, :, -BLOCK:], restored[0].values[:, :, -BLOCK:])


def test_errors_of_the_yardsticks_are_those_of_their_formats() -> None:
    cutter = Cutter(identity("fp32"), CONTEXT, TAIL)
    kv = cutter.rounded(random_kv())
    coded = cutter.coded()
    found = cutter.through(kv, Int4Token(), registry_with(CODECS), Weight())
    for exact, restored in zip(kv, found, strict=True):
        for one, other in zip(exact, restored, strict=True):
            span = one.amax(-1, keepdim=True) - one.amin(-1, keepdim=True)
            error = (one - other).abs()[:, :, coded]
            assert (error <= span[:, :, coded] / 30 + 2e-3 * span[:, :, coded]).all()
    found = cutter.through(kv, Nvfp4(), registry_with(CODECS), Weight())
    for exact, restored in zip(kv, found, strict=True):
        for one, other in zip(exact, restored, strict=True):
            groups = one.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
            error = (one - other).unflatten(-1, (-1, 16)).abs()
            # Half the widest step of E2M1 (4 to 6), and the scale's own rounding to 4 bits.
            assert (error <= groups * (1 / 6 + 1 / 16 + 0.01)).all()


def test_ratios_count_everything_that_is_kept() -> None:
    cutter = Cutter(identity(), CONTEXT, TAIL)
    kv = cutter.rounded(random_kv())
    weight = Weight()
    cutter.through(kv, Int4Token(), registry_with(CODECS), weight)
    token = 2 * 2 * HEADS * DIM * 2
    payload = 2 * 2 * HEADS * (DIM // 2 + 4)
    coded = 3 * BLOCK - SINKS
    assert weight.coded_raw == 2 * coded * token
    assert weight.coded == 2 * (coded * payload + 3 * HEADER)
    assert weight.total_raw == 2 * CONTEXT * token
    assert weight.total > weight.coded + 2 * 2 * BLOCK * token // 2
    exact = Weight()
    cutter.through(kv, CODECS.named("raw"), CODECS, exact)
    assert exact.ratio_payload == pytest.approx(1.0, abs=0.01)


def test_ratios_count_against_16_bit_whatever_the_engine_holds() -> None:
    half, full = Weight(), Weight()
    for kv_dtype, weight in (("fp16", half), ("fp32", full)):
        cutter = Cutter(identity(kv_dtype), CONTEXT, TAIL)
        cutter.through(cutter.rounded(random_kv()), Int4Token(), registry_with(CODECS), weight)
    assert full.coded_raw == half.coded_raw
    assert full.coded == half.coded


def test_a_block_that_cannot_be_coded_is_lossless_and_counted() -> None:
    cutter = Cutter(identity(), CONTEXT, TAIL)
    kv = cutter.rounded(random_kv())
    weight = Weight()
    picky = Picky(id=65003, name="picky")
    registry = CodecRegistry([picky, Lossless()])
    restored = cutter.through(kv, picky, registry, weight)
    assert dict(weight.fallbacks) == {("I do not like it", "lossless"): 2}
    assert weight.blocks == 6
    spans = (slice(BLOCK), slice(BLOCK, 2 * BLOCK), slice(2 * BLOCK, 3 * BLOCK))
    same = [torch.equal(kv[0].keys[:, :, span], restored[0].keys[:, :, span]) for span in spans]
    assert same == [False, True, False]


def test_a_block_that_cannot_be_coded_goes_to_the_fallback() -> None:
    cutter = Cutter(identity(), CONTEXT, TAIL)
    kv = cutter.rounded(random_kv())
    weight, alone = Weight(), Weight()
    picky = Picky(id=65003, name="picky")
    registry = registry_with(CODECS, (picky, Nvfp4()))
    restored = cutter.through(kv, picky, registry, weight, Nvfp4())
    assert dict(weight.fallbacks) == {("I do not like it", "nvfp4"): 2}
    other = cutter.through(kv, Nvfp4(), registry, alone)
    for span, same in ((slice(BLOCK), False), (slice(BLOCK, 2 * BLOCK), True)):
        assert torch.equal(restored[0].keys[:, :, span], other[0].keys[:, :, span]) == same
    weight.add(weight)
    assert (weight.blocks, weight.fallbacks.total()) == (12, 4)
    neither = Weight()
    cutter.through(kv, picky, registry, neither, picky)
    assert dict(neither.fallbacks) == {("I do not like it", "lossless"): 2}


def test_what_blocks_cannot_hold_is_refused() -> None:
    with pytest.raises(TierKVError, match="no multiple"):
        Cutter(identity(), CONTEXT + 1)
    with pytest.raises(TierKVError, match="no multiple"):
        Cutter(identity(), BLOCK, TAIL)
    with pytest.raises(TierKVError, match="tail of 300"):
        Cutter(identity(), CONTEXT, tail=300)
    with pytest.raises(TierKVError, match="cannot be evaluated"):
        Cutter(identity("fp8_e4m3"), CONTEXT)
    layer = LayerSpec(kv_heads=1, k_dim=64, v_dim=32, rope=Rope())
    uneven = Identity(
        model="m", weights="w", kv_dtype="bf16", tokens_per_block=BLOCK, layers=(layer,)
    )
    with pytest.raises(TierKVError, match="differ in size"):
        Cutter(uneven, CONTEXT)
