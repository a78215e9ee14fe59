"""From what was measured to rows, classes, pairs and the gate file, on numbers made by hand."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from pyarrow import parquet

from tierkv import gate
from tierkv.errors import TierKVError
from tierkv.gate import Gate, Limit, Thresholds
from tierkv.identity import Identity, LayerSpec, Rope
from tierkv_codecs import NO_ARTIFACT
from tierkv_codecs.lab import report, results
from tierkv_codecs.lab.evaluate import KINDS, Results, Suite, Tally
from tierkv_codecs.lab.measures import Predictions
from tierkv_codecs.lab.report import Report

ARTIFACT = bytes(range(32))
IDENTITY = Identity(
    model="m",
    weights="w",
    epoch=3,
    kv_dtype="bf16",
    tokens_per_block=64,
    layers=(LayerSpec(kv_heads=1, k_dim=8, v_dim=8, rope=Rope()),),
)


def tally(profile: str, domain: str, kl: float, *, artifact: bytes = NO_ARTIFACT) -> Tally:
    """Return four sequences of ten tokens, each with this KL."""
    one = Tally(profile, domain, lossy=profile != "raw", artifact=artifact)
    for number in range(4):
        same = np.ones(10)
        one.documents.append(f"document {number}")
        one.predictions.append(Predictions(np.full(10, kl), same, np.full(10, kl / 2), same))
    one.weight.coded_raw, one.weight.coded = 8000, 2500
    one.weight.total_raw, one.weight.total = 10000, 5000
    one.weight.encode_bytes, one.weight.encode_s, one.weight.decode_s = 10**9, 0.5, 0.25
    one.weight.blocks = 8
    one.errors = {kind: [[0.04, 1.0], [0.0, 0.0]] for kind in KINDS}
    return one


def measured() -> Results:
    tallies = [
        tally("raw", "prose", 0.0),
        tally("raw", "code", 0.0),
        tally("int4", "prose", 0.001),
        tally("int4", "code", 0.004),
        tally("nvfp4", "prose", 0.002, artifact=ARTIFACT),
        tally("nvfp4", "code", 0.2, artifact=ARTIFACT),
    ]
    tallies[3].weight.fallbacks["not finite", "lossless"] = 2
    found = {(one.profile, one.domain): one for one in tallies}
    return Results(Suite("own", 4, 256, 10), ("raw", "int4", "nvfp4"), ("prose", "code"), found)


def full(old: Gate) -> Report:
    found = measured()
    entries = results.entries(found, IDENTITY)
    given = results.verdicts(found, entries, old.thresholds)
    return Report(
        about={"model": "m <b>"},
        rows=results.rows(found, given),
        verdicts=given,
        sequences=results.sequences(found),
        layers=results.layers(found),
        pairs=results.pairs(found),
        fallbacks=results.fallbacks(found),
        entries=results.storable(entries),
    )


def test_classes_are_of_the_worst_domain() -> None:
    found = measured()
    entries = results.entries(found, IDENTITY)
    given = results.verdicts(found, entries, Thresholds())
    assert [one.fidelity_class for one in given.values()] == ["exact", "safe", "rejected"]
    assert given["nvfp4"].why == "code: mean KL up to 0.2 > 0.05"
    strict = Thresholds(
        near_lossless=Limit(kl_mean=1e-4, kl_p99=1e-3, top1=0.99),
        safe=Limit(kl_mean=1e-3, kl_p99=1e-3, top1=0.99),
    )
    assert results.verdicts(found, entries, strict)["int4"].fidelity_class == "economy"


def test_rows_by_hand() -> None:
    row = full(Gate()).rows[3]
    assert (row.profile, row.domain, row.fidelity_class) == ("int4", "code", "safe")
    assert (row.ratio_payload, row.ratio_total) == (3.2, 2.0)
    assert (row.encode_gbps, row.decode_gbps) == (2.0, 4.0)
    assert [row.kl_mean, row.kl_lo, row.kl_hi, row.kl_p99] == [pytest.approx(0.004)] * 4
    assert row.dnll == pytest.approx(0.002)
    assert row.top1 == 1.0
    assert (row.fallback, row.fallback_share) == ("lossless", 0.25)
    assert (full(Gate()).rows[2].fallback, full(Gate()).rows[2].fallback_share) == ("", 0.0)


def test_pairs_layers_and_fallbacks() -> None:
    found = full(Gate())
    pairs = {(one.profile, one.reference, one.domain): one for one in found.pairs}
    assert len(pairs) == 4
    assert pairs["int4", "nvfp4", "code"].kl_ratio_hi == pytest.approx(0.02)
    layers = [one for one in found.layers if (one.profile, one.domain) == ("int4", "code")]
    assert [one.key_error for one in layers] == [pytest.approx(0.2), 0.0]
    (fallback,) = found.fallbacks
    assert (fallback.profile, fallback.domain, fallback.share) == ("int4", "code", 0.25)
    assert fallback.fallback == "lossless"


def test_a_calibrated_profile_stands_beside_what_it_must_not_lose_more_than() -> None:
    names = {"kvtc@8x": 0.001, "kvtc@16x": 0.002, "int4": 0.002, "nvfp4": 0.004}
    found = {(name, "prose"): tally(name, "prose", kl) for name, kl in names.items()}
    measured = Results(Suite("own", 4, 256, 10), tuple(names), ("prose",), found)
    (pair,) = results.matches(results.pairs(measured))
    assert (pair.profile, pair.reference, pair.ratio_payload) == ("kvtc@8x", "int4", 3.2)
    assert [pair.kl_ratio, pair.kl_ratio_hi] == [pytest.approx(0.5)] * 2


def test_the_gate_has_what_can_be_stored_and_keeps_what_it_had(tmp_path: Path) -> None:
    old = report.folder(tmp_path / "out")
    assert old == Gate()
    report.write(tmp_path / "out", full(old), old)
    (entry,) = report.folder(tmp_path / "out").entries
    assert (entry.profile, entry.context, entry.artifact) == ("int4", 256, "")
    assert entry.family == IDENTITY.family.hex()
    assert entry.ratio == 3.2
    assert [one.domain for one in entry.domains] == ["prose", "code"]
    thresholds = Thresholds(economy=Limit(kl_mean=0.3, kl_p99=1.0, top1=0.5))
    other = Gate(thresholds=thresholds, entries=(msgspec.structs.replace(entry, context=512),))
    (tmp_path / "out" / "gate.json").write_bytes(gate.dump(other))
    again = report.folder(tmp_path / "out")
    report.write(tmp_path / "out", full(again), again)
    found = gate.load(tmp_path / "out" / "gate.json")
    assert found.thresholds == thresholds
    assert [one.context for one in found.entries] == [512, 256]


def test_files_tell_the_same(tmp_path: Path) -> None:
    told = full(Gate())
    report.write(tmp_path, told, Gate())
    rows = json.loads((tmp_path / "rows.json").read_bytes())
    assert rows == parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    pairs = json.loads((tmp_path / "pairs.json").read_bytes())
    assert pairs == parquet.read_table(tmp_path / "pairs.parquet").to_pylist()
    table = parquet.read_table(tmp_path / "fallbacks.parquet")
    assert table.to_pylist()[0]["reason"] == "not finite"
    assert table.schema.metadata[b"tierkv.model"] == b"m <b>"
    text = (tmp_path / "report.html").read_text()
    assert "m &lt;b&gt;" in text
    assert "25.0%" in text
    assert "<b>" not in text


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierKVError, match="cannot write to"):
        report.folder(tmp_path / "file")
