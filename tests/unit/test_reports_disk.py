"""What users reported of full, shared, lying and slow disks, at the level of the store."""

import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.disk_rigs import (
    MIB,
    Answer,
    Open,
    Wall,
    counters,
    evict_ram,
    opening,
    place,
    texts,
)
from tests.frames import make_frame
from tests.memory_tier import MemoryTier
from tests.stores import PAGE, Rig, chain
from tierkv import calls
from tierkv.errors import TierKVError
from tierkv.executor import Threads
from tierkv.settings import StoreSettings
from tierkv.tier import DONE, Item, Outcome, Status
from tierkv.tiers import region_log
from tierkv.tiers.region_log import LOG_NAME
from tierkv.wrap import check
from tierkv.write_behind import BATCH_BYTES

LANES = {"control": 2, "touch": 1, "nvme-read": 4, "nvme-seal": 1, "nvme-write": 1}


@pytest.fixture
def open_rig(tmp_path: Path) -> Iterator[Open]:
    with opening(tmp_path) as make:
        yield make


# --- R19: no size cap: the disk fills and takes the node down ---


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    folder = tmp_path / "volume"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("mount is not installed")
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_r19_a_cap_above_the_volume_is_an_error_that_names_both(volume: Path) -> None:
    with opening(volume) as make, pytest.raises(TierKVError, match=r"1072693248.*has \d+ bytes"):
        make(size=1024 * MIB)


def test_r19_the_cap_holds_whatever_is_written(volume: Path) -> None:
    with opening(volume) as make:
        rig = make(size=32 * MIB, pages=64)
        for session in range(1600):  # 200 MiB
            rig.put(chain(session, 8))
            rig.inline.drain()
        used = os.statvfs(volume)
        assert (used.f_blocks - used.f_bfree) * used.f_frsize <= 33 * MIB
        rig.sound()
        assert rig.stat()["counters"].get("invariant_broken", 0) == 0


def write_for_ever(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(MIB))


