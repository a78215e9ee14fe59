"""Copies on a real GPU: what they give, in what order, and how fast. `make gpu` runs this.

Written and dry-run on `tests/late_cuda.py`; a GPU has the last word.
"""

import dataclasses
import mmap
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.vllm_double import EngineDouble, prompts
from tests.vllm_layouts import BLOCKS, MAKE, Engine, pattern
from tests.vllm_memory import kept_of
from tierkv.cache import TierKV
from tierkv.channel import EmbeddedChannel
from tierkv.settings import Settings
from tierkv.tiers.host import HostSettings
from tierkv_connectors.device import Lane
from tierkv_connectors.device.cuda import CudaDevice
from tierkv_connectors.views import Piece

if not torch.cuda.is_available():
    pytest.skip("no GPU here: torch sees no CUDA device", allow_module_level=True)

GPU = torch.device("cuda", 0)
IDS = [4, 1, 2, 5]
SLEEP_CYCLES = 2_000_000
"""About a millisecond of a kernel that does nothing."""


@pytest.fixture(params=["pinned", "bounced"])
def device(request: pytest.FixtureRequest) -> CudaDevice:
    device = CudaDevice(GPU)
    device.counters["want_pinned"] = request.param == "pinned"
    return device


@pytest.fixture
def arena(device: CudaDevice) -> Iterator[memoryview]:
    """Return 256 MiB, pinned in pieces of 16 MiB or not at all."""
    view = memoryview(mmap.mmap(-1, 256 << 20))
    if device.counters["want_pinned"]:
        pin(device, view)
        assert not device.counters["pins_refused"]
    yield view
    device.unpin()


def pin(device: CudaDevice, view: memoryview) -> None:
    device.pins._piece_bytes = 16 << 20
    device.pin(view)
    thread = device.pins._thread
    assert isinstance(thread, threading.Thread)
    thread.join()


def block_in(arena: memoryview, like: torch.Tensor, offset: int = 192) -> torch.Tensor:
    flat = torch.frombuffer(arena, dtype=torch.uint8)[offset : offset + like.nbytes]
    return flat.view(like.dtype).view(like.shape)


def on_gpu(engine: Engine) -> Engine:
    """Return an engine whose tensors lie on the GPU as they lie here, in one storage or several."""
    storages: dict[int, torch.Tensor] = {}
    moved = []
    for tensor in engine.tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
            storages[storage.data_ptr()] = flat.to(GPU, copy=True)
        whole = storages[storage.data_ptr()]
        moved.append(whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return dataclasses.replace(engine, tensors=moved)


@pytest.mark.parametrize("name", list(MAKE))
def test_gathers_are_the_twin_s(name: str, device: CudaDevice, arena: memoryview) -> None:
    written = pattern(len(IDS))
    engine = MAKE[name]()
    engine.write(IDS, written)
    lane, block = device.lane(written.nbytes), block_in(arena, written)
    lane.after(device.mark())
    lane.gather(on_gpu(engine).layout().views(IDS), block)
    lane.wait()
    assert torch.equal(block, written)


@pytest.mark.parametrize("name", list(MAKE))
def test_scatters_are_the_twin_s(name: str, device: CudaDevice, arena: memoryview) -> None:
    engine, block = MAKE[name](), pattern(len(IDS), seed=1)
    engine.write(list(range(1, BLOCKS)), pattern(BLOCKS - 1))
    moved = on_gpu(engine)
    engine.write(IDS, block)
    lane = device.lane(block.nbytes)
    lane.after(device.mark())
    block_in(arena, block).copy_(block)
    lane.scatter(block_in(arena, block), moved.layout().views(IDS))
    lane.wait()
    for got, wanted in zip(moved.tensors, engine.tensors, strict=True):
        assert torch.equal(got.cpu(), wanted)


def test_r07_ten_thousand_blocks_behind_a_slow_kernel(
    device: CudaDevice, arena: memoryview
) -> None:
    """Each is written behind a slow kernel, gathered, and overwritten at once."""
    blocks, size = 10_000, 4096
    pages = torch.zeros((1, size // 16, 2, 4), dtype=torch.int16, device=GPU)
    views = [Piece(slice(0, 1), slice(0, size // 16), pages, pages)]
    flat = torch.frombuffer(arena, dtype=torch.int16)[: blocks * size].view(blocks, -1)
    shape = (1, 2, size // 16, 2, 4)
    lane = device.lane(flat[0].nbytes)
    for number in range(blocks):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        pages.fill_(number)
        lane.after(device.mark())
        lane.gather(views, flat[number].view(shape))
        lane.hold()
        pages.fill_(-1)
        lane.wait()
    wanted = torch.arange(blocks, dtype=torch.int16)[:, None]
    assert bool((flat == wanted).all())


@pytest.mark.parametrize("pinned", [True, False])
def test_what_one_engine_computes_another_loads(pinned: bool) -> None:
    """The real worker over a real store, its engine's memory on the GPU."""
    store = TierKV.open(Settings(host=HostSettings(size_bytes=64 << 20)))
    device = CudaDevice(GPU)
    if pinned:
        pin(device, store.host.view)
    one, two = (EmbeddedChannel(store, store.host.view, number) for number in (1, 2))
    kept, where = kept_of(4, 16), str(GPU)
    engine = EngineDouble(kept, one, two, blocks=128, device=device, where=where)
    many = [tokens for tokens, _ in zip(prompts(1, 90), range(10), strict=False)]
    for tokens in many:
        torch.cuda._sleep(SLEEP_CYCLES)
        engine.run(tokens)  # checks every value
        engine.settle()
    loaded = sum(engine.run(tokens).external for tokens in many)
    engine.settle()
    engine.close()
    device.unpin()
    store.close(0.0)
    assert loaded == 10 * 80
    assert not engine.edge.failures


def seconds(lane: Lane, copy: Any, rounds: int = 5) -> float:
    copy()
    lane.wait()
    start = time.perf_counter()
    for _ in range(rounds):
        copy()
    lane.wait()
    return (time.perf_counter() - start) / rounds


def test_speed(device: CudaDevice, arena: memoryview, capsys: pytest.CaptureFixture[str]) -> None:
    """Print GB/s of blocks of 64 MiB beside one cudaMemcpy of as many bytes."""
    layers, tokens, heads, dim = 32, 512, 8, 128
    pages = torch.zeros((layers, 2, tokens // 16, 16, heads, dim), dtype=torch.bfloat16, device=GPU)
    keys, values = pages[:, 0].flatten(1, 2), pages[:, 1].flatten(1, 2)
    views = [Piece(slice(0, layers), slice(0, tokens), keys, values)]
    like = torch.empty((layers, 2, tokens, heads, dim), dtype=torch.bfloat16)
    block, lane = block_in(arena, like), device.lane(like.nbytes)
    out = seconds(lane, lambda: lane.gather(views, block))
    into = seconds(lane, lambda: lane.scatter(block, views))
    host, there = like.pin_memory(), torch.empty_like(like, device=GPU)
    plain_out = seconds(lane, lambda: host.copy_(there))
    plain_in = seconds(lane, lambda: there.copy_(host))
    way = "pinned" if device.counters["want_pinned"] else "bounced"
    gb = like.nbytes / 1e9
    with capsys.disabled():
        print(  # noqa: T201 -- `make gpu` is there to show it
            f"\n{way}: out {gb / out:.1f} GB/s (cudaMemcpy {gb / plain_out:.1f}), "
            f"in {gb / into:.1f} GB/s (cudaMemcpy {gb / plain_in:.1f})"
        )
