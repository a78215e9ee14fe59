"""`tierkv replay`: JSON for programs, a table and a plot for people, one line for an error."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests.traces import trace_path
from tierkv.errors import TierKVError
from tierkv.simulation.cascade import MAKES
from tierkv.simulation.scenario import Scenario, read_scenario
from tierkv.simulation.serving import Served, contest, read_workload, serve
from tierkv.simulation.traces import Trace, load
from tierkv_service import cli, replay, sweep
from tierkv_service.replay_plot import draw

FIELDS = {"requests", "accesses", "block_hit", "prefix_hit", "ttft_s", "ttft_full_prefill_s"}
FIELDS |= {"ttft_infinite_free_s", "by_tier", "by_class", "written_bytes", "quality_loss_mean"}
FIELDS |= {"seconds_per_million_decisions"}


def output(*arguments: str | Path) -> str:
    done = CliRunner().invoke(cli.app, ["replay", *map(str, arguments)])
    if isinstance(done.exception, TierKVError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def found(*arguments: str | Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(output(*arguments, "--json"))
    return result


def test_json_has_every_field() -> None:
    result = found(trace_path("taubench"), "--blocks", "16")
    assert set(result) >= FIELDS
    assert (result["requests"], result["accesses"]) == (471, 1448)
    assert result["block_hit"] == 1020 / 1448
    assert result["by_tier"] == {"host": 1020 / 1448}
    assert result["by_class"] == {"exact": 1020 / 1448, "computed": 1 - 1020 / 1448}
    assert result["prefix_hit"] == 1095 / 1448
    assert result["ttft_s"] is result["ttft_full_prefill_s"] is result["ttft_infinite_free_s"]
    assert result["ttft_s"] is None
    assert result["quality_loss_mean"] == 0
    block = 64 * sweep.BYTES_PER_TOKEN
    assert result["capacity_bytes"] == {"host": 16 * block}
    assert result["written_bytes"] == {"host": (1448 - 1020) * block}
    assert 0 < result["seconds_per_million_decisions"] < 1000


def test_what_is_measured_alone_differs_between_runs() -> None:
    runs = [found(trace_path("sharegpt300"), "--blocks", "700") for _ in range(2)]
    for run in runs:
        del run["seconds_per_million_decisions"]
    assert runs[0] == runs[1]


def test_a_policy_is_chosen_by_name() -> None:
    result = found(trace_path("taubench"), "--blocks", "16", "--policy", "belady")
    assert result["policy"] == "belady"
    assert result["block_hit"] == pytest.approx(0.7700, abs=1e-4)


@pytest.mark.parametrize("policy", ["evicpress", "lru@int8", "gdsf"])
def test_a_policy_over_a_scenario_is_chosen_by_name(policy: str) -> None:
    result = found(trace_path("taubench"), "--config", "small", "--policy", policy)
    assert set(result) >= FIELDS
    assert result["policy"] == policy
    assert 0 < result["ttft_s"]["mean"] < result["ttft_full_prefill_s"]["mean"]


def test_blocks_are_regrouped() -> None:
    result = found(trace_path("miniswe"), "--blocks", "9999", "--block-tokens", "256")
    accesses = load(Trace(trace_path("miniswe"), tokens=256))
    assert result["accesses"] == len(accesses.ids) < 37_984 / 4
    assert result["block_hit"] == 1 - accesses.distinct / len(accesses.ids)


def test_a_table_for_people() -> None:
    text = output(trace_path("taubench"), "--blocks", "16")
    for part in "through lru", "5.0% of distinct", "70.44%", "75.62%", "77.69%", "128.0 MiB":
        assert part in text


def test_a_plot_is_the_same_twice(tmp_path: Path) -> None:
    for name in "a.png", "b.png":
        assert output(trace_path("taubench"), "--plot", tmp_path / name) == ""
    image = (tmp_path / "a.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert image == (tmp_path / "b.png").read_bytes()


def test_the_curves_of_a_plot_rise_to_the_ideal_under_the_bound() -> None:
    accesses = load(Trace(trace_path("taubench")))
    *curves, bound = sweep.sweep_blocks(accesses, 1000, replay.watched).curves
    assert bound.bound
    assert [curve.name for curve in curves] == list(sweep.POLICIES)
    for curve in curves:
        assert curve.capacity_bytes[-1] == 323 * 1000
        assert curve.values[-1] == bound.values[-1] == 100 * 1125 / 1448
        # Counted on arrival, a cache smaller than a prompt may pass the bound by a hair.
        assert all(
            mine <= best + 0.5 for mine, best in zip(curve.values, bound.values, strict=True)
        )


def test_the_sweep_of_a_scenario_has_every_policy_over_its_bounds() -> None:
    trace = Trace(trace_path("miniswe"))
    workload, small = read_workload(trace), read_scenario("small")
    tiers = [msgspec.structs.replace(tier, gib=tier.gib / 64) for tier in small.tier]
    scenario = msgspec.structs.replace(small, tier=tiers)

    def serve_over(each: Scenario, policy: str) -> Served:
        chosen = contest(each, policy, "safe", workload, 0)
        return serve(workload, each, "safe", chosen)

    times, hits = sweep.sweep_tiers(
        load(trace), trace.tokens_per_block, scenario, "safe", serve_over, replay.watched
    )
    names = [curve.name for curve in times.curves[:-1]]
    assert names == [curve.name for curve in hits.curves[:-1]]
    assert {name.partition("@")[0] for name in names} == {"lru", "evicpress", *MAKES}
    for curve in times.curves:
        assert curve.capacity_bytes == [int(each * (16 << 30) / 64) for each in sweep.TIMES]
        assert all(
            mine >= least for mine, least in zip(curve.values, times.curves[-1].values, strict=True)
        )
        assert curve.values[-1] <= curve.values[0]
    for curve in hits.curves:
        assert all(
            mine <= most + 0.5
            for mine, most in zip(curve.values, hits.curves[-1].values, strict=True)
        )
    assert draw("both", [times, hits]).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--blocks N"),
        (("--blocks", "0"), "at least one block"),
        (("--blocks", "5", "--policy", "mru"), "'mru' is not known; use one of lru"),
        (("--blocks", "5", "--block-tokens", "100"), "multiple"),
        (("--plot", os.devnull + "/none/a.png"), "no such folder"),
        (("--blocks", "5", "--plot", "a.png"), "without --plot"),
        (("--blocks", "5", "--config", "small"), "without --config"),
        (("--config", "small", "--plot", os.devnull + "/none/a.png"), "no such folder"),
    ],
)
def test_what_the_caller_must_change_is_said(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(TierKVError, match=says):
        output(trace_path("taubench"), *arguments)
