"""RAM: embedded and through a sidecar, beside plain copies of the same memory, and the peers."""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence

import torch

from bench import peers
from bench.engine import (
    MIB,
    RING_BYTES,
    Engine,
    chain,
    embedded,
    match_call,
    pairs_of,
    put_call,
    ring,
    sidecar,
)
from bench.rows import Row, rows_of
from bench.timing import Run, percentile, take_turns
from tierkv.client import Client
from tierkv.reservation import Pieces
from tierkv.tiers.host import populate

HOST_BYTES = 4 * RING_BYTES + 128 * MIB
"""What is read, what the limit writes to, and two rings for puts: each evicts one before."""


def copies(pieces: Sequence[Pieces], blocks: Sequence[torch.Tensor], *, inwards: bool) -> Run:
    """Return the plain copy of blocks into pieces of the arena, or back."""
    pairs = pairs_of(pieces, blocks)
    if not inwards:
        pairs = [(here, there) for there, here in pairs]

    def run() -> float:
        start = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        return time.perf_counter() - start

    return run


def map_whole(client: Client) -> None:
    """Enter the arena into this process's page table, as an engine does that pins it."""
    arena = client._channel.borrow()  # noqa: SLF001
    assert arena is not None
    populate(arena)
    client._channel.give_back()  # noqa: SLF001


@contextlib.contextmanager
def _limits(
    client: Client, keys: bytes, source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]
) -> Iterator[tuple[Run, Run]]:
    """Yield plain copies (in, out): to reserved frames, and from the very frames that are read."""
    size, seed = len(source[0]), 10**9
    reservation = client.put(put_call(chain(seed, len(source)), size))
    assert reservation is not None
    room = [reservation.payload(index) for index in range(len(source))]
    reply = client.match(match_call(keys, size))
    transfer = client.get(reply.match, reply.blocks)
    assert transfer is not None
    there = []
    for unit in range(transfer.units):
        header = transfer.header(unit)
        assert header is not None
        there.append(transfer.payload(unit, header))
    yield copies(room, source, inwards=True), copies(there, target, inwards=False)
    del room, there
    reservation.abort()
    transfer.close()


def measure(
    name: str, block_bytes: int, turns: int, seed: int, absent: dict[str, str], *, with_peers: bool
) -> list[Row]:
    """Measure put and get of one block size; `name` is host or sidecar."""
    source, target = ring(block_bytes, seed), ring(block_bytes, seed + 1)
    blocks, numbers = len(source), itertools.count(1000 + seed)
    keys = chain(seed, blocks)
    with contextlib.ExitStack() as ends:
        opened = embedded(HOST_BYTES) if name == "host" else sidecar(HOST_BYTES)
        _, client = ends.enter_context(opened)
        map_whole(client)
        engine = Engine(client, source, target)
        engine.put(keys)
        engine.verify(keys)
        plain_in, plain_out = ends.enter_context(_limits(client, keys, source, target))
        found = ends.enter_context(
            peers.running(name, block_bytes, blocks, absent, wanted=with_peers)
        )
        rows: list[Row] = []
        ours = {"put": lambda: engine.put(chain(next(numbers), blocks)),
                "get": lambda: engine.get(keys)}  # fmt: skip
        limits = {"put": plain_in, "get": plain_out}
        for index, op in enumerate(ours):
            contenders = {"tierkv": ours[op], "limit": limits[op]}
            contenders |= {peer: runs[index] for peer, runs in found.items()}
            seconds = take_turns(contenders, turns, 3, seed)
            rows += rows_of(name, op, block_bytes, blocks, seconds)
        return rows


def doubted(block_bytes: int, turns: int, seed: int) -> list[Row]:
    """Measure what it costs to doubt RAM: `verify = "always"` beside "arrival", embedded."""
    source, target = ring(block_bytes, seed), ring(block_bytes, seed + 1)
    numbers, keys = itertools.count(1000 + seed), chain(seed, len(source))
    with (
        embedded(HOST_BYTES, 'verify = "always"\n') as (_, always),
        embedded(HOST_BYTES) as (_, on),
    ):
        engines = {"tierkv": Engine(always, source, target), "arrival": Engine(on, source, target)}
        for engine in engines.values():
            map_whole(engine.client)
            engine.put(keys)
            engine.verify(keys)
        rows: list[Row] = []
        for op in "get", "put":  # puts evict what is read
            runs = {
                name: (lambda engine=engine: engine.put(chain(next(numbers), len(source))))
                if op == "put"
                else (lambda engine=engine: engine.get(keys))
                for name, engine in engines.items()
            }
            seconds = take_turns(runs, turns, 3, seed)
            rows += rows_of("host_doubted", op, block_bytes, len(source), seconds)
        return rows


def latency(samples: int, seed: int) -> list[Row]:
    """Measure one 2 MiB block at a time through a sidecar, beside the plain copy of one."""
    block_bytes = 2 * MIB
    source, target = ring(block_bytes, seed), ring(block_bytes, seed + 1)
    blocks = len(source)
    with sidecar(HOST_BYTES) as (_, client):
        map_whole(client)
        chains = [chain(seed + index, 1) for index in range(blocks)]
        engines = [
            Engine(client, source[index : index + 1], target[index : index + 1])
            for index in range(blocks)
        ]
        for engine, keys in zip(engines, chains, strict=True):
            engine.put(keys)
            engine.verify(keys)
        gets, aparts, puts, plain = [], [], [], []
        fresh = itertools.count(100_000 + seed)
        for turn in range(samples + blocks):
            at = turn % blocks
            got = engines[at].get(chains[at])
            after = (at + blocks // 8) % blocks
            apart = engines[after].get(chains[after], fetch=False)
            put = engines[(at + blocks // 2) % blocks].put(chain(next(fresh), 1))
            other = (at + blocks // 4) % blocks
            start = time.perf_counter()
            target[other].copy_(source[other])
            copied = time.perf_counter() - start
            if turn >= blocks:
                gets.append(got)
                aparts.append(apart)
                puts.append(put)
                plain.append(copied)
    return [
        Row(
            name="sidecar_latency",
            op=op,
            block_bytes=block_bytes,
            samples=samples,
            p50_us=round(percentile(values, 50) * 1e6, 1),
            p99_us=round(percentile(values, 99) * 1e6, 1),
            copy_p50_us=round(percentile(plain, 50) * 1e6, 1),
            remark=f"the copy alone takes {percentile(plain, 50) * 1e6:.0f} us; the rest is"
            f" {(percentile(values, 50) - percentile(plain, 50)) * 1e6:.0f} us of calls",
        )
        for op, values in (("get", gets), ("get_two_calls", aparts), ("put", puts))
    ]
