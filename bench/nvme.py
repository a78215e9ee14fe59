"""NVMe: the tier with its checksums, beside plain O_DIRECT on a file of the same disk.

Writes go as write-behind does, one batch at a time while a second thread seals the next one; reads
as stages do, six threads. Before each write the frames' checksums are taken away, so that every
write makes them anew; every read verifies them. The limit moves the same batches at the same depth
with one preadv or pwritev each, without headers, from and to the same memory: how its pages lie in
physical memory decides how large a disk's requests are, and so up to 1.7 times the speed. Both go
round in files of LOG_BYTES, every byte of which was written before: first writes to preallocated
space cost the file system more, and a log is new once.
"""

import contextlib
import itertools
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from bench import engine, peers
from bench.engine import MIB, RING_BYTES, chain, disk_folder, ring
from bench.rows import Row, rows_of
from bench.timing import Run, take_turns
from tierkv import frame
from tierkv.calls import FlushCall
from tierkv.fidelity import Fidelity
from tierkv.part import Part
from tierkv.stages import read_jobs
from tierkv.tier import ALIGN, FrameId, Item, Status
from tierkv.tiers.nvme import LARGE_REGION_BYTES, NvmeSettings, NvmeTier
from tierkv.wrap import Sealed
from tierkv.write_behind import BATCH_BYTES, BATCH_FRAMES, FIRST_BATCH_BYTES

T = TypeVar("T")
LOG_BYTES = 8 * RING_BYTES
"""With regions as they are on a disk of 8 GiB and more."""
STORE_BYTES = LOG_BYTES
"""A region of 64 MiB holds one frame of 32 MiB and its header: two rings need twice their bytes."""


def header_of(key: bytes, block_bytes: int) -> frame.Header:
    """Return the unsealed header of a raw frame."""
    return frame.Header(
        codec_id=1, flags=0, fidelity=Fidelity.EXACT, tokens=256, position=0, generation=0,
        fingerprint=engine.FINGERPRINT, key=key, namespace=bytes(16), artifact=bytes(32),
        part=Part.unpack(engine.PARTS), raw_bytes=block_bytes, epoch=0, segments=(block_bytes,),
    )  # fmt: skip


