"""What a request wishes reaches the store, and what its answer and the events say of it."""

from typing import Any

import msgspec
import pytest

from tests.vllm_double import EngineDouble, over, prompts
from tests.vllm_memory import ENGINE, STORE, kept_of
from tierkv.cache import TierKV
from tierkv.calls import MAX_SESSION, StatCall
from tierkv_connectors.vllm.events import Events, Types
from tierkv_connectors.vllm.reports import Report, Saved


@pytest.fixture
def calls(engine: EngineDouble, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Return the calls that reach the store, as they come, with their hints."""
    seen: list[tuple[str, Any]] = []

    def watch(client: Any, name: str) -> None:
        original = getattr(client, name)

        def watched(call: Any) -> Any:
            seen.append((name, (call.session, call.ttl_s, call.closed, call.pin)))
            return original(call)

        monkeypatch.setattr(client, name, watched)

    watch(engine.scheduler._client, "match")
    watch(engine.worker._client, "put")
    return seen


def test_hints_reach_the_store(engine: EngineDouble, calls: list[tuple[str, Any]]) -> None:
    tokens = next(prompts(1, 60))
    engine.run(tokens, session="chat 7", ttl_s=90, pin=True)
    engine.settle()
    hints = ("chat 7", 90.0, False, True)
    assert calls == [("match", hints), ("put", hints)]
    calls.clear()
    engine.run(tokens)
    engine.settle()
    assert calls[0] == ("match", ("", None, False, False))


def test_a_session_ends_with_its_last_call(
    store: TierKV, engine: EngineDouble, calls: list[tuple[str, Any]]
) -> None:
    engine.run(next(prompts(2, 60)), session="chat 8", closed=True)
    engine.settle()
    names = dict(calls)
    assert calls[0] == ("match", ("chat 8", None, False, False)), "more calls follow"
    assert names == {"match": ("chat 8", None, True, False), "put": ("chat 8", None, True, False)}
    answers: list[dict[str, Any]] = []
    store.stat(StatCall(), answers.append)
    assert answers[0]["holds"]["matches"] == 0


def test_a_session_ends_though_nothing_is_kept(
    engine: EngineDouble, calls: list[tuple[str, Any]]
) -> None:
    engine.run(next(prompts(3, 60)), session="chat 9", closed=True, store=False)
    engine.settle()
    assert calls[-1] == ("match", ("chat 9", None, True, False))


def test_the_engine_may_know_the_session(
    engine: EngineDouble, calls: list[tuple[str, Any]]
) -> None:
    for number, (wishes, named) in enumerate(
        [({}, "vllm's own"), ({"session": "mine"}, "mine"), ({}, "x" * 999)]
    ):
        request = engine.made(next(prompts(4 + number, 60)), **wishes)
        request.session_id = "vllm's own" if number < 2 else named
        engine.scheduler.arrived(request)
        engine.settle()
        assert calls[-1][1][0] == named[:MAX_SESSION]
        engine.scheduler.ended(request)


@pytest.mark.parametrize(
    "wrong", [{"ttl_s": 0}, {"ttl_s": 1e9}, {"session": "x" * 257}, {"pin": 1}, {"closed": "no"}]
)
def test_a_wish_that_makes_no_sense_is_one_line(
    engine: EngineDouble, wrong: dict[str, Any], calls: list[tuple[str, Any]]
) -> None:
    request = engine.ask(next(prompts(7, 60)), **wrong)
    told = engine.scheduler.ended(request)["problem"]
    assert "\n" not in told
    assert f"$.{next(iter(wrong))}" in told
    assert "it may have store, fidelity, session, ttl_s, closed, pin" in told
    assert calls == []


def test_an_answer_says_of_which_class_its_tokens_were(store: TierKV, engine: EngineDouble) -> None:
    tokens = next(prompts(8, 100))
    engine.run(tokens)
    engine.settle()
    other = over(store, kept_of(ENGINE, STORE, fidelity="safe"), blocks=64)
    request = other.ask(tokens)
    other.admit(request)
    other.compute(request, other.wait(request, request.external))
    assert other.scheduler.ended(request) == {
        "loaded_tokens": {"host": 96}, "loaded_classes": {"exact": 96}, "fidelity": "safe",
    }  # fmt: skip
    other.settle()
    other.close()


def test_ranks_agree_on_the_lower_class() -> None:
    one = Report({"a": {4: 3}, "b": {3: 1}}, [Saved(b"k", b"", 4)])
    other = Report({"a": {4: 2, 2: 1}}, [Saved(b"k", b"k", 4)])
    wanted = {"a": {4: 2, 2: 1}, "b": {3: 1}}
    for merged in (one.merge(other), other.merge(one)):
        assert merged.classes == wanted
        assert sorted(merged.saves) == sorted(one.saves + other.saves)


class Stored(msgspec.Struct):
    block_hashes: list[Any]
    medium: str | None
    ownership: str | None = None


class Removed(msgspec.Struct):
    block_hashes: list[Any]
    medium: str | None


def test_events_follow_saves_and_matches(store: TierKV, engine: EngineDouble) -> None:
    tokens = next(prompts(9, 40))

    def run(one: EngineDouble) -> list[Any]:
        one.scheduler.events = one.scheduler.events or Events(
            Types(Stored, Removed, str), STORE, ENGINE
        )
        request = one.made(tokens)
        request.block_hashes = [str(number) for number in range(10)]
        one.scheduler.arrived(request)
        one.admit(request)
        one.compute(request, one.wait(request, request.external))
        one.settle()
        one.hear()
        one.end(request)
        return list(one.scheduler.events.take())

    stored = [
        Stored(["0", "1", "2", "3"], "CPU", "tierkv/exact"),
        Stored(["4", "5", "6", "7"], "CPU", "tierkv/exact"),
    ]
    assert run(engine) == stored
    assert run(engine) == [], "it is known"
    other = over(store, engine.kept, blocks=64)
    assert run(other) == stored, "what another engine has stored is this one's too"
    other.settle()
    other.close()
    engine.scheduler.reset()
    events = engine.scheduler.events
    assert events is not None
    removed = [Removed(["0", "1", "2", "3"], "CPU"), Removed(["4", "5", "6", "7"], "CPU")]
    assert list(events.take()) == removed
