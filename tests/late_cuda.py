"""A CuPy without a GPU, in which everything happens as late as it may: when somebody waits for it.

What is queued on a stream runs, in order, in the thread that waits for it, or for something that
waits for it in turn. "Device memory" is host memory, and kernels are numpy reading their tables.
What CUDA would refuse, or would silently make slow, is an assertion here.
"""

import ctypes
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import numpy as np
import pytest
import torch

INDEX = 1
"""Of the device: nobody is on it without having said so."""


class CUDARuntimeError(RuntimeError):
    pass


class CompileException(Exception):  # noqa: N818 -- CuPy's name
    pass


class Stream:
    def __init__(self, late: "LateCuda") -> None:
        self.late, self.ptr, self.device = late, next(late.numbers), late.current.device
        self.todo: deque[tuple[int, bool, Callable[[], None]]] = deque()
        self.queued = self.ran = 0
        late.streams[self.ptr] = self

    def queue(self, work: Callable[[], None], *, copy: bool = False) -> None:
        with self.late.guard:
            self.todo.append((threading.get_ident(), copy, work))
            self.queued += 1

    def run(self, until: int) -> None:
        with self.late.guard:
            while self.ran < until:
                self.todo.popleft()[-1]()
                self.ran += 1

    def synchronize(self) -> None:
        self.run(self.queued)

    def wait_event(self, event: "Event") -> None:
        stream, until = event.recorded
        if stream is not None:
            self.queue(lambda: stream.run(until))

    def __enter__(self) -> Self:
        assert self.late.current.device == self.device, "a stream of another device"
        self.late.current.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.late.current.streams.pop()


class Event:
    def __init__(self, late: "LateCuda") -> None:
        self.ptr = next(late.numbers)
        self.recorded: tuple[Stream | None, int] = (None, 0)
        late.events[self.ptr] = self

    def record(self, stream: Stream) -> None:
        self.recorded = (stream, stream.queued)

    def synchronize(self) -> None:
        stream, until = self.recorded
        if stream is not None:
            stream.run(until)


class OnDevice:
    def __init__(self, late: "LateCuda", index: int) -> None:
        self.late, self.index = late, index

    def __enter__(self) -> None:
        self.late.current.devices.append(self.index)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.late.current.devices.pop()


class Memory:
    def __init__(self, late: "LateCuda", ranges: dict[int, int], nbytes: int) -> None:
        late.on_device()
        self.bytes = np.full(nbytes, 0xEE, np.uint8)
        self.ptr = self.bytes.ctypes.data
        ranges[self.ptr] = nbytes


class Current(threading.local):
    def __init__(self) -> None:
        self.devices, self.streams = [0], list[Stream]()

    @property
    def device(self) -> int:
        return self.devices[-1]


class LateCuda:
    """`cupy` is the module. `allowed` bytes can be registered, no more."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.numbers = itertools.count(1000)
        self.guard = threading.RLock()
        self.current = Current()
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.device_memory: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.launches = 0
        with OnDevice(self, INDEX):
            self.engine = Stream(self)
        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError, memcpyHostToDevice=1, memcpyDeviceToHost=2,
            memcpyAsync=self.memcpy, hostRegister=self.register, hostUnregister=self.unregister,
            eventRecord=lambda event, stream: self.events[event].record(self.streams[stream]),
            streamWaitEvent=lambda stream, event: self.streams[stream].wait_event(
                self.events[event]
            ),
        )  # fmt: skip
        cuda = SimpleNamespace(
            Device=lambda index: OnDevice(self, index),
            Stream=lambda *, non_blocking: Stream(self) if non_blocking else None,
            Event=lambda *, block=False, disable_timing: Event(self),
            Memory=lambda nbytes: Memory(self, self.device_memory, nbytes),
            PinnedMemory=lambda nbytes: Memory(self, self.pinned, nbytes),
            compiler=SimpleNamespace(CompileException=CompileException),
            runtime=runtime,
        )
        self.cupy: Any = SimpleNamespace(cuda=cuda, RawModule=self.module)

    def on_device(self) -> None:
        assert self.current.device == INDEX, "not on the device"

    def unfinished(self, *, copies: bool = False) -> bool:
        """Whether anything has not run yet that the calling thread has queued, or any copy."""
        me = threading.get_ident()
        waiting = [one for stream in self.streams.values() for one in list(stream.todo)]
        return any(who == me and (copy or not copies) for who, copy, _ in waiting)

    def memcpy(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.on_device()
        host, device = (source, to) if kind == 1 else (to, source)
        assert within(self.device_memory, device, nbytes), "not the device's memory"
        assert within(self.pinned | self.registered, host, nbytes), "not pinned in one piece"
        self.streams[stream].queue(lambda: void(ctypes.memmove(to, source, nbytes)), copy=True)

    def register(self, address: int, nbytes: int, flags: int) -> None:
        self.on_device()
        assert not flags
        if sum(self.registered.values()) + nbytes > self.allowed:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self.on_device()
        del self.registered[address]

    def module(self, code: str) -> SimpleNamespace:
        def function(name: str) -> Callable[..., None]:
            assert f"COPY({name}, " in code
            return lambda grid, block, args: self.launch(int(name[-1]), grid, block, args)

        return SimpleNamespace(get_function=function)

    def launch(self, word: int, grid: tuple[int, int], block: tuple[int], args: tuple[Any]) -> None:
        self.on_device()
        table = args[0].copy()
        assert table.nbytes <= 4096
        assert grid[1] == table["spans"]
        assert 0 < grid[0] * block[0] < 1 << 31
        self.launches += 1
        self.current.streams[-1].queue(lambda: execute(word, table))


def void(_: object) -> None:
    pass


def within(ranges: dict[int, int], address: int, nbytes: int) -> bool:
    return any(first <= address <= address + nbytes <= first + n for first, n in ranges.items())


def execute(word: int, table: Any) -> None:
    """Do what copy.cu does."""
    axes = int(table["axes"])
    shape = (*table["sizes"][:axes].tolist(), word)
    for page, block in zip(table["pages"], table["blocks"], strict=True):
        if page:
            pages = memory(int(page), shape, (*table["page_steps"][:axes].tolist(), 1))
            inside = memory(int(block), shape, (*table["block_steps"][:axes].tolist(), 1))
            to, source = (pages, inside) if table["to_pages"] else (inside, pages)
            to[...] = source


def memory(address: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> Any:
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    flat = np.ctypeslib.as_array((ctypes.c_ubyte * extent).from_address(address))
    return np.lib.stride_tricks.as_strided(flat, shape, steps)


def installed(monkeypatch: pytest.MonkeyPatch, allowed: int = 1 << 40) -> LateCuda:
    """Make `import cupy` give a late one, and torch know its engine's stream."""
    late = LateCuda(allowed)
    monkeypatch.setitem(sys.modules, "cupy", late.cupy)
    current = SimpleNamespace(cuda_stream=late.engine.ptr)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current)
    return late
