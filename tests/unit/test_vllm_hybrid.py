"""Engines with sliding windows and several ranks over a real store: every value is looked at."""

import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from tests.vllm_double import Asked, EngineDouble, finish, over, prompts
from tests.vllm_memory import kept_of
from tierkv.cache import TierKV
from tierkv.calls import ClearCall, StatCall
from tierkv_connectors.vllm import worker as worker_module

ENGINE, STORE = 4, 8
WINDOW = 20
"""Two whole store blocks and a part of a third."""
GEMMA = (WINDOW, WINDOW, None)


@pytest.fixture
def engine(store: TierKV) -> Iterator[EngineDouble]:
    engine = hybrid(store, 0)
    yield engine
    finish(engine)


def hybrid(store: TierKV, chunk: int = 0, blocks: int = 512, **options: Any) -> EngineDouble:
    """Return an engine like Gemma 3's; `chunk` tokens are computed in a step, 0: all."""
    kept = kept_of(ENGINE, STORE, GEMMA, **options)
    engine = over(store, kept, blocks=blocks, step=chunk or 4096)
    engine.patient = True
    return engine


def placements(store: TierKV) -> int:
    answers: list[dict[str, Any]] = []
    store.stat(StatCall(), answers.append)
    held = answers[0]["holds"]
    assert (held["matches"], held["transfers"], held["reservations"]) == (0, 0, 0)
    count: int = answers[0]["tiers"][0]["placements"]
    return count


@pytest.mark.parametrize("length", [9, 17, 20, 21, 24, 25, 41, 100, 104, 105])
def test_what_one_engine_computes_another_loads(
    store: TierKV, engine: EngineDouble, length: int
) -> None:
    """Prompts shorter and longer than the window, by a token or by much."""
    tokens = next(prompts(1, length))
    engine.run(tokens)
    engine.settle()
    other = hybrid(store)
    assert other.run(tokens).external == (length - 1) // STORE * STORE
    other.settle()
    assert other.worker.counters["loads_failed"] == 0
    finish(other)


def test_of_sliding_layers_only_the_window_is_stored(store: TierKV, engine: EngineDouble) -> None:
    engine.run(next(prompts(2, 100)))
    engine.settle()
    assert placements(store) == 12 + 3, "12 blocks of the full layers, 3 windows' worth"


@pytest.mark.parametrize("chunk", [4, 12, 16, 48])
def test_what_is_computed_in_pieces_is_stored_while_it_is_there(store: TierKV, chunk: int) -> None:
    """Blocks that the window has left are other requests' at once, and never saved as ours."""
    engine = hybrid(store, chunk)
    many = [tokens for tokens, _ in zip(prompts(3, 90), range(6), strict=False)]
    for tokens in many:
        engine.run(tokens, new=14)
        engine.settle()
    for tokens in many:
        assert engine.run(tokens).external == 88
    finish(engine)


