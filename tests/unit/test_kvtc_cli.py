"""`tierkv calibrate` from a model directory to an artifact, and `tierkv eval` with it."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.lab_models import LAYERS, tiny_llama
from tierkv.errors import TierKVError
from tierkv_codecs.kvtc_artifact import read
from tierkv_codecs.lab.evaluate import SUITES, Suite
from tierkv_connectors import calibration
from tierkv_connectors.calibration import CalibrationSubject, capture, part_of, sequences_of
from tierkv_service import cli
from tierkv_service.calibrate import in_lines

RATIOS = (8.0, 4.0)
STAGES = ["reading", "basis", "errors", "plan"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("out") / "tiny.kvtc"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "CONTEXT", 192)
        patch.setattr(calibration, "CONTINUATION", 32)
        call = ["calibrate", "--model", str(model), "--out", str(out), "--tokens", "4000"]
        done = CliRunner().invoke(cli.app, [*call, "--ratios", "4,8"])
    assert done.exit_code == 0, done.output
    lines = done.stderr.splitlines()
    assert [stage for stage in STAGES if f"{stage} 100%" in lines] == STAGES, "off a terminal, too"
    return out, done.output


def test_the_artifact_is_of_this_model_and_says_what_it_is(
    model: Path, made: tuple[Path, str]
) -> None:
    path, said = made
    artifact, subject = read(path), CalibrationSubject(model)
    artifact.check(subject.identity, part_of(subject.identity))
    assert artifact.header.ratios == RATIOS
    assert len(artifact.header.layers) == LAYERS
    assert artifact.header.tokens >= 3900
    assert f"{path.stat().st_size / 1e6:.1f} MB" in said.replace("\n", "")
    assert artifact.digest.hex()[:16] in said
    assert not path.with_name(path.name + ".new").exists()


def test_its_profiles_are_evaluated(
    model: Path, made: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SUITES, "quick", Suite("quick", 4, continuation=24))
    call = ["eval", "--model", str(model), "--out", str(tmp_path / "quality"), "--json"]
    call += ["--artifact", str(made[0]), "--profiles", "kvtc@8x,kvtc@4x"]
    done = CliRunner().invoke(cli.app, [*call, "--tokens-per-block", "64", "--context", "256"])
    assert done.exit_code == 0, done.output
    rows = [row for row in json.loads(done.stdout) if row["domain"] == "prose"]
    assert [row["profile"] for row in rows] == ["kvtc@8x", "kvtc@4x"]
    assert rows[0]["ratio_payload"] > rows[1]["ratio_payload"] > 3


def test_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Ticks(), list[str]()
    monkeypatch.setattr("tierkv_service.calibrate.time", clock)
    on_step = in_lines(told.append)
    for step in range(101):
        clock.now = step / 10
        on_step("reading", step / 100)
    on_step("basis", 0.5)
    assert told == ["reading   0%", "reading  50%", "reading 100%", "basis  50%"]


class Ticks:
    """A clock that stands in for the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_another_models_artifact_is_refused(made: tuple[Path, str], tmp_path: Path) -> None:
    other = tiny_llama(tmp_path, seed=2)
    call = ["eval", "--model", str(other), "--out", str(tmp_path / "quality")]
    done = CliRunner().invoke(cli.app, [*call, "--artifact", str(made[0])])
    assert isinstance(done.exception, TierKVError)
    assert "the artifact was calibrated for" in str(done.exception)


def test_gradients_say_how_the_likelihood_moves(model: Path) -> None:
    subject = CalibrationSubject(model)
    ids = torch.tensor(subject.tokens("What one token changes, others feel. " * 4))[None]
    kv, rest = subject.prefill(ids[:, :64]), ids[:, 64:80]
    slopes = subject.gradients(kv, rest, torch.Generator().manual_seed(3))
    drawn_by = torch.Generator().manual_seed(3)
    before = subject.proceed(kv, rest)[0].log_softmax(-1)
    drawn = torch.multinomial(before.exp(), 1, generator=drawn_by)
    step = 1e-2
    moved = [
        layer._replace(values=layer.values + step * slope.values / (slope.values.norm() + 1e-12))
        for layer, slope in zip(kv, slopes, strict=True)
    ]
    after = subject.proceed(moved, rest)[0].log_softmax(-1)
    gained = float((after - before).gather(1, drawn).sum())
    expected = step * sum(float(slope.values.norm()) for slope in slopes)
    assert gained == pytest.approx(expected, rel=0.05)


def test_capture_holds_out_whole_sequences(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "CONTEXT", 48)
    monkeypatch.setattr(calibration, "CONTINUATION", 16)
    subject = CalibrationSubject(model)
    sequences = sequences_of([subject.tokens("Some text to read. " * 60)], 400)
    rows = capture(subject, sequences, lambda _name, _share: None)
    per = 48 - 4
    assert len(rows.keys) == len(rows.held) == len(sequences) * per
    assert rows.held.view(-1, per).float().mean(1).tolist() == [
        float(number % 8 == 7) for number in range(len(sequences))
    ]
    for metric in rows.metrics:
        assert torch.linalg.eigvalsh(metric.double()).min() > -1e-9


def test_too_little_text_is_refused() -> None:
    with pytest.raises(TierKVError, match="give longer or more files"):
        sequences_of([list(range(3000))], 10_000)


def test_where_nothing_can_be_written_is_said_at_once(tmp_path: Path) -> None:
    """Not after the minutes that a calibration takes; nothing was read yet."""
    call = ["calibrate", "--model", str(tmp_path / "none"), "--out", "/proc/of-ours.kvtc"]
    done = CliRunner().invoke(cli.app, call)
    assert isinstance(done.exception, TierKVError)
    assert "cannot write /proc/of-ours.kvtc" in str(done.exception)
