"""evicpress in a real sidecar with a gate, a real disk and a codec worker, end to end.

Nobody commands: RAM is full, so copies are cut short, go down encoded again, and come back when
they are asked for. Every byte is where the counters say, every block is what its class promises.
"""

import json
import os
import random
import re
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.live import Live
from tests.move_rigs import EVERY, class_of
from tests.sidecars import Process
from tests.stores import chain
from tierkv import frame
from tierkv.codec import BY_CODEC_ID, BY_LEVELS, PROFILES
from tierkv.explain import Copy
from tierkv.fidelity import Fidelity
from tierkv.stat import StoreStat
from tierkv.tiers.nvme import NvmeSettings, NvmeTier

SESSIONS, BLOCKS = 24, 4
PUTS = "kvtc@4x", "raw"
GRANULE = {"host": 16 << 10, "nvme": 4096}
HANGS_S = 4.0
BEFORE = f"""
from tierkv_service import codec_process
codec_process.JOB_S, codec_process.MIN_PAUSE_S, codec_process.NICE = {HANGS_S}, 0.1, 0
"""
Copies = dict[bytes, tuple[Copy, ...]]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """A sidecar whose copies go down by the policy's demotions alone: its queue has no room."""
    (tmp_path / "gate.json").write_bytes(msgspec.json.encode(EVERY))
    more = (
        f'gate = "{tmp_path}/gate.json"\nwrite_behind = 1\n'
        f'[nvme]\npath = "{tmp_path}/nvme"\nsize = "16MiB"\nregion = "1MiB"\nfree_floor = 0\n'
    )
    one = Process(tmp_path, more, host_bytes=4 << 20, http="port = 0")
    one.start(before=BEFORE)
    yield one
    one.kill()


def ask(live: Live, session: int) -> None:
    keys = chain(session, BLOCKS)
    live.sessions.add(session)
    live.get(keys)
    live.put(keys, live.puts[session % len(live.puts)])


def press(live: Live, *names: str, more: int = 3, timeout_s: float = 240.0) -> float:
    """Ask for chains, some much more often than others, until all of this has happened.

    Chains that nobody asked for come in all the time. Returns: the seconds of the slowest question.
    """
    slowest, new = 0.0, max(live.sessions, default=0)
    rng, end, before = random.Random(0), time.monotonic() + timeout_s, live.stat().counters
    while any(live.count(name) < before.get(name, 0) + more for name in names):
        assert time.monotonic() < end, live.stat().counters
        new += 1
        for _ in range(8):
            begun = time.monotonic()
            ask(live, new - int(rng.paretovariate(0.7)) % SESSIONS)
            slowest = max(slowest, time.monotonic() - begun)
    return slowest


def copies_of(live: Live) -> Copies:
    return {key: live.explain(key).copies for key in live.stored}


def still(live: Live, timeout_s: float = 60.0) -> tuple[StoreStat, Copies]:
    """Return counters and copies that are of one moment: moves may end between two questions."""
    end = time.monotonic() + timeout_s
    while True:
        stat, copies = live.settle(), copies_of(live)
        if live.settle().tiers == stat.tiers:
            return stat, copies
        assert time.monotonic() < end, "copies never stand still"


@pytest.mark.timeout(900)
def test_what_leaves_ram_comes_back_and_every_byte_is_accounted_for(process: Process) -> None:
    live = Live(process.path, *PUTS)
    press(live, "encoded", "demoted", "downgraded", "promoted")
    copies = accounted(process, live)
    lossy = [one for some in copies.values() for one in some if one.tier == "nvme"]
    assert {"int8", "int4"} & {one.profile for one in lossy}, "nothing went down encoded again"
    found_again(process, live, 16 << 20)
    process.start(before=BEFORE)
    again = Live(process.path)
    again.stored = live.stored
    found = sum(len(contents(again, session)) for session in live.sessions)
    assert found > 0, "nothing was found again"


