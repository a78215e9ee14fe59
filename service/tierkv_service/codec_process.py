"""Codec process: the codec worker as the sidecar sees it, an `Encoder` over a child process.

Demotions ask it on a lane of their own; the data loop never waits for it. It starts when it is
first needed and ends with the sidecar. One that dies, hangs or answers nonsense costs the block
that it worked on; another is started, after a pause that grows while none gets anything done.

Orders and answers go over a socket pair, as u32 bytes and then msgpack. The worker maps the arena,
reads the frame there and leaves the payload in a memory file that both have open; it is copied from
there outside the interpreter's lock.
"""

import importlib.util
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tierkv import frame
from tierkv.codec import Profile
from tierkv.encoder import Encoded, Lost
from tierkv.identity import Identity, to_wire
from tierkv.tiers.host import aligned
from tierkv_service.calibrations import Calibration
from tierkv_service.session import ArenaFile

NICE = 10
"""A tenth of a busy core: at 19 it would not even be ready within minutes there."""
START_S = 300.0
"""How long a worker may take to be ready: it imports torch, on a machine that may be busy."""
JOB_S = 30.0
"""How long it may take for a block: the first of a profile may have to be compiled."""
MIN_PAUSE_S = 1.0
MAX_PAUSE_S = 300.0
MAX_MESSAGE_BYTES = 16 << 20
_SIZE = struct.Struct("<I")

_log = logging.getLogger("tierkv.codecs")


