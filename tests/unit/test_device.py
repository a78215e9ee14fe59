"""Devices: a GPU's lane gives what the twin gives, pinned or bounced, once it was waited for."""

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.late_cuda import INDEX, CompileException, LateCuda, installed
from tests.sidecars import served, until
from tests.vllm_layouts import BLOCKS, MAKE, Engine, pattern
from tests.vllm_memory import kept_of
from tierkv.codec import profile_of
from tierkv.errors import TierKVError
from tierkv.part import Part
from tierkv_codecs.codec import NO_ARTIFACT
from tierkv_connectors.device import Lane, Mark
from tierkv_connectors.device import cuda as cuda_module
from tierkv_connectors.device.cuda import CudaDevice
from tierkv_connectors.device.host import HostDevice
from tierkv_connectors.device.pins import PinRefusedError, Pins, Span
from tierkv_connectors.pages import UnitCopier
from tierkv_connectors.sidecar import SidecarChannel
from tierkv_connectors.views import Piece, Views

GPU = torch.device("cuda", INDEX)
IDS = [4, 1, 2, 5]
PIECE = 1 << 30


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    monkeypatch.setattr(cuda_module, "BOUNCE_BYTES", 1000)  # several rounds of the ring for a block
    return installed(monkeypatch)


@pytest.fixture(params=list(MAKE))
def engine(request: pytest.FixtureRequest) -> Engine:
    return MAKE[request.param]()


@pytest.fixture
def arena() -> memoryview:
    return memoryview(bytearray(2 * pattern(len(IDS)).nbytes + 4096))


def block_in(arena: memoryview, offset: int = 192) -> torch.Tensor:
    like = pattern(len(IDS))
    flat = torch.frombuffer(arena, dtype=torch.uint8)[offset : offset + like.nbytes]
    return flat.view(like.dtype).view(like.shape)


def pinned(device: CudaDevice, arena: memoryview, piece_bytes: int = PIECE) -> CudaDevice:
    device.pins._piece_bytes = piece_bytes
    device.pin(arena)
    thread = device.pins._thread
    assert thread is not None
    thread.join()
    return device


def lanes(late: LateCuda, arena: memoryview) -> Iterator[tuple[str, Lane]]:
    nbytes = pattern(len(IDS)).nbytes
    yield "host", HostDevice().lane(nbytes)
    yield "bounced", CudaDevice(GPU).lane(nbytes)
    yield "pinned", pinned(CudaDevice(GPU), arena).lane(nbytes)
    late.registered.clear()
    yield "in pieces", pinned(CudaDevice(GPU), arena, piece_bytes=1500).lane(nbytes)
    late.registered.clear()
    late.allowed = 4000
    yield "in part", pinned(CudaDevice(GPU), arena, piece_bytes=1500).lane(nbytes)


def test_gathers_are_the_twin_s(late: LateCuda, engine: Engine, arena: memoryview) -> None:
    written = pattern(len(IDS))
    engine.write(IDS, written)
    for name, lane in lanes(late, arena):
        block = block_in(arena)
        block.zero_()
        lane.gather(engine.layout().views(IDS), block)
        assert name == "host" or not block.any(), "copied before it was waited for"
        lane.wait()
        assert torch.equal(block, written), name
        assert not late.unfinished()


@pytest.mark.parametrize("skip", [0, 1])
def test_scatters_are_the_twin_s(
    late: LateCuda, engine: Engine, arena: memoryview, skip: int
) -> None:
    block, before = block_in(arena), pattern(BLOCKS - 1, seed=1)
    block.copy_(pattern(len(IDS)))
    views = engine.layout().views(IDS[skip:], skip)
    wanted: list[torch.Tensor] = []
    for name, lane in lanes(late, arena):
        engine.write(list(range(1, BLOCKS)), before)
        lane.scatter(block, views)
        lane.wait()
        wanted = wanted or [tensor.clone() for tensor in engine.tensors]  # the twin is the first
        assert all(map(torch.equal, engine.tensors, wanted)), name


