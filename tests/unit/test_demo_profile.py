"""The demo's lossy profile on a tiny model: made and measured once, kept, and refused clearly."""

from pathlib import Path

import pytest

from tests.lab_models import tiny_llama
from tierkv import gate
from tierkv.errors import ErrorKind, TierKVError
from tierkv.fidelity import Fidelity
from tierkv.gate import Gate, Limit, Thresholds
from tierkv_codecs.lab.evaluate import Suite
from tierkv_codecs.lab.report import GATE
from tierkv_connectors import calibration
from tierkv_service.demo_profile import ARTIFACT, Amount, Lossy, prepare

SUITE = Suite("tiny", 2, context=256, continuation=24, tail=0)


LENIENT = Thresholds(economy=Limit(kl_mean=9.0, kl_p99=99.0, top1=0.0))
"""Random weights lose more by 4x than the usual limits allow."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(calibration, "CONTEXT", 192)
    monkeypatch.setattr(calibration, "CONTINUATION", 32)
    return tiny_llama(tmp_path / "model")


def made(model: Path, name: str) -> tuple[Lossy, list[str]]:
    lines: list[str] = []
    return prepare(model, name, lines.append, Amount(1600, SUITE)), lines


def test_it_is_calibrated_and_measured_once(model: Path) -> None:
    folder = model.with_name("model-tiny")
    folder.mkdir()
    (folder / GATE).write_bytes(gate.dump(Gate(thresholds=LENIENT)))
    lossy, lines = made(model, "kvtc@4x")
    assert (lossy.profile, lossy.artifact) == ("kvtc@4x", str(folder / ARTIFACT))
    assert (lossy.gate, lossy.fidelity, lossy.limit) == (str(folder / GATE), Fidelity.ECONOMY, 9.0)
    assert 0 < lossy.kl < lossy.limit
    told = " ".join(lines)
    for part in ("calibrating model, once", "reading 100%", "plan 100%", "measuring what kvtc@4x"):
        assert part in told
    assert made(model, "kvtc@4x") == (lossy, []), "what is kept is taken"
    path = folder / ARTIFACT
    path.write_bytes(path.read_bytes()[:-1])
    again, lines = made(model, "kvtc@4x")
    assert "is of no use any more" in lines[0]
    assert "calibrating model, once" in lines[1]
    assert again.kl == lossy.kl, "the same text gives the same artifact"


def test_what_the_gate_rejects_is_refused_in_one_message(model: Path) -> None:
    for turn in (0, 1):
        lines: list[str] = []
        with pytest.raises(TierKVError, match=r"rejects kvtc@4x .*KL up to .*try int8") as refused:
            prepare(model, "kvtc@4x", lines.append, Amount(1600, SUITE))
        assert refused.value.kind is ErrorKind.INVALID
        assert bool(lines) == (turn == 0), "nothing is measured again"
    lossy, lines = made(model, "int8")
    assert not lossy.artifact
    assert lossy.fidelity is not Fidelity.EXACT
    assert "calibrating" not in " ".join(lines)
