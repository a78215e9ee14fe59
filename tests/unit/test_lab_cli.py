"""`tierkv eval` from a model directory to its files, on a model that is made in a second."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.lab_models import LAYERS, tiny_gemma, tiny_llama
from tierkv import gate
from tierkv.errors import TierKVError
from tierkv_codecs.lab.evaluate import SUITES, Suite
from tierkv_codecs.lab.results import Row
from tierkv_service import cli
from tierkv_service import evaluate as command

PROFILES = "raw,lossless,int4-token-g64,nvfp4"
FIELDS = [
    "profile", "domain", "ratio_payload", "ratio_total", "kl_mean", "kl_lo", "kl_hi", "kl_p99",
    "top1", "dnll", "needle_ok", "needle_n", "encode_gbps", "decode_gbps", "fidelity_class",
    "fallback", "fallback_share",
]  # fmt: skip
DOMAINS = ["prose", "code", "spanish", "mine", "needle"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def small_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "quick", Suite("quick", 4, continuation=24))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["eval", *map(str, arguments)])


@pytest.fixture(scope="module")
def evaluated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("out")
    text = folder / "mine.txt"
    text.write_text("Of my own, that nobody else has read so far. " * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SUITES, "quick", Suite("quick", 4, continuation=24))
        done = run(
            "--model", model, "--out", folder / "quality", "--profiles", PROFILES,
            "--text", f"mine={text}", "--tokens-per-block", 64, "--context", 256, "--json",
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    return folder / "quality", json.loads(done.stdout)


def test_rows_have_exactly_these_fields(evaluated: tuple[Path, list[Any]]) -> None:
    folder, rows = evaluated
    assert [list(row) for row in rows] == [FIELDS] * 4 * len(DOMAINS)
    assert [(row["profile"], row["domain"]) for row in rows] == [
        (profile, domain) for profile in PROFILES.split(",") for domain in DOMAINS
    ]
    assert json.loads((folder / "rows.json").read_bytes()) == rows


def test_rows_say_what_was_done(evaluated: tuple[Path, list[Any]]) -> None:
    rows = {(row["profile"], row["domain"]): row for row in evaluated[1]}
    for domain in DOMAINS:
        exact, lossless = rows["raw", domain], rows["lossless", domain]
        for row in (exact, lossless):
            assert row["kl_mean"] == row["kl_hi"] == row["kl_p99"] == row["dnll"] == 0.0
            assert row["top1"] == 1.0
            assert row["fidelity_class"] == "exact"
        # All 4 blocks of 64 tokens are coded; a header has 256 bytes.
        raw_block = LAYERS * 2 * 64 * 2 * 32 * 2
        assert exact["ratio_payload"] == pytest.approx(
            (4 * 64 - 4) * raw_block / 64 / (4 * 64 * raw_block / 64 + 4 * 256 - 4 * raw_block / 64)
        )
        lossy = rows["int4-token-g64", domain]
        # Heads of 32 channels: groups of 32, so 4 bits and 32 bits of ends for each group.
        assert lossy["ratio_payload"] == pytest.approx(3.2, rel=0.03)
        assert 1 < lossy["ratio_total"] < lossy["ratio_payload"]
        assert 0 < lossy["kl_lo"] <= lossy["kl_mean"] <= lossy["kl_hi"]
        assert lossy["kl_p99"] > lossy["kl_mean"]
        assert min(row["encode_gbps"], row["decode_gbps"]) > 0
    assert rows["int4-token-g64", "prose"]["kl_mean"] < rows["nvfp4", "prose"]["kl_mean"] * 3


def test_every_file_is_there(evaluated: tuple[Path, list[Any]]) -> None:
    folder, rows = evaluated
    assert {path.name for path in folder.iterdir()} == {
        "rows.json", "pairs.json", "rows.parquet", "sequences.parquet", "layers.parquet",
        "pairs.parquet", "report.html", "gate.json", *(f"kl-{domain}.png" for domain in DOMAINS),
    }  # fmt: skip
    assert parquet.read_table(folder / "rows.parquet").to_pylist() == rows
    sequences = parquet.read_table(folder / "sequences.parquet").to_pylist()
    assert len(sequences) == 4 * 4 * len(DOMAINS)
    mine = [
        row["kl_mean"]
        for row in sequences
        if (row["profile"], row["domain"]) == ("int4-token-g64", "code")
    ]
    total = next(r for r in rows if (r["profile"], r["domain"]) == ("int4-token-g64", "code"))
    assert sum(mine) / 4 == pytest.approx(total["kl_mean"])
    pairs = parquet.read_table(folder / "pairs.parquet").to_pylist()
    assert {(pair["profile"], pair["reference"]) for pair in pairs} == {
        ("int4-token-g64", "nvfp4"),
        ("nvfp4", "int4-token-g64"),
    }
    layers = parquet.read_table(folder / "layers.parquet").to_pylist()
    assert {row["layer"] for row in layers} == set(range(LAYERS))
    lossy = [row for row in layers if row["profile"] == "int4-token-g64"]
    assert all(0 < row["key_error"] < 0.2 for row in lossy)
    assert all(0 < row["attention_error"] < 0.5 for row in lossy)
    for domain in DOMAINS:
        assert (folder / f"kl-{domain}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_nothing_else(evaluated: tuple[Path, list[Any]]) -> None:
    text = (evaluated[0] / "report.html").read_text()
    for part in ("int4-token-g64", "spanish", "data:image/png;base64,", "KL against KL"):
        assert part in text
    assert "http:" not in text
    assert "https:" not in text
    assert 'src="kl' not in text


def test_yardsticks_never_reach_a_gate(evaluated: tuple[Path, list[Any]]) -> None:
    assert gate.load(evaluated[0] / "gate.json").entries == ()


def test_tables_for_people(evaluated: tuple[Path, list[Any]], model: Path, tmp_path: Path) -> None:
    done = run(
        "--model", model, "--out", tmp_path, "--profiles", "int4-token-g64", "--context", 256
    )
    assert done.exit_code == 0, done.output
    assert "what stands against a better one" in done.output
    assert "gate.json" in done.output


def test_profiles_of_an_artifact(model: Path, tmp_path: Path) -> None:
    artifact, out = tmp_path / "a.kvtc", tmp_path / "out"
    asked = ["--model", model, "--out", artifact, "--tokens", 2048, "--ratios", "4,8"]
    done = CliRunner().invoke(cli.app, ["calibrate", *map(str, asked)])
    assert done.exit_code == 0, done.output
    named = ("--artifact", artifact, "--profiles", "kvtc@8x", "--context", 256)
    done = run("--model", model, "--out", out, *named)
    assert done.exit_code == 0, done.output
    assert "[store] gate" in done.output
    (entry,) = gate.load(out / "gate.json").entries
    digest = hashlib.sha256(artifact.read_bytes()).hexdigest()
    assert (entry.profile, entry.artifact) == ("kvtc@8x", digest)
    assert digest in (out / "report.html").read_text()
    other = tiny_llama(tmp_path / "other", seed=1)
    done = run("--model", other, "--out", out, *named)
    assert "was calibrated for" in str(done.exception)


def test_a_model_of_sliding_windows_is_gated_and_kvtc_says_why_not(tmp_path: Path) -> None:
    """A Gemma 3 but for its size: one KV head of 256, two RoPE bases, five windows to one."""
    folder, out = tiny_gemma(tmp_path / "model", layers=6, head_dim=256), tmp_path / "out"
    call = ["calibrate", "--model", folder, "--out", tmp_path / "a.kvtc", "--tokens", 2048]
    done = CliRunner().invoke(cli.app, [*map(str, call)])
    assert isinstance(done.exception, TierKVError)
    assert "gemma3_text has 2 KV groups" in str(done.exception)
    assert "use int8 or int4 for this one" in str(done.exception)
    assert not (tmp_path / "a.kvtc").exists()
    named = ("--profiles", "lossless,int8,int4", "--context", 256, "--tokens-per-block", 64)
    done = run("--model", folder, "--out", out, "--json", *named)
    assert done.exit_code == 0, done.output
    rows = {row["profile"]: row for row in json.loads(done.stdout) if row["domain"] == "prose"}
    assert rows["lossless"]["kl_mean"] == 0
    assert 0 < rows["int8"]["kl_mean"] < rows["int4"]["kl_mean"]
    assert rows["int4"]["ratio_payload"] > 3
    assert rows["int4"]["fallback"] == "", "its RoPE is known, layer by layer"
    entries = gate.load(out / "gate.json").entries
    assert [entry.profile for entry in entries] == ["int8", "int4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suite", "slow"), "use one of quick, full"),
        (("--profiles", "int5"), "codec 'int5' is not known; use one of"),
        (("--text", "nofile"), "is not NAME=FILE"),
        (("--text", "a=/nowhere/b.txt"), "cannot read /nowhere/b.txt"),
        (("--text", "needle=@"), "'needle' is the lab's"),
        (("--text", "short=@"), "give longer or more texts"),
        (("--kv-dtype", "int3"), "use one of bf16"),
        (("--tokens-per-block", "100"), "no multiple of 100"),
        (
            ("--context", "128", "--tail", "128"),
            "before its exact tail of 128",
        ),
        (("--tail", "-1"), "exact tail of -1"),
    ],
)
def test_what_is_wrong_is_said(
    model: Path, tmp_path: Path, arguments: tuple[str, str], message: str
) -> None:
    (tmp_path / "short.txt").write_text("too short")
    filled = [one.replace("@", str(tmp_path / "short.txt")) for one in arguments]
    done = run("--model", model, "--out", tmp_path / "out", "--context", 256, *filled)
    assert isinstance(done.exception, TierKVError)
    assert message in str(done.exception)


def test_no_model(tmp_path: Path) -> None:
    done = run("--model", tmp_path, "--out", tmp_path / "out")
    assert "no model directory" in str(done.exception)
    file = tmp_path / "file"
    file.touch()
    assert "cannot write" in str(run("--model", tmp_path, "--out", file).exception)


def test_a_gate_that_cannot_be_read_stops_it_before_any_work(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    path.write_text("{}")
    done = run("--model", tmp_path, "--out", tmp_path)
    assert str(done.exception).startswith(str(path))


def test_a_table_fits_a_terminal(evaluated: tuple[Path, list[Any]]) -> None:
    text = io.StringIO()
    rows = [Row(**row) for row in evaluated[1]]
    Console(file=text, width=120).print(command._rows(rows))
    assert all(len(line) <= 120 for line in text.getvalue().splitlines())
    assert "int4-token-g64" in text.getvalue()
