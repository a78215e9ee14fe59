"""What the cost model expects of reads is held against what they take."""

from typing import Any

import pytest

from tests.memory_tier import MemoryTier
from tests.stores import BLOCK, Rig, chain
from tierkv.store import FIRST_RATES
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
