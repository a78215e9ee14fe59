"""CUDA: copies by a GPU, in streams of their own. The one place that imports CuPy.

A block passes through staging memory on the GPU, where it lies as it does in the arena: one launch
gathers it from pages or scatters it, and one copy takes it to or from the host. The host's side of
that copy has to be pinned (`pins`); what is not goes piece by piece through a small pinned ring.

Streams run beside the engine's and know nothing of it but events: see `device` for the rules.
"""

import contextlib
import ctypes
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tierkv.errors import invalid
from tierkv_connectors.device import Mark
from tierkv_connectors.device.pins import PinRefusedError, Pins
from tierkv_connectors.device.table import SOURCE, WORDS, tables
from tierkv_connectors.views import Views, are_whole

BOUNCE_BYTES = 4 << 20
BOUNCE_SLOTS = 2
THREADS = 256
WORDS_PER_THREAD = 8

Copy = Callable[[int, int, int], None]
"""Copies bytes: host address, device address, count."""


class CudaDevice:
    """The device of an engine that runs on one GPU.

    Raises: TierKVError (invalid) saying what CuPy lacks to copy on it.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import cupy
        except ImportError as error:
            raise invalid(
                f"copies on a GPU need CuPy ({error}): pip install 'tierkv-sidecar[cuda]'"
            ) from error
        self.counters: Counter[str] = Counter()
        self.cupy: Any = cupy
        self.index = device.index or 0
        self.on = cupy.cuda.Device(self.index)
        self.pins = Pins(self._register, self._unregister, self.counters)
        with self._refusing(), self.on:
            module = cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"))
            self.kernels = {word: module.get_function(f"copy_{word}") for word in WORDS}

    def lane(self, block_bytes: int) -> "CudaLane":
        """Return a lane. Raises: TierKVError (invalid): its memory cannot be had."""
        with self._refusing(), self.on:
            return CudaLane(self, block_bytes)

    def mark(self) -> Mark:
        """Record an event on the engine's current stream."""
        with self.on:
            event = self.cupy.cuda.Event(disable_timing=True)
            self.cupy.cuda.runtime.eventRecord(event.ptr, self.engine_stream())
        return event

    def engine_stream(self) -> int:
        """Return the address of the stream on which the calling thread queues its work."""
        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def pin(self, arena: memoryview) -> None:
        """Begin to register the arena."""
        memory = np.frombuffer(arena, np.uint8)
        self.pins.begin(memory.ctypes.data, memory.nbytes)

    def unpin(self) -> None:
        """Unregister the arena."""
        self.pins.end()

    def _register(self, address: int, nbytes: int) -> None:
        try:
            with self.on:
                self.cupy.cuda.runtime.hostRegister(address, nbytes, 0)
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise PinRefusedError(str(error)) from error

    def _unregister(self, address: int) -> None:
        # At an engine's end its context may be gone, and what was registered with it.
        with contextlib.suppress(self.cupy.cuda.runtime.CUDARuntimeError), self.on:
            self.cupy.cuda.runtime.hostUnregister(address)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, self.cupy.cuda.compiler.CompileException) as error:
            raise invalid(f"CuPy cannot copy on GPU {self.index}: {error}") from error


class _Slot:
    """Pinned memory, and the event behind its last copy."""

    def __init__(self, cuda: Any) -> None:  # noqa: ANN401
        self.memory = cuda.PinnedMemory(BOUNCE_BYTES)
        self.address: int = self.memory.ptr
        self.used = cuda.Event(block=True, disable_timing=True)