def test_r19_a_full_disk_refuses_writes_and_goes_on_reading(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be preallocated, others may take the room: ENOSPC in the middle."""

    def sparse(fd: int, size: int) -> bool:
        os.ftruncate(fd, size)
        return False

    monkeypatch.setattr(region_log, "_allocate", sparse)
    with opening(volume) as make:
        rig, kept = make(size=48 * MIB, pages=64), chain(1, 8)
        rig.put(kept, b"old")
        assert rig.flush(kept) == b"\1" * 8
        other = volume / "of another process"
        with pytest.raises(OSError, match="No space"):
            write_for_ever(other)
        rig.put(chain(2, 8), b"new")
        assert rig.flush(chain(2, 8)) == bytes(8)
        assert counters(rig)["demote_failed"] == 8
        evict_ram(rig)
        assert rig.read(kept) == texts(kept, b"old")
        assert rig.read(chain(2, 8)) == []
        other.unlink()
        rig.put(chain(3, 8), b"again")
        assert rig.flush(chain(3, 8)) == b"\1" * 8
        rig.sound()


# --- R20: two instances, one directory ---


def test_r20_the_second_store_is_told_and_the_first_goes_on(open_rig: Open, tmp_path: Path) -> None:
    rig, keys = open_rig(), chain(1, 3)
    rig.put(keys, b"old")
    with (
        opening(tmp_path) as another,
        pytest.raises(TierKVError, match=rf"in use by process {os.getpid()}"),
    ):
        another()
    assert rig.flush(keys) == b"\1\1\1"
    evict_ram(rig)
    assert rig.read(keys) == texts(keys, b"old")


def test_r20_what_is_there_is_not_written_again(open_rig: Open) -> None:
    rig, keys = open_rig(), chain(1, 3)
    rig.put(keys, b"old")
    rig.flush(keys)
    written = rig.stat()["tiers"][1]["written_bytes"]
    assert rig.flush(keys) == b"\1\1\1"
    assert rig.stat()["tiers"][1]["written_bytes"] == written
    again = open_rig()
    assert again.put(keys, b"old") == 0
    assert again.flush(keys) == b"\1\1\1"
    assert again.stat()["tiers"][1]["written_bytes"] == 0
    assert written > 0


def test_r20_a_flush_answers_for_its_own_namespace(open_rig: Open) -> None:
    """A copy that this tenant may not read is not what makes its block durable."""
    rig, keys = open_rig(), chain(1, 3)
    rig.put(keys, b"one")
    rig.flush(keys)
    evict_ram(rig)
    rig.put(keys, b"two", namespace="two")
    assert rig.flush(keys, namespace="two") == b"\1\1\1"
    assert open_rig().read(keys, namespace="two") == texts(keys, b"two")


# --- R21: right length, wrong bytes; and storage that hangs ---


def patch(log: Path, offset: int, data: bytes) -> None:
    with log.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flip(log: Path, offset: int) -> None:
    with log.open("rb") as file:
        file.seek(offset)
        byte = file.read(1)[0]
    patch(log, offset, bytes([byte ^ (1 << random.Random(offset).randrange(8))]))


@pytest.mark.parametrize("harm", ["header", "payload", "trailer", "zeroes", "swap", "old length"])
def test_r21_what_lies_is_dropped_and_counted(open_rig: Open, tmp_path: Path, harm: str) -> None:
    rig, keys = open_rig(), chain(1, 5)
    rig.put(keys, b"old")
    rig.flush(keys)
    evict_ram(rig)
    log, at, other = tmp_path / "nvme" / LOG_NAME, place(rig, keys[2]), place(rig, keys[4])
    if harm in {"header", "payload", "trailer"}:
        flip(log, at + {"header": 40, "payload": 5000, "trailer": PAGE - 1}[harm])
    elif harm == "zeroes":
        patch(log, at, bytes(4096))
    else:
        with log.open("rb") as file:
            one, two = (os.pread(file.fileno(), PAGE, place) for place in (at, other))
        patch(log, at, two)
        if harm == "swap":
            patch(log, other, one)
    assert rig.read(keys) == texts(keys, b"old")[:2]
    bad = {"swap": 2}.get(harm, 1)
    assert counters(rig)["corrupt"] == bad
    assert rig.put(keys, b"old") == bad, "what was dropped is taken again"
    assert rig.flush(keys) == b"\1" * 5
    evict_ram(rig)
    assert rig.read(keys) == texts(keys, b"old")
    rig.idle()


def test_r21_whatever_a_tier_checks_itself_another_frame_is_corrupt() -> None:
    ours, theirs = make_frame(1), make_frame(2)
    item = ours.item(0)
    assert check(item) == DONE
    assert check(item._replace(id=theirs.id)).status is Status.CORRUPT
    assert check(item._replace(nbytes=item.nbytes + 1)).status is Status.CORRUPT


def test_r21_a_read_that_hangs_leaves_the_others_their_threads() -> None:
    hangs, let_go = threading.Event(), threading.Event()
    tier = MemoryTier()
    rig = Rig(64, [tier], executor=Threads(LANES), clock=Wall())
    stuck, fine = chain(1, 2), chain(2, 2)
    for keys in (stuck, fine):
        rig.put(keys, b"old")
        durable = Answer()
        call = calls.FlushCall(
            namespace="one", keys=b"".join(keys), parts=rig.match_call(keys).parts, deadline_s=10.0
        )
        rig.store.flush(call, durable)
        assert durable.wait().durable == b"\1\1"
    evict_ram(rig)
    names = set(stuck)

    def fault(op: str, item: Item) -> Outcome | None:
        if op == "read" and item.id.key in names:
            tier._lock.release()
            hangs.set()
            let_go.wait(20)
            tier._lock.acquire()
        return None

    tier.fault = fault
    assert rig.store.match(1, rig.match_call(stuck)).pending
    assert hangs.wait(30)
    answer = Answer()
    reply = rig.store.match(1, rig.match_call(fine))
    rig.store.wait(1, calls.WaitCall(match=reply.match), answer)
    assert answer.wait().blocks == 2
    let_go.set()
    rig.store.close(0.0)


# --- R25: stores pile up and starve loads ---


class SlowDisk(MemoryTier):
    """A disk of so many bytes a second that does one request after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.bps = float("inf")
        self.moved = 0
        """Bytes read and written: its own clock, which no load of the machine delays."""
        self._free_at = 0.0
        self._turn = threading.Lock()

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        self._spend(items)
        return super().write(items)

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        self._spend(items)
        return super().read(items)

    def _spend(self, items: Sequence[Item]) -> None:
        with self._turn:
            nbytes = sum(item.nbytes for item in items)
            self.moved += nbytes
            seconds = nbytes / self.bps
            self._free_at = max(self._free_at, time.monotonic()) + seconds
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)  # the fault: the disk is slow


