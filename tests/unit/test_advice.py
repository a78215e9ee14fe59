"""Advice against the arithmetic of the specification."""

import pytest
from typer.testing import CliRunner

from tierkv.simulation.advice import RUN_TOKENS, break_even, worth
from tierkv.simulation.scenario import read_scenario
from tierkv_service import cli


def test_break_even_falls_with_the_position() -> None:
    points = break_even(read_scenario("h100-8b"))
    assert points[0].raw_bps == pytest.approx(131072 / (32e-6 + 1.05e-9 * RUN_TOKENS / 2))
    assert [point.raw_bps for point in points] == sorted(
        (point.raw_bps for point in points), reverse=True
    )


def test_raw_never_pays_from_redis_near_a_head_and_kvtc_does() -> None:
    found = {(one.tier, one.form): one for one in worth(read_scenario("h100-8b"), "safe", 0)}
    raw, kvtc = found["redis", "raw"], found["redis", "kvtc9"]
    assert raw.saved_s < 0
    assert raw.saved_s_per_gib == 0
    assert kvtc.saved_s > 0
    per_token = 131072 * (1 / (9 * 2.5e9) + 1 / 40e9)
    tokens = kvtc.least_tokens
    assert tokens is not None
    recompute = read_scenario("h100-8b").recompute
    assert recompute.seconds(tokens, 0) >= 2e-3 + tokens * per_token
    assert recompute.seconds(tokens - 1, 0) < 2e-3 + (tokens - 1) * per_token
    assert found["host", "int8"].load_s < found["host", "raw"].load_s < found["nvme", "raw"].load_s
    assert found["host", "kvtc9"].saved_s_per_gib > 8 * found["host", "raw"].saved_s_per_gib


def test_the_command_prints_both_tables() -> None:
    done = CliRunner().invoke(cli.app, ["advise", "--scenario", "small", "--class", "economy"])
    assert done.exit_code == 0, done.output
    assert "loading pays above" in done.stdout
    assert "kvtc36" in done.stdout
    assert "redis" not in done.stdout
