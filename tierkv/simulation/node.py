"""Node: one machine of the world. A disk that stays, a sidecar that is killed and started again."""

import random
from collections.abc import Callable
from typing import Literal, Protocol

from tierkv import calls
from tierkv.frame import parse
from tierkv.namespace import digest_of
from tierkv.part import PACKED_BYTES, Part
from tierkv.settings import StoreSettings
from tierkv.simulation.disk import Disk, ModelTier
from tierkv.simulation.engine import Engine, Model
from tierkv.simulation.lanes import Lanes, Time
from tierkv.simulation.media import Faults, Name
from tierkv.simulation.progressive import GATE
from tierkv.simulation.server import ModelShared, Server
from tierkv.simulation.sidecar import Sidecar
from tierkv.tier import DurableTier
from tierkv.tiers.host import HostSettings, HostTier

LANES = {
    "control": 2, "touch": 1, "nvme-read": 4, "nvme-seal": 1, "nvme-write": 1,
    "redis-read": 4, "redis-seal": 1, "redis-write": 1,
}  # fmt: skip
ARENA_BYTES = (1 << 20, 3 << 20)
REGIONS = 11
REGION_BYTES = 1 << 20
QUEUE_BYTES = 1 << 20
ENGINES = 3
POLICIES: tuple[Literal["lru", "evicpress"], ...] = ("lru", "evicpress")


class Scene(Protocol):
    """What all nodes share."""

    rng: random.Random
    time: Time
    faults: Faults
    server: Server
    models: list[Model]
    chains: dict[str, list[bytes]]
    versions: dict[str, int]
    version_of: dict[tuple[str, int], int]

    def pause(self) -> None:
        """Let others run in the middle of I/O."""


