"""What the cost model expects of reads is held against what they take; RAM is what clients tell."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from tests.memory_tier import MemoryTier
from tests.stores import BLOCK, Rig, chain, fill
from tierkv.channel import EmbeddedChannel
from tierkv.client import Client
from tierkv.codec import INT8, RAW
from tierkv.cost import HOST_RATES, LATENCY_BYTES, RATE_BYTES, Rates
from tierkv.lower import FIRST_RATES
from tierkv.reservation import Written
from tierkv.tier import Item, Outcome, Status


def nvme(rig: Rig) -> dict[str, Any]:
    return dict(rig.stat()["tiers"][1])


def staged(rig: Rig, seconds: float, status: Status | None = None) -> None:
    """Bring a chain up from a medium that takes so long for each frame."""

    def late(op: str, _item: Item) -> Outcome | None:
        if op == "read":
            rig.clock.now += seconds
            return None if status is None else Outcome(status, "on purpose")
        return None

    tier = rig.lower[0]
    assert isinstance(tier, MemoryTier)
    tier.fault = late
    rig.match(chain(1, 4))


def evicted() -> Rig:
    """Return a store whose first chain is only below RAM."""
    rig = Rig(8, [MemoryTier()])
    assert rig.put(chain(1, 4), b"one") == 4
    rig.inline.drain()
    assert rig.put(chain(2, 8), b"two") == 8
    rig.inline.drain()
    return rig


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_the_error_is_what_reality_adds(seconds: float) -> None:
    rig = evicted()
    staged(rig, seconds)
    found, rates = nvme(rig), FIRST_RATES["nvme"]
    one_job = rates.latency_s + found["read_bytes"] / rates.read_bps
    assert found["read_bytes"] >= 4 * BLOCK
    assert found["expected_read_s"] == pytest.approx(one_job)
    assert found["read_s"] == pytest.approx(4 * seconds)
    assert found["read_error_s"] == pytest.approx(abs(4 * seconds - one_job))


def test_what_failed_says_nothing_of_predictions() -> None:
    rig = evicted()
    staged(rig, 0.5, Status.MISSING)
    assert (nvme(rig)["read_s"], nvme(rig)["read_error_s"]) == (0.0, 0.0)


def told(
    blocks: int, seconds: float, monkeypatch: pytest.MonkeyPatch, codec_id: int = RAW.codec_id
) -> dict[str, Any]:
    """Return what RAM is said to do after a client wrote and read blocks, each in `seconds`."""
    rig = Rig(128, [])
    client = Client(EmbeddedChannel(rig.store, rig.host.view))
    held = client.put(rig.put_call(chain(1, blocks)))
    assert held is not None
    for index in range(blocks):
        fill(held.payload(index), bytes(BLOCK))
    written = [Written(RAW.number, (BLOCK,))] * blocks
    assert held.commit_written(written, seconds) == blocks
    transfer = client.get(client.match(rig.match_call(chain(1, blocks))).match, blocks)
    assert transfer is not None
    monkeypatch.setattr("tierkv.client.time.perf_counter", rig.clock)
    with transfer:
        for unit, header in enumerate(transfer.headers()):
            transfer.payload(unit, replace(header, codec_id=codec_id))
        rig.clock.now += seconds
        assert transfer.intact(blocks) == blocks
    return dict(rig.stat()["tiers"][0])


def after(old: float, new: float) -> object:
    """Return a rate that one measurement has moved by a fifth of the way."""
    return pytest.approx(old + (new - old) / 5, rel=1e-3)


def test_ram_is_as_fast_as_clients_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(100, 0.0004, monkeypatch)
    assert found["write_bps"] == after(HOST_RATES.write_bps, 100 * BLOCK / 0.0004)
    assert found["read_bps"] == after(HOST_RATES.read_bps, 100 * BLOCK / 0.0004)
    assert found["latency_s"] == HOST_RATES.latency_s


def test_a_copy_that_decodes_says_nothing_of_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(100, 0.001, monkeypatch, INT8.codec_id)["read_bps"] == HOST_RATES.read_bps


def test_copies_that_waited_for_a_core_do_not_make_ram_as_slow_as_a_disk() -> None:
    """Or a busy minute would have engines compute what lies in RAM."""
    rates = HOST_RATES
    for _ in range(100):
        rates = rates.with_told("read", RATE_BYTES, 3.0).with_told("write", RATE_BYTES, 3.0)
        rates = rates.with_told("read", 4096, 0.5)
    assert rates == pytest.approx((8e-5, 2e9, 2e9))


def test_a_small_copy_tells_how_long_ram_takes_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(1, 5e-5, monkeypatch)
    assert found["latency_s"] == after(HOST_RATES.latency_s, 5e-5)
    assert (found["read_bps"], found["write_bps"]) == (HOST_RATES.read_bps, HOST_RATES.write_bps)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e-12, 1e9])
@pytest.mark.parametrize("nbytes", [-1, 0, LATENCY_BYTES - 1, LATENCY_BYTES, RATE_BYTES, 1 << 60])
def test_what_cannot_be_changes_no_rate(nbytes: int, seconds: float) -> None:
    assert HOST_RATES.with_told("read", nbytes, seconds) == HOST_RATES
    assert HOST_RATES.with_told("write", nbytes, seconds) == HOST_RATES


def test_a_load_is_predicted_by_what_ram_does() -> None:
    rig = Rig(128, [])
    rig.put(chain(1, 4))
    before = rig.match(chain(1, 4)).load_s
    rig.store._store.host_rates = Rates(0.5, 1e6, 1e6)
    assert rig.match(chain(1, 4)).load_s == pytest.approx(0.5 + 4 * BLOCK / 1e6, rel=0.05)
    assert before < 1e-3
