"""A sidecar with an artifact: exact copies go down as kvtc, and are cut short later, end to end.

The engine puts raw blocks alone. What kvtc there is was made by the codec worker, a process of its
own over a real artifact; a real disk holds it.
"""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.kvtc_rigs import artifact, packed
from tests.live import Live
from tests.move_rigs import RATIOS, gate_of
from tests.sidecars import Process
from tests.unit.test_live_moves import BEFORE, accounted, contents, found_again, press, worker_of
from tierkv.codec import KVTC, PROFILES
from tierkv.explain import Copy

CUTTING = "from tests import cutting_policy; cutting_policy.install()"
KVTC_NAMES = [one.name for one in KVTC]


NVME_BYTES = 6 << 20


@pytest.fixture
def process(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    """A sidecar whose gate allows kvtc and nothing else that loses."""
    (tmp_path / "gate.json").write_bytes(msgspec.json.encode(gate_of(*KVTC_NAMES)))
    (tmp_path / "a.kvtc").write_bytes(packed(artifact(RATIOS)))
    more = (
        f'gate = "{tmp_path}/gate.json"\nartifacts = ["{tmp_path}/a.kvtc"]\nwrite_behind = 1\n'
        f'[nvme]\npath = "{tmp_path}/nvme"\nsize = {NVME_BYTES}\nregion = "1MiB"\nfree_floor = 0\n'
    )
    one = Process(tmp_path, more, host_bytes=4 << 20, http="port = 0")
    one.start(before=BEFORE + getattr(request, "param", ""))
    yield one
    one.kill()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the worker has: on some CPUs the last bit of a product depends on the count."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def calibrated(copies: dict[bytes, tuple[Copy, ...]], tier: str) -> list[str]:
    every = [one for some in copies.values() for one in some if one.tier == tier]
    return [one.profile for one in every if PROFILES[one.profile].levels]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("process", [CUTTING], indirect=True, ids=["cutting"])
def test_exact_blocks_go_down_as_kvtc_are_cut_there_and_come_back(process: Process) -> None:
    """Only kvtc@4x is encoded: what is coarser was cut."""
    live = Live(process.path, "raw")
    press(live, "encoded", "demoted", "promoted", "downgraded")
    copies = accounted(process, live)
    assert set(calibrated(copies, "nvme")) & set(KVTC_NAMES[1:]), "nothing was cut below"
    state = live.stat().enabled["codec worker"]
    assert f"artifact {artifact(RATIOS).digest.hex()[:8]} of synthetic" in state
    found_again(process, live, NVME_BYTES)
    process.start(before=BEFORE)
    again = Live(process.path, "raw")
    again.stored = live.stored
    profiles = {name for session in live.sessions for name in contents(again, session)}
    assert profiles & set(KVTC_NAMES), "nothing of it was found again"


@pytest.mark.timeout(900)
def test_evicpress_sends_down_the_coarsest_level_that_readers_allow(process: Process) -> None:
    live = Live(process.path, "raw")
    press(live, "encoded", "demoted", "promoted")
    assert set(calibrated(accounted(process, live), "nvme")) == {KVTC_NAMES[-1]}
    assert not live.count("moves_refused")


@pytest.mark.timeout(900)
def test_a_worker_that_is_killed_over_kvtc_costs_no_bytes(process: Process) -> None:
    live = Live(process.path, "raw")
    press(live, "encoded", more=1)
    first = worker_of(live)
    os.kill(first, signal.SIGKILL)
    press(live, "encode_failed", more=1)
    press(live, "encoded", more=1)
    assert worker_of(live) != first
    accounted(process, live)


@pytest.mark.timeout(900)
def test_an_artifact_that_changed_is_refused_and_counted(process: Process, tmp_path: Path) -> None:
    (tmp_path / "a.kvtc").write_bytes(packed(artifact(RATIOS), weights="others"))
    live = Live(process.path, "raw")
    press(live, "encode_refused", more=1)
    assert not calibrated(accounted(process, live), "nvme")
    assert re.search(r"a\.kvtc is not what it was when the sidecar started", process.said())
