"""A broken invariant never reaches an engine: the store says so, and answers only misses."""

from typing import Any

import pytest

from tests.stores import Rig, chain
from tierkv import calls
from tierkv.channel import EmbeddedChannel
from tierkv.client import Client
from tierkv.errors import ErrorKind, TierKVError
from tierkv.stat import from_wire
from tierkv_service.routes import readiness


def fail(*_: Any, **__: Any) -> Any:
    raise AssertionError("a hold ended twice")


def broken_rig(monkeypatch: pytest.MonkeyPatch) -> tuple[Rig, Client]:
    """Return a store whose catalog fails in the next match, and a client in its process."""
    rig = Rig(8)
    rig.put(chain(1, 4))
    monkeypatch.setattr(rig.store._store.catalog, "hold", fail)
    return rig, Client(EmbeddedChannel(rig.store, rig.host.view))


def test_an_engine_sees_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, client = broken_rig(monkeypatch)
    assert client.match(rig.match_call(chain(1, 4))).blocks == 0
    monkeypatch.undo()
    assert client.match(rig.match_call(chain(1, 4))).blocks == 0
    assert client.put(rig.put_call(chain(2, 1))) is None
    stat = client.stat()
    assert stat is not None
    assert stat["counters"]["invariant_broken"] == 1
    assert "a hold ended twice" in stat["enabled"]["state"]


def test_r28_a_broken_store_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a job that raises leaves it: the process lives, answers, and serves nothing."""
    rig, _ = broken_rig(monkeypatch)
    assert readiness(from_wire(rig.stat()), details=True)[0] == 200
    rig.store.break_down(RuntimeError("spilled"))
    status, body = readiness(from_wire(rig.stat()), details=True)
    assert (status, body["status"], body["failing"]) == (503, "unavailable", ["host"])
    assert "spilled" in body["tiers"]["host"]["problem"]


def test_a_peer_is_told_that_the_store_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _ = broken_rig(monkeypatch)
    with pytest.raises(TierKVError, match="a hold ended twice") as caught:
        rig.store.match(1, rig.match_call(chain(1, 4)))
    assert caught.value.kind is ErrorKind.UNAVAILABLE


def test_a_job_that_breaks_the_store_is_noticed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(8)
    rig.put(chain(1, 4))
    monkeypatch.setattr(rig.store._store.catalog, "begin", fail)
    with pytest.raises(TierKVError):
        rig.inline.drain()
    monkeypatch.undo()
    assert rig.store._store.broken
    assert rig.match(chain(1, 4)).blocks == 0


def test_what_was_leased_before_is_not_handed_out_any_more() -> None:
    rig = Rig(8, [])
    rig.put(chain(1, 4))
    reply = rig.match(chain(1, 4))
    held = rig.offer(chain(2, 2))
    assert held is not None
    catalog = rig.store._store.catalog
    catalog.bytes[0][2] += 4096
    rig.store._store.check()
    assert rig.store._store.broken.startswith("host: free")
    assert rig.store.get(1, calls.GetCall(match=reply.match, blocks=4)).transfer == 0
    assert held.commit([5, 5]) == 0
