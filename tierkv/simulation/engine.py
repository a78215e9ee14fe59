"""Engine: a simulated client with sessions that share prefixes. It checks every byte it is given.

A block's payload follows from its key, its part and the version of the weights, which goes up with
each clear; so an engine can tell a wrong byte, and a right one that should have been cleared.
"""

import hashlib
import itertools
import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from tierkv import calls, frame
from tierkv.codec import KVTC
from tierkv.fidelity import Fidelity
from tierkv.namespace import digest_of
from tierkv.part import PACKED_BYTES, Part
from tierkv.simulation.progressive import ARTIFACT, FAMILY, cuts
from tierkv.simulation.sidecar import Sidecar

FINGERPRINT = hashlib.sha256(b"tierkv.simulation").digest()
TOKENS = 64
OFFERS: tuple[dict[str, Any], ...] = (
    {"profiles": ("raw", "lossless")},
    {"profiles": ("kvtc@4x",), "artifacts": (ARTIFACT,)},
    {"profiles": ("raw", "kvtc@4x"), "artifacts": (frame.NO_ARTIFACT, ARTIFACT)},
)
PROGRESSIVE = {profile.name for profile in KVTC}
PATIENCE = 0.8
"""How often an engine waits on for an answer that is pending."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


def content(name: bytes, version: int, nbytes: int) -> bytes:
    """Return the payload of a unit (key and packed part) under a version of the weights."""
    seed = xxhash.xxh3_64_intdigest(name + struct.pack("<Q", version))
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * _ODD + np.uint64(seed)
    words ^= words >> np.uint64(29)
    words[0] = version
    return words.tobytes()[:nbytes]


@dataclass(frozen=True, slots=True)
class Model:
    """What the engines of a namespace compute: parts of a block, raw bytes of each."""

    namespace: str
    parts: tuple[Part, ...]
    raw_bytes: int

    @property
    def packed(self) -> bytes:
        """The parts as they travel."""
        return b"".join(part.pack() for part in self.parts)


@dataclass(frozen=True, slots=True)
class _Question:
    """An open match and the answers that its wait has got."""

    call: calls.MatchCall
    number: int
    answers: list[calls.MatchReply]


class Host(Protocol):
    """What an engine sees of its world."""

    sidecar: Sidecar
    rng: random.Random

    def version(self, namespace: str) -> int:
        """Return the version of the weights now."""

    def floor(self, namespace: str) -> int:
        """Return the lowest version that a hit may have now."""

    def promised(self, call: calls.FlushCall, since: int) -> Callable[[calls.FlushReply], None]:
        """Return what takes the answer of a flush."""

    def mark(self) -> int:
        """Return the number of this step."""


class Engine:
    """One client process. Its turns follow from the world's random numbers."""

    def __init__(self, host: Host, owner: int, model: Model, chains: list[bytes]) -> None:
        self.owner = owner
        self.model = model
        self.verified = 0
        self._host = host
        self._chains = chains
        self._matches: list[_Question] = []
        self._transfers: list[tuple[calls.MatchCall, calls.GetReply, list[bytes], int]] = []
        self._writes: list[tuple[calls.PutCall, calls.PutReply, int]] = []

    def turn(self) -> None:
        """Do one thing."""
        acts = [self._ask, self._offer, self._fetch, self._finish_write, self._end, self._flush]
        self._host.rng.choices(acts, [30, 25, 25, 20, 20, 5])[0]()

    def rest(self) -> None:
        """End everything that is open, in good order."""
        while self._matches or self._transfers or self._writes:
            self._fetch()
            self._finish_write()
            self._end()

    def verify_all(self, drain: Callable[[], None]) -> None:
        """Ask for every chain, let it come up and read it."""
        for chain in self._chains:
            self._match(chain)
            drain()
            self.rest()

    def _ask(self) -> None:
        if len(self._matches) < 6:  # noqa: PLR2004 - enough to make several wait for one read
            self._match(self._host.rng.choice(self._hot()))

    def _hot(self) -> list[bytes]:
        """Return the chains of this turn: the first ones are asked for most."""
        return self._chains[: self._host.rng.randint(1, len(self._chains))]

    def _match(self, chain: bytes) -> None:
        rng = self._host.rng
        blocks = rng.randint(1, len(chain) // 32)
        known = rng.random() < 0.5  # noqa: PLR2004
        call = calls.MatchCall(
            namespace=self.model.namespace, fingerprint=FINGERPRINT, keys=chain[: blocks * 32],
            parts=self.model.packed, fidelity=rng.choice([Fidelity.ECONOMY, Fidelity.EXACT]),
            position=0, tokens_per_block=TOKENS,
            raw_bytes=self.model.raw_bytes * len(self.model.parts),
            linear=1e-6 if known else 0.0, quadratic=1e-9 if known else 0.0,
            deadline_s=rng.choice([0.5, 3.0, 10.0]),
            fetch=rng.random() < 0.3,  # noqa: PLR2004
        )  # fmt: skip
        floor = self._host.floor(call.namespace)
        reply = self._host.sidecar.match(self.owner, call)
        if reply.got is not None and reply.got.transfer:
            self._transfers.append((call, reply.got, self._verify(call, reply.got, floor), floor))
            return
        answers: list[calls.MatchReply] = []
        if reply.pending:
            wait = calls.WaitCall(match=reply.match)
            self._host.sidecar.wait(self.owner, wait, answers.append)
        else:
            answers.append(reply)
        if reply.match:
            self._matches.append(_Question(call, reply.match, answers))

    def _fetch(self) -> None:
        """Turn a match into a transfer, settle one that is pending, or let it go."""
        if not self._matches:
            return
        host = self._host
        index = host.rng.randrange(len(self._matches))
        if not self._matches[index].answers and host.rng.random() < PATIENCE:
            return
        asked = self._matches.pop(index)
        call, number = asked.call, asked.number
        waited = bool(asked.answers)
        settled = host.sidecar.settle(self.owner, calls.SettleCall(match=number))
        assert waited or len(asked.answers) == 1, "a wait is not answered when its match is final"
        assert len(asked.answers) == 1, "a wait was answered twice"
        assert not settled.pending, "a settled match is still pending"
        reply = asked.answers[0]
        if not reply.blocks or host.rng.random() < 0.1:  # noqa: PLR2004
            host.sidecar.release(self.owner, calls.ReleaseCall(match=number))
            return
        floor = host.floor(call.namespace)
        got = host.sidecar.get(
            self.owner, calls.GetCall(match=number, blocks=host.rng.randint(1, reply.blocks))
        )
        if got.transfer:
            seen = self._verify(call, got, floor)
            self._transfers.append((call, got, seen, floor))

    def _verify(self, call: calls.MatchCall, got: calls.GetReply, floor: int) -> list[bytes]:
        """Assert that every frame of a transfer is the one asked for, byte by byte."""
        seen = []
        for unit, pieces in enumerate(self._frames(got.run_counts, got.runs)):
            block, index = divmod(unit, len(self.model.parts))
            key = call.keys[block * 32 : block * 32 + 32]
            part = self.model.parts[index]
            header = frame.parse(pieces[0][: frame.MAX_HEADER_BYTES])
            assert not isinstance(header, frame.Refusal), f"unit {unit} is no frame: {header}"
            assert (header.key, header.part) == (key, part), f"unit {unit} is another block"
            assert header.namespace == digest_of(call.namespace), "another tenant's block"
            assert header.fidelity >= call.fidelity, "a lower class than asked for"
            view = frame.cut(pieces, header.header_bytes, header.payload_bytes)
            data = b"".join(view)
            version = int.from_bytes(data[:8], "little")
            assert data == content(key + part.pack(), version, len(data)), f"wrong bytes in {unit}"
            assert version >= floor, f"weights {version} were cleared, {floor} is the lowest now"
            seen.append(xxhash.xxh3_128_digest(data))
            self.verified += 1
        return seen

    def _end(self) -> None:
        """Close a transfer; its bytes must not have changed while it was open."""
        if self._transfers:
            call, got, seen, floor = self._transfers.pop(
                self._host.rng.randrange(len(self._transfers))
            )
            assert self._verify(call, got, floor) == seen, "bytes changed under a transfer"
            self._host.sidecar.release(self.owner, calls.ReleaseCall(transfer=got.transfer))

    def _offer(self) -> None:
        rng, model = self._host.rng, self.model
        if len(self._writes) > 3:  # noqa: PLR2004
            return
        chain = rng.choice(self._hot())
        blocks = rng.randint(1, len(chain) // 32)
        call = calls.PutCall(
            namespace=model.namespace, fingerprint=FINGERPRINT, keys=chain[: blocks * 32],
            parts=model.packed, raw_bytes=struct.pack("<q", model.raw_bytes) * len(model.parts),
            fidelity=rng.choice([Fidelity.ECONOMY, Fidelity.EXACT, Fidelity.EXACT]), position=0,
            tokens_per_block=TOKENS, start=rng.randint(0, min(blocks - 1, 2)), family=FAMILY,
            **rng.choice(OFFERS),
        )  # fmt: skip
        reply = self._host.sidecar.put(self.owner, call)
        if reply.reservation:
            version = self._host.version(model.namespace)
            self._writes.append((call, reply, version))
            self._write(call, reply, version, half=0)

    def _write(self, call: calls.PutCall, reply: calls.PutReply, version: int, half: int) -> None:
        """Write one half of each payload; the other one follows in a later turn."""
        every: list[calls.PutReply | calls.Beside] = [reply]
        every += [reply.beside] if reply.beside else []
        for copies in every:
            frames = self._frames(copies.run_counts, copies.runs)
            for unit, pieces in zip(_units(reply), frames, strict=True):
                name = self._name(call, unit)
                nbytes = sum(self._lengths(name, copies.profile))
                room = sum(map(len, pieces)) - copies.header_bytes
                data = content(name, version, nbytes) if nbytes <= room else b""
                middle = len(data) // 2
                start, part = (middle, data[middle:]) if half else (0, data[:middle])
                at = 0
                for view in frame.cut(pieces, copies.header_bytes + start, len(part)):
                    view[:] = part[at : at + len(view)]
                    at += len(view)

    def _lengths(self, name: bytes, profile: str) -> list[int]:
        """Return the bytes of a unit's segments: but for raw ones they vary with the key."""
        raw = self.model.raw_bytes
        if profile in PROGRESSIVE:
            return cuts(name, raw)
        return [raw if profile == "raw" else raw * (40 + name[0] % 60) // 100]

    def _name(self, call: calls.PutCall, unit: int) -> bytes:
        block, index = divmod(unit, len(self.model.parts))
        part = call.parts[index * PACKED_BYTES : (index + 1) * PACKED_BYTES]
        return call.keys[block * 32 : block * 32 + 32] + part

    def _finish_write(self) -> None:
        if not self._writes:
            return
        rng, sidecar = self._host.rng, self._host.sidecar
        call, reply, version = self._writes.pop(rng.randrange(len(self._writes)))
        if rng.random() < 0.1:  # noqa: PLR2004
            sidecar.abort(self.owner, calls.AbortCall(reservation=reply.reservation))
            return
        self._write(call, reply, version, half=1)
        lengths = self._made(call, reply, reply.profile, 0.03)
        beside = self._made(call, reply, reply.beside.profile, 0.2) if reply.beside else []
        sidecar.commit(
            self.owner,
            calls.CommitCall(
                reservation=reply.reservation,
                lengths=_packed([sum(unit) for unit in lengths]),
                segments=_packed(itertools.chain(*lengths)),
                beside=_packed(itertools.chain(*beside)),
            ),
        )

    def _made(
        self, call: calls.PutCall, reply: calls.PutReply, profile: str, lost: float
    ) -> list[list[int]]:
        """Return the bytes of each unit's segments; some are given up."""
        found = []
        for unit in _units(reply):
            lengths = self._lengths(self._name(call, unit), profile)
            found.append([0] * len(lengths) if self._host.rng.random() < lost else lengths)
        return found

    def _flush(self) -> None:
        host = self._host
        call = calls.FlushCall(
            namespace=self.model.namespace, keys=host.rng.choice(self._hot()),
            parts=self.model.packed, deadline_s=host.rng.choice([0.1, 5.0]),
        )  # fmt: skip
        host.sidecar.flush(call, host.promised(call, host.mark()))

    def _frames(self, run_counts: bytes, runs: bytes) -> list[list[memoryview]]:
        arena = self._host.sidecar.host.view
        pairs = np.frombuffer(runs, "<i8").reshape(-1, 2).tolist()
        out, at = [], 0
        for count in np.frombuffer(run_counts, "<u2").tolist():
            out.append([arena[start : start + size] for start, size in pairs[at : at + count]])
            at += count
        return out


def _units(reply: calls.PutReply) -> list[int]:
    units: list[int] = np.frombuffer(reply.units, "<u4").tolist()
    return units


def _packed(numbers: Iterable[int]) -> bytes:
    return np.fromiter(numbers, "<i8").tobytes()
