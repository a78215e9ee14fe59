"""What all tests share: a replayable hypothesis seed, a redis-server, and the small real model."""

import gc
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from tests import redis_server as redis_process
from tests import stores
from tests.redis_server import RedisFactory, RedisServer
from tierkv_connectors.models import smollm2

LEFT_OPEN = 48
"""Descriptors that a module may leave: pools of libraries, servers of the whole run."""

# Nothing here may look for a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"

settings.register_profile("tierkv", derandomize=False, print_blob=True, deadline=None)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw one hypothesis seed per run, unless one was given, so that every failure has one."""
    settings.load_profile("tierkv")
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = secrets.randbelow(1 << 32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let real engines come last: `make test` installs one while the others run."""
    items.sort(key=lambda item: "engines" in item.path.parts)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        seed = config.option.hypothesis_seed
        terminalreporter.write_line(f"hypothesis seed: replay with --hypothesis-seed={seed}")


def descriptors() -> Counter[str]:
    """Return the open descriptors of this process, by what they are."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            found[re.sub(r"\d+", "N", link.readlink().name)] += 1
    return found


@pytest.fixture(autouse=True, scope="module")
def _descriptors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module that leaves descriptors open: all together they reach the system's limit."""
    before = descriptors()
    yield
    if (descriptors() - before).total() > LEFT_OPEN:
        gc.collect()  # what only waits for it is no leak
    left = descriptors() - before
    assert left.total() <= LEFT_OPEN, f"{request.node.name} leaves open {dict(left)}"


@pytest.fixture(autouse=True)
def _rigs() -> Iterator[None]:
    """Close the stores that a test has opened: arenas, files, threads."""
    yield
    while stores.OPEN:
        stores.OPEN[-1].close()


@pytest.fixture(scope="session")
def redis_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisFactory]:
    """Start a server with settings of its own, such as maxmemory="8mb", at each call."""
    if redis_process.binary() is None:
        pytest.skip("redis-server is not installed: `make setup` as root installs it")
    started: list[RedisServer] = []

    def start(**settings: str) -> RedisServer:
        server = RedisServer(tmp_path_factory.mktemp("redis"), **settings)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def redis_server(redis_factory: RedisFactory) -> RedisServer:
    """Return a server for the whole run; tests keep apart by key prefix and never flush it."""
    return redis_factory()


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Return the directory of SmolLM2-135M; `make model` converts it before the tests start."""
    return smollm2()
