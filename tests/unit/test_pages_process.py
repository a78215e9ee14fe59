"""The HTTP process of a real sidecar comes back when it was killed."""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.sidecars import Process, until


@pytest.fixture
def served(tmp_path: Path) -> Process:
    return Process(tmp_path)


def test_http_process_is_started_again(served: Process) -> None:
    text = served._file.read_text().replace("enabled = false", "port = 0")
    served._file.write_text(text)
    served.start(before="from tierkv_service import sidecar; sidecar.LIVES_S = 0.0")
    try:
        assert until(lambda: _healthy(served))
        children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children")
        child = int(children.read_text().split()[0])
        os.kill(child, signal.SIGKILL)
        assert until(lambda: len(_urls(served)) == 2 and _healthy(served)), served.said()
        assert "starting another" in served.said()
    finally:
        served.kill()


def _urls(served: Process) -> list[str]:
    return re.findall(r"http://127\.0\.0\.1:\d+", served.said())


def _healthy(served: Process) -> bool:
    urls = _urls(served)
    if not urls:
        return False
    try:
        return httpx.get(f"{urls[-1]}/healthz", timeout=2).is_success
    except httpx.TransportError:
        return False
