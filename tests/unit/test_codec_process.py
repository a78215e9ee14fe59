"""The codec worker of a sidecar: a real child over a real arena, killed, hung and lying."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest
import torch

from tests.kvtc_rigs import PART, artifact, foreign, packed, place_at, text_like
from tests.move_rigs import IDENTITY, RATIOS, RAW_BYTES, TOKENS, registry
from tests.sidecars import until
from tierkv import frame
from tierkv.codec import FP8, INT4, INT8, KVTC, LOSSLESS, RAW, Profile
from tierkv.encoder import Encoded, Lost
from tierkv.fidelity import Fidelity
from tierkv.frame import NO_ARTIFACT
from tierkv.identity import Identity
from tierkv.settings import SocketSettings
from tierkv.tiers.host import HostSettings, HostTier
from tierkv_codecs import CODECS
from tierkv_connectors import wire
from tierkv_service import codec_process
from tierkv_service.calibrations import Calibration
from tierkv_service.codec_process import CodecProcess
from tierkv_service.locks import Locks, holders

FIXED = (LOSSLESS, INT8, INT4, FP8)
CODECS_OF = registry()


class Stored(NamedTuple):
    """A raw frame in an arena."""

    block: torch.Tensor
    header: frame.Header
    runs: list[tuple[int, int]]


class Bench:
    """An arena with frames in it, and the worker that maps it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tierkv.sock"
        self.locks = Locks(self.path, SocketSettings())
        self.locks.take_arena(1.0)
        self.locks.share_arena()
        self.host = HostTier(HostSettings(size_bytes=8 << 20))
        self.codecs = CodecProcess(self.host, self.path)

    def store(self, block: torch.Tensor) -> Stored:
        """Write a raw frame in two runs, as a crowded arena would have it."""
        start = frame.header_bytes(1)
        header = frame.Header(
            codec_id=RAW.codec_id, flags=0, fidelity=Fidelity.EXACT, tokens=TOKENS, position=TOKENS,
            generation=0, fingerprint=IDENTITY.fingerprint, key=bytes(32), namespace=bytes(16),
            artifact=NO_ARTIFACT, part=PART, raw_bytes=RAW_BYTES, epoch=self.host.epoch,
            segments=(RAW_BYTES,), checksums=(),
        )  # fmt: skip
        data = frame.pack(header).ljust(start, b"\0") + block.view(torch.uint8).numpy().tobytes()
        page, half = self.host.page_bytes, 5 * self.host.page_bytes
        locators = [self.host.reserve(half), self.host.reserve(page), self.host.reserve(half)]
        assert None not in locators
        runs = []
        for locator, part in ((locators[0], data[:half]), (locators[2], data[half:])):
            at = self.host.start(locator or 0)
            self.host.view[at : at + len(part)] = part
            runs.append((at, half))
        return Stored(block, header, runs)

    def encode(
        self, stored: Stored, profile: Profile, artifact: bytes = NO_ARTIFACT
    ) -> Encoded | Lost:
        return self.codecs.encode(IDENTITY, stored.header, stored.runs, profile, artifact)

    @property
    def pid(self) -> int:
        process = self.codecs._process
        return process.pid if process is not None else 0

    def close(self) -> None:
        self.codecs.close()
        self.host.close()
        self.locks.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path)
    yield one
    one.close()


def payload(block: torch.Tensor, profile: Profile) -> bytes:
    """Return what the codec makes of a block in this process."""
    codec = CODECS.named(profile.name)
    out = torch.empty(codec.bound(RAW_BYTES), dtype=torch.uint8)
    return out[: sum(codec.encode(block, out, place_at(TOKENS)))].numpy().tobytes()


def check(made: Encoded | Lost, block: torch.Tensor, profile: Profile) -> None:
    assert isinstance(made, Encoded)
    data = bytes(made.memory[frame.header_bytes(1) : made.nbytes])
    assert data == payload(block, profile)


CALIBRATED = artifact(RATIOS)


