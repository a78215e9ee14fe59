"""What users reported of storage that hangs (R21), at the level of the store."""

from tests.disk_rigs import counters, evict_ram, stuck_rig, texts
from tests.stores import chain
from tierkv import calls
from tierkv.store import OFF_S


def test_r21_a_tier_that_hangs_is_left_alone_and_tried_again() -> None:
    rig, executor = stuck_rig()
    keys, others = chain(1, 2), chain(2, 2)
    for each in (keys, others):
        rig.put(each, b"old")
        rig.flush(each)
    evict_ram(rig)
    assert rig.store.match(1, rig.match_call(keys)).pending
    executor.age = 60.0
    assert not rig.store.match(1, rig.match_call(others)).pending
    executor.age = 0.0
    executor.drain()
    assert not rig.store.match(1, rig.match_call(others)).pending, "not at once"
    rig.clock.now += OFF_S + 0.1
    assert rig.read(others) == texts(others, b"old")


def test_r21_one_read_that_hangs_for_ever_does_not_keep_the_tier_off() -> None:
    rig, executor = stuck_rig()
    keys, others = chain(1, 2), chain(2, 2)
    for each in (keys, others):
        rig.put(each, b"old")
        rig.flush(each)
    evict_ram(rig)
    assert rig.store.match(1, rig.match_call(keys)).pending
    hangs, executor.jobs = executor.jobs, []
    executor.jobs.append(("nvme-read", lambda: None))
    executor.age, executor.share = 60.0, 0.25
    assert not rig.store.match(1, rig.match_call(others)).pending
    assert rig.stat()["tiers"][1]["state"] == "lost"
    assert counters(rig)["off_nvme"] == 1
    rig.clock.now += OFF_S + 0.1
    assert rig.stat()["tiers"][1]["state"] == "ok"
    asked = rig.store.match(2, rig.match_call(others))
    assert asked.pending, "by a thread that is free"
    assert not rig.store.match(3, rig.match_call(keys)).pending, "nobody waits for the hung one"
    rig.store.release(2, calls.ReleaseCall(match=asked.match))
    executor.share = 1.0
    assert rig.stat()["tiers"][1]["state"] == "lost", "no thread is left"
    rig.clock.now += 10 * OFF_S
    assert rig.stat()["tiers"][1]["state"] == "lost"
    executor.age = 0.0
    executor.jobs += hangs
    executor.drain()
    rig.clock.now += OFF_S + 0.1
    assert rig.read(others) == texts(others, b"old")
    assert rig.read(keys) == texts(keys, b"old")
