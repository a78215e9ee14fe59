"""vLLM's own attention writes KV, and our layout finds it: run by the Python of a vLLM, if any."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = Path("~/.cache/tierkv/vllm-0.32.0/bin/python").expanduser()
CASES = [f"{dtype} {tokens}" for dtype in ("float32", "bfloat16") for tokens in (32, 128)]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    if not PYTHON.exists():
        pytest.skip(f"vLLM is not installed: there is no {PYTHON}")
    roots = (".", "codecs", "connectors", "service")
    path = os.pathsep.join(str(REPOSITORY / root) for root in roots)
    done = subprocess.run(
        [PYTHON, REPOSITORY / "tests/engines/vllm_layout.py"],
        env=os.environ | {"PYTHONPATH": path, "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    sys.stderr.write(done.stderr)
    assert done.returncode == 0
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_layout_holds(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "holds"


@pytest.mark.parametrize("wrong", ["K and V swapped", "K not transposed"])
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_layout_is_seen(outcomes: dict[str, str], case: str, wrong: str) -> None:
    reason = outcomes[f"{case} {wrong}"]
    assert reason == "keys of model.layers.0.self_attn.attn are not where we look"
