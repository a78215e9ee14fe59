"""What tests share: of the vLLM connector a store, and an engine that betrays a wrong block.

Of moves a log, and a policy that is always asked.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tierkv import demotions
from tierkv.cache import TierKV
from tierkv.settings import Settings
from tierkv.tiers.host import HostSettings

if TYPE_CHECKING:
    from tests.move_rigs import Logs
    from tests.vllm_double import EngineDouble


@pytest.fixture
def store() -> Iterator[TierKV]:
    """Return a store of 32 MiB of RAM in this process."""
    store = TierKV.open(Settings(host=HostSettings(size_bytes=32 << 20)))
    yield store
    store.close(0.0)


@pytest.fixture
def engine(store: TierKV) -> Iterator["EngineDouble"]:
    """Return an engine over the store with full attention and blocks of ENGINE and STORE tokens."""
    from tests.vllm_double import finish, over  # brings torch
    from tests.vllm_memory import ENGINE, STORE, kept_of

    engine = over(store, kept_of(ENGINE, STORE), blocks=128)
    yield engine
    finish(engine)


@pytest.fixture
def always_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the policy be asked for demotions at every tick."""
    monkeypatch.setattr(demotions, "LOW_WATER", 1.0)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator["Logs"]:
    """Return how to open a log, again too."""
    from tests.move_rigs import logs  # brings torch

    with logs(tmp_path / "log") as make:
        yield make
