"""What tests of real engines share: the end of an engine's log, and what vLLM says without one."""

import json
import os
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_engine import STARTED, environment, needs_vllm, python

PROGRAM = Path(__file__).with_name("vllm_facts.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the log: what goes wrong in a real vLLM is usually said there."""
    report = yield
    if report.failed and STARTED:
        report.sections.append(("end of vLLM's log", STARTED[-1].said()))
    return report


@pytest.fixture(scope="session")
def vllm_says(model_dir: Path) -> Callable[[str], Any]:
    """Return what gives the answer to a question of `vllm_facts`; importing vLLM takes long."""
    needs_vllm()
    done = subprocess.run(
        [python(), PROGRAM, model_dir], env=os.environ | environment(), capture_output=True,
        text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])

    def answer(question: str) -> Any:
        assert "error" not in found[question], found[question]["error"]
        return found[question]["answer"]

    return answer
