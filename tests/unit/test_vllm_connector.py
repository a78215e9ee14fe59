"""Both sides of the vLLM connector over a real store, with an engine that betrays a wrong block."""

import threading
import time
from functools import partial
from typing import Any

import pytest

from tests.vllm_double import EngineDouble, over, prompts
from tests.vllm_memory import ENGINE, STORE, kept_of
from tierkv.cache import TierKV
from tierkv.calls import ClearCall, StatCall
from tierkv.errors import TierKVError
from tierkv.fidelity import Fidelity
from tierkv_connectors.vllm import worker as worker_module
from tierkv_connectors.vllm.groups import Span
from tierkv_connectors.vllm.kept import block_tokens, check_device, options_of
from tierkv_connectors.vllm.plan import Load, Save, StepPlan


def holds(store: TierKV) -> tuple[int, int, int]:
    answers: list[dict[str, Any]] = []
    store.stat(StatCall(), answers.append)
    held = answers[0]["holds"]
    return held["matches"], held["transfers"], held["reservations"]


def busy(until: threading.Event) -> None:
    until.wait(30)


def test_what_one_engine_computes_another_loads(store: TierKV, engine: EngineDouble) -> None:
    (prompt,) = zip(prompts(1, 100), range(1), strict=False)
    tokens = prompt[0]
    assert engine.run(tokens).external == 0
    engine.settle()
    other = over(store, engine.kept, blocks=64)
    assert other.run(tokens).external == 96
    assert other.run(tokens[:50]).external == 48
    other.settle()
    assert other.worker.counters["saved_blocks"] == 0, "known blocks are not copied again"
    other.close()
    assert holds(store) == (0, 0, 0)


def test_answers_are_kept_too(engine: EngineDouble) -> None:
    tokens = next(prompts(2, 40))
    first = engine.run(tokens, new=60)
    engine.settle()
    assert engine.run([*first.all_token_ids, 5]).external == 96


@pytest.mark.parametrize("length", [16, 15, 17, 32, 31, 33, 1, 0])
def test_r10_a_token_is_left_to_compute(engine: EngineDouble, length: int) -> None:
    tokens = next(prompts(3, 48))
    engine.run(tokens)
    engine.settle()
    found = engine.run(tokens[:length]).external if length else 0
    assert found == max(length - 1, 0) // STORE * STORE