@pytest.fixture
def calibrated(bench: Bench, tmp_path: Path) -> Calibration:
    """The artifact as a file, by which the bench's worker encodes."""
    path = tmp_path / "artifact.kvtc"
    path.write_bytes(packed(CALIBRATED))
    one = Calibration(path, CALIBRATED.digest, "synthetic")
    bench.codecs.close()
    bench.codecs = CodecProcess(bench.host, bench.path, [one])
    return one


def test_a_worker_makes_the_bytes_that_an_artifact_makes(
    bench: Bench, calibrated: Calibration
) -> None:
    stored = bench.store(text_like(TOKENS, 1, TOKENS))
    assert bench.codecs.artifacts == {NO_ARTIFACT, calibrated.digest}
    assert calibrated.digest.hex()[:8] in bench.codecs.state
    for profile in KVTC:
        codec = CODECS_OF.named(profile.name)
        out = torch.empty(codec.bound(RAW_BYTES), dtype=torch.uint8)
        segments = codec.encode(stored.block, out, place_at(TOKENS))
        made = bench.encode(stored, profile, calibrated.digest)
        assert isinstance(made, Encoded)
        assert made.segments == (*segments, *(0,) * (4 - profile.levels))
        data = bytes(made.memory[frame.header_bytes(4) : made.nbytes])
        assert data == out[: sum(segments)].numpy().tobytes()
    check(bench.encode(stored, INT8), stored.block, INT8)
    assert bench.codecs.state.startswith(f"pid {bench.pid}, 5 blocks, 1 starts")


def test_what_an_artifact_does_not_fit_is_refused_and_the_worker_stays(
    bench: Bench, calibrated: Calibration
) -> None:
    strange = bench.store(foreign(TOKENS, 3))
    assert bench.encode(strange, KVTC[0], calibrated.digest) is Lost.REFUSED
    stored = bench.store(text_like(TOKENS, 1, TOKENS))
    other = msgspec.structs.replace(IDENTITY, weights="others")
    made = bench.codecs.encode(other, stored.header, stored.runs, KVTC[0], calibrated.digest)
    assert made is Lost.REFUSED
    assert bench.encode(stored, KVTC[0], bytes(31) + b"\1") is Lost.REFUSED
    check(bench.encode(strange, INT8), strange.block, INT8)
    assert bench.codecs.state.startswith(f"pid {bench.pid}, 1 blocks, 1 starts")


@pytest.mark.parametrize("how", ["gone", "another"])
def test_an_artifact_that_is_not_what_it_was_is_not_used(
    bench: Bench, calibrated: Calibration, how: str
) -> None:
    if how == "gone":
        calibrated.path.unlink()
    else:
        calibrated.path.write_bytes(packed(CALIBRATED, model="another"))
    stored = bench.store(text_like(TOKENS, 1, TOKENS))
    assert bench.encode(stored, KVTC[0], calibrated.digest) is Lost.REFUSED
    check(bench.encode(stored, INT8), stored.block, INT8)


def test_a_worker_makes_the_bytes_that_the_codec_makes(bench: Bench) -> None:
    assert bench.codecs.state.startswith("not started")
    blocks = [bench.store(text_like(TOKENS, seed, TOKENS)) for seed in range(3)]
    for stored in blocks:
        for profile in FIXED:
            check(bench.encode(stored, profile), stored.block, profile)
    first = bench.pid
    assert bench.codecs.state == f"pid {first}, {len(blocks) * len(FIXED)} blocks, 1 starts"
    assert os.getpriority(os.PRIO_PROCESS, first) == codec_process.NICE > 0


