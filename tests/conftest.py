"""What all tests share: a replayable hypothesis seed, a redis-server, and the small real model."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import redis_server as redis_process
from tests import stores
from tests.redis_server import RedisFactory, RedisServer
from tierkv_connectors.models import smollm2

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


@pytest.fixture(autouse=True)
def rigs() -> Iterator[None]:
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
