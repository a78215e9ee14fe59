"""`tierkv replay --config`: the figures of a scenario as JSON and for people, and its errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierkv.errors import TierKVError
from tierkv_service import cli

FIELDS = {"requests", "accesses", "block_hit", "prefix_hit", "ttft_s", "ttft_full_prefill_s"}
FIELDS |= {"ttft_infinite_free_s", "by_tier", "by_class", "written_bytes", "quality_loss_mean"}
FIELDS |= {"seconds_per_million_decisions"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Make three turns of four conversations."""
    path = tmp_path / "chat_512tok.jsonl"
    lines = [
        {
            "timestamp": 1000 * (20 * turn + one),
            "input_length": 512 * (turn + 2),
            "output_length": 9,
            "hash_ids": [0, *range(100 * one + 1, 100 * one + turn + 2)],
        }
        for turn in range(3)
        for one in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return path


def output(*arguments: str | Path) -> str:
    done = CliRunner().invoke(cli.app, ["replay", *map(str, arguments)])
    if isinstance(done.exception, TierKVError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_json_has_every_field(trace: Path) -> None:
    result: dict[str, Any] = json.loads(
        output(trace, "--config", "small", "--class", "economy", "--engines", "2", "--json")
    )
    assert set(result) >= FIELDS
    assert (result["policy"], result["fidelity"]) == ("evicpress", "economy")
    assert (result["requests"], result["accesses"]) == (12, 36)
    assert result["prefix_hit"] == (36 - 13) / 36
    assert result["ttft_infinite_free_s"]["mean"] < result["ttft_s"]["mean"]
    assert result["ttft_s"]["mean"] < result["ttft_full_prefill_s"]["mean"]
    assert result["ttft_queued_s"]["mean"] == pytest.approx(result["ttft_s"]["mean"])


def test_clients_may_say_more(trace: Path) -> None:
    """What was asked stands beside what came of it; a future that is known costs nobody time."""
    asked = [str(trace), "--config", "small", "--class", "economy", "--json"]
    told = ["--hints", "closed", "--sensitivity-cv", "0.4", "--kl-floor", "0.001"]
    plain = json.loads(output(*asked))
    result = json.loads(output(*asked, *told))
    assert (plain["hints"], plain["sensitivity_cv"], plain["kl_floor"]) == (None, 0.0, None)
    assert (result["hints"], result["sensitivity_cv"], result["kl_floor"]) == ("closed", 0.4, 0.001)
    assert "economy" not in result["by_class"] or result["by_class"]["economy"] == 0
    assert sum(result["written_bytes"].values()) < sum(plain["written_bytes"].values())
    known = json.loads(output(*asked, "--policy", "clairvoyant"))
    assert known["ttft_s"]["mean"] <= plain["ttft_s"]["mean"]


def test_people_get_a_table(trace: Path) -> None:
    table = output(trace, "--config", "h100-8b", "--policy", "lru@kvtc9")
    assert "time to first token" in table
    assert "with" not in table.split("loads free")[1].split("tokens from")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "small", "--policy", "lru@kvtc36"], "lru@kvtc9"),
        (["--config", "small", "--policy", "fifo"], "evicpress"),
        (["--config", "smal"], "h100-8b, small"),
        (["--blocks", "5", "--hints", "closed"], "go with --config"),
        (["--blocks", "5", "--kl-floor", "0"], "go with --config"),
        (["--config", "small", "--blocks", "5"], "--blocks goes without --config"),
    ],
)
def test_what_is_wrong_is_named(trace: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(TierKVError, match=message):
        output(trace, *arguments)