RAW = 240 << 10
LIMIT = 16 * MIB
BLOCKS = 48
"""Of a load: more bytes than a batch of stores, which is what it may have to wait for."""


def load_bytes(rig: Rig, disk: SlowDisk, sessions: range) -> int:
    """Return the bytes that the disk moves while a session's chain comes up, of the slowest."""
    most = 0
    for session in sessions:
        answer, at_the_end = Answer(), list[int]()

        def done(reply: object, answer: Answer = answer, seen: list[int] = at_the_end) -> None:
            seen.append(disk.moved)
            answer(reply)

        before = disk.moved
        reply = rig.store.match(1, rig.match_call(chain(session, BLOCKS), raw_bytes=RAW))
        rig.store.wait(1, calls.WaitCall(match=reply.match), done)
        assert answer.wait().blocks == BLOCKS
        most = max(most, at_the_end[0] - before)
        rig.store.release(1, calls.ReleaseCall(match=reply.match))
    return most


def test_r25_loads_keep_their_time_while_stores_saturate_the_disk() -> None:
    disk = SlowDisk()
    rig = Rig(4096, [disk], executor=Threads(LANES), clock=Wall(), write_behind_bytes=LIMIT)
    for session in range(14):
        rig.put(chain(session, BLOCKS), b"old", raw=RAW)
        while not rig.store._write_behind.idle():
            time.sleep(0.001)
    evict_ram(rig)
    disk.bps = 100.0 * MIB
    idle = load_bytes(rig, disk, range(4))
    stop = threading.Event()
    most = 0

    def store_on() -> None:
        nonlocal most
        session = 1000
        while not stop.wait(0.01):  # 400 MiB/s
            for _ in range(4):
                session += 1
                rig.put(chain(session, 4), b"new", raw=RAW)
            most = max(most, rig.store._write_behind.nbytes)

    storing = threading.Thread(target=store_on)
    storing.start()
    try:
        busy = load_bytes(rig, disk, range(4, 14))
    finally:
        stop.set()
        storing.join()
    assert busy <= 2 * idle, "a load waits for a batch of stores, and for no more"
    assert LIMIT / 2 < most <= LIMIT
    assert counters(rig)["demote_dropped"] > 0
    rig.sound()
    rig.store.close(0.0)


def test_r25_the_queue_is_bounded_and_what_it_drops_is_counted() -> None:
    limit = 10 * PAGE
    rig = Rig(200, [MemoryTier()], write_behind_bytes=limit)
    for session in range(10):
        rig.put(chain(session, 8))
        assert rig.stat()["write_behind"]["queued_bytes"] <= limit
    assert counters(rig)["demote_dropped"] == 70
    evict_ram(rig)
    assert rig.stat()["tiers"][0]["used_bytes"] == 0, "what waits for a slow tier holds no RAM"
    rig.inline.drain()
    rig.idle()


def test_r25_a_load_goes_before_the_next_batch_of_stores() -> None:
    """The next batch of writes waits until nobody waits for a read of that tier."""
    order: list[str] = []
    tier = MemoryTier()
    rig = Rig(4096, [tier], write_behind_bytes=4 * BATCH_BYTES)
    rig.put(chain(1, 2), b"old")
    rig.flush(chain(1, 2))
    evict_ram(rig)
    for session in range(2, 10):
        rig.put(chain(session, 8), raw=RAW)
    tier.fault = lambda op, _: order.append(op)
    assert rig.store.match(1, rig.match_call(chain(1, 2))).pending
    rig.inline.drain()
    first_read = order.index("read")
    written_before = order[:first_read].count("write")
    assert written_before * RAW <= BATCH_BYTES + RAW
    assert order.count("write") == 64
    assert StoreSettings().write_behind_bytes < 1 << 30


def test_r25_a_flush_offers_again_what_the_full_queue_dropped() -> None:
    """The place of a block that left RAM while it waited is not mistaken for the next one's."""
    rig = Rig(16, [MemoryTier()], write_behind_bytes=PAGE)
    rig.put(chain(1, 1))
    evict_ram(rig)
    rig.put(chain(2, 1))
    assert counters(rig)["demote_dropped"] == 1
    assert rig.flush(chain(2, 1)) == b"\1"
