"""Downwards and back: one read for many, what a stop writes first, and reuse that never comes."""

import logging
from typing import Any

import pytest

from tests.frames import content, make_frame
from tests.memory_tier import Medium, MemoryTier
from tests.stores import PAGE, Rig, chain
from tierkv import calls, frame
from tierkv.executor import Inline, Job
from tierkv.puts import UNUSED_FROM
from tierkv.tier import DONE, Outcome, Status
from tierkv.wrap import seal_in_place
from tierkv.write_behind import BATCH_FRAMES


def test_several_waiters_for_one_block_make_one_read() -> None:
    medium = Medium()
    first = Rig(lower=[MemoryTier(medium)])
    keys = chain(1, 3)
    first.put(keys)
    assert first.flush(keys) == b"\1\1\1"
    tier = MemoryTier(medium)
    rig = Rig(lower=[tier])
    asked = [rig.store.match(owner, rig.match_call(keys)) for owner in (1, 2, 3)]
    assert all(reply.pending for reply in asked)
    rig.inline.drain()
    got = [
        rig.store.settle(owner, calls.SettleCall(match=reply.match))
        for owner, reply in zip((1, 2, 3), asked, strict=True)
    ]
    assert [reply.blocks for reply in got] == [3, 3, 3]
    assert [op for op, _ in tier.calls].count("read") == len(keys)
    for owner, reply in zip((1, 2, 3), got, strict=True):
        rig.store.release(owner, calls.ReleaseCall(match=reply.match))
    rig.idle()


class Once(Inline):
    """Runs one job of the lower tier's write lane at once, when it may."""

    armed = False

    def submit(self, lane: str, job: Job) -> None:
        if self.armed and lane == "nvme-write":
            self.armed = False
            job()
        else:
            super().submit(lane, job)


def test_a_stop_writes_first_what_was_used_last() -> None:
    medium, executor = Medium(), Once()
    tier = MemoryTier(medium)
    tier.fault = lambda _op, _item: Outcome(Status.THROTTLED)
    rig = Rig(pages=128, lower=[tier], executor=executor)
    sessions = [chain(number, 40) for number in range(3)]
    for keys in sessions:
        rig.put(keys, raw=PAGE // 2)
        executor.drain()
    rig.store.match(1, rig.match_call(sessions[0]))
    rig.store.end_leases(1)
    assert not medium.frames
    tier.fault = lambda _op, _item: None
    executor.armed = True
    rig.store.close(0.0)
    headers = [frame.parse(data[: frame.MAX_HEADER_BYTES]) for data in medium.frames.values()]
    written = {header.key for header in headers if isinstance(header, frame.Header)}
    assert len(written) == BATCH_FRAMES
    assert written == set(sessions[0][:BATCH_FRAMES]), "a chain is worth nothing without its head"


def test_the_next_batch_is_sealed_while_one_is_written() -> None:
    medium, executor = Medium(), Inline()
    tier = MemoryTier(medium)
    rig = Rig(pages=128, lower=[tier], executor=executor)
    keys = chain(1, 2 * BATCH_FRAMES)
    rig.put(keys, raw=PAGE // 2)
    while not medium.frames:
        assert executor.step()
    assert len(medium.frames) == BATCH_FRAMES
    assert "nvme-seal" in {lane for lane, _ in executor.jobs}, "it was begun before the write"
    executor.drain()
    headers = [frame.parse(data[: frame.MAX_HEADER_BYTES]) for data in medium.frames.values()]
    assert len(headers) == len(keys)
    assert all(isinstance(header, frame.Header) and header.checksums for header in headers)


@pytest.mark.parametrize(("asked", "warned"), [(False, 1), (True, 0)])
def test_r01_much_stored_and_nothing_found_again_is_said_once(
    caplog: pytest.LogCaptureFixture, *, asked: bool, warned: int
) -> None:
    medium = Medium()
    first = Rig(lower=[MemoryTier(medium)])
    first.put(chain(0, 4))
    first.flush(chain(0, 4))
    rig = Rig(pages=64, lower=[MemoryTier(medium)])
    if asked:
        rig.read(chain(0, 4))
    with caplog.at_level(logging.WARNING, "tierkv"):
        for session in range(1, UNUSED_FROM // 8 + 4):
            rig.put(chain(session, 8), raw=PAGE // 2)
            rig.inline.drain()
    assert caplog.text.count("none of the 4 found at start was ever asked for") == warned
    assert rig.stat()["counters"].get("no_reuse_across_restarts", 0) == warned


def test_a_frame_that_another_tier_seals_meanwhile_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of an old header and half of a new one would be no header."""
    frames = [make_frame(1, nbytes=9000, seal=seal) for seal in (False, True)]
    item = frames[0].item(0)
    refuse = frame._refuse

    def seal_now(fields: tuple[Any, ...], length: int) -> frame.Refusal | None:
        item.pieces[0][: frames[1].header.header_bytes] = frame.pack(frames[1].header)
        return refuse(fields, length)

    monkeypatch.setattr(frame, "_refuse", seal_now)
    assert seal_in_place(item) is DONE
    assert content(item) == frames[1].data