class CudaLane:
    """A stream, its staging memory for one block, and its ring of pinned memory."""

    def __init__(self, device: CudaDevice, block_bytes: int) -> None:
        cuda = device.cupy.cuda
        self._device = device
        self._runtime = cuda.runtime
        self._stream = cuda.Stream(non_blocking=True)
        self._memory = cuda.Memory(block_bytes)
        self._bytes = block_bytes
        self._staging: int = self._memory.ptr
        self._ring = [_Slot(cuda) for _ in range(BOUNCE_SLOTS)]
        self._read = cuda.Event(disable_timing=True)
        self._done = cuda.Event(block=True, disable_timing=True)
        self._staged: torch.Tensor | None = None
        """Where the block goes that was gathered into staging memory."""

    def after(self, mark: Mark) -> None:
        """Let the stream wait for the mark's event."""
        self._stream.wait_event(mark)

    def gather(self, views: Views, block: torch.Tensor) -> None:
        """Launch the gather; `wait` takes the block to the host."""
        assert are_whole(views, block), "not a whole block"
        self._land()
        with self._device.on, self._stream:
            self._launch(views, block, to_pages=False)
            self._read.record(self._stream)
        self._staged = block

    def scatter(self, block: torch.Tensor, views: Views) -> None:
        """Queue the copy to staging memory and the scatter behind it."""
        self._land()
        with self._device.on, self._stream:
            self._copy(block, self._pinned_in, self._bounce_in)
            self._launch(views, block, to_pages=True)

    def hold(self) -> None:
        """Let the engine's stream wait for the last gather."""
        with self._device.on:
            self._runtime.streamWaitEvent(self._device.engine_stream(), self._read.ptr)

    def wait(self) -> None:
        """Take a gathered block to the host; wait for all that the stream does."""
        try:
            self._land()
        finally:
            with self._device.on:
                self._done.record(self._stream)
                self._done.synchronize()

    def _launch(self, views: Views, block: torch.Tensor, *, to_pages: bool) -> None:
        assert block.nbytes <= self._bytes, f"a block of {block.nbytes} bytes, not {self._bytes}"
        for word, table in tables(views, block, self._staging, to_pages=to_pages):
            grid = -(-int(table["words"]) // (THREADS * WORDS_PER_THREAD)), int(table["spans"])
            self._device.kernels[word](grid, (THREADS,), (table,))

    def _land(self) -> None:
        block, self._staged = self._staged, None
        if block is not None:
            with self._device.on:
                self._copy(block, self._pinned_out, self._bounce_out)

    def _copy(self, block: torch.Tensor, pinned: Copy, bounced: Copy) -> None:
        """Copy a block between its place in host memory and staging memory."""
        assert block.is_contiguous()
        host = block.data_ptr()
        for span in self._device.pins.spans(host, block.nbytes):
            copy = pinned if span.pinned else bounced
            copy(host + span.start, self._staging + span.start, span.nbytes)

    def _pinned_in(self, host: int, device: int, nbytes: int) -> None:
        kind = self._runtime.memcpyHostToDevice
        self._runtime.memcpyAsync(device, host, nbytes, kind, self._stream.ptr)

    def _pinned_out(self, host: int, device: int, nbytes: int) -> None:
        kind = self._runtime.memcpyDeviceToHost
        self._runtime.memcpyAsync(host, device, nbytes, kind, self._stream.ptr)

    def _bounce_in(self, host: int, device: int, nbytes: int) -> None:
        for slot, start, size in self._parts(nbytes):
            slot.used.synchronize()
            ctypes.memmove(slot.address, host + start, size)
            self._pinned_in(slot.address, device + start, size)
            slot.used.record(self._stream)

    def _bounce_out(self, host: int, device: int, nbytes: int) -> None:
        coming: deque[tuple[_Slot, int, int]] = deque()
        for slot, start, size in self._parts(nbytes):
            if len(coming) == len(self._ring):
                _arrive(*coming.popleft())
            self._pinned_out(slot.address, device + start, size)
            slot.used.record(self._stream)
            coming.append((slot, host + start, size))
        for part in coming:
            _arrive(*part)

    def _parts(self, nbytes: int) -> Iterator[tuple[_Slot, int, int]]:
        """Yield slots in turn, each with start and size of the bytes that go through it."""
        for number, start in enumerate(range(0, nbytes, BOUNCE_BYTES)):
            slot = self._ring[number % len(self._ring)]
            yield slot, start, min(BOUNCE_BYTES, nbytes - start)


def _arrive(slot: _Slot, host: int, nbytes: int) -> None:
    slot.used.synchronize()
    ctypes.memmove(host, slot.address, nbytes)