class Frames:
    """A ring of frames in aligned memory, each in one piece."""

    def __init__(self, block_bytes: int, seed: int) -> None:
        self.block_bytes = block_bytes
        self.count = RING_BYTES // block_bytes
        self.nbytes = frame.header_bytes(1) + block_bytes
        stride = -(-self.nbytes // ALIGN) * ALIGN
        memory = memoryview(mmap.mmap(-1, stride * self.count))
        data = np.frombuffer(memory, np.uint8)
        data[:] = np.random.default_rng(seed).integers(0, 256, len(data), dtype=np.uint8)
        self.pieces = [memory[at * stride : (at + 1) * stride] for at in range(self.count)]

    def name(self, seed: int) -> list[FrameId]:
        """Write unsealed headers for new keys into the frames."""
        keys = chain(seed, self.count)
        ids = []
        for at, piece in enumerate(self.pieces):
            header = header_of(keys[at * 32 : at * 32 + 32], self.block_bytes)
            piece[: header.header_bytes] = frame.pack(header)
            ids.append(FrameId(header.key, header.part))
        return ids

    def items(self, ids: Sequence[FrameId], locators: Sequence[int]) -> list[Item]:
        """Return items of all frames."""
        return [
            Item(id_, locator, self.nbytes, [piece])
            for id_, locator, piece in zip(ids, locators, self.pieces, strict=True)
        ]


class Tier:
    """The tier under its checksums; at most two rings of frames are in it."""

    def __init__(self, folder: str, block_bytes: int, seed: int) -> None:
        settings = NvmeSettings(
            path=folder, size_bytes=LOG_BYTES, region_bytes=LARGE_REGION_BYTES, free_floor_bytes=0
        )
        self._tier = NvmeTier(settings)
        self._sealed = Sealed(self._tier)
        self.out = Frames(block_bytes, seed)
        self.back = Frames(block_bytes, seed + 1)
        self._written: list[Item] = []
        self._seeds = itertools.count(seed)
        self._reads = ThreadPoolExecutor(NvmeTier.batch.threads)
        self._seals = ThreadPoolExecutor(1)

    def put(self) -> float:
        """Write the ring under new keys and return the seconds; what was there before is freed."""
        for item in self._written:
            self._tier.free(item.locator, item.nbytes)
        for region in self._tier.regions():
            if not region.live:
                self._tier.release(region.number)
        ids = self.out.name(next(self._seeds))
        places = [self._tier.reserve(self.out.nbytes) for _ in ids]
        locators = [place for place in places if place is not None]
        items = self.out.items(ids, locators)
        start = time.perf_counter()
        write_behind(self._sealed, self._seals, items)
        seconds = time.perf_counter() - start
        self._written = items
        return seconds

    def get(self) -> float:
        """Read the ring back, verified, and return the seconds."""
        ids = [item.id for item in self._written]
        items = self.back.items(ids, [item.locator for item in self._written])
        jobs = list(read_jobs(items, [item.nbytes for item in items], NvmeTier.batch))
        start = time.perf_counter()
        for outcomes in self._reads.map(self._sealed.read, jobs):
            assert all(outcome.status is Status.DONE for outcome in outcomes), outcomes
        return time.perf_counter() - start

    def close(self) -> None:
        """Close the tier."""
        self._reads.shutdown()
        self._seals.shutdown()
        self._tier.close()


def write_behind(
    tier: Sealed, seals: ThreadPoolExecutor, items: Sequence[Item], batch_bytes: int = BATCH_BYTES
) -> None:
    """Write items as write-behind does: a thread seals the next batch while one is written."""
    batches = list(write_batches(items, items[0].nbytes, batch_bytes))
    sealing = seals.submit(tier.seal, batches[0])
    for batch, ahead in itertools.pairwise([*batches, []]):
        sealing.result()
        sealing = seals.submit(tier.seal, ahead)
        outcomes = tier.write(batch)
        assert all(outcome.status is Status.DONE for outcome in outcomes), outcomes


def write_batches(
    items: Sequence[T], nbytes: int, batch_bytes: int = BATCH_BYTES
) -> Iterator[Sequence[T]]:
    """Cut items as write-behind does."""
    at, most = 0, FIRST_BATCH_BYTES
    while at < len(items):
        count = min(-(-most // nbytes), BATCH_FRAMES)
        yield items[at : at + count]
        at, most = at + count, batch_bytes


@contextlib.contextmanager
def raw(out: Frames, back: Frames) -> Iterator[tuple[Run, Run]]:
    """Yield (write, read) of the ring in a preallocated file, past the page cache."""
    block_bytes = out.block_bytes
    with (
        tempfile.NamedTemporaryFile(dir=disk_folder()) as file,
        ThreadPoolExecutor(NvmeTier.batch.threads) as pool,
    ):
        os.posix_fallocate(file.fileno(), 0, LOG_BYTES)
        fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        ring_number = 0

        def move(batch: Sequence[int], *, outwards: bool) -> None:
            frames = out if outwards else back
            views = [frames.pieces[number][:block_bytes] for number in batch]
            at = ring_number * RING_BYTES + batch[0] * block_bytes
            size = os.pwritev(fd, views, at) if outwards else os.preadv(fd, views, at)
            assert size == block_bytes * len(batch)

        def write() -> float:
            nonlocal ring_number
            ring_number = (ring_number + 1) % (LOG_BYTES // RING_BYTES)
            start = time.perf_counter()
            for batch in write_batches(range(out.count), out.nbytes):
                move(batch, outwards=True)
            return time.perf_counter() - start

        def read() -> float:
            sizes = [back.nbytes] * back.count
            jobs = list(read_jobs(range(back.count), sizes, NvmeTier.batch))
            start = time.perf_counter()
            for _ in pool.map(lambda job: move(job, outwards=False), jobs):
                pass
            return time.perf_counter() - start

        try:
            for _ in range(LOG_BYTES // RING_BYTES):
                write()
            yield write, read
        finally:
            os.close(fd)


def measure(
    block_bytes: int, turns: int, seed: int, absent: dict[str, str], *, with_peers: bool
) -> list[Row]:
    """Measure writes and verified reads of one block size."""
    blocks = RING_BYTES // block_bytes
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory(dir=disk_folder()))
        tier = Tier(folder, block_bytes, seed)
        ends.callback(tier.close)
        for _ in range(LOG_BYTES // RING_BYTES + 1):
            tier.put()
        raw_write, raw_read = ends.enter_context(raw(tier.out, tier.back))
        found = ends.enter_context(
            peers.running("nvme", block_bytes, blocks, absent, wanted=with_peers)
        )
        rows: list[Row] = []
        for index, op, ours, limit in (
            (0, "put", tier.put, raw_write),
            (1, "get", tier.get, raw_read),
        ):
            contenders = {"tierkv": ours, "limit": limit}
            contenders |= {peer: runs[index] for peer, runs in found.items()}
            seconds = take_turns(contenders, turns, 1, seed)
            rows += rows_of("nvme", op, block_bytes, blocks, seconds)
        return rows


def stages(block_bytes: int, turns: int, seed: int) -> list[Row]:
    """Measure put to flush, and match to copied out with every block on NVMe: the whole way."""
    source, target = ring(block_bytes, seed), ring(block_bytes, seed + 1)
    blocks, numbers = len(source), itertools.count(seed)
    host_bytes = RING_BYTES + 64 * MIB
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory(dir=disk_folder()))
        more = (
            f'write_behind = "1GiB"\n[nvme]\npath = "{folder}"\nsize = {STORE_BYTES}\n'
            "free_floor = 0\n"
        )
        _, client = ends.enter_context(engine.embedded(host_bytes, more))
        one = engine.Engine(client, source, target)
        frames = Frames(block_bytes, seed)
        raw_write, raw_read = ends.enter_context(raw(frames, frames))
        chains: list[bytes] = []

        def put() -> float:
            chains[:] = [*chains[-1:], chain(next(numbers), blocks)]
            start = time.perf_counter()
            one.put(chains[-1])
            call = FlushCall(
                namespace="bench", keys=chains[-1], parts=engine.PARTS, deadline_s=60.0
            )
            durable = client.flush(call)
            assert durable == bytes([1]) * blocks, f"{sum(durable)} of {blocks} are durable"
            return time.perf_counter() - start

        def get() -> float:
            chains.reverse()  # RAM holds one ring: what is asked for is only on NVMe
            return one.get(chains[0])

        rows = []
        for _ in range(STORE_BYTES // RING_BYTES + 1):
            put()
        for op, ours, limit in (("put", put, raw_write), ("get", get, raw_read)):
            seconds = take_turns({"tierkv": ours, "limit": limit}, turns, 1, seed)
            rows += rows_of("nvme_end_to_end", op, block_bytes, blocks, seconds)
        one.verify(chains[1])
        return rows
