"""A store over a real log and a real Redis, real blocks of every codec, and a policy to command."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.kvtc_rigs import LAYERS, PART, SPEC, artifact, place_at, text_like
from tests.stores import PAGE, Rig, chain, fill
from tests.unit.test_gate import domain, entry
from tierkv import calls, frame
from tierkv.catalog import READY, Catalog
from tierkv.client import Transfer
from tierkv.codec import PROFILES, Profile
from tierkv.encoder import Encoded, Lost
from tierkv.fidelity import Fidelity
from tierkv.gate import Gate
from tierkv.identity import Identity, to_wire
from tierkv.plan import Kind, Move
from tierkv.policies.lru import Lru
from tierkv.reservation import Written
from tierkv.tier import RAM, DurableTier
from tierkv.tiers.host import aligned
from tierkv.tiers.nvme import NvmeSettings, NvmeTier
from tierkv_codecs import CODECS, Codec, CodecRegistry
from tierkv_codecs.encoder import encode_again
from tierkv_codecs.kvtc import codecs_of

TOKENS = 256
RATIOS = (32.0, 16.0, 8.0, 4.0)
IDENTITY = Identity(
    model="synthetic", weights="seed 7", kv_dtype="bf16", tokens_per_block=TOKENS,
    layers=(SPEC,) * LAYERS,
)  # fmt: skip
RAW_BYTES = PART.raw_bytes(IDENTITY)
NVME, REDIS = 1, 2
KEYS = chain(1, 2)


def registry() -> CodecRegistry:
    return CodecRegistry([*CODECS.all(), *codecs_of(artifact(RATIOS), guard=float("inf"))])


COARSE = frozenset({"kvtc@32x", "int4"})
"""Profiles that the gate finds safe; it finds the others near-lossless."""


def class_of(name: str) -> Fidelity:
    if not PROFILES[name].lossy:
        return Fidelity.EXACT
    return Fidelity.SAFE if name in COARSE else Fidelity.NEAR_LOSSLESS


def gate_of(*names: str) -> Gate:
    """Return a gate that knows these profiles."""
    digest = artifact(RATIOS).digest.hex()
    return Gate(
        entries=tuple(
            entry(
                domain(kl_hi=0.005 if name in COARSE else 0.0006),
                profile=name, family=IDENTITY.family.hex(), context=1 << 16,
                artifact=digest if PROFILES[name].levels else "",
            )
            for name in names
        )
    )  # fmt: skip


EVERY = gate_of("kvtc@4x", "kvtc@8x", "kvtc@16x", "kvtc@32x", "int8", "int4")


class Commanded(Lru):
    """Asks for the Moves it was told, each once; drops the oldest when it was told of none."""

    def __init__(self, tiers: int) -> None:
        super().__init__(tiers)
        self.orders: list[Move] = []

    def reclaim(self, view: Catalog, tier: int, need: int, *, at_once: bool) -> list[Move]:
        quick = (Kind.DROP, Kind.DOWNGRADE)
        mine = [
            move
            for move in self.orders
            if view.tier[move.row] == tier and (move.kind in quick or not at_once)
        ]
        self.orders = [move for move in self.orders if move not in mine]
        return mine or super().reclaim(view, tier, need, at_once=at_once)


class Stored(NamedTuple):
    """A block as it was put."""

    block: torch.Tensor
    payload: bytes
    segments: tuple[int, ...]
    codec: Codec
    position: int


def decoded(codecs: CodecRegistry, header: frame.Header, payload: bytes) -> torch.Tensor:
    """Return the block of a frame."""
    block = torch.empty((LAYERS, 2, TOKENS, 2, 16), dtype=torch.bfloat16)
    codec = codecs.of_id(header.codec_id, header.artifact)
    data = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
    segments = tuple(length for length in header.segments if length)
    codec.decode(data, segments, block, place_at(header.position))
    return block


def read_all(codecs: CodecRegistry, transfer: Transfer) -> list[tuple[frame.Header, torch.Tensor]]:
    """Return header and decoded block of each frame of a transfer, and end it."""
    found = []
    with transfer:
        for unit in range(transfer.units):
            header = transfer.header(unit)
            assert header is not None
            payload = b"".join(transfer.payload(unit, header))
            found.append((header, decoded(codecs, header, payload)))
            assert transfer.unchanged(unit)
    return found


class InProcess:
    """An encoder without a process: what the codec worker does, by the same code."""

    state = "in this process"

    def __init__(self, arena: memoryview, artifacts: Sequence[bytes] = ()) -> None:
        self._arena = arena
        self.artifacts = frozenset({frame.NO_ARTIFACT, *artifacts})

    def payload(self, header: frame.Header, runs: Sequence[tuple[int, int]]) -> list[memoryview]:
        pieces = [self._arena[start : start + nbytes] for start, nbytes in runs]
        return frame.cut(pieces, header.header_bytes, header.payload_bytes)

    def encode(
        self, identity: Identity, header: frame.Header, runs: Sequence[tuple[int, int]],
        profile: Profile, artifact: bytes,
    ) -> Encoded | Lost:  # fmt: skip
        assert (artifact != frame.NO_ARTIFACT) == bool(profile.levels)
        payload = self.payload(header, runs)
        start = frame.header_bytes(profile.segments)
        memory = aligned(start + header.raw_bytes + profile.bound_extra)
        segments = encode_again(identity, header, payload, profile, memory[start:], registry())
        empty = (0,) * (profile.segments - len(segments))
        return Encoded(memory, (*segments, *empty)) if segments else Lost.REFUSED


class MoveRig(Rig):
    """A rig whose blocks are KV and whose policy obeys."""

    def __init__(self, lower: Sequence[DurableTier], pages: int = 64, **fields: Any) -> None:
        self.commanded = Commanded(1 + len(lower))
        values: dict[str, Any] = {"gate": EVERY, "write_behind_bytes": 1}
        super().__init__(pages, lower, **(values | fields))
        self.store._store.policy = self.commanded
        self.codecs = registry()

    def encode(self, *, knows: bool = True) -> None:
        """Let exact copies be encoded again, of a model that was introduced or not."""
        self.store.encode_with(InProcess(self.host.view, [artifact(RATIOS).digest]))
        if knows:
            self.store.introduce(1, calls.IdentityCall(identity=to_wire(IDENTITY)))

    @property
    def catalog(self) -> Catalog:
        return self.store._store.catalog

    def call_fields(self, fidelity: int = Fidelity.SAFE) -> dict[str, Any]:
        return {
            "parts": (PART,), "fidelity": int(fidelity), "fingerprint": IDENTITY.fingerprint,
            "tokens_per_block": TOKENS,
        }  # fmt: skip

    def put_blocks(
        self, keys: Sequence[bytes], name: str, fidelity: int = Fidelity.SAFE
    ) -> list[Stored]:
        """Put a chain of blocks in a profile; all of them must find room."""
        codec = self.codecs.named(name)
        held = self.offer(
            keys, profiles=(name,), artifacts=self.codecs.artifacts((name,)),
            family=IDENTITY.family, raw=RAW_BYTES, **self.call_fields(fidelity),
        )  # fmt: skip
        assert held is not None
        assert len(held.units) == len(keys)
        made = []
        for index in range(len(keys)):
            block = text_like(TOKENS, 500 + index, index * TOKENS)
            out = torch.empty(codec.bound(RAW_BYTES), dtype=torch.uint8)
            segments = codec.encode(block, out, place_at(index * TOKENS))
            payload = out[: sum(segments)].numpy().tobytes()
            fill(held.payload(index), payload)
            made.append(Stored(block, payload, segments, codec, index * TOKENS))
        written = [Written(PROFILES[name].number, one.segments) for one in made]
        assert held.commit_written(written) == len(keys)
        return made

    def get_blocks(
        self, keys: Sequence[bytes], fidelity: int = Fidelity.SAFE
    ) -> list[tuple[frame.Header, torch.Tensor]]:
        """Return the header and the decoded block of all that a reader gets."""
        fields = self.call_fields(fidelity) | {"raw_bytes": RAW_BYTES}
        reply = self.match(keys, **dict(fields))
        transfer = self.transfer(reply, self.match_call(keys, **dict(fields)))
        if transfer is None:
            return []
        return read_all(self.codecs, transfer)

    def prefix_of(self, stored: Stored, levels: int) -> torch.Tensor:
        """Return what the first segments of a block decode to."""
        block = torch.empty_like(stored.block)
        segments = stored.segments[:levels]
        data = torch.from_numpy(np.frombuffer(stored.payload[: sum(segments)], np.uint8).copy())
        stored.codec.decode(data, segments, block, place_at(stored.position))
        return block

    def row(self, key: bytes, tier: int) -> int:
        """Return a block's ready placement in a tier, -1 where there is none."""
        catalog = self.catalog
        row = catalog.in_tier(catalog.head(key, catalog.part_number(PART)), tier)
        return row if row != -1 and catalog.state[row] == READY else -1

    def order(self, kind: Kind, keys: Sequence[bytes], tier: int, source: int, name: str) -> None:
        """Let the policy ask for Moves when it is asked next."""
        number = PROFILES[name].number if name else 0
        self.commanded.orders += [Move(kind, self.row(key, source), tier, number) for key in keys]

    def relieve(self) -> None:
        """Let the policy ask for demotions."""
        self.store._demotions._ask_from = 0.0
        self.store.tick()

    def downgrade(self, keys: Sequence[bytes], name: str) -> None:
        """Cut copies in RAM short at once."""
        self.order(Kind.DOWNGRADE, keys, RAM, RAM, name)
        self.store._moves.make_room(1 << 40)

    def count(self, name: str) -> int:
        return self.store._store.counters[name]