def test_blocks_follow_each_other_through_one_lane(late: LateCuda, arena: memoryview) -> None:
    """Staging memory and ring are used again before anybody waits."""
    engine, nbytes = MAKE["LBNHC"](), pattern(2).nbytes
    written = [pattern(2), pattern(2, seed=1)]
    for lane in (CudaDevice(GPU).lane(nbytes), pinned(CudaDevice(GPU), arena).lane(nbytes)):
        flat = torch.frombuffer(arena, dtype=torch.uint8)[: 2 * nbytes].view(written[0].dtype)
        blocks = flat.view(2, *written[0].shape)
        blocks.zero_()
        for ids, block in zip(([1, 2], [4, 3]), written, strict=True):
            engine.write(ids, block)
        for ids, block in zip(([1, 2], [4, 3]), blocks, strict=True):
            lane.gather(engine.layout().views(ids), block)
        lane.wait()
        assert all(map(torch.equal, blocks, written))
        for ids, block in zip(([5, 1], [2, 4]), blocks, strict=True):
            lane.scatter(block, engine.layout().views(ids))
        lane.gather(engine.layout().views([2, 4]), blocks[0])
        lane.scatter(pattern(2, seed=2), engine.layout().views([1, 3]))
        lane.wait()
        assert torch.equal(blocks[0], written[1])
        assert torch.equal(gathered(engine, [1, 3]), pattern(2, seed=2))


def gathered(engine: Engine, ids: list[int]) -> torch.Tensor:
    block = torch.zeros_like(pattern(len(ids)))
    HostDevice().lane(block.nbytes).gather(engine.layout().views(ids), block)
    return block


def test_copies_go_behind_the_mark(late: LateCuda, arena: memoryview) -> None:
    device, engine, written = CudaDevice(GPU), MAKE["LBNHC"](), pattern(len(IDS))
    late.engine.queue(lambda: engine.write(IDS, written))  # a forward that has not run yet
    lane = device.lane(written.nbytes)
    lane.after(device.mark())
    lane.gather(engine.layout().views(IDS), block_in(arena))
    lane.wait()
    assert torch.equal(block_in(arena), written)


def test_the_engine_goes_behind_what_is_being_read(late: LateCuda, arena: memoryview) -> None:
    device, engine, written = CudaDevice(GPU), MAKE["LBNHC"](), pattern(len(IDS))
    engine.write(IDS, written)
    lane = device.lane(written.nbytes)
    lane.hold()  # with nothing to wait for
    lane.gather(engine.layout().views(IDS), block_in(arena))
    lane.hold()
    late.engine.queue(lambda: engine.write(IDS, pattern(len(IDS), seed=1)))
    late.engine.synchronize()  # the GPU is quick with the forward
    lane.wait()
    assert torch.equal(block_in(arena), written)


class LateLane:
    """The twin, with all that a lane may put off put off: each copy is made when waited for."""

    def __init__(self) -> None:
        self.twin, self.todo = HostDevice().lane(0), list[Callable[[], None]]()

    def after(self, mark: Mark) -> None:
        pass

    def gather(self, views: Views, block: torch.Tensor) -> None:
        self.todo.append(lambda: self.twin.gather(views, block))

    def scatter(self, block: torch.Tensor, views: Views) -> None:
        self.todo.append(lambda: self.twin.scatter(block, views))

    def hold(self) -> None:
        pass

    def wait(self) -> None:
        while self.todo:
            self.todo.pop(0)()


