"""Calibration: what it refuses, that it fits text like its own, and the command's own checks."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.kvtc_rigs import FEATURES, RATIOS, artifact, calibration_rows, header
from tierkv.errors import TierKVError
from tierkv_codecs import kvtc_basis, kvtc_calibrate
from tierkv_codecs.kvtc_basis import fit, weighted, weights
from tierkv_codecs.kvtc_calibrate import calibrate
from tierkv_codecs.kvtc_rans import NONE
from tierkv_service import cli


def test_budgets_are_kept_and_used() -> None:
    for ratio, realised in zip(RATIOS, artifact().header.realised, strict=True):
        assert ratio * kvtc_calibrate.HEADROOM <= realised < 1.03 * ratio * kvtc_calibrate.HEADROOM


def test_levels_nest_and_errors_fall() -> None:
    for side in artifact().sides:
        assert (side.shifts[1:] <= side.shifts[:-1]).all()
        assert (side.shifts[-1] < NONE).any()
    errors = torch.tensor(artifact().header.errors)
    assert (errors[1:] < errors[:-1]).all()


def test_too_few_rows_are_refused() -> None:
    rows = calibration_rows(1, 64)
    with pytest.raises(TierKVError, match="at least 256 tokens"):
        calibrate(rows, header(), lambda _name, _share: None)


def test_weights_are_roots_of_the_metric_and_their_inverses() -> None:
    metric = calibration_rows(1, 8).metrics[0]
    weight, unweight = weights(metric)
    identity = torch.eye(metric.shape[1]).expand_as(metric)
    torch.testing.assert_close(weight @ unweight, identity, rtol=0, atol=1e-3)
    ridge = (weight @ weight - metric).diagonal(dim1=1, dim2=2)
    assert (ridge > 0).all()
    assert (ridge < 0.2 * metric.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) + 0.1).all()


def test_the_randomised_basis_spans_what_the_exact_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = calibration_rows(4)
    exact = fit(rows.keys, rows.metrics[0], rows.held, lambda _share: None)
    monkeypatch.setattr(kvtc_basis, "SMALL", FEATURES - 1)
    found = fit(rows.keys, rows.metrics[0], rows.held, lambda _share: None)
    torch.testing.assert_close(found.variances[:24], exact.variances[:24], rtol=0.01, atol=0)
    features = weighted(rows.keys[~rows.held], exact.mean, exact.weight)
    energy = [(features @ basis.vectors[:, :24]).square().sum() for basis in (exact, found)]
    assert float(energy[1]) == pytest.approx(float(energy[0]), rel=1e-3)


def test_another_metric_moves_the_error_where_it_is_cheap() -> None:
    rows = calibration_rows()
    cheap = torch.eye(16).expand(8, 16, 16).clone()
    cheap[0] *= 1e-6
    plain = fit(rows.values, torch.eye(16).expand(8, 16, 16), rows.held, lambda _share: None)
    bent = fit(rows.values, cheap, rows.held, lambda _share: None)
    first = slice(0, 16)
    lost = []
    for basis in (plain, bent):
        features = weighted(rows.values[rows.held], basis.mean, basis.weight)
        some = basis.vectors[:, :20]
        residual = (features - features @ some @ some.T).view(-1, 8, 16)
        back = torch.einsum("nbi,bij->nbj", residual, basis.unweight).flatten(1)
        lost.append(float(back[:, first].square().mean()))
    assert lost[1] > 1.3 * lost[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ratios", "4,x"], "--ratios '4,x' is not a list"),
        (["--ratios", "1"], "ratios from 2 to 128"),
        (["--text", "no-such-file"], "cannot read no-such-file as UTF-8"),
        ([], "is no model directory"),
    ],
)
def test_the_command_says_what_to_change(arguments: list[str], said: str, tmp_path: Path) -> None:
    out = tmp_path / "model.kvtc"
    call = ["calibrate", "--model", str(tmp_path), "--out", str(out), *arguments]
    found = CliRunner().invoke(cli.app, call)
    assert isinstance(found.exception, TierKVError)
    assert said in str(found.exception)
    assert not out.exists()
