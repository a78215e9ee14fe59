"""The engine's own prefix cache, as the connector tells the sidecar of it."""

import threading
from functools import partial
from typing import Any

from tests.unit.test_vllm_connector import busy, holds
from tests.vllm_double import Asked, EngineDouble, over, prompts
from tests.vllm_memory import ENGINE, STORE, kept_of
from tierkv.cache import TierKV
from tierkv.calls import StatCall
from tierkv_connectors.vllm.own import Own


class PoolDouble:
    """vLLM's BlockPool: has a block of each name up to one."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.looks = 0

    def get_cached_block(self, name: object, groups: list[int], /) -> list[object] | None:
        self.looks += 1
        assert isinstance(name, int)
        assert groups == [0]
        return [object()] if name < self.blocks else None


def named(engine: EngineDouble, tokens: list[int]) -> Asked:
    """Return a request with names of its full blocks that has not arrived yet."""
    request = engine.made(tokens)
    request.block_hashes = list(range(len(tokens) // ENGINE))
    return request


def hits(store: TierKV) -> dict[str, int]:
    """Return tokens found by tier."""
    answers: list[dict[str, Any]] = []
    store.stat(StatCall(), answers.append)
    return {name: n * STORE for name, n in answers[0]["hits_by_tier_blocks"].items() if n}


def stored(engine: EngineDouble, seed: int) -> list[int]:
    """Return a prompt of 100 tokens that is stored."""
    tokens = next(prompts(seed, 100))
    engine.run(tokens)
    engine.settle()
    return tokens


def serve(engine: EngineDouble, request: Asked, local: int) -> None:
    """Run a request of which the engine has `local` tokens."""
    engine.admit(request, local)
    engine.compute(request, engine.wait(request, local + request.external))
    engine.check(request)
    engine.end(request)
    engine.settle()


def test_hits_in_the_engines_own_cache_are_told(store: TierKV, engine: EngineDouble) -> None:
    tokens = stored(engine, 30)
    engine.scheduler.own.pool = PoolDouble(64 // ENGINE)
    request = named(engine, tokens)
    engine.scheduler.arrived(request)
    serve(engine, request, 64)
    assert request.external == 32
    assert hits(store) == {"hbm": 64, "host": 32}
    assert holds(store) == (0, 0, 0)
    assert engine.scheduler.counters == {"loaded_tokens_host": 32}


def test_what_the_engine_gave_up_meanwhile_is_asked_for(
    store: TierKV, engine: EngineDouble
) -> None:
    tokens = stored(engine, 31)
    engine.scheduler.own.pool = PoolDouble(96 // ENGINE)
    request = named(engine, tokens)
    engine.scheduler.arrived(request)
    engine.settle()
    assert engine.scheduler.matched(request, 36) is None
    serve(engine, request, 36)
    assert request.external == 60
    assert holds(store) == (0, 0, 0)


def test_what_the_engine_has_does_not_wait_for_us(store: TierKV) -> None:
    engine = over(store, kept_of(ENGINE, STORE), blocks=64)
    tokens = stored(engine, 32)
    engine.scheduler.own.pool = PoolDouble(96 // ENGINE)
    hangs = threading.Event()
    for _ in range(2):
        engine.threads.submit("lookup", partial(busy, hangs))
    request = named(engine, tokens)
    engine.scheduler.arrived(request)
    assert engine.scheduler.matched(request, 92) is None, "a block of ours is missing yet"
    assert engine.scheduler.matched(request, 96) == 0
    engine.scheduler.allocated(request, [[1] * 25], 0)
    hangs.set()
    engine.settle()
    assert holds(store)[0] == 0
    assert hits(store) == {"hbm": 96}
    engine.close()


def test_few_looks_tell_how_much_is_held() -> None:
    own = Own(kept_of(16, 128))
    request = Asked("r", list(range(1024 * 128 + 5)))
    request.block_hashes = list(range(1024 * 8))
    assert own.blocks(request) == 0, "it is not known yet"
    for blocks in (0, 7, 8, 800, 1024 * 8):
        own.pool = pool = PoolDouble(blocks)
        assert own.blocks(request) == blocks // 8
        assert pool.looks <= 11


def test_of_groups_with_windows_nothing_is_said() -> None:
    own = Own(kept_of(16, 128, windows=(None, 64)))
    own.pool = pool = PoolDouble(1024)
    request = Asked("r", list(range(1024)))
    request.block_hashes = list(range(64))
    assert (own.blocks(request), pool.looks) == (0, 0)