class Order(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The first message to a worker: descriptors that it inherits, and the sidecar's socket.

    `artifacts` are files with the digests that they had when the sidecar started.
    """

    arena: int
    arena_bytes: int
    out: int
    socket_path: str
    artifacts: tuple[tuple[str, bytes], ...] = ()


class Job(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A frame, as (offset, bytes) in the arena, and the profile that its block is wanted in.

    `artifact` is the digest of the calibration that the profile needs.
    """

    identity: bytes
    runs: tuple[tuple[int, int], ...]
    profile: str
    artifact: bytes = frame.NO_ARTIFACT


class Answer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Bytes of the payload's segments, which are at the start of the memory file.

    None: it cannot be made. The first answer only says that the worker is ready.
    """

    segments: tuple[int, ...] = ()


def send(sock: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. Raises: OSError."""
    body = msgspec.msgpack.encode(message)
    sock.sendall(_SIZE.pack(len(body)) + body)


def receive(sock: socket.socket, limit_s: float | None = None) -> bytes:
    """Return the next message's body. Raises: OSError: the other end is gone, or late."""
    end = None if limit_s is None else time.monotonic() + limit_s
    (size,) = _SIZE.unpack(_take(sock, _SIZE.size, end))
    if size > MAX_MESSAGE_BYTES:
        raise OSError(f"a message of {size} bytes")
    return _take(sock, size, end)


def _take(sock: socket.socket, count: int, end: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        sock.settimeout(None if end is None else max(end - time.monotonic(), 0.001))
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the other end is gone")
        data += more
    return bytes(data)


def possible() -> bool:
    """Return whether what a worker needs is installed."""
    return all(map(importlib.util.find_spec, ("torch", "numba", "safetensors")))


class CodecProcess:
    """Starts, asks, watches and replaces the worker. `encode` belongs to one thread.

    Args:
        arena: where the frames are.
        path: the sidecar's socket.
        calibrations: by which it encodes.
        command: that runs a worker.
    """

    def __init__(
        self,
        arena: ArenaFile,
        path: Path,
        calibrations: Sequence[Calibration] = (),
        command: Sequence[str] = (sys.executable, "-P", "-m", "tierkv_service.codec_worker"),
    ) -> None:
        self._arena = arena
        self._path = path
        self._calibrations = tuple(calibrations)
        self.artifacts = frozenset({frame.NO_ARTIFACT, *(one.digest for one in calibrations)})
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._out = -1
        self._again = 0.0
        self._pause_s = MIN_PAUSE_S
        self._closed = False
        self._guard = threading.Lock()
        self._encoded = self._started = 0

    @property
    def state(self) -> str:
        """See `tierkv.encoder.Encoder`."""
        process, wait_s = self._process, self._again - time.monotonic()
        done = f"{self._encoded} blocks, {self._started} starts"
        for one in self._calibrations:
            done += f", artifact {one.digest.hex()[:8]} of {one.model}"
        if process is not None:
            return f"pid {process.pid}, {done}"
        return f"down for {wait_s:.0f} s, {done}" if wait_s > 0 else f"not started, {done}"

    def encode(
        self,
        identity: Identity,
        header: frame.Header,
        runs: Sequence[tuple[int, int]],
        profile: Profile,
        artifact: bytes,
    ) -> Encoded | Lost:
        """See `tierkv.encoder.Encoder`."""
        job = Job(
            identity=to_wire(identity), runs=tuple(runs), profile=profile.name, artifact=artifact
        )
        with self._guard:
            sock = self._sock or self._start()
            if sock is None:
                return Lost.DOWN
            try:
                made = self._ask(sock, job, profile, frame.payload_bound(header.raw_bytes))
            except (OSError, msgspec.MsgspecError) as error:
                self._end(f"failed at a block: {error}")
                return Lost.FAILED
        self._pause_s = MIN_PAUSE_S
        if made is None:
            return Lost.REFUSED
        self._encoded += 1
        return made

    def close(self) -> None:
        """End the worker; nothing is encoded any more. Idempotent, for any thread."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._guard:
            self._end("is not needed any more")

    def _ask(self, sock: socket.socket, job: Job, profile: Profile, most: int) -> Encoded | None:
        """Return what the worker makes of a frame. Raises: OSError, MsgspecError: it failed."""
        sock.settimeout(JOB_S)
        send(sock, job)
        segments = msgspec.msgpack.decode(receive(sock, JOB_S), type=Answer).segments
        if not segments:
            return None
        length, count = sum(segments), max(profile.levels, 1)
        if len(segments) != count or min(segments) <= 0 or length > most:
            raise OSError(f"a payload of segments of {segments[:count]} bytes")
        start = frame.header_bytes(profile.segments)
        memory = aligned(start + length)
        if os.preadv(self._out, [memory[start : start + length]], 0) != length:
            raise OSError("the payload is not there")
        return Encoded(memory, (*segments, *(0,) * (profile.segments - count)))

    def _start(self) -> socket.socket | None:
        """Start a worker and wait until it is ready; returns None when there is none now."""
        if self._closed or time.monotonic() < self._again:
            return None
        self._out = os.memfd_create("tierkv-codec", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair()
        self._sock = ours
        self._started += 1
        try:
            with theirs:
                process = self._process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    pass_fds=(self._arena.fd, self._out),
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
            order = Order(
                arena=self._arena.fd,
                arena_bytes=self._arena.nbytes,
                out=self._out,
                socket_path=str(self._path),
                artifacts=tuple((str(one.path), one.digest) for one in self._calibrations),
            )
            send(ours, order)
            msgspec.msgpack.decode(receive(ours, START_S), type=Answer)
        except (OSError, msgspec.MsgspecError) as error:
            self._end(f"did not start: {error}")
            return None
        if self._closed:  # while it started
            self._end("came too late")
            return None
        _log.info("a codec worker is ready, pid %d", process.pid)
        return ours

    def _end(self, why: str) -> None:
        """End the worker that there is, and let there be none for a while."""
        process, sock = self._process, self._sock
        self._process = self._sock = None
        self._again = time.monotonic() + self._pause_s
        if not self._closed:
            _log.warning("the codec worker %s; the next in %.0f s at least", why, self._pause_s)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        if sock is not None:
            sock.close()
            os.close(self._out)
        if process is not None:
            process.kill()
            process.wait()
