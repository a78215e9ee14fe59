"""Engine: what an engine does with a tierkv client, over a ring of blocks that no cache holds.

Blocks are copied on one thread, as the connectors copy; the limit is a plain copy, torch's copy_.
"""

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from tierkv.cache import TierKV
from tierkv.calls import MatchCall, PutCall
from tierkv.channel import EmbeddedChannel
from tierkv.client import Client, Transfer
from tierkv.part import Part
from tierkv.reservation import Pieces, Reservation
from tierkv.settings import parse
from tierkv_codecs.copies import copy
from tierkv_connectors.sidecar import connect

MIB = 1 << 20
RING_BYTES = 256 * MIB
PARTS = Part(0, 0, 4, 0, 4).pack()
FINGERPRINT = hashlib.sha256(b"tierkv bench").digest()
TOKENS_PER_BLOCK = 256
START_S = 60.0


def chain(seed: int, blocks: int) -> bytes:
    """Return keys that no other seed has."""
    return np.random.default_rng(seed).bytes(32 * blocks)


def ring(block_bytes: int, seed: int, ring_bytes: int = RING_BYTES) -> list[torch.Tensor]:
    """Return blocks of random bytes that lie one behind the other."""
    count = ring_bytes // block_bytes
    data = np.random.default_rng(seed).integers(0, 256, (count, block_bytes), dtype=np.uint8)
    return list(torch.from_numpy(data).unbind())


def match_call(keys: bytes, block_bytes: int, *, fetch: bool = False) -> MatchCall:
    """Return a question for exact blocks of one part; `fetch` asks for the transfer with it."""
    return MatchCall(
        namespace="bench", fingerprint=FINGERPRINT, keys=keys, parts=PARTS, fidelity=4, position=0,
        tokens_per_block=TOKENS_PER_BLOCK, raw_bytes=block_bytes, deadline_s=30.0, fetch=fetch,
    )  # fmt: skip


def put_call(keys: bytes, block_bytes: int) -> PutCall:
    """Return an offer of blocks of one part, as they are."""
    return PutCall(
        namespace="bench", fingerprint=FINGERPRINT, keys=keys, parts=PARTS,
        raw_bytes=block_bytes.to_bytes(8, "little"), fidelity=4, position=0,
        tokens_per_block=TOKENS_PER_BLOCK,
    )  # fmt: skip


def copy_in(reservation: Reservation, blocks: Sequence[torch.Tensor]) -> None:
    """Copy blocks to where a reservation says."""
    places = [reservation.payload(index) for index in range(len(reservation.units))]
    for there, here in pairs_of(places, blocks):
        copy(there, here)


def copy_out(transfer: Transfer, blocks: Sequence[torch.Tensor]) -> None:
    """Copy a transfer's blocks out, as carefully as a connector does."""
    headers = transfer.headers()
    assert len(headers) == transfer.units, "a frame was not what the match promised"
    places = [transfer.payload(unit, header) for unit, header in enumerate(headers)]
    for there, here in pairs_of(places, blocks):
        copy(here, there)
    assert transfer.intact(transfer.units) == transfer.units


def pairs_of(
    places: Sequence[Pieces], blocks: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what is copied to what: tensors over each piece of a payload and over its block.

    All of them before the first copy: one that stands between copies finds its code pushed out of
    the processor's caches.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for pieces, block in zip(places, blocks, strict=False):
        at = 0
        for piece in pieces:
            size = min(len(piece), len(block) - at)
            if size:
                there = torch.frombuffer(piece, dtype=torch.uint8, count=size)
                pairs.append((there, block if size == len(block) else block[at : at + size]))
                at += size
    return pairs


class Engine:
    """Puts and gets chains of one block size through a client."""

    def __init__(
        self, client: Client, source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]
    ) -> None:
        self.client = client
        self._source = source
        self._target = target
        self._block_bytes = len(source[0])

    def put(self, keys: bytes) -> float:
        """Put a chain and return the seconds."""
        call = put_call(keys, self._block_bytes)
        start = time.perf_counter()
        reservation = self.client.put(call)
        assert reservation is not None
        copy_in(reservation, self._source)
        done = reservation.commit([self._block_bytes] * len(reservation.units))
        seconds = time.perf_counter() - start
        assert done == len(keys) // 32, f"{done} of {len(keys) // 32} blocks were stored"
        return seconds

    def get(self, keys: bytes, *, fetch: bool = True) -> float:
        """Match, get, copy out and release a chain; returns the seconds.

        With `fetch` the match brings the transfer, as where scheduler and worker are one process.
        """
        call = match_call(keys, self._block_bytes, fetch=fetch)
        start = time.perf_counter()
        reply = self.client.match(call)
        if reply.pending:
            reply = self.client.wait(reply.match, 30.0)
        assert reply.blocks == len(keys) // 32, f"{reply.blocks} of {len(keys) // 32} blocks"
        transfer = self.client.get(reply.match, reply.blocks)
        assert transfer is not None
        copy_out(transfer, self._target)
        transfer.close()
        return time.perf_counter() - start

    def verify(self, keys: bytes) -> None:
        """Assert that what comes back is what was put."""
        for block in self._target:
            block.zero_()
        self.get(keys)
        count = len(keys) // 32
        for mine, back in zip(self._source[:count], self._target[:count], strict=True):
            assert torch.equal(mine, back), "bytes came back that were not put"


def settings_text(folder: Path, host_bytes: int, more: str = "") -> str:
    """Return a settings file's text for a store of a benchmark."""
    return (
        f'[socket]\npath = "{folder / "tierkv.sock"}"\n[host]\nsize = {host_bytes}\n'
        f'[store]\ngrace = "0s"\n{more}'
    )


QUIET = "[http]\nenabled = false\n"


@contextlib.contextmanager
def embedded(host_bytes: int, more: str = "") -> Iterator[tuple[TierKV, Client]]:
    """Run a store in this process."""
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as name:
        store = TierKV.open(parse(settings_text(Path(name), host_bytes, more)))
        client = Client(EmbeddedChannel(store, store.host.view))
        try:
            wait_touched(os.getpid(), host_bytes)
            yield store, client
        finally:
            client.close()
            store.close(0.0)


@contextlib.contextmanager
def sidecar(host_bytes: int, more: str = QUIET) -> Iterator[tuple[int, Client]]:
    """Run `tierkv serve` in a process of its own; yields its pid and a client."""
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as name:
        folder = Path(name)
        process = serve(folder, host_bytes, more)
        client = connect(folder / "tierkv.sock", client="bench", timeout_s=5.0)
        try:
            wait_touched(process.pid, host_bytes)
            yield process.pid, client
        finally:
            client.close()
            process.terminate()
            process.wait(30)


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def disk_folder() -> Path:
    """Return where files go that measure the disk: the user's cache, on no RAM disk we hope."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tierkv" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def serve(folder: Path, host_bytes: int, more: str = QUIET) -> "subprocess.Popen[bytes]":
    """Start `tierkv serve` and return at once."""
    config = folder / "tierkv.toml"
    config.write_text(settings_text(folder, host_bytes, more))
    command = [str(Path(sys.executable).with_name("tierkv")), "serve", "--config", str(config)]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def wait_touched(pid: int, host_bytes: int) -> None:
    """Wait until a store's process has all of its arena in its page table."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        shared = next(int(line.split()[1]) for line in lines if line.startswith("RssShmem"))
        if shared << 10 >= host_bytes // MIB * MIB:
            return
        time.sleep(0.02)
    raise TimeoutError(f"no store of {host_bytes >> 20} MiB within {START_S:g} s")
