"""What tests of a real vLLM share: the sidecar beside it, prompts, and what either says of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tests.engines.vllm_engine import Engine, needs_vllm
from tests.sidecars import Process, until
from tierkv_connectors.sidecar import connect

BLOCK = 128
"""Tokens of a store block."""
NVME = '[nvme]\npath = "{folder}/nvme"\nsize = "1GiB"\n'
REDIS = '[redis]\nurl = "{url}"\nprefix = "vllm-engines"\n'


def prompt(count: int, seed: int = 1, start: int = 0) -> list[int]:
    return [100 + (seed * 7919 + number * 104729) % 40000 for number in range(start, count)]


class Listens(Protocol):
    """A sidecar, whoever started it."""

    path: Path


WAITS = {"deadline_s": 60.0, "timeout_s": 10.0}
"""Longer than any machine that is busy with other things may need."""


def config(sidecar: Listens, **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv_connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(sidecar.path), **WAITS, **options},
    }


def stat(sidecar: Listens) -> dict[str, Any]:
    client = connect(sidecar.path)
    found = client.stat()
    client.close()
    assert found is not None
    return found


def begin(sidecar: Process, ram_bytes: int) -> None:
    """Start a sidecar and wait until all of its memory is there."""
    sidecar.start()
    wait_for_memory(sidecar, ram_bytes)


def wait_for_memory(sidecar: Listens, ram_bytes: int) -> None:
    assert until(lambda: stat(sidecar)["tiers"][0]["capacity_bytes"] == ram_bytes)


def hits(sidecar: Listens) -> dict[str, int]:
    """Return tokens of answered blocks by tier."""
    by_tier: dict[str, int] = stat(sidecar)["hits_by_tier_blocks"]
    return {tier: count * BLOCK for tier, count in by_tier.items() if count}


def stored(sidecar: Listens) -> int:
    """Return blocks in RAM."""
    count: int = stat(sidecar)["tiers"][0]["placements"]
    return count


@contextmanager
def serving(folder: Path, ram_bytes: int, more: str = "") -> Iterator[Process]:
    """Run a sidecar with all of its memory; `more` are lines of its settings."""
    needs_vllm()
    one = Process(folder, more, host_bytes=ram_bytes)
    try:
        begin(one, ram_bytes)
        yield one
    finally:
        one.kill()


def find_again(engine: Engine) -> None:
    """Wait until an engine's connections to a new sidecar are up, both of them."""
    assert until(lambda: engine.generate([prompt(2 * BLOCK + 1, 77)], 1)[0].cached == 2 * BLOCK)


def lose(sidecar: Listens) -> None:
    """Clear everything, whatever has been promised of it."""
    client = connect(sidecar.path)
    client.clear("default")
    client.close()
