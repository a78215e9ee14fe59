"""What a request adds to the keys of its blocks: a salt and an adapter, named by its content."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm_configs import save
from tierkv_connectors.vllm.identity import LoraNames, request_extras


def request(**changes: Any) -> SimpleNamespace:
    fields = dict.fromkeys(
        ("pooling_params", "prompt_embeds", "cache_salt", "lora_request"), None
    ) | {"mm_features": [], "resumable": False}
    return SimpleNamespace(**fields | changes)


def lora(path: Path, number: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_name="law", lora_int_id=number, lora_path=str(path))


def test_plain_requests_have_no_extras() -> None:
    assert request_extras(request(), LoraNames()) == {}
    assert request_extras(request(cache_salt="one"), LoraNames()) == {"salt": "one"}


@pytest.mark.parametrize(
    "changes",
    [
        {"pooling_params": object()},
        {"prompt_embeds": torch.zeros(1)},
        {"mm_features": [SimpleNamespace(identifier="my-cat", mm_hash="my-cat")]},
        {"resumable": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_requests_that_tokens_do_not_name_are_left_alone(changes: dict[str, Any]) -> None:
    assert request_extras(request(**changes), LoraNames()) is None


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = save(tmp_path / "adapter")
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text('{"lora_alpha": 16}')
    return directory


def test_r04_adapters_are_named_by_their_content(adapter: Path) -> None:
    loras = LoraNames()
    extras = request_extras(request(lora_request=lora(adapter), cache_salt="one"), loras)
    assert extras is not None
    assert extras["salt"] == "one"
    name = extras["lora"]
    assert loras.name_of(lora(adapter)) == name == LoraNames().name_of(lora(adapter, 7))
    (adapter / "adapter_config.json").write_text('{"lora_alpha": 32}')
    # The engine may hold either content under this number; another number is read anew.
    assert loras.name_of(lora(adapter)) is None
    assert loras.name_of(lora(adapter, 2)) not in {name, None}


def test_adapters_that_cannot_be_read_are_left_alone(adapter: Path) -> None:
    for path in (Path("org/adapter"), adapter / "none"):
        assert request_extras(request(lora_request=lora(path)), LoraNames()) is None
    os.truncate(adapter / "adapter_model.safetensors", 4)
    assert LoraNames().name_of(lora(adapter)) is None
