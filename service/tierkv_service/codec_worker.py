"""Codec worker: encodes exact blocks of the arena again, in a process of its own.

`codec_process` starts it and has the messages. It takes one core at a low priority, maps the
arena for reading, and holds the arena's lock meanwhile, as every process does that maps it. It ends
with the sidecar. An error that is not a codec's own word ends it too: another one is started.
What would be encoded by an artifact that is not there any more, or another one now, is refused.
"""

import contextlib
import functools
import math
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
from tierkv.identity import Identity, LayerSpec, Rope, from_wire
from tierkv.part import Part
from tierkv_codecs import CODECS, Codec, CodecError, CodecRegistry, Place
from tierkv_codecs.encoder import encode_again
from tierkv_codecs.kvtc import codecs_of
from tierkv_codecs.kvtc_artifact import Artifact, read
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
        codecs = Codecs(order)
        codecs.warm_up()
        with contextlib.suppress(ConnectionError):  # the sidecar is gone
            send(sock, Answer())
            while True:
                job = msgspec.msgpack.decode(receive(sock), type=Job)
                send(sock, Answer(segments=work(arena, job, payload, codecs)))
        lock.release()
    return 0


class Codecs:
    """The fixed codecs, and those of every artifact that is still the one that was ordered."""

    def __init__(self, order: Order) -> None:
        self._of = {frame.NO_ARTIFACT: CODECS}
        self._artifacts: dict[bytes, Artifact] = {}
        for path, digest in order.artifacts:
            try:
                found = read(Path(path))
            except TierKVError as error:
                sys.stderr.write(f"tierkv: no kvtc from the codec worker: {error}\n")
                continue
            if found.digest != digest:
                sys.stderr.write(
                    f"tierkv: no kvtc from the codec worker: {path} is not what it was when the"
                    " sidecar started: start it again\n"
                )
                continue
            self._artifacts[digest] = found
            self._of[digest] = CodecRegistry([*CODECS.all(), *codecs_of(found)])

    def of(self, artifact: bytes, identity: Identity, part: Part) -> CodecRegistry | None:
        """Return the codecs with those of an artifact; None: there is none for this block."""
        found = self._artifacts.get(artifact)
        try:
            if found is not None:
                found.check(identity, part)
        except TierKVError:
            return None
        return self._of.get(artifact)

    def warm_up(self) -> None:
        """Have all kernels loaded, or compiled, before a block waits for them."""
        spec = LayerSpec(kv_heads=1, k_dim=64, v_dim=64, rope=Rope(rotary_dim=64))
        for codec in CODECS.all():
            _try(codec, Place((spec,), Part(0, 0, 1, 0, 1), 0))
        for artifact in self._artifacts.values():
            _try(codecs_of(artifact, math.inf)[-1], Place(artifact.header.layers, artifact.part, 0))


def _try(codec: Codec, place: Place) -> None:
    """Encode a block of noise."""
    heads = place.part.head_stop - place.part.head_start
    block = torch.randn((len(place.layers), 2, 128, heads, place.layers[0].k_dim)).bfloat16()
    out = torch.empty(codec.bound(block.nbytes), dtype=torch.uint8)
    with contextlib.suppress(CodecError):
        codec.encode(block, out, place)


def work(arena: memoryview, job: Job, payload: Payload, codecs: Codecs) -> tuple[int, ...]:
    """Encode a job's block; returns the bytes of its segments, none where it cannot be made."""
    pieces = [arena[start : start + nbytes] for start, nbytes in job.runs]
    header = frame.parse(bytes(pieces[0][: frame.MAX_HEADER_BYTES]))
    if isinstance(header, frame.Refusal):
        return ()
    identity, profile = identity_of(job.identity), profile_of(job.profile)
    mine = codecs.of(job.artifact, identity, header.part)
    if mine is None:
        return ()
    out = payload.room(header.raw_bytes + profile.bound_extra)
    data = frame.cut(pieces, header.header_bytes, header.payload_bytes)
    return encode_again(identity, header, data, profile, out, mine)


if __name__ == "__main__":
    sys.exit(main())