@pytest.mark.parametrize("lane", ["late", "cuda"])
@pytest.mark.parametrize("name", ["raw", "lossless"])
def test_units_share_scratch_memory_while_nothing_is_over_yet(
    late: LateCuda, name: str, lane: str
) -> None:
    kept, profile = kept_of(4, 16), profile_of(name)
    used = LateLane() if lane == "late" else CudaDevice(GPU).lane(kept.raw_bytes)
    copier = UnitCopier(kept.identity, Part.whole(kept.identity), used)
    blocks = [torch.full(copier.shape, number, dtype=copier.dtype) for number in (1, 2, 3)]
    frames, headers = [], list[Any]()
    for block in blocks:
        frame = memoryview(bytearray(2 * kept.raw_bytes))
        taken = copier.take(whole(block), [profile], [frame])
        length = copier.encode(taken, [profile], [frame], 0).length
        frames.append(frame[:length])
        headers.append(
            SimpleNamespace(
                raw_bytes=kept.raw_bytes, tokens=16, codec_id=profile.codec_id, position=0,
                payload_bytes=length, segments=(length,), artifact=NO_ARTIFACT,
            )
        )  # fmt: skip
    transfer: Any = SimpleNamespace(payload=lambda unit, _: [frames[unit]])
    found = [torch.zeros_like(block) for block in blocks]
    for unit, (header, block) in enumerate(zip(headers, found, strict=True)):
        assert copier.read(transfer, unit, header, whole(block))
    copier._lane.wait()
    assert all(map(torch.equal, found, blocks))


def whole(block: torch.Tensor) -> list[Piece]:
    layers, _, tokens, _, _ = block.shape
    return [Piece(slice(0, layers), slice(0, tokens), block[:, 0], block[:, 1])]


def test_what_was_begun_is_waited_for_after_a_failure(late: LateCuda, arena: memoryview) -> None:
    engine = MAKE["kv first"]()
    lane = CudaDevice(GPU).lane(pattern(len(IDS)).nbytes)
    late.cupy.cuda.runtime.memcpyDeviceToHost = 1  # the copy out fails
    lane.gather(engine.layout().views(IDS), block_in(arena))
    with pytest.raises(AssertionError, match="not the device's memory"):
        lane.wait()
    assert not late.unfinished()
    lane.wait()


def test_no_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TierKVError, match=r"need CuPy .*tierkv-sidecar\[cuda\]"):
        CudaDevice(GPU)