def paged(nbytes: int, granule: int = PAGE) -> int:
    return -(-nbytes // granule) * granule


def used(rig: MoveRig, tier: int) -> int:
    """Return the bytes that placements take, by the tier itself."""
    space = rig.host.space() if tier == RAM else rig.lower[tier - 1].space()
    return space.capacity - space.free - space.dead


def cut_bytes(stored: Stored, levels: int) -> int:
    return frame.header_bytes(4) + sum(stored.segments[:levels])


def is_prefix(rig: MoveRig, stored: list[Stored], levels: int) -> None:
    """Assert that readers get exactly what the first segments decode to."""
    found = rig.get_blocks(KEYS)
    assert len(found) == len(stored)
    for (header, block), one in zip(found, stored, strict=True):
        assert [length for length in header.segments if length] == list(one.segments[:levels])
        assert header.flags & frame.LOSSY
        assert header.fidelity == (Fidelity.SAFE if levels == 1 else Fidelity.NEAR_LOSSLESS)
        assert torch.equal(block, rig.prefix_of(one, levels))
    assert len(rig.get_blocks(KEYS, Fidelity.NEAR_LOSSLESS)) == (0 if levels == 1 else len(stored))
    assert rig.get_blocks(KEYS, Fidelity.EXACT) == []


Logs = Callable[[], NvmeTier]


@contextmanager
def logs(folder: Path) -> Iterator[Logs]:
    """Yield what opens the log of a folder, as a restart would after the last one was killed."""
    opened: list[NvmeTier] = []

    def make() -> NvmeTier:
        for tier in opened:
            tier.close()
        settings = NvmeSettings(
            path=str(folder), size_bytes=16 << 20, region_bytes=2 << 20, free_floor_bytes=0
        )
        opened.append(NvmeTier(settings))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()