class Node:
    """A sidecar, its media and its engines. `engine.Host` of these."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.rng = scene.rng
        self.disk = Disk(REGIONS, REGION_BYTES)
        self.verified = 0
        self._arena_bytes = scene.rng.choice(ARENA_BYTES)
        self._policy = scene.rng.choice(POLICIES)
        self._owner = 0
        self._floors: dict[str, int] = {}
        """Version of each namespace's last clear that this disk keeps."""
        self.start()

    def start(self) -> None:
        """Open the sidecar over what the disk holds, and begin with fresh engines."""
        scene = self.scene
        self.lanes = Lanes(scene.time, LANES)
        self._started = False
        lower: list[DurableTier] = [
            ModelTier(self.disk, scene.faults, scene.time, self._pause),
            ModelShared(scene.server, scene.faults, scene.time, self._pause),
        ]
        self.sidecar = Sidecar(
            HostTier(HostSettings(size_bytes=self._arena_bytes)), lower, executor=self.lanes,
            clock=scene.time, wall=scene.time,
            settings=StoreSettings(write_behind_bytes=QUEUE_BYTES, policy=self._policy), gate=GATE,
        )  # fmt: skip
        self._started = True
        self._cleared: dict[str, int] = dict(self._floors)
        self.engines = [self._engine() for _ in range(ENGINES)]

    def crash(self) -> None:
        """Kill the process and start it again; what was promised must be there."""
        self._count_verified()
        self.sidecar.host.close()
        self.start()
        newest = set(self.disk.newest().values())
        for at, record in self.disk.records.items():
            if record.promised and not record.faulty and at in newest and self._live(record.data):
                assert self.sidecar.lists("nvme", record.name), "a promised frame is lost"

    def replace_engine(self) -> None:
        """End an engine's process without a word; another one takes its place."""
        index = self.rng.randrange(len(self.engines))
        self.verified += self.engines[index].verified
        self.sidecar.disown(self.engines[index].owner)
        self.engines[index] = self._engine()

    def clear(self) -> None:
        """Change the weights of a namespace, then clear it; the answer is checked from then on."""
        scene = self.scene
        namespace = self.rng.choice(scene.models).namespace
        scene.versions[namespace] += 1
        version = scene.versions[namespace]
        incarnation = self.lanes

        def done(reply: calls.ClearReply) -> None:
            key = (namespace, reply.generation)
            scene.version_of[key] = max(scene.version_of.get(key, 0), version)
            if incarnation is not self.lanes:
                return
            self._cleared[namespace] = max(self._cleared.get(namespace, 0), version)
            if "nvme" not in reply.failed:
                self._floors[namespace] = max(self._floors.get(namespace, 0), version)

        self.sidecar.clear(calls.ClearCall(namespace=namespace), done)

    def version(self, namespace: str) -> int:
        """Return the version of the weights now."""
        return self.scene.versions[namespace]

    def floor(self, namespace: str) -> int:
        """Return the lowest version that a hit may have: of clears answered or heard of here."""
        known = self.sidecar.generation(namespace)
        heard = [
            version
            for (name, generation), version in self.scene.version_of.items()
            if name == namespace and generation <= known
        ]
        return max([self._cleared.get(namespace, 0), *heard])

    def mark(self) -> int:
        """Return the number of this step."""
        return self.disk.step

    def promised(self, call: calls.FlushCall, since: int) -> Callable[[calls.FlushReply], None]:
        """Return what checks a flush's answer against the disk and remembers what it promised."""
        incarnation, generation = self.lanes, self.sidecar.generation(call.namespace)
        parts = len(call.parts) // PACKED_BYTES

        def done(reply: calls.FlushReply) -> None:
            if (incarnation, generation) != (self.lanes, self.sidecar.generation(call.namespace)):
                return  # the process is gone, or what was asked for is cleared
            for unit, durable in enumerate(reply.durable):
                block, index = divmod(unit, parts)
                packed = call.parts[index * PACKED_BYTES : (index + 1) * PACKED_BYTES]
                name = (call.keys[block * 32 : block * 32 + 32], Part.unpack(packed))
                if durable:
                    self._promise(name, digest_of(call.namespace), since)

        return done

    def end(self) -> None:
        """Let every process go and see that nothing is left; then read everything once more."""
        for engine in self.engines:
            engine.rest()
        self.scene.time.advance(60.0)
        self.drain()
        self.sidecar.audit_rest()
        for engine in self.engines:
            engine.verify_all(self.drain)
        self.drain()
        self.sidecar.audit()
        self.sidecar.audit_rest()
        self._count_verified()

    def drain(self) -> None:
        """Run what is queued and what hangs, until nothing is left."""
        while names := self.lanes.ready() + self.lanes.hanging():
            (self.lanes.wake if names[0] in self.lanes.hanging() else self.lanes.step)(names[0])
        self.sidecar.tick()
        if self.lanes.ready():
            self.drain()

    def _pause(self) -> None:
        if self._started:
            self.scene.pause()

    def _engine(self) -> Engine:
        self._owner += 1
        model = self.scene.models[self._owner % len(self.scene.models)]
        return Engine(self, self._owner, model, self.scene.chains[model.namespace])

    def _count_verified(self) -> None:
        self.verified += sum(engine.verified for engine in self.engines)
        for engine in self.engines:
            engine.verified = 0

    def _promise(self, name: Name, namespace: bytes, since: int) -> None:
        for record in self.disk.records.values():
            mine = record.name == name and record.row["namespace"][0].tobytes() == namespace
            if mine and not record.freed and (record.faulty or self._live(record.data)):
                record.promised = True
                return
        gone = self.disk.freed.get(name, -1) >= since or self.sidecar.lists("redis", name)
        gone |= name in self.scene.server.lost
        assert gone, "a frame was promised that is in no durable tier"

    def _live(self, data: bytes) -> bool:
        """Return whether a frame on the disk is not cleared."""
        header = parse(data)
        minimum = self.disk.generations.get(getattr(header, "namespace", b""), 0)
        return getattr(header, "generation", 0) >= minimum
