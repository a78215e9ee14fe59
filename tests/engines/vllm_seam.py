"""Run by vLLM's own Python: what the sides of the connector say to each other, in its classes."""

import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.engine.core import EngineCore

from tierkv.fidelity import Fidelity
from tierkv_connectors.vllm import stream, weights
from tierkv_connectors.vllm.connector import TierKVConnector
from tierkv_connectors.vllm.events import Asker
from tierkv_connectors.vllm.reports import Report, Saved
from tierkv_connectors.vllm.stats import Word
from tierkv_connectors.vllm.worker import NoWorker


def connector() -> Any:
    made: Any = object.__new__(TierKVConnector)
    made._worker, made._scheduler = NoWorker(), SimpleNamespace(refused=False)
    return made


def refusal() -> dict[str, Any]:
    worker, scheduler, child = connector(), connector(), connector()
    kv_transfer_state._KV_CONNECTOR_AGENT = worker
    words = {(0, 0): None, (0, 1): worker.get_handshake_metadata()}
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): Word()})
    before = scheduler._scheduler.refused
    scheduler.set_xfer_handshake_metadata_pp_aware(pickle.loads(pickle.dumps(words)))  # noqa: S301
    told = [before, scheduler._scheduler.refused, child.get_handshake_metadata()]
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    return {"told": told}


def words() -> dict[str, Any]:
    one = Word(report=Report({"r": {4: 2}}, [Saved(b"k", b"k", 4)]))
    both = pickle.loads(pickle.dumps(one)).aggregate(Word(refused=True))  # noqa: S301
    return {"refused": both.refused, "classes": both.report.classes["r"][4]}


def events() -> list[Any]:
    spec = SimpleNamespace(block_size=16)
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    kept: Any = SimpleNamespace(windows=False, tokens=32, ranks=SimpleNamespace(shards=1))
    config: Any = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
    made = stream.events_of(config, cache, kept)
    assert made is not None
    asker = Asker([bytes([at]) * 32 for at in range(4)], list(range(64)), (None, None), "s")
    made.looked_up(asker, bytes(range(64)), 2, [("host", 1), ("nvme", 1)], Fidelity.EXACT)
    made.forgotten()
    batch = KVEventBatch(ts=1.0, events=list(made.take()))
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    found = [[type(one).__name__, one.medium, len(one.block_hashes)] for one in back.events]
    kept.windows = True
    return [*found, stream.events_of(config, cache, kept)]


def answers() -> dict[str, Any]:
    """Return what came of each question."""
    watched = [hasattr(EngineCore, name) for name in weights.WATCHED]
    return {"refusal": refusal(), "words": words(), "events": events(), "watched": watched}