def accounted(process: Process, live: Live) -> Copies:
    """Assert that all copies, the counters, HTTP and the classes agree; returns the copies."""
    stat, copies = still(live)
    used: Counter[str] = Counter()
    placed: Counter[str] = Counter()
    for one in (one for some in copies.values() for one in some):
        assert (one.state, one.held) == ("ready", 0)
        assert one.allocated == -(-one.nbytes // GRANULE[one.tier]) * GRANULE[one.tier]
        assert one.fidelity == class_of(one.profile).label
        used[one.tier] += one.allocated
        placed[one.tier] += 1
    for tier in stat.tiers:
        assert (tier.used_bytes, tier.placements) == (used[tier.name], placed[tier.name])
        assert tier.used_bytes + tier.dead_bytes + tier.free_bytes == tier.capacity_bytes
    url = re.findall(r"http://\S+", process.said())[-1]
    with urllib.request.urlopen(f"{url}/v1/tiers", timeout=30) as answer:  # noqa: S310 - loopback
        tiers = json.load(answer)["tiers"]
    for tier, told in zip(stat.tiers, tiers, strict=False):
        assert (tier.name, tier.used_bytes) == (told["name"], told["used_bytes"])
        assert (tier.dead_bytes, tier.free_bytes) == (told["dead_bytes"], told["free_bytes"])
    for session in live.sessions:
        contents(live, session)
    return copies


def contents(live: Live, session: int) -> list[str]:
    """Assert that a chain's readers get what they may; returns the profiles of what they got."""
    keys, profiles = chain(session, BLOCKS), []
    exact = live.get(keys, Fidelity.EXACT)
    for key, (header, block) in zip(keys, exact, strict=False):
        assert not BY_CODEC_ID[header.codec_id].lossy
        assert torch.equal(block, live.stored[key].block)
    for key, (header, block) in zip(keys, live.get(keys), strict=False):
        levels = sum(map(bool, header.segments))
        profile = BY_LEVELS.get((header.codec_id, levels), BY_CODEC_ID[header.codec_id])
        assert header.fidelity == class_of(profile.name)
        assert torch.equal(block, live.expected(key, header))
        profiles.append(profile.name)
    return profiles


def found_again(process: Process, live: Live, nvme_bytes: int) -> None:
    """Kill the sidecar; assert that its file has the frames that it said were there."""
    _, copies = still(live)
    process.kill()
    folder = process.path.parent / "nvme"
    assert (folder / "tierkv.log").stat().st_size <= nvme_bytes
    tier = NvmeTier(
        NvmeSettings(
            path=str(folder), size_bytes=nvme_bytes, region_bytes=1 << 20, free_floor_bytes=0
        )
    )  # fmt: skip
    try:
        found = {row["key"].tobytes(): row for row in tier.scan()}
    finally:
        tier.close()
    for key, some in copies.items():
        for one in some:
            if one.tier == "nvme":
                assert one.nbytes == prefix_bytes(folder / "tierkv.log", found[key], one)


def prefix_bytes(log: Path, row: np.void, one: Copy) -> int:
    """Return the bytes of a copy's frame in the file, up to its profile's last segment."""
    with log.open("rb") as file:
        file.seek(int(row["locator"]))
        header = frame.parse(file.read(frame.MAX_HEADER_BYTES))
    assert isinstance(header, frame.Header)
    assert header.frame_bytes == row["nbytes"]
    profile = PROFILES[one.profile]
    assert header.codec_id == row["codec_id"] == profile.codec_id
    count = profile.levels or 1
    assert all(header.segments[:count])
    return header.header_bytes + sum(header.segments[:count])


@pytest.mark.timeout(900)
def test_a_worker_that_hangs_delays_nobody_and_is_replaced(process: Process) -> None:
    live = Live(process.path, *PUTS)
    press(live, "encoded")
    first = worker_of(live)
    os.kill(first, signal.SIGSTOP)
    slowest = press(live, "encode_failed", more=1)
    assert slowest < HANGS_S / 2, "a call waited for the worker"
    press(live, "encoded")
    assert worker_of(live) != first
    assert not Path(f"/proc/{first}").exists()
    accounted(process, live)


def worker_of(live: Live) -> int:
    found = re.search(r"pid (\d+)", live.stat().enabled["codec worker"])
    assert found is not None
    return int(found[1])
