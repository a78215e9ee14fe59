"""What users reported, at the level of the store, over the real NVMe tier where it is about one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.disk_rigs import (
    MIB,
    Hooked,
    Open,
    counters,
    evict_ram,
    opening,
    shared,
    stuck_rig,
    texts,
)
from tests.stores import BLOCK, PAGE, chain
from tierkv import calls
from tierkv.simulation.server import Server
from tierkv.tiers.region_log import LOG_NAME


@pytest.fixture
def open_rig(tmp_path: Path) -> Iterator[Open]:
    with opening(tmp_path) as make:
        yield make


# --- R6: "cache cleared" answered success while a lower tier keeps serving ---


def test_r06_a_clear_reaches_every_tier_and_says_so(open_rig: Open) -> None:
    server, keys = Server(), chain(1, 3)
    rig = open_rig("nvme", shared(server))
    rig.put(keys, b"old")
    assert rig.flush(keys) == b"\1\1\1"
    rig.inline.drain()
    assert len(server.frames) == 3
    answer = rig.clear()
    assert answer.removed == {"host": 3, "nvme": 3, "redis": 3}
    assert answer.failed == {}
    assert rig.read(keys) == []
    assert open_rig("nvme", shared(server)).read(keys) == []
    assert open_rig("another machine", shared(server)).read(keys) == []


def test_r06_what_failed_is_named_and_misses_all_the_same(
    open_rig: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, keys = Server(), chain(1, 3)
    rig = open_rig("nvme", shared(server))
    rig.put(keys, b"old")
    rig.flush(keys)
    server.reachable = False

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(rig.lower[0], "raise_generation", refuse)
    assert set(rig.clear().failed) == {"nvme", "redis"}
    assert rig.read(keys) == []
    server.reachable = True
    assert rig.read(keys) == []


@pytest.mark.parametrize("op", ["write", "read"])
def test_r06_what_is_in_flight_never_becomes_visible(open_rig: Open, op: str) -> None:
    rig, keys = open_rig(), chain(1, 3)
    tier = rig.lower[0]
    assert isinstance(tier, Hooked)
    answers: list[calls.ClearReply] = []
    clear = calls.ClearCall(namespace="one")
    rig.put(keys, b"old")
    if op == "read":
        rig.flush(keys)
        evict_ram(rig)
    tier.between = lambda now: rig.store.clear(clear, answers.append) if now == op else None
    if op == "read":
        assert rig.read(keys) == []
    rig.inline.drain()
    tier.between = lambda _: None
    assert answers
    assert rig.read(keys) == []
    assert rig.flush(keys) == b"\0\0\0"
    rig.idle()
    assert open_rig().read(keys) == []


def test_r06_a_put_under_way_never_becomes_visible(open_rig: Open) -> None:
    rig, keys = open_rig(), chain(1, 2)
    held = rig.offer(keys)
    assert held is not None
    rig.clear()
    assert held.commit([BLOCK] * 2) == 0
    assert rig.read(keys) == []
    rig.idle()


def test_r06_a_lease_from_before_the_clear_is_a_miss(open_rig: Open) -> None:
    rig, keys = open_rig(), chain(1, 2)
    rig.put(keys, b"old")
    reply = rig.match(keys)
    assert reply.blocks == 2
    rig.clear()
    assert rig.transfer(reply, rig.match_call(keys)) is None
    rig.idle()


def test_r06_another_sidecars_clear_survives_our_restart(open_rig: Open) -> None:
    server, keys = Server(), chain(1, 3)
    ours, theirs = open_rig("ours", shared(server)), open_rig("theirs", shared(server))
    ours.put(keys, b"old")
    ours.flush(keys)
    theirs.clear()
    ours.match(chain(9, 1))  # any question that reaches the server
    assert ours.read(keys) == []
    server.reachable = False
    assert open_rig("ours", shared(server)).read(keys) == []


def test_r06_a_second_clear_by_another_sidecar_is_a_clear(open_rig: Open) -> None:
    server, keys = Server(), chain(1, 3)
    ours, theirs = open_rig("ours", shared(server)), open_rig("theirs", shared(server))
    ours.clear()
    ours.put(keys, b"old")
    ours.flush(keys)
    ours.inline.drain()
    assert theirs.clear().generation == 2
    assert theirs.read(keys) == []
    ours.put(keys, b"new")


def test_r06_clears_that_cannot_hear_of_each_other_differ(open_rig: Open) -> None:
    """Both sidecars clear while the server is gone: the later clear takes what lies between."""
    server, keys = Server(), chain(1, 3)
    ours = open_rig("ours", shared(server), wall=lambda: 100.0)
    theirs = open_rig("theirs", shared(server), wall=lambda: 101.0)
    server.reachable = False
    first = ours.clear()
    ours.put(keys, b"between")
    second = theirs.clear()
    assert set(first.failed) == set(second.failed) == {"redis"}
    assert first.generation < second.generation
    server.reachable = True
    ours.flush(keys)
    ours.inline.drain()
    assert theirs.read(keys) == []
    ours.clock.now += 2.0
    ours.store.tick()
    ours.inline.drain()
    assert ours.read(keys) == []


def test_r06_a_clock_that_goes_back_does_not_undo_a_clear(open_rig: Open) -> None:
    hours, keys = [9.0, 5.0], chain(1, 3)
    rig = open_rig(wall=lambda: hours.pop(0) * 3600)
    first = rig.clear()
    rig.put(keys, b"old")
    rig.flush(keys)
    assert rig.clear().generation == first.generation + 1
    assert rig.read(keys) == []


def test_a_better_copy_below_is_not_hidden_by_a_poor_one_in_ram(open_rig: Open) -> None:
    server, keys = Server(), chain(1, 3)
    theirs, ours = open_rig("theirs", shared(server)), open_rig("ours", shared(server))
    theirs.put(keys, b"exact")
    theirs.flush(keys)
    theirs.inline.drain()
    assert ours.put(keys, b"poor", fidelity=2, derived=True) == 3
    assert ours.read(keys, fidelity=2) == texts(keys, b"poor")
    held = ours.match(keys[:1], fidelity=2, owner=5)
    assert ours.read(keys) == [], "somebody holds the poor head"
    ours.store.release(5, calls.ReleaseCall(match=held.match))
    ours.clock.now += 10.0
    assert ours.read(keys) == texts(keys, b"exact")
    assert ours.read(keys, fidelity=2) == texts(keys, b"exact")
    ours.idle()


def test_another_namespaces_copy_in_ram_makes_way_for_one_from_below(open_rig: Open) -> None:
    rig, keys = open_rig(), chain(1, 3)
    rig.put(keys, b"two", namespace="two")
    rig.flush(keys, namespace="two")
    rig.put(keys, b"one")
    assert rig.read(keys, namespace="two") == texts(keys, b"two")
    rig.idle()


def test_r06_new_blocks_take_the_place_of_cleared_ones(open_rig: Open) -> None:
    server, keys = Server(), chain(1, 3)
    ours, theirs = open_rig("ours", shared(server)), open_rig("theirs", shared(server))
    ours.put(keys, b"old")
    ours.flush(keys)
    theirs.clear()
    theirs.put(keys, b"new")
    theirs.inline.drain()
    assert ours.read(keys) == texts(keys, b"old"), "all of it is in RAM: nobody asked the server"
    ours.store.tick()
    ours.inline.drain()
    assert ours.read(keys) == texts(keys, b"new")
    evict_ram(ours)
    assert ours.read(keys) == texts(keys, b"new")


def test_r06_a_clear_that_was_not_persisted_holds_once_new_blocks_are(open_rig: Open) -> None:
    rig, old, new = open_rig(), chain(1, 3), chain(2, 3)
    rig.put(old, b"old")
    rig.flush(old)
    rig.store.clear(calls.ClearCall(namespace="one"), lambda _: None)
    lane, persist = rig.inline.jobs.pop()
    assert lane == "control"
    rig.put(new, b"new")
    rig.flush(new)
    del persist  # the kill comes before the minimum is on the disk
    again = open_rig()
    assert again.read(old) == []
    assert again.read(new) == texts(new, b"new")
    assert again.clear().generation == 2
    assert again.read(new) == []


def test_r06_disk_works_again_after_a_clear(open_rig: Open) -> None:
    rig, keys = open_rig(), chain(1, 3)
    rig.put(keys, b"old")
    rig.flush(keys)
    rig.clear()
    rig.put(keys, b"new")
    assert rig.flush(keys) == b"\1\1\1"
    evict_ram(rig)
    assert rig.read(keys) == texts(keys, b"new")
    assert counters(rig).get("corrupt", 0) == 0


# --- R11: a file vanished or unreadable at load ---


def unlink(log: Path) -> None:
    log.unlink()


def become_directory(log: Path) -> None:
    log.unlink()
    log.mkdir()


def empty(log: Path) -> None:
    log.write_bytes(b"")


def halve(log: Path) -> None:
    with log.open("r+b") as file:
        file.truncate(MIB + 2 * PAGE + 4096)


def lock_away(log: Path) -> None:
    log.chmod(0)


@pytest.mark.parametrize("harm", [unlink, become_directory, empty, halve, lock_away])
def test_r11_a_log_that_is_harmed_gives_right_bytes_or_misses(
    open_rig: Open, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    rig, keys = open_rig(), chain(1, 4)
    rig.put(keys, b"old")
    assert rig.flush(keys) == b"\1\1\1\1"
    evict_ram(rig)
    harm(tmp_path / "nvme" / LOG_NAME)
    got = rig.read(keys)
    left: dict[Callable[[Path], None], int] = {empty: 0, halve: 2}
    expected = left.get(harm, 4)
    assert got == texts(keys, b"old")[:expected]
    known = rig.match(keys).blocks
    assert known == expected, "what cannot be read is forgotten"
    rig.put(chain(2, 2), b"new")
    durable = rig.flush(chain(2, 2))
    assert durable == (b"\1\1" if harm is lock_away else b"\0\0")
    assert rig.read(chain(2, 2)) == texts(chain(2, 2), b"new")
    rig.sound()


def test_r11_evicting_what_is_gone_is_no_error(open_rig: Open, tmp_path: Path) -> None:
    rig = open_rig(pages=200)
    for session in range(60):
        rig.put(chain(session, 8))
        rig.inline.drain()
    (tmp_path / "nvme" / LOG_NAME).unlink()
    for session in range(100, 140):
        rig.put(chain(session, 8))
        rig.inline.drain()
    rig.sound()


# --- R12: a hit that never completes ---


def test_r12_a_read_that_never_returns_is_a_miss_at_the_deadline() -> None:
    rig, executor = stuck_rig()
    keys, answers = chain(1, 3), list[calls.MatchReply]()
    rig.put(keys, b"old")
    rig.flush(keys)
    evict_ram(rig)
    reply = rig.store.match(1, rig.match_call(keys, deadline_s=2.0))
    assert reply.pending
    rig.store.wait(1, calls.WaitCall(match=reply.match), answers.append)
    rig.clock.now += 1.9
    rig.store.tick()
    assert not answers
    rig.clock.now += 0.2
    rig.store.tick()
    assert [(answer.blocks, answer.pending) for answer in answers] == [(0, False)]
    assert counters(rig)["stage_late"] == 3
    assert executor.jobs


def test_r12_a_late_completion_touches_nothing() -> None:
    rig, executor = stuck_rig(pages=8)
    keys, others = chain(1, 3), chain(2, 5)
    rig.put(keys, b"old")
    rig.flush(keys)
    evict_ram(rig)
    reply = rig.store.match(1, rig.match_call(keys, deadline_s=2.0))
    late = list(executor.jobs)
    executor.jobs.clear()
    rig.clock.now += 3.0
    rig.store.tick()
    assert not rig.store.settle(1, calls.SettleCall(match=reply.match)).blocks
    assert rig.put(others, b"new") == 5
    assert rig.put(chain(3, 1), b"more") in {0, 1}
    executor.jobs += late
    executor.drain()
    assert rig.read(others) == texts(others, b"new")[: len(rig.read(others))]
    assert rig.read(keys) in (texts(keys, b"old")[:n] for n in range(4))
    rig.idle()


def test_r12_nobody_waits_again_for_a_read_that_hangs() -> None:
    """The second request for a chain whose read hangs is answered at once."""
    rig, executor = stuck_rig()
    keys = chain(1, 3)
    rig.put(keys, b"old")
    rig.flush(keys)
    evict_ram(rig)
    assert rig.store.match(1, rig.match_call(keys)).pending
    executor.age = 60.0
    second = rig.store.match(2, rig.match_call(keys))
    assert (second.blocks, second.pending) == (0, False)
    executor.age = 0.0
    rig.clock.now += 60.0
    rig.store.tick()
    executor.drain()
    rig.idle()


def test_r12_a_dead_writers_blocks_can_be_put_again(open_rig: Open) -> None:
    rig, keys = open_rig(), chain(1, 2)
    assert rig.offer(keys, owner=7) is not None
    assert rig.put(keys, b"mine") == 0
    rig.store.disown(7)
    assert rig.put(keys, b"mine") == 2
    assert rig.read(keys) == texts(keys, b"mine")


# --- R18: the disk cache is useless or leaks after a restart ---


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_r18_what_was_acknowledged_counts_after_a_restart(
    open_rig: Open, tmp_path: Path, end: str
) -> None:
    rig, size = open_rig(pages=64), 20 * MIB
    sessions = range(40)
    for session in sessions:
        rig.put(chain(session, 8), b"old")
        assert rig.flush(chain(session, 8)) == b"\1" * 8
    used = rig.stat()["tiers"][1]["used_bytes"]
    if end == "stop":
        rig.store.close(0.0)
    again = open_rig(pages=64)
    assert again.stat()["tiers"][1]["used_bytes"] == used
    for session in sessions:
        assert again.read(chain(session, 8)) == texts(chain(session, 8), b"old")
    for session in range(100, 200):
        again.put(chain(session, 8), b"new")
        again.inline.drain()
    blocks = sum(path.stat().st_blocks * 512 for path in (tmp_path / "nvme").iterdir())
    assert blocks <= size
    again.sound()
