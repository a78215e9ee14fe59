"""Codec worker: encodes exact blocks of the arena again, in a process of its own.

`codec_process` starts it and has the messages. It takes one core at a low priority, maps the
arena for reading, and holds the arena's lock meanwhile, as every process does that maps it. It ends
with the sidecar. An error that is not a codec's own word ends it too: another one is started.
"""

import contextlib
import functools
import mmap
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import torch

from tierkv import frame
from tierkv.codec import profile_of
from tierkv.errors import TierKVError
from tierkv.identity import LayerSpec, Rope, from_wire
from tierkv.part import Part
from tierkv_codecs import CODECS, Place
from tierkv_codecs.encoder import encode_again
from tierkv_connectors.arena import ArenaLock
from tierkv_service.codec_process import Answer, Job, Order, receive, send

identity_of = functools.lru_cache(maxsize=16)(from_wire)


class Payload:
    """The memory file that payloads are left in, which grows to the largest."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._view = memoryview(b"")

    def room(self, nbytes: int) -> memoryview:
        """Return its first bytes."""
        if len(self._view) < nbytes:
            os.ftruncate(self._fd, nbytes)
            self._view = memoryview(mmap.mmap(self._fd, nbytes))
        return self._view[:nbytes]


def main() -> int:
    """Answer the sidecar at standard input until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the sidecar ends, then we do
    torch.set_num_threads(1)
    with socket.socket(fileno=os.dup(0)) as sock:
        order = msgspec.msgpack.decode(receive(sock), type=Order)
        try:
            lock = ArenaLock(Path(order.socket_path))
        except TierKVError as error:
            sys.stderr.write(f"tierkv: no codec worker: {error}\n")
            return 1
        arena = memoryview(mmap.mmap(order.arena, order.arena_bytes, prot=mmap.PROT_READ))
        payload = Payload(order.out)
        warm_up()
        with contextlib.suppress(ConnectionError):  # the sidecar is gone
            send(sock, Answer())
            while True:
                job = msgspec.msgpack.decode(receive(sock), type=Job)
                send(sock, Answer(length=work(arena, job, payload)))
        lock.release()
    return 0


def warm_up() -> None:
    """Have the kernels of the fixed codecs loaded, or compiled, before a block waits for them."""
    spec = LayerSpec(kv_heads=1, k_dim=64, v_dim=64, rope=Rope(rotary_dim=64))
    place = Place((spec,), Part(0, 0, 1, 0, 1), 0)
    block = torch.randn((1, 2, 128, 1, 64)).to(torch.bfloat16)
    for codec in CODECS.all():
        codec.encode(block, torch.empty(codec.bound(block.nbytes), dtype=torch.uint8), place)


def work(arena: memoryview, job: Job, payload: Payload) -> int:
    """Encode a job's block; returns the bytes of the payload, 0 where it cannot be made."""
    pieces = [arena[start : start + nbytes] for start, nbytes in job.runs]
    header = frame.parse(bytes(pieces[0][: frame.MAX_HEADER_BYTES]))
    if isinstance(header, frame.Refusal):
        return 0
    profile = profile_of(job.profile)
    out = payload.room(header.raw_bytes + profile.bound_extra)
    data = frame.cut(pieces, header.header_bytes, header.payload_bytes)
    return sum(encode_again(identity_of(job.identity), header, data, profile, out))


if __name__ == "__main__":
    sys.exit(main())