def test_a_block_that_a_codec_cannot_take_is_refused_and_the_worker_stays(bench: Bench) -> None:
    broken = text_like(TOKENS, 1, TOKENS)
    broken[0, 0, 7] = float("nan")
    sound = text_like(TOKENS, 2, TOKENS)
    assert bench.encode(bench.store(broken), INT8) is Lost.REFUSED
    other = Identity(
        model="other", weights="0", kv_dtype="fp32", tokens_per_block=TOKENS, layers=IDENTITY.layers
    )
    stored = bench.store(sound)
    assert bench.codecs.encode(other, stored.header, stored.runs, INT8, NO_ARTIFACT) is Lost.REFUSED
    check(bench.encode(stored, INT8), sound, INT8)
    assert bench.codecs.state.endswith("1 starts")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_worker_that_is_killed_or_hangs_costs_a_block_and_is_replaced(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(codec_process, "MIN_PAUSE_S", 0.5)
    bench.codecs.close()
    bench.codecs = CodecProcess(bench.host, bench.path)
    stored = bench.store(text_like(TOKENS, 1, TOKENS))
    check(bench.encode(stored, INT8), stored.block, INT8)
    first = bench.pid
    os.kill(first, how)
    monkeypatch.setattr(codec_process, "JOB_S", 0.3)
    assert bench.encode(stored, INT8) is Lost.FAILED
    assert not Path(f"/proc/{first}").exists(), "it is gone, and waited for"
    assert bench.encode(stored, INT8) is Lost.DOWN
    assert bench.codecs.state.startswith("down for")
    monkeypatch.setattr(codec_process, "JOB_S", 30.0)
    assert until(lambda: isinstance(bench.encode(stored, INT8), Encoded), 60)
    assert bench.pid not in (0, first)
    check(bench.encode(stored, INT4), stored.block, INT4)


LIAR = """
import os, socket, struct, sys, msgspec
sock = socket.socket(fileno=0)
def take():
    (size,) = struct.unpack("<I", sock.recv(4))
    return msgspec.msgpack.decode(sock.recv(size))
def say(data):
    sock.sendall(struct.pack("<I", len(data)) + data)
order = take()
say(msgspec.msgpack.encode([[]]))
take()
say({answer})
sock.recv(1)
"""


@pytest.mark.parametrize(
    "answer",
    [
        "msgspec.msgpack.encode([[1 << 40]])", "msgspec.msgpack.encode([[-1]])", "b'rubbish'",
        "msgspec.msgpack.encode([[4096]])", "msgspec.msgpack.encode([['many']])",
        "msgspec.msgpack.encode([[10, 10]])", "msgspec.msgpack.encode([5])",
    ],
    ids=["too long", "negative", "no message", "nothing there", "no number", "two segments",
         "no segments"],
)  # fmt: skip
def test_an_answer_that_cannot_be_ends_the_worker(bench: Bench, answer: str) -> None:
    program = LIAR.replace("{answer}", answer)
    bench.codecs.close()
    bench.codecs = CodecProcess(bench.host, bench.path, command=[sys.executable, "-c", program])
    stored = bench.store(text_like(TOKENS, 1, TOKENS))
    assert bench.encode(stored, INT8) is Lost.FAILED
    assert bench.encode(stored, INT8) is Lost.DOWN


def test_one_that_never_starts_is_tried_less_and_less(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(codec_process, "time", SimpleNamespace(monotonic=lambda: now))
    bench.codecs.close()
    bench.codecs = CodecProcess(
        bench.host, bench.path, command=[sys.executable, "-c", "raise SystemExit"]
    )
    stored = bench.store(text_like(TOKENS, 1, TOKENS))
    starts = []
    for second in range(64):
        now = float(second)
        before = bench.codecs._started
        assert bench.encode(stored, INT8) is Lost.DOWN
        starts += [second] * (bench.codecs._started - before)
    assert starts == [0, 1, 3, 7, 15, 31, 63]


def test_the_worker_ends_with_the_sidecar_and_frees_the_arena(bench: Bench) -> None:
    stored = bench.store(text_like(TOKENS, 1, TOKENS))
    check(bench.encode(stored, INT8), stored.block, INT8)
    process, sock = bench.codecs._process, bench.codecs._sock
    assert process is not None
    assert sock is not None
    with wire.arena_path(bench.path).open("rb") as file:
        assert process.pid in holders(file.fileno())
        sock.close()  # as when the sidecar is killed
        process.wait(30)
        assert process.pid not in holders(file.fileno())
