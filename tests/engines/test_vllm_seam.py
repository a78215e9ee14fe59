"""What the sides of the connector tell each other, in vLLM's own classes, without an engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_engine import environment, needs_vllm, python

PROGRAM = Path(__file__).with_name("vllm_seam.py")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    needs_vllm()
    done = subprocess.run(
        [python(), PROGRAM], env=os.environ | environment(),
        capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    sys.stderr.write(done.stderr)
    assert done.returncode == 0
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_a_worker_that_keeps_nothing_says_so_at_start(found: dict[str, Any]) -> None:
    """And not as one of several connectors, where its word would hide another's."""
    assert found["refusal"]["told"] == [False, True, None]


def test_what_workers_tell_is_added_up(found: dict[str, Any]) -> None:
    assert found["words"] == {"refused": True, "classes": 2}


def test_events_are_vllms_own(found: dict[str, Any]) -> None:
    assert found["events"] == [
        ["BlockStored", "CPU", 2], ["BlockStored", "STORAGE", 2],
        ["BlockRemoved", "CPU", 2], ["BlockRemoved", "STORAGE", 2], None,
    ]  # fmt: skip


def test_what_may_change_weights_is_there_to_be_watched(found: dict[str, Any]) -> None:
    assert found["watched"] == [True, True, True]
