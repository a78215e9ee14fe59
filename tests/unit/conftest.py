"""What tests of the vLLM connector share: a store, and an engine that betrays a wrong block."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tierkv.cache import TierKV
from tierkv.settings import Settings
from tierkv.tiers.host import HostSettings

if TYPE_CHECKING:
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
