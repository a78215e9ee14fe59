"""The pure parts of the demo's engine on vLLM; `make demo ENGINE=vllm` runs the whole of it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tierkv.errors import TierKVError
from tierkv_connectors.vllm.kept import options_of
from tierkv_service.demo_vllm import (
    NEEDED,
    OWN,
    PACKAGES,
    block_bytes,
    by_hand,
    command,
    environment,
    find,
    request,
    sources_of,
    tokens_of,
)

ROOT = Path(__file__).parents[2]
ROOTS = (str(ROOT), str(ROOT / "codecs"), str(ROOT / "connectors"))

METRICS = """\
# HELP vllm:prompt_tokens_cached_by_source_total Cached prompt tokens by source.
# TYPE vllm:prompt_tokens_cached_by_source_total counter
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="smollm2",source="device"} 32.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="smollm2",source="host"} 2816.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="smollm2",source="disk"} 1.28e+03
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="smollm2",source="p2p"} 0.0
vllm:prompt_tokens_cached_by_source_created{engine="0",model_name="smollm2",source="host"} 1.7e+09
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 2816.0
"""


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_command_has_a_connector_that_knows_its_options() -> None:
    words = command("python", "model dir", 8123, "folder/one.sock")
    assert words[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert option(words, "--port") == "8123"
    assert option(words, "--model") == "model dir"
    assert option(words, "--dtype") == "float32"
    transfer = json.loads(option(words, "--kv-transfer-config"))
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert options_of(transfer["kv_connector_extra_config"]).socket == "folder/one.sock"


def test_the_lines_by_hand_are_what_the_demo_does() -> None:
    serve, server, curl = map(shlex.split, by_hand("python", "it's a model", 8000))
    assert serve == ["tierkv", "serve"]
    assert server[:2] == ["env", f"PYTHONPATH={':'.join(ROOTS)}"]
    assert server[server.index("python") :] == command("python", "it's a model", 8000)
    assert "kv_connector_extra_config" not in option(server, "--kv-transfer-config")
    assert json.loads(option(curl, "-d")) == request("PROMPT", 24)
    assert "http://127.0.0.1:8000/v1/completions" in curl


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        (b'data: {"id":"1","choices":[{"index":0,"text":"a b","token_ids":[5,6]}]}\n', [5, 6]),
        (b'data: {"choices":[{"text":"","token_ids":null,"finish_reason":"stop"}]}\r\n', []),
        (b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n', []),
        (b"data: [DONE]\n", []),
        (b"\n", []),
        (b": a comment\n", []),
    ],
)
def test_a_line_of_a_stream(line: bytes, tokens: list[int]) -> None:
    assert tokens_of(line) == tokens


def test_an_error_in_a_stream_is_raised() -> None:
    with pytest.raises(TierKVError, match="out of memory"):
        tokens_of(b'data: {"error":{"message":"out of memory","code":500}}\n')


def test_sources_have_the_names_of_tiers() -> None:
    found = sources_of(METRICS)
    assert +found == {OWN: 32, "host": 2816, "nvme": 1280}
    assert found - sources_of(METRICS.replace("2816.0", "2560.0")) == {"host": 256}


def test_the_size_of_a_block() -> None:
    config = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}
    assert block_bytes(config) == 128 * 46080


def test_the_server_finds_tierkv_and_nothing_else_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "theirs")
    environment(tmp_path)
    first, *more = environment(tmp_path)["PYTHONPATH"].split(":")
    assert more == ["theirs"]
    assert {path.name for path in Path(first).iterdir()} == set(PACKAGES)
    assert (Path(first) / "tierkv_connectors" / "vllm" / "connector.py").is_file()


def fake_python(path: Path, missing: str) -> str:
    path.write_text(f"#!/bin/sh\necho {missing}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_with_all_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(tmp_path / "python", "")
    monkeypatch.chdir(tmp_path)
    assert find("./python") == str(tmp_path / "python"), "engines have another working directory"


@pytest.mark.parametrize(
    ("missing", "says"), [("vllm xxhash", "make vllm"), ("xxhash", "tierkv needs xxhash")]
)
def test_a_python_without_says_what_to_do(tmp_path: Path, missing: str, says: str) -> None:
    with pytest.raises(TierKVError, match=says):
        find(fake_python(tmp_path / "python", missing))


def test_a_python_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TierKVError, match=r"no program.*make vllm"):
        find(str(tmp_path / "none"))


def test_the_look_for_packages_is_a_real_one() -> None:
    with pytest.raises(TierKVError) as caught:
        find(sys.executable)
    assert str(caught.value).startswith(f"{sys.executable} has no vLLM"), NEEDED


def test_the_command_line_says_so_in_one_line() -> None:
    program = "from tierkv_service.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "demo", "--engine", "vllm"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "make vllm" in line