@pytest.mark.parametrize("have", [260, 511, 512])
@pytest.mark.parametrize("local", [0, 16, 32, 240, 256, 272])
def test_r09_loads_begin_where_the_engine_ends(store: TierKV, local: int, have: int) -> None:
    """The engine's hits are whole blocks of its own: 16 tokens, where the store's have 256."""
    kept = kept_of(16, 256)
    engine = over(store, kept, blocks=128)
    tokens = next(prompts(4, 600))
    engine.run(tokens[:have])
    engine.settle()
    found = engine.run(tokens, local=local).external
    assert found == max(have // 256 * 256 - local, 0)
    engine.settle()
    engine.close()
    assert not engine.edge.failures


def test_r07_nothing_is_saved_before_it_was_computed(
    engine: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves are slow, blocks are given to others at once, steps go on: no wrong value is stored."""
    original = worker_module.Worker._write

    def slow(self: Any, *arguments: Any) -> Any:
        time.sleep(0.03)
        return original(self, *arguments)

    monkeypatch.setattr(worker_module.Worker, "_write", slow)
    many = [tokens for tokens, _ in zip(prompts(5, 90), range(40), strict=False)]
    for tokens in many:
        engine.run(tokens)
    engine.settle()
    monkeypatch.undo()
    loaded = [engine.run(tokens).external for tokens in many]
    assert sum(loaded) > 0
    assert engine.worker.counters["saves_cut_short"] > 0, "the fence had something to do"


def test_r11_lost_between_match_and_load(store: TierKV, engine: EngineDouble) -> None:
    tokens = next(prompts(6, 100))
    engine.run(tokens)
    engine.settle()
    request = engine.ask(tokens)
    engine.settle()
    store.clear(ClearCall(namespace="default"), lambda _: None)
    engine.admit(request)
    assert request.external == 96
    computed = engine.wait(request, request.external)
    assert computed == 0
    engine.compute(request, computed)
    engine.check(request)
    engine.end(request)
    assert engine.worker.counters["loads_failed"] == 1


def test_r12_a_load_that_comes_too_late_is_computed(store: TierKV) -> None:
    engine = over(store, kept_of(ENGINE, STORE, deadline_s=0.2), blocks=128)
    tokens = next(prompts(7, 100))
    engine.run(tokens)
    engine.settle()
    engine.threads.submit("load", lambda: time.sleep(0.4))
    request = engine.run(tokens)
    assert request.external == 96
    assert engine.worker.counters["loads_late"] == 1
    engine.settle()
    engine.close()


def test_r13_both_sides_fall_back_together(engine: EngineDouble) -> None:
    """A worker that cannot deliver reports it, and the scheduler's length is what is left."""
    tokens = next(prompts(8, 100))
    engine.run(tokens)
    engine.settle()
    client = engine.worker._client
    claim, client.claim = client.claim, lambda *_: None  # type: ignore[method-assign]
    assert engine.run(tokens).external == 96
    client.claim = claim  # type: ignore[method-assign]
    assert engine.run(tokens).external == 96


def test_r14_looked_up_and_never_fetched(store: TierKV, engine: EngineDouble) -> None:
    tokens = next(prompts(9, 100))
    engine.run(tokens)
    engine.settle()
    for _ in range(8):
        request = engine.ask(tokens)
        engine.scheduler.ended(request)  # aborted before it was scheduled
    engine.settle()
    assert holds(store)[0] == 0
    request = engine.ask(tokens)
    engine.settle()
    assert holds(store)[0] == 1
    engine.scheduler.allocated(request, [[1] * 25], 0)  # vLLM wants nothing of it
    assert holds(store)[0] == 0
    engine.scheduler.ended(request)


def test_a_request_aborted_while_it_loads_is_still_reported(
    store: TierKV, engine: EngineDouble
) -> None:
    tokens = next(prompts(10, 100))
    engine.run(tokens)
    engine.settle()
    request = engine.ask(tokens)
    engine.admit(request)
    engine.scheduler.ended(request)
    engine.wait(request, request.external)
    assert holds(store) == (0, 0, 0)
    assert not engine.scheduler._requests


def test_an_answer_that_waited_too_long_is_asked_for_again(store: TierKV) -> None:
    engine = over(store, kept_of(ENGINE, STORE, deadline_s=0.2), blocks=128)
    tokens = next(prompts(11, 100))
    engine.run(tokens)
    engine.settle()
    request = engine.ask(tokens)
    engine.settle()
    time.sleep(0.3)  # the request waits for memory meanwhile
    engine.admit(request)
    computed = engine.wait(request, request.external)
    assert computed == 96
    engine.compute(request, computed)
    engine.check(request)
    engine.end(request)
    engine.settle()
    engine.close()


def test_a_worker_that_keeps_nothing_reports_every_load() -> None:
    nothing = worker_module.NoWorker()
    span = Span(0, 0, 0, ((3, 4),))
    load = Load("r", 1, 1, bytes(32), bytes(32), Fidelity.EXACT, (span,), 0.0)
    nothing.fence(StepPlan())
    nothing.begin_loads([load])
    nothing.begin_saves([Save(bytes(32), b"", Fidelity.EXACT, ())])
    assert nothing.ended() == {"r"}
    assert nothing.unfilled() == {3, 4}
    assert nothing.failed() == {"r"}
    assert not nothing.ended()
    assert not nothing.unfilled()
    assert not nothing.failed()


def test_a_step_that_could_not_be_planned_stops_every_save(engine: EngineDouble) -> None:
    hangs = threading.Event()
    engine.threads.submit("save", partial(busy, hangs))
    tokens = next(prompts(12, 100))
    engine.run(tokens)
    engine.worker.fence(StepPlan(overwritten=None))
    hangs.set()
    engine.settle()
    assert engine.worker.counters["saved_blocks"] == 0


def test_no_store_is_no_hit_and_no_harm(store: TierKV, engine: EngineDouble) -> None:
    tokens = next(prompts(13, 100))
    engine.run(tokens)
    engine.settle()
    engine.scheduler._client.close()
    engine.worker._client.close()
    assert engine.run(tokens).external == 0


def test_what_computing_costs_is_learnt_and_decides(engine: EngineDouble) -> None:
    tokens = next(prompts(14, 100))
    engine.run(tokens)
    engine.settle()
    engine.scheduler.cost.linear = 1e-12  # computing is all but free
    assert engine.run(tokens).external == 0
    engine.scheduler.cost.linear = 1.0
    assert engine.run(tokens).external == 96


def test_a_request_may_ask_not_to_be_kept(engine: EngineDouble) -> None:
    tokens = next(prompts(15, 100))
    engine.run(tokens, store=False)
    engine.settle()
    assert engine.run(tokens).external == 0
    engine.settle()
    assert engine.run(tokens, store=False).external == 96


def test_a_request_whose_wishes_cannot_be_read_is_left_alone(
    engine: EngineDouble, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = next(prompts(18, 100))
    engine.run(tokens)
    engine.settle()
    request = engine.ask(tokens, stroe=False)
    engine.admit(request)
    assert request.external == 0
    engine.compute(request, 0)
    told = engine.scheduler.ended(request)
    assert "unknown field `stroe`; it may have store, fidelity" in told["problem"]
    (line,) = [one for one in caplog.records if one.name == "vllm.tierkv"]
    assert told["problem"] in line.getMessage()
    assert line.exc_info is None
    assert not engine.scheduler.problems


def test_classes_are_kept_apart(store: TierKV, engine: EngineDouble) -> None:
    """In both caches: blocks of a lower class are nothing to a request of a higher one."""
    tokens = next(prompts(21, 100))
    first = engine.run(tokens, fidelity="safe")
    engine.settle()
    assert engine.run(tokens).external == 0, "what was computed for a lower class may be lossy"
    engine.settle()
    plain, lower = engine.ask(tokens), engine.ask(tokens, fidelity="safe")
    assert plain.cache_salt is None
    assert lower.cache_salt == first.cache_salt, "one class shares the engine's own cache"
    assert lower.block_hashes[0][0] == lower.cache_salt
    assert engine.ask(tokens, fidelity="exact").cache_salt is None, "it is the engine's class"
    assert engine.run(tokens, fidelity="economy").external == 96, "better than asked is fine"
    other = over(store, kept_of(ENGINE, STORE, fidelity="safe"), blocks=64)
    assert other.run(tokens).external == 96
    assert other.ask(tokens).cache_salt is None
    assert other.ask(tokens, fidelity="exact").cache_salt is not None
    other.settle()
    other.close()


def test_an_engine_whose_worker_keeps_nothing_is_left_alone(engine: EngineDouble) -> None:
    tokens = next(prompts(19, 100))
    engine.run(tokens)
    engine.settle()
    engine.scheduler.refused = True
    request = engine.ask(tokens)
    engine.admit(request)
    assert request.external == 0
    assert engine.step({request.request_id: (request, 0, 64, True)}).saves == ()


def test_a_reset_leaves_nothing_to_find(engine: EngineDouble) -> None:
    tokens = next(prompts(16, 100))
    engine.run(tokens)
    engine.settle()
    for _ in range(2):
        engine.scheduler.reset()
        assert engine.run(tokens).external == 0
        engine.settle()
        assert engine.run(tokens).external == 96


def test_what_runs_when_the_weights_change_is_not_kept(store: TierKV, engine: EngineDouble) -> None:
    """Its blocks are of both weights, under a name that other engines look for."""
    tokens = next(prompts(22, 100))
    request = engine.ask(tokens)
    engine.admit(request)
    engine.step({request.request_id: (request, 0, 50, True)})
    engine.scheduler.reset()
    plan = engine.step({request.request_id: (request, 50, 50, False)})
    assert plan.saves == ()
    engine.settle()
    other = over(store, engine.kept, blocks=64)
    assert other.run(tokens).external == 48, "what was computed before has its old name"
    other.settle()
    other.close()


def test_what_waits_to_load_when_the_weights_change_is_computed(
    store: TierKV, engine: EngineDouble
) -> None:
    tokens = next(prompts(23, 100))
    engine.run(tokens)
    engine.settle()
    request = engine.ask(tokens)
    engine.settle()
    found = engine.scheduler.matched(request, 0)
    assert found == 96
    request.block_ids, request.external = [[engine.free.pop(0) for _ in range(25)]], 96
    engine.scheduler.allocated(request, request.block_ids, 96)
    engine.scheduler.reset()
    engine.step({})
    assert engine.wait(request, 96) == 0
    engine.compute(request, 0)
    engine.check(request)
    assert engine.scheduler.ended(request) == {}
    engine.settle()
    assert holds(store) == (0, 0, 0)


def test_an_answer_says_where_its_tokens_came_from(engine: EngineDouble) -> None:
    tokens = next(prompts(17, 100))
    request = engine.run(tokens)
    engine.settle()
    request = engine.ask(tokens)
    engine.admit(request, 8)
    assert engine.scheduler.sources(request) == {"host": 88}
    engine.compute(request, engine.wait(request, 96))
    assert engine.scheduler.ended(request) == {
        "loaded_tokens": {"host": 88}, "loaded_classes": {"exact": 88}, "fidelity": "exact",
    }  # fmt: skip
    assert engine.scheduler.counters == {"loaded_tokens_host": 88}


def test_an_answer_counts_what_a_load_has_filled(engine: EngineDouble) -> None:
    tokens = next(prompts(20, 100))
    engine.run(tokens)
    engine.settle()
    request = engine.ask(tokens)
    engine.admit(request)
    engine.settle()
    load = engine.worker._over.pop()  # as if the third store block had been lost
    engine.worker._over.append(load._replace(unfilled=request.block_ids[0][8:24]))
    computed = engine.wait(request, request.external)
    assert computed == 32
    engine.compute(request, computed)
    engine.check(request)
    assert engine.scheduler.ended(request) == {
        "loaded_tokens": {"host": 32}, "loaded_classes": {"exact": 32}, "fidelity": "exact",
    }  # fmt: skip


def test_options() -> None:
    assert options_of({"socket": "x", "deadline_s": 2}).deadline_s == 2.0
    with pytest.raises(TierKVError, match=r"'good' is not known; use one of exact, near_lossless"):
        options_of({"fidelity": "good"})
    with pytest.raises(TierKVError, match=r"profile 'zip' is not known"):
        options_of({"profiles": ["raw", "zip"]})
    for wrong in ({"sokcet": "x"}, {"deadline_s": "soon"}):
        with pytest.raises(TierKVError, match=r"kv_connector_extra_config.*it may have socket,"):
            options_of(wrong)
    assert [block_tokens(*pair) for pair in ((16, 0), (128, 0), (96, 0), (16, 64))] == [
        128, 128, 192, 64,
    ]  # fmt: skip
    with pytest.raises(TierKVError, match="multiple of 16"):
        block_tokens(16, 100)


def test_a_gpu_is_only_used_when_that_was_asked_for() -> None:
    plain, brave = options_of({}), options_of({"experimental_cuda": True})
    for options in (plain, brave):
        check_device("cpu", options)
        with pytest.raises(TierKVError, match="lies on tpu: only CPU and CUDA"):
            check_device("tpu", options)
    check_device("cuda", brave)
    with pytest.raises(TierKVError, match=r"not run on a GPU yet.*set experimental_cuda in"):
        check_device("cuda", plain)