def test_slow_saves_never_store_what_came_after(
    store: TierKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7 with windows: long prefills in small steps, one memory for all groups, slow saves."""
    original = worker_module.Worker._write

    def slow(self: Any, *arguments: Any) -> Any:
        time.sleep(0.005)
        return original(self, *arguments)

    engine = hybrid(store, 16, blocks=80)
    engine.patient = False
    monkeypatch.setattr(worker_module.Worker, "_write", slow)
    many = [tokens for tokens, _ in zip(prompts(4, 90), range(20), strict=False)]
    for tokens in many:
        engine.run(tokens)
    engine.settle()
    monkeypatch.undo()
    loaded = [engine.run(tokens).external for tokens in many]
    assert sum(loaded) > 0
    assert engine.worker.counters["saves_cut_short"] > 0, "the fence had something to do"
    finish(engine)


def test_answers_are_kept_too(engine: EngineDouble) -> None:
    tokens = next(prompts(5, 40))
    first = engine.run(tokens, new=60)
    engine.settle()
    assert engine.run([*first.all_token_ids, 5]).external == 96


def test_where_a_second_request_went_another_way_a_third_one_hits(
    store: TierKV, engine: EngineDouble
) -> None:
    """The first leaves windows at its end only; the second, which finds none, leaves some there."""
    shared, *tails = (tokens for tokens, _ in zip(prompts(6, 60), range(4), strict=False))
    engine.run(shared + tails[0])
    engine.settle()
    assert engine.run(shared + tails[1]).external == 0
    engine.settle()
    assert engine.run(shared + tails[2]).external == 56
    engine.settle()
    # 120 tokens are whole blocks, so each leaves the window of 14 blocks beside that of 15.
    assert placements(store) == (15 + 4) + (8 + 3 + 4) + (8 + 4)


@pytest.mark.parametrize("local", [0, 8, 20, 60, 72, 84, 88])
def test_r09_loads_begin_where_the_engine_ends(engine: EngineDouble, local: int) -> None:
    tokens = next(prompts(7, 90))
    engine.run(tokens)
    engine.settle()
    assert engine.run(tokens, local=local).external == max(88 - local, 0)


@pytest.mark.parametrize("lost", ["window", "head", "all"])
def test_a_load_that_lacks_anything_fails_as_a_whole(
    store: TierKV, engine: EngineDouble, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM knows no longer which blocks a hit of fewer tokens would need: all is computed."""
    tokens = next(prompts(8, 100))
    engine.run(tokens)
    engine.settle()
    request = engine.ask(tokens)
    engine.settle()
    if lost == "all":
        store.clear(ClearCall(namespace="default"), lambda _: None)
    else:
        claim = engine.worker._client.claim

        def some(match: int, start: int, call: Any) -> Any:
            missing = (start == 0) == (lost == "head")
            return None if missing else claim(match, start, call)

        monkeypatch.setattr(engine.worker._client, "claim", some)
    engine.admit(request)
    assert request.external == 96
    assert engine.wait(request, 96) == 0
    engine.compute(request, 0)
    engine.check(request)
    assert engine.scheduler.ended(request) == {}, "nothing was loaded for it"
    assert engine.worker.counters["loads_failed"] == 1


def test_a_load_that_cannot_be_planned_fails_as_a_whole(engine: EngineDouble) -> None:
    tokens = next(prompts(9, 100))
    engine.run(tokens)
    engine.settle()
    request = engine.ask(tokens)
    engine.settle()
    assert engine.scheduler.matched(request, 0) == 96
    request.external = 96
    engine.allocate(request, 0, 0)
    engine.scheduler.fail(request, request.block_ids)
    engine.step({})
    assert engine.wait(request, 96) == 0
    engine.compute(request, 0)
    engine.check(request)
    engine.end(request)


def test_preempted_requests_begin_again(store: TierKV) -> None:
    """Their blocks go to others in the same step; they come back as resumed, with new ones."""
    engine = hybrid(store, 16, blocks=200)
    random = Random(1)
    many = [tokens for tokens, _ in zip(prompts(10, 90), range(12), strict=False)]
    for tokens in many:
        request = engine.ask(tokens)
        engine.admit(request)
        computed, first = engine.wait(request, request.external), True
        stop = random.randrange(computed, 90)
        while computed < stop:
            count = min(16, 90 - computed)
            engine.step({request.request_id: (request, computed, count, first)})
            computed, first = computed + count, False
        engine.release(request)  # preempted
        found = engine.scheduler.matched(request, 0)
        while found is None:
            found = engine.scheduler.matched(request, 0)
        request.external = found
        engine.allocate(request, found, 0)
        engine.scheduler.allocated(request, request.block_ids, found)
        engine.step({})
        resume(engine, request, engine.wait(request, found))
        engine.check(request)
        engine.end(request)
    engine.settle()
    assert [engine.run(tokens).external for tokens in many] == [88] * 12
    finish(engine)


def resume(engine: EngineDouble, request: Asked, computed: int) -> None:
    """Run a request that was preempted to its end: first with all of its block ids."""
    name = request.request_id
    output = engine.output

    def resumed(running: Any) -> Any:
        found = output(running)
        found.scheduled_cached_reqs.resumed_req_ids = {name}
        found.scheduled_cached_reqs.new_block_ids = [tuple(map(list, request.block_ids))]
        return found

    engine.output = resumed  # type: ignore[method-assign]
    count = min(16, request.num_tokens - computed)
    engine.step({name: (request, computed, count, False)})
    engine.output = output  # type: ignore[method-assign]
    while (computed := computed + count) < request.num_tokens:
        count = min(16, request.num_tokens - computed)
        engine.step({name: (request, computed, count, False)})


def test_an_engine_of_sliding_layers_only(store: TierKV) -> None:
    """One group, but with a window: vLLM cannot go on from the block before a lost one."""
    kept = kept_of(ENGINE, STORE, (WINDOW,))
    assert kept.fails_whole
    engine = over(store, kept, blocks=128, step=16)
    tokens = next(prompts(11, 100))
    engine.run(tokens)
    engine.settle()
    assert engine.run(tokens).external == 96
    finish(engine)


def test_blocks_of_other_windows_are_others(store: TierKV, engine: EngineDouble) -> None:
    tokens = next(prompts(12, 100))
    engine.run(tokens)
    engine.settle()
    other = over(store, kept_of(ENGINE, STORE, (WINDOW + 1, WINDOW + 1, None)), blocks=512)
    assert other.run(tokens).external == 0
    finish(other)


@pytest.mark.parametrize("windows", [(None,), GEMMA], ids=["full", "hybrid"])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_ranks_give_one_answer(store: TierKV, shards: int, windows: Any) -> None:
    """One scheduler looks up for all; each worker writes and reads the parts of its own heads."""
    kept = kept_of(ENGINE, STORE, windows, heads=4, shards=shards)
    one, two = (over(store, kept, blocks=512, step=48) for _ in range(2))
    one.patient = True
    tokens = next(prompts(13, 100))
    one.run(tokens, new=20)
    one.settle()
    assert two.run(tokens).external == 96
    assert two.run(tokens, local=40).external == 56
    two.settle()
    assert [rank.worker.counters["saved_blocks"] for rank in two.ranks] == [0] * shards
    for engine in (one, two):
        finish(engine)


@pytest.mark.parametrize("windows", [(None,), (17, 17, None)], ids=["full", "hybrid"])
@pytest.mark.parametrize(("wrote", "reads"), [(2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (1, 4)])
def test_what_one_parallel_size_wrote_another_reads(
    store: TierKV, wrote: int, reads: int, windows: Any
) -> None:
    writer = over(
        store, kept_of(ENGINE, STORE, windows, heads=4, shards=wrote), blocks=512, step=4096
    )
    tokens, other = (tokens for tokens, _ in zip(prompts(14, 100), range(2), strict=False))
    writer.run(tokens)
    writer.settle()
    alone = over(store, kept_of(ENGINE, STORE, windows, heads=4, shards=reads), blocks=512)
    assert alone.run(other + tokens).external == 0
    assert alone.run(tokens[:9]).external == 0, "sizes that are not named are not looked up"
    finish(alone)  # what it has stored is less than what the other size has
    kept = kept_of(ENGINE, STORE, windows, heads=4, shards=reads, parallel_sizes=[wrote, reads])
    reader = over(store, kept, blocks=512, step=4096)
    assert reader.run(tokens, local=12).external == 84
    reader.settle()
    assert all(rank.worker.counters["loads_failed"] == 0 for rank in reader.ranks)
    assert all(rank.worker.counters["saved_blocks"] > 0 for rank in reader.ranks), "its own parts"
    reader.scheduler._kept.__dict__["stored_shards"] = (reads,)
    assert reader.run(tokens).external == 96
    for engine in (writer, reader):
        finish(engine)


def test_a_rank_that_lacks_its_part_fails_for_all(store: TierKV) -> None:
    kept = kept_of(ENGINE, STORE, heads=4, shards=2)
    engine = over(store, kept, blocks=128)
    tokens = next(prompts(15, 100))
    engine.run(tokens)
    engine.settle()
    client = engine.ranks[1].worker._client
    claim, client.claim = client.claim, lambda *_: None  # type: ignore[method-assign]
    request = engine.run(tokens)
    assert request.external == 96
    assert [rank.worker.counters["loads_failed"] for rank in engine.ranks] == [0, 1]
    client.claim = claim  # type: ignore[method-assign]
    assert engine.run(tokens).external == 96
    finish(engine)


def test_a_rank_that_has_not_stored_its_part_is_a_miss_for_all(store: TierKV) -> None:
    kept = kept_of(ENGINE, STORE, heads=4, shards=2)
    engine = over(store, kept, blocks=128)
    tokens = next(prompts(16, 100))
    put = engine.ranks[1].worker._client.put
    engine.ranks[1].worker._client.put = lambda call: None  # type: ignore[method-assign]
    engine.run(tokens)
    engine.settle()
    assert engine.run(tokens).external == 0
    engine.ranks[1].worker._client.put = put  # type: ignore[method-assign]
    engine.run(tokens)
    engine.settle()
    assert engine.run(tokens).external == 96
    finish(engine)
