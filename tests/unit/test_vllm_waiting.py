"""What vLLM's scheduler waits for: no longer than a millisecond in a call, and never for ever."""

import threading
from functools import partial

import pytest

from tests.unit.test_vllm_connector import busy
from tests.vllm_double import EngineDouble, prompts
from tierkv_connectors.vllm.asked import Asked

MOST_S = 0.001


class Waited(threading.Event):
    """Knows what it was waited for, and lets nobody wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return super().wait(0.0)


def test_a_call_waits_a_millisecond_at_most(engine: EngineDouble) -> None:
    hangs = threading.Event()
    for _ in range(2):
        engine.threads.submit("lookup", partial(busy, hangs))
    request = engine.ask(next(prompts(40, 100)))
    lookup = engine.scheduler._requests[request.request_id].lookup
    assert lookup is not None
    lookup.answered = waited = Waited()
    assert [engine.scheduler.matched(request, 0) for _ in range(3)] == [None] * 3
    assert len(waited.seconds) == 3
    assert all(seconds is not None and seconds <= MOST_S for seconds in waited.seconds)
    hangs.set()


def test_a_question_that_fails_is_a_miss(
    engine: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a bug of ours, say: its request is computed like any other."""
    tokens = next(prompts(41, 100))
    engine.run(tokens)
    engine.settle()

    def fails(self: Asked, keys: bytes, tokens: int) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Asked, "extended", fails)
    request = engine.ask(tokens)
    engine.admit(request)
    assert request.external == 0
    monkeypatch.undo()
    engine.compute(request, 0)
    engine.check(request)
    engine.end(request)
    assert engine.run(tokens).external == 96
