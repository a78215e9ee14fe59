"""What waits to be saved: bounded, paced beside steps, and saved at the end while time allows."""

import threading
import time
from functools import partial
from typing import Any

import pytest

from tests.vllm_double import EngineDouble, over, prompts
from tests.vllm_memory import ENGINE, STORE, kept_of
from tierkv.cache import TierKV
from tierkv.codec import KVTC, RAW, Profile
from tierkv.errors import TierKVError
from tierkv.fidelity import Fidelity
from tierkv.offers import Offer, Offers
from tierkv.policy import Picked
from tierkv.reservation import Written
from tierkv_connectors.pages import UnitCopier
from tierkv_connectors.vllm.kept import options_of

ARTIFACT = b"a" * 32


def engine_of(store: TierKV, **options: Any) -> EngineDouble:
    return over(store, kept_of(ENGINE, STORE, **options), blocks=128)


def hang(engine: EngineDouble) -> threading.Event:
    """Let the lane of saves do nothing until told."""
    go = threading.Event()
    engine.threads.submit("save", partial(go.wait, 30))  # type: ignore[arg-type]
    return go


def test_what_waits_is_bounded_and_comes_with_the_next_save(store: TierKV) -> None:
    size = kept_of(ENGINE, STORE).raw_bytes
    engine = engine_of(store, save_queue_bytes=3 * size)
    tokens = next(prompts(1, 100))
    go = hang(engine)
    request = engine.ask(tokens)
    engine.admit(request)
    engine.compute(request, 0)  # steps of 64 and 36 tokens: 4 store blocks, then 2
    assert engine.worker.counters["saves_dropped"] == 1, "one may be larger than the bound"
    go.set()
    engine.settle()
    assert engine.worker._pace.waiting_bytes == 0
    engine.grow(request)
    for _ in range(16):
        engine.grow(request)
    engine.compute(request, 100)
    engine.end(request)
    engine.settle()
    assert engine.worker.counters["saved_blocks"] == 7, "the last save offers the whole chain"
    engine.close()
    assert not engine.edge.failures


def test_an_engine_that_ends_saves_what_waits(store: TierKV) -> None:
    engine = engine_of(store, save_share=1e-6)
    tokens = next(prompts(2, 100))
    engine.worker._pace.step_begins = lambda: None  # type: ignore[method-assign]
    engine.run(tokens)
    engine.worker._pace._computes = True  # a step goes on: copies would take their time
    engine.worker.flush(30.0)
    engine.close()
    other = engine_of(store)
    assert other.run(tokens).external == 96
    other.settle()
    other.close()


def test_it_does_so_no_longer_than_it_may(store: TierKV) -> None:
    engine = engine_of(store)
    go = hang(engine)
    engine.run(next(prompts(3, 100)))
    started = time.monotonic()
    engine.worker.flush(0.2)
    assert time.monotonic() - started >= 0.2
    go.set()
    engine.settle()
    engine.close()


def test_a_copy_beside_the_first_is_made_where_the_store_wants_it(
    store: TierKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = Offer(KVTC[0], ARTIFACT, Fidelity.SAFE, 0.0)
    allowed, made = Offers.allowed, list[int]()

    def encode(_: UnitCopier, block: Any, profile: Profile, pieces: Any, position: int) -> Written:
        assert (profile, block.isfinite().all()) == (KVTC[0], True)
        made.append(position)
        return Written(profile.number, (1, 1, 1, 1) if position else ())

    picked = Picked(RAW.number, KVTC[0].number)
    monkeypatch.setattr("tierkv.policies.lru.Lru.picks", lambda *_: picked)
    monkeypatch.setattr(Offers, "allowed", lambda self, call: [*allowed(self, call), offer])
    monkeypatch.setattr(UnitCopier, "encode_beside", encode)
    engine = engine_of(store)
    engine.run(next(prompts(4, 100)))
    engine.settle()
    assert made == [0, 16, 32, 48, 64, 80]
    assert store._store.counters["put_beside"] == 5
    assert engine.run(next(prompts(4, 100))).external == 96
    engine.close()
    assert not engine.edge.failures


def test_copies_are_paced_by_what_they_took(store: TierKV, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(store)
    took: list[float] = []
    monkeypatch.setattr(engine.worker._pace, "copied", took.append)
    take = engine.worker._shelves.own(0).writer.take

    def slow(*arguments: Any) -> Any:
        time.sleep(0.01)
        return take(*arguments)

    monkeypatch.setattr(engine.worker._shelves.own(0).writer, "take", slow)
    engine.run(next(prompts(4, 100)))
    engine.settle()
    assert len(took) == 6
    assert min(took) >= 0.01
    engine.close()


@pytest.mark.parametrize(
    "wrong", [{"save_share": 0}, {"save_share": 1.5}, {"save_queue_bytes": -1}, {"flush_s": -1}]
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TierKVError, match=next(iter(wrong))):
        options_of(wrong)
