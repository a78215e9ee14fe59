"""An arena's pages are entered before they are used, and none before it is backed."""

import mmap
import os
import resource
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.sidecars import until
from tierkv.tiers.host import populate
from tierkv_connectors.device import entered as entered_module
from tierkv_connectors.device.entered import Entered
from tierkv_connectors.device.host import HostDevice

STEP = 1 << 20
STEPS = 4


class Memory(NamedTuple):
    """A sidecar's mapping of an arena, and an engine's."""

    fd: int
    sidecar: memoryview
    engine: memoryview

    def back(self, step: int) -> None:
        populate(self.sidecar[step * STEP : (step + 1) * STEP])

    def backed_bytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(entered_module, "STEP_BYTES", STEP)
    monkeypatch.setattr(entered_module, "LOOK_S", 0.01)
    fd = os.memfd_create("arena")
    os.ftruncate(fd, STEPS * STEP)
    first, second = mmap.mmap(fd, STEPS * STEP), mmap.mmap(fd, STEPS * STEP)
    yield Memory(fd, memoryview(first), memoryview(second))
    os.close(fd)


def faults_of_writing(view: memoryview) -> int:
    """Return the faults of a write to each page."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for at in range(0, len(view), mmap.PAGESIZE):
        view[at] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_pages_that_were_entered_do_not_fault(memory: Memory) -> None:
    pages = STEPS * STEP // mmap.PAGESIZE
    for step in range(STEPS):
        memory.back(step)
    device = HostDevice()
    device.pin(memory.engine)
    assert until(lambda: device.entered.nbytes == len(memory.engine))
    assert faults_of_writing(memory.engine) < pages // 8
    device.unpin()
    other = memoryview(mmap.mmap(memory.fd, STEPS * STEP))
    assert faults_of_writing(other) == pages, "a mapping of its own faults for itself"


def test_what_is_not_backed_is_waited_for(memory: Memory) -> None:
    memory.back(0)
    one = Entered()
    one.begin(memory.engine)
    assert until(lambda: one.nbytes == STEP)
    assert not until(lambda: one.nbytes > STEP, 0.1)
    assert memory.backed_bytes() == STEP, "no memory is taken in the sidecar's stead"
    for step in range(1, STEPS):
        memory.back(step)
    assert until(lambda: one.nbytes == STEPS * STEP)
    one.end()


def test_it_ends_when_told_whatever_is_left(memory: Memory) -> None:
    one = Entered()
    one.begin(memory.engine)
    one.end()
    one.end()
    assert one.nbytes == 0
    memory.engine.release()
