"""What vLLM says without an engine: of its tensors, configs, and the connector's two sides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tierkv_connectors.transformers_identity import identity_of

pytestmark = pytest.mark.timeout(600)

Says = Callable[[str], Any]
CASES = [f"{dtype} {tokens}" for dtype in ("float32", "bfloat16") for tokens in (32, 128)]


@pytest.fixture
def found(vllm_says: Says) -> dict[str, Any]:
    answers: dict[str, Any] = vllm_says("seam")
    return answers


@pytest.mark.parametrize("case", CASES)
def test_layout_holds(vllm_says: Says, case: str) -> None:
    """Its own attention writes KV, and our layout finds it."""
    assert vllm_says("layout")[case] == "holds"


@pytest.mark.parametrize("wrong", ["K and V swapped", "K not transposed"])
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_layout_is_seen(vllm_says: Says, case: str, wrong: str) -> None:
    reason = vllm_says("layout")[f"{case} {wrong}"]
    assert reason == "keys of model.layers.0.self_attn.attn are not where we look"


def test_vllm_and_transformers_agree_on_an_identity(vllm_says: Says, model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert vllm_says("fingerprint") == identity_of(model).fingerprint.hex()


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
