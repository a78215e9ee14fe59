"""An arena's pages are entered before they are used."""

import mmap
import os
import resource
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.sidecars import until
from tierkv.tiers.host import reserve
from tierkv_connectors.device import entered as entered_module
from tierkv_connectors.device.entered import Entered
from tierkv_connectors.device.host import HostDevice

STEP = 1 << 20
STEPS = 4


class Memory(NamedTuple):
    """An arena that a sidecar has reserved, and an engine's mapping of it."""

    fd: int
    engine: memoryview


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(entered_module, "STEP_BYTES", STEP)
    fd = os.memfd_create("arena")
    os.ftruncate(fd, STEPS * STEP)
    reserve(fd, STEPS * STEP)
    yield Memory(fd, memoryview(mmap.mmap(fd, STEPS * STEP)))
    os.close(fd)


def faults_of_writing(view: memoryview) -> int:
    """Return the faults of a write to each page."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for at in range(0, len(view), mmap.PAGESIZE):
        view[at] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_pages_that_were_entered_do_not_fault(memory: Memory) -> None:
    pages = STEPS * STEP // mmap.PAGESIZE
    device = HostDevice()
    device.pin(memory.engine)
    assert until(lambda: device.entered.nbytes == len(memory.engine))
    assert faults_of_writing(memory.engine) < pages // 8
    device.unpin()
    other = memoryview(mmap.mmap(memory.fd, STEPS * STEP))
    assert faults_of_writing(other) == pages, "a mapping of its own faults for itself"


def test_it_ends_when_told_whatever_is_left(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entered_module, "REST", 1e9)
    one = Entered()
    one.begin(memory.engine)
    assert until(lambda: one.nbytes == STEP)
    one.end()
    one.end()
    assert one.nbytes == STEP
    memory.engine.release()
