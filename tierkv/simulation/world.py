"""World: nodes, a shared server and one source of randomness. One seed decides every step."""

import hashlib
import random
from collections import Counter
from types import TracebackType
from typing import NamedTuple, Self

from tierkv.part import Part
from tierkv.simulation.engine import Model
from tierkv.simulation.lanes import CrashError, Time
from tierkv.simulation.media import Faults
from tierkv.simulation.node import Node
from tierkv.simulation.server import Server

NODES = 2
FAULT_RATE = 0.03
CRASH_IN_IO = 0.004
GO_ON = 0.3
"""How often the world goes on in the middle of one I/O."""
DEEPEST = 3
CHAINS = 12
SHARED_BLOCKS = 3
LONGEST = 10

ACTS = {
    "turn": 520, "job": 420, "time": 80, "hang": 3, "wake": 20, "engine_died": 5, "clear": 2,
    "crash": 3, "evict": 3, "server_lost": 2, "server_back": 10,
}  # fmt: skip
INNER = {name: ACTS[name] for name in ("turn", "job", "time", "clear", "engine_died", "evict")}
FAULTY = {"hang", "engine_died", "crash", "evict", "server_lost"}


class Result(NamedTuple):
    """How a seed went."""

    seed: int
    steps: int
    digest: str
    verified: int
    counters: Counter[str]
    faults: Counter[str]


class _Named:
    """Adds seed and step to whatever goes wrong inside."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            world = self._world
            error.add_note(
                f"simulation: seed {world.seed}, step {world.step}; replay with"
                f" `make sim SEED={world.seed}`"
            )


class World:
    """`node.Scene` of the nodes, and the hand that turns the clock."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.rng = random.Random(seed)
        self.time = Time()
        self.faults = Faults(self.rng, self.rng.choice([0.0, FAULT_RATE, 4 * FAULT_RATE]))
        self.server = Server()
        self.models = [
            Model("one", (Part(0, 0, 2, 0, 2),), self.rng.choice([9_000, 20_000, 40_000])),
            Model("two", (Part(0, 0, 2, 0, 1), Part(0, 0, 2, 1, 2)), 12_000),
        ]
        self.chains = {model.namespace: self._chains(model) for model in self.models}
        self.versions = dict.fromkeys(self.chains, 1)
        self.version_of: dict[tuple[str, int], int] = {}
        self._running: list[Node] = []
        self._quiet = True
        self.nodes = [Node(self) for _ in range(NODES)]

    def run(self, steps: int) -> Result:
        """Go through the steps, then let everything end. Any failure names seed and step."""
        with _Named(self):
            self._quiet = False
            for self.step in range(1, steps + 1):
                self._act(ACTS)
                for node in self.nodes:
                    node.sidecar.audit()
            self._quiet = True
            self.faults.rate, self.server.reachable = 0.0, True
            for node in self.nodes:
                node.drain()
            for node in self.nodes:
                node.end()
        return self._result()

    def pause(self) -> None:
        """Let others run in the middle of an I/O; now and then the process dies there."""
        assert self._running or self._quiet, "I/O outside of a lane"
        if self._quiet:
            return
        drawn = self.rng.random()
        if len(self._running) == 1 and drawn < CRASH_IN_IO:
            self.faults.injected["crash_in_io"] += 1
            raise CrashError
        if len(self._running) < DEEPEST and drawn < GO_ON:
            for _ in range(self.rng.randint(1, 3)):
                self._act(INNER)

    def _act(self, acts: dict[str, int]) -> None:
        act = self.rng.choices(list(acts), list(acts.values()))[0]
        node = self.rng.choice(self.nodes)
        for each in self.nodes:
            each.disk.step = self.step
        if act in FAULTY:
            self.faults.injected[act] += 1
        match act:
            case "turn":
                self.rng.choice(node.engines).turn()
            case "job" | "hang" | "wake":
                self._job(node, act)
            case "time":
                self.time.advance(self.rng.choice([0.001, 0.05, 0.5, 3.0]))
                node.sidecar.tick()
            case "clear":
                node.clear()
            case "engine_died":
                node.replace_engine()
            case "crash":
                node.crash()
            case "evict":
                self.server.evict(self.rng)
            case _:
                self.server.reachable = act == "server_back"

    def _job(self, node: Node, act: str) -> None:
        """Run, hang or wake a job of a node; a crash in its middle ends the node's process."""
        lanes = node.lanes.hanging() if act == "wake" else node.lanes.ready()
        if act == "hang":
            lanes = [name for name in lanes if name.endswith("-read")]
        if not lanes:
            return
        lane = self.rng.choice(lanes)
        if act == "hang":
            node.lanes.hang(lane)
            return
        self._running.append(node)
        crashed = False
        try:
            (node.lanes.wake if act == "wake" else node.lanes.step)(lane)
        except CrashError:
            crashed = True
        finally:
            self._running.pop()
        if crashed:
            node.crash()

    def _chains(self, model: Model) -> list[bytes]:
        """Return chains of keys that share heads, as conversations do."""
        chains: list[bytes] = []
        for number in range(CHAINS):
            chain = (
                self.rng.choice(chains)[: self.rng.randint(0, SHARED_BLOCKS) * 32]
                if chains
                else b""
            )
            parent = f"{model.namespace} {number}".encode()
            while len(chain) < 32 * self.rng.randint(SHARED_BLOCKS + 1, LONGEST):
                parent = hashlib.sha256(parent + chain[-32:]).digest()
                chain += parent
            chains.append(chain)
        return chains

    def _result(self) -> Result:
        counters: Counter[str] = Counter()
        digest = hashlib.sha256(repr((self.time.now, self.rng.getstate())).encode())
        for node in self.nodes:
            digest.update(node.sidecar.digest())
            counters += node.sidecar.counters()
        digest.update(repr(sorted(self.server.frames)).encode())
        verified = sum(node.verified for node in self.nodes)
        return Result(
            self.seed, self.step, digest.hexdigest(), verified, counters, self.faults.injected
        )

    def close(self) -> None:
        """Give the arenas back."""
        for node in self.nodes:
            node.sidecar.close(0.0)


def simulate(seed: int, steps: int) -> Result:
    """Run one seed."""
    world = World(seed)
    try:
        return world.run(steps)
    finally:
        world.close()