def test_kernels_that_do_not_compile_are_a_refusal(
    late: LateCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(code: str) -> None:
        raise CompileException("no architecture")

    monkeypatch.setattr(late.cupy, "RawModule", broken)
    with pytest.raises(TierKVError, match="GPU 1: no architecture"):
        CudaDevice(GPU)


def test_no_pinned_memory_at_all_is_a_refusal(
    late: LateCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(nbytes: int) -> None:
        raise RuntimeError("cudaErrorMemoryAllocation")

    monkeypatch.setattr(late.cupy.cuda, "PinnedMemory", none)
    with pytest.raises(TierKVError, match="cudaErrorMemoryAllocation"):
        CudaDevice(GPU).lane(4096)


def test_r16_pinning_that_is_refused_is_one_warning_and_counted(
    late: LateCuda, arena: memoryview, caplog: pytest.LogCaptureFixture
) -> None:
    late.allowed = 64 << 10  # the usual ulimit -l
    device = CudaDevice(GPU)
    with caplog.at_level(logging.WARNING, "vllm.tierkv"):
        for _ in range(2):  # a sidecar that restarts
            pinned(device, memoryview(bytearray(1 << 20)))
    (record,) = caplog.records
    assert record.getMessage() == (
        "the sidecar's memory cannot be pinned (cudaErrorMemoryAllocation: out of memory): it is "
        "copied by way of a small pinned buffer, more slowly; allow this process to lock it "
        "(ulimit -l)"
    )
    assert device.counters == {"pins_refused": 2}


def test_r16_a_sidecar_s_arena_is_pinned_where_it_is_mapped(late: LateCuda, tmp_path: Path) -> None:
    """Nothing is allocated beside it; it is let go before it is unmapped, and not while in use."""
    device = CudaDevice(GPU)
    with served(tmp_path / "s.sock") as sidecar:
        channel = SidecarChannel(sidecar.path, on_map=device.pin, on_unmap=device.unpin)
        view = channel.borrow()
        assert view is not None
        assert until(lambda: late.registered)
        address = np.frombuffer(view, np.uint8).ctypes.data
        assert late.registered == {address: sidecar.store.arena.nbytes}
        channel.close()
        assert until(lambda: channel.counters.disconnects)
        assert late.registered, "let go while it is borrowed"
        channel.give_back()
        assert until(lambda: not late.registered)
    assert not device.counters


class Registry:
    """What `Pins` registers with; the piece of number `stop` waits until it is told to go on."""

    def __init__(self, allowed: int = 1 << 40, stop: int = -1) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.allowed, self.stop = allowed, stop
        self.reached, self.go = threading.Event(), threading.Event()
        self.counters: Counter[str] = Counter()
        self.pins = Pins(self.register, self.unregister, self.counters)

    def register(self, address: int, nbytes: int) -> None:
        if len(self.pieces) == self.stop:
            self.reached.set()
            assert self.go.wait(30)
        if sum(size for _, size in self.pieces) + nbytes > self.allowed:
            raise PinRefusedError("enough")
        self.pieces.append((address, nbytes))

    def unregister(self, address: int) -> None:
        self.pieces = [piece for piece in self.pieces if piece[0] != address]

    def settle(self) -> None:
        assert self.pins._thread is not None
        self.pins._thread.join()


BASE = 7 * PIECE + 4096


@pytest.mark.parametrize(
    ("nbytes", "sizes"),
    [(1, [1]), (PIECE, [PIECE]), (3 * PIECE + 5, [PIECE] * 3 + [5]), (0, [])],
)
def test_an_arena_is_pinned_in_pieces_of_a_gib(nbytes: int, sizes: list[int]) -> None:
    registry = Registry()
    registry.pins.begin(BASE, nbytes)
    registry.settle()
    assert [size for _, size in registry.pieces] == sizes
    assert [address for address, _ in registry.pieces] == [
        BASE + number * PIECE for number in range(len(sizes))
    ]
    registry.pins.end()
    registry.pins.end()
    assert not registry.pieces


def test_copies_are_cut_where_pieces_end() -> None:
    registry = Registry(allowed=2 * PIECE)
    registry.pins.begin(BASE, 4 * PIECE)
    registry.settle()
    spans = registry.pins.spans

    assert list(spans(BASE, PIECE)) == [Span(0, PIECE, pinned=True)]
    assert list(spans(BASE + PIECE - 5, 9)) == [Span(0, 5, pinned=True), Span(5, 4, pinned=True)]
    assert list(spans(BASE + PIECE - 5, 2 * PIECE)) == [
        Span(0, 5, pinned=True),
        Span(5, PIECE, pinned=True),
        Span(PIECE + 5, PIECE - 5, pinned=False),
    ]
    assert list(spans(BASE + 3 * PIECE - 5, 9)) == [Span(0, 9, pinned=False)]
    assert list(spans(64, 9)) == [Span(0, 9, pinned=False)], "a scratch block"
    assert registry.counters == {"pins_refused": 1}
    registry.pins.end()
    assert list(spans(BASE, 9)) == [Span(0, 9, pinned=False)]


def test_pinning_is_in_the_background_and_ends_when_the_arena_does() -> None:
    registry = Registry(stop=1)
    registry.pins.begin(BASE, 4 * PIECE)
    assert registry.reached.wait(30)
    assert list(registry.pins.spans(BASE + PIECE - 1, 2)) == [
        Span(0, 1, pinned=True),
        Span(1, 1, pinned=False),
    ]
    ending = threading.Thread(target=registry.pins.end)
    ending.start()
    ending.join(0.05)
    assert ending.is_alive(), "memory is unmapped while it is being registered"
    registry.go.set()
    ending.join(30)
    assert not registry.pieces


def test_no_thread_to_pin_with_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str, run: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("tierkv_connectors.threads.start", none)
    registry = Registry()
    registry.pins.begin(BASE, PIECE)
    assert registry.counters == {"pins_refused": 1}
    assert list(registry.pins.spans(BASE, 9)) == [Span(0, 9, pinned=False)]
