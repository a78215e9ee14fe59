"""What a store refuses or loses is counted under the name that docs/OPERATIONS.md explains."""

import pytest

from tests.disk_rigs import counters, evict_ram
from tests.memory_tier import MemoryTier
from tests.stores import Rig, chain
from tierkv.tier import Outcome, Status

KEYS = chain(1, 4)


def below(pages: int = 8) -> tuple[Rig, MemoryTier]:
    """Return a store whose only chain lies in its lower tier."""
    tier = MemoryTier()
    rig = Rig(pages, [tier])
    rig.put(KEYS)
    rig.inline.drain()
    evict_ram(rig)
    return rig, tier


def test_a_put_without_room_is_counted() -> None:
    rig = Rig(4, [])
    rig.put(KEYS)
    held = rig.match(KEYS)
    assert held.blocks == 4
    assert rig.put(chain(2, 3)) == 0
    assert counters(rig)["put_refused_full"] == 3


def test_a_stage_without_room_is_counted() -> None:
    rig, _ = below(4)
    rig.put(chain(2, 3))
    assert rig.match(chain(2, 3)).blocks == 3
    assert rig.match(KEYS, owner=2).blocks == 1
    assert counters(rig)["stage_refused_full"] == 3


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (Status.FAILED, "stage_failed"),
        (Status.UNKNOWN, "unknown_format"),
        (Status.CORRUPT, "corrupt"),
        (Status.MISSING, "missing"),
    ],
)
def test_a_read_that_brings_nothing_is_counted(status: Status, name: str) -> None:
    rig, tier = below()
    tier.fault = lambda op, _item: Outcome(status) if op == "read" else None
    assert rig.read(KEYS) == []
    assert counters(rig)[name] == 4
    rig.idle()


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (Status.FAILED, "demote_failed"),
        (Status.FULL, "demote_failed"),
        (Status.THROTTLED, "demote_throttled"),
    ],
)
def test_a_copy_that_does_not_go_down_is_counted(status: Status, name: str) -> None:
    tier = MemoryTier()
    tier.fault = lambda op, _item: Outcome(status) if op == "write" else None
    rig = Rig(8, [tier])
    rig.put(KEYS)
    assert rig.flush(KEYS) == bytes(4)
    assert counters(rig)[name] == 4


def test_a_flush_that_the_disk_refuses_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*, power: bool) -> None:
        raise OSError(5, f"no, power={power}")

    tier = MemoryTier()
    monkeypatch.setattr(tier, "sync", refuse)
    rig = Rig(8, [tier], sync="power")
    rig.put(KEYS)
    assert rig.flush(KEYS) == bytes(4), "not durable, so not said to be"
    assert counters(rig)["sync_failed"] == 1


def test_who_dies_with_something_in_hand_is_counted() -> None:
    rig = Rig(8, [])
    rig.put(KEYS)
    rig.match(KEYS, owner=5)
    for owner in 5, 6:
        rig.store.disown(owner)
    assert counters(rig)["owner_died"] == 1
    rig.idle()
