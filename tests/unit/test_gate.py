"""The gate: classes at their limits, the worst domain, contexts, and files not to be trusted."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tierkv import gate
from tierkv.errors import ErrorKind, TierKVError
from tierkv.fidelity import Fidelity
from tierkv.gate import Domain, Entry, Gate, Limit, Thresholds, Verdict
from tierkv.identity import Identity, LayerSpec, Rope

NEAR, SAFE, ECONOMY = Fidelity.NEAR_LOSSLESS, Fidelity.SAFE, Fidelity.ECONOMY
FAMILY = bytes(range(32))
ARTIFACT = bytes(range(1, 33))
NO_ARTIFACT = bytes(32)


def domain(name: str = "prose", **fields: Any) -> Domain:
    values: dict[str, Any] = {
        "sequences": 8, "tokens": 1024, "kl_mean": 0.0005, "kl_lo": 0.0004, "kl_hi": 0.0006,
        "kl_p99": 0.005, "kl_p99_hi": 0.006, "top1": 0.99, "top1_lo": 0.98, "dnll": -0.001,
    }  # fmt: skip
    return Domain(domain=name, **(values | fields))


def entry(*domains: Domain, **fields: Any) -> Entry:
    values: dict[str, Any] = {
        "model": "llama", "family": FAMILY.hex(), "kv_dtype": "bf16", "profile": "int4",
        "artifact": "", "context": 1024, "ratio": 3.2, "domains": domains or (domain(),),
    }  # fmt: skip
    return Entry(**(values | fields))


def verdict(*domains: Domain, thresholds: Thresholds | None = None) -> Verdict:
    return Gate(thresholds=thresholds or Thresholds()).verdict(entry(*domains))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, NEAR),
        ({"kl_mean": 0.001, "kl_hi": 0.001}, NEAR),
        ({"kl_mean": 0.0001, "kl_hi": 0.00101}, SAFE),
        ({"kl_hi": 0.0001, "kl_mean": 0.00101}, SAFE),
        ({"kl_hi": 0.01}, SAFE),
        ({"kl_hi": 0.0101}, ECONOMY),
        ({"kl_hi": 0.05}, ECONOMY),
        ({"kl_hi": 0.0501}, None),
        ({"kl_p99_hi": 0.01}, NEAR),
        ({"kl_p99_hi": 0.0101}, SAFE),
        ({"kl_p99_hi": 0.1}, SAFE),
        ({"kl_p99": 0.11}, ECONOMY),
        ({"kl_p99_hi": 0.51}, None),
        ({"top1_lo": 0.97}, NEAR),
        ({"top1_lo": 0.969}, SAFE),
        ({"top1_lo": 0.919}, ECONOMY),
        ({"top1_lo": 0.85}, ECONOMY),
        ({"top1_lo": 0.849}, None),
        ({"top1": 0.5, "top1_lo": 0.99}, None),
        ({"needle_ok": 8, "needle_n": 8}, NEAR),
        ({"needle_ok": 7, "needle_n": 8}, None),
        ({"dnll": 5.0}, NEAR),
    ],
)
def test_classes_at_their_limits(fields: dict[str, Any], expected: Fidelity | None) -> None:
    assert verdict(domain(**fields)).fidelity is expected


def test_the_worst_domain_decides() -> None:
    good, poor = domain("prose"), domain("code", kl_hi=0.02)
    assert verdict(good, poor).fidelity is verdict(poor, good).fidelity is ECONOMY
    assert verdict(good, poor).kl == 0.02
    lost = domain("needle", needle_ok=0, needle_n=1)
    assert verdict(good, lost).fidelity is None


def test_a_verdict_says_what_stands_against_more() -> None:
    assert verdict(domain()).why == ""
    assert verdict(domain("code", kl_hi=0.02)).why == "code: mean KL up to 0.02 > 0.01"
    assert verdict(domain(kl_p99_hi=0.6)).why == "prose: p99 KL up to 0.6 > 0.5"
    assert verdict(domain(top1_lo=0.8)).why == "prose: top-1 down to 80.0% < 85.0%"
    found = verdict(domain(), domain("needle", needle_ok=7, needle_n=8))
    assert found.why == "needle: 7 of 8 needles found"


def test_thresholds_are_the_files_own() -> None:
    strict = Thresholds(near_lossless=Limit(kl_mean=1e-4, kl_p99=1e-3, top1=0.999))
    assert verdict(domain(), thresholds=strict).fidelity is SAFE


def test_an_entry_speaks_for_its_key_only() -> None:
    one = Gate(entries=(entry(), entry(profile="kvtc@8x", artifact=ARTIFACT.hex())))
    assert one.look(FAMILY, "int4", NO_ARTIFACT, 1024).fidelity is NEAR
    assert one.look(FAMILY, "kvtc@8x", ARTIFACT, 1024).fidelity is NEAR
    for found in (
        one.look(ARTIFACT, "int4", NO_ARTIFACT, 1024),
        one.look(FAMILY, "int8", NO_ARTIFACT, 1024),
        one.look(FAMILY, "int4", ARTIFACT, 1024),
        one.look(FAMILY, "kvtc@8x", NO_ARTIFACT, 1024),
        one.look(b"", "int4", NO_ARTIFACT, 1024),
    ):
        assert found.fidelity is None
        assert found.kl == math.inf
        assert "measured" in found.why


def test_contexts_are_answered_by_the_next_longer_one_and_to_twice_the_longest() -> None:
    long = entry(domain(kl_hi=0.005), context=4096)
    rejected = entry(domain(kl_hi=0.5), context=256)
    one = Gate(entries=(long, entry(), rejected))
    asked = (1, 256, 257, 1024, 1025, 4096, 8192)
    classes = [one.look(FAMILY, "int4", NO_ARTIFACT, n).fidelity for n in asked]
    assert classes == [None, None, NEAR, NEAR, SAFE, SAFE, SAFE]
    beyond = one.look(FAMILY, "int4", NO_ARTIFACT, 8193)
    assert beyond.fidelity is None
    assert beyond.why == "contexts above 2 x 4096 tokens were not measured"


def test_passing_profiles() -> None:
    one = Gate(entries=(entry(), entry(domain(kl_hi=1.0), profile="int2")))
    assert one.passing() == {"int4"}


def test_a_file_reads_as_it_was_written(tmp_path: Path) -> None:
    one = Gate(entries=(entry(), entry(domain(kl_hi=1.0), profile="kvtc@8x", context=4096)))
    path = tmp_path / "gate.json"
    path.write_bytes(gate.dump(one))
    assert gate.load(path) == one
    assert path.read_text().startswith('{\n  "format": "tierkv.gate",\n  "version": 1,')


def test_merging_replaces_what_was_measured_again() -> None:
    old = Gate(entries=(entry(), entry(profile="int8")))
    new = entry(domain(kl_hi=1.0))
    assert gate.merge(old, [new]).entries == (new, entry(profile="int8"))
    assert len(gate.merge(old, [entry(context=4096)]).entries) == 3


def test_family_differs_with_everything_but_the_epoch() -> None:
    layer = LayerSpec(kv_heads=1, k_dim=8, v_dim=8, rope=Rope())
    one = Identity(
        model="m", weights="w", kv_dtype="bf16", tokens_per_block=64, layers=(layer,), epoch=3
    )
    replace = msgspec.structs.replace
    assert one.family == replace(one, epoch=4).family != one.fingerprint
    assert replace(one, epoch=0).family == replace(one, epoch=0).fingerprint
    changes: list[dict[str, Any]] = [
        {"model": "n"}, {"weights": "v"}, {"kv_dtype": "fp16"}, {"kv_scales": "s"},
        {"tokens_per_block": 32}, {"layers": (layer, layer)},
    ]  # fmt: skip
    families = {replace(one, **change).family for change in changes}
    assert len(families | {one.family}) == len(changes) + 1


def broken(**changes: Any) -> bytes:
    """Return a file of one entry with fields replaced; a path's last name is the field."""
    data = json.loads(gate.dump(Gate(entries=(entry(),))))
    for path, value in changes.items():
        at: Any = data
        *names, last = path.split("__")
        for name in names:
            at = at[int(name) if name.isdigit() else name]
        at[last] = value
    return json.dumps(data).encode()


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "truncated"),
    "no JSON": (b"not = toml", "malformed"),
    "no UTF-8": (b'{"format": "\xff"}', "UTF-8"),
    "an array": (b"[]", "Expected `object`"),
    "deep nesting": (b'{"format":' + b"[" * 200_000, "."),
    "no format": (b'{"version": 1}', "format"),
    "another format": (broken(format="other"), "write it again"),
    "a later version": (broken(version=2, surprise=1), "version 2 is not"),
    "a version as text": (broken(version="1"), "version"),
    "an unknown field": (broken(surprise=1), "surprise"),
    "an unknown field of an entry": (broken(entries__0__class="safe"), "class"),
    "an unknown field of a domain": (broken(entries__0__domains__0__x=1), "x"),
    "a missing number": (
        broken(entries__0__domains=[{"domain": "prose"}]),
        "missing required field",
    ),
    "a number as text": (broken(entries__0__domains__0__kl_hi="0"), "kl_hi"),
    "not a number": (broken(entries__0__domains__0__kl_hi=math.nan), "malformed"),
    "infinite": (broken(entries__0__domains__0__kl_hi=math.inf), "malformed"),
    "too large": (
        broken(entries__0__domains__0__kl_hi=7.25).replace(b"7.25", b"1e999"),
        "out of range",
    ),
    "negative KL": (broken(entries__0__domains__0__kl_hi=-1.0), "kl_hi is -1.0"),
    "a share above 1": (broken(entries__0__domains__0__top1=1.5), "top1 is 1.5"),
    "needles out of nothing": (broken(entries__0__domains__0__needle_ok=1), "1 of 0 needles"),
    "no sequences": (broken(entries__0__domains__0__sequences=0), "show nothing"),
    "no domains": (broken(entries__0__domains=[]), "at least one"),
    "no context": (broken(entries__0__context=0), "context is 0"),
    "a vast context": (broken(entries__0__context=1 << 60), "context"),
    "a short digest": (broken(entries__0__family="ab"), "64 hex digits"),
    "no family": (broken(entries__0__family=""), "64 hex digits"),
    "a digest in capitals": (broken(entries__0__artifact="A" * 64), "64 hex digits"),
    "an unknown dtype": (broken(entries__0__kv_dtype="int3"), "use one of bf16"),
    "no profile": (broken(entries__0__profile=""), "profile is empty"),
    "one class above another": (
        broken(thresholds__economy__kl_mean=1e-5),
        "economy asks for more than",
    ),
    "a threshold below 0": (broken(thresholds__safe__kl_p99=-1), "kl_p99 is -1"),
    "a threshold above 1": (broken(thresholds__safe__top1=2), "top1 is 2"),
    "the same twice": (
        msgspec.json.encode({**json.loads(broken()), "entries": [entry(), entry()]}),
        r"entries\[1\] \(int4\) measures what entries\[0\] does",
    ),
    "too many entries": (
        msgspec.json.encode(
            {**json.loads(broken()), "entries": [entry(context=n + 1) for n in range(4097)]}
        ),
        "4097 entries",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_one_message(name: str, tmp_path: Path) -> None:
    data, expected = HOSTILE[name]
    path = tmp_path / "gate.json"
    path.write_bytes(data)
    with pytest.raises(TierKVError, match=expected) as found:
        gate.load(path)
    assert found.value.kind is ErrorKind.INVALID
    assert str(found.value).startswith(f"{path}: ")
    assert len(str(found.value)) < 500 + len(str(path))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TierKVError, match="cannot read the gate file"):
        gate.load(tmp_path / "none.json")
    with pytest.raises(TierKVError, match="cannot read the gate file"):
        gate.load(tmp_path)
    path = tmp_path / "large.json"
    path.write_bytes(b" " * (gate.MAX_FILE_BYTES + 1))
    with pytest.raises(TierKVError, match="is it a gate file"):
        gate.load(path)
