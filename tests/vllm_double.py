"""An engine double: schedules like vLLM, computes KV that any wrong token or block would betray.

The KV of a token is a number that depends on every token before it, so after a request every value
in its blocks is compared with what computing the whole prompt gives.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tierkv.cache import TierKV
from tierkv.channel import EmbeddedChannel
from tierkv.client import Channel, Client
from tierkv.executor import Threads
from tierkv.identity import Identity, LayerSpec, Rope
from tierkv.part import Part
from tierkv_connectors.device import Device
from tierkv_connectors.device.host import HostDevice
from tierkv_connectors.edge import Edge
from tierkv_connectors.vllm.kept import Kept, Options
from tierkv_connectors.vllm.layout import Attention, layout_of
from tierkv_connectors.vllm.plan import StepPlan
from tierkv_connectors.vllm.scheduler import Scheduler
from tierkv_connectors.vllm.worker import Worker

LAYERS, HEADS, DIM = 2, 2, 4


def kept_of(engine_tokens: int, tokens: int, **options: Any) -> Kept:
    layer = LayerSpec(kv_heads=HEADS, k_dim=DIM, v_dim=DIM, rope=Rope())
    identity = Identity(
        model="double", weights="w", kv_dtype="fp32", tokens_per_block=tokens,
        layers=(layer,) * LAYERS,
    )  # fmt: skip
    return Kept(identity, Part.whole(identity), engine_tokens, Options(**options))


def states(tokens: Sequence[int]) -> torch.Tensor:
    """Return a number for every token that depends on all tokens up to it."""
    state, out = 1, []
    for token in tokens:
        state = (state * 48271 + token + 1) % 16_777_213  # exact in float32
        out.append(state)
    return torch.tensor(out, dtype=torch.float32)


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


@dataclass
class Asked:
    """A request."""

    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    block_hashes: list[Any] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    external: int = 0
    """Tokens that were loaded."""

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def update_block_hashes(self) -> None:
        """Name blocks as the engine's own prefix cache would, in one name for all."""
        self.block_hashes.append((self.cache_salt, tuple(self.all_token_ids)))


class EngineDouble:
    """One engine with a scheduler side and a worker side, as two clients of a store."""

    def __init__(
        self,
        kept: Kept,
        scheduler: Channel,
        worker: Channel,
        blocks: int = 64,
        step: int = 64,
        device: Device | None = None,
        where: str = "cpu",
    ) -> None:
        self.kept, self.tokens, self.step_tokens = kept, kept.engine_tokens, step
        self.free = list(range(1, blocks))
        names = [f"model.layers.{number}.attn" for number in range(LAYERS)]
        shape = (2, blocks, self.tokens, HEADS, DIM)
        self.memory = {name: torch.zeros(shape, device=where) for name in names}
        spec = FullAttentionSpec(
            block_size=self.tokens, num_kv_heads=HEADS, head_size=DIM, head_size_v=DIM,
            dtype=torch.float32, page_size_bytes=2 * self.tokens * HEADS * DIM * 4,
        )  # fmt: skip
        group = SimpleNamespace(layer_names=names, kv_cache_spec=spec)
        config: Any = SimpleNamespace(num_blocks=blocks, kv_cache_groups=[group])
        self.layout = layout_of(config, self.memory, Attention("FLASH_ATTN"))
        self.edge = Edge()
        self.threads = Threads({"lookup": 2, "load": 1, "save": 1})
        self.scheduler = Scheduler(kept, Client(scheduler), self.threads, lambda _: {})
        self.worker = Worker(
            kept, Client(worker), self.threads, self.layout, device or HostDevice(), self.edge
        )
        self._numbers = itertools.count()

    def ask(self, tokens: Sequence[int], **wishes: object) -> Asked:
        params = {"tierkv": wishes} if wishes else None
        request = Asked(f"r{next(self._numbers)}", list(tokens), params)
        self.scheduler.arrived(request)
        return request

    def run(self, tokens: Sequence[int], local: int = 0, new: int = 0, **wishes: object) -> Asked:
        """Run a request to its end; `local` of its tokens are in the engine's own cache."""
        request = self.ask(tokens, **wishes)
        self.admit(request, local)
        computed = self.wait(request, local + request.external)
        self.compute(request, computed, new)
        self.check(request)
        self.end(request)
        return request

    def admit(self, request: Asked, local: int = 0) -> None:
        """Match, allocate and begin to load."""
        found = None
        until = time.monotonic() + 30
        while found is None:
            found = self.scheduler.matched(request, local)
            assert time.monotonic() < until
        count = -(-request.num_tokens // self.tokens)
        request.block_ids = [self.free.pop(0) for _ in range(count)]
        self.fill(request, 0, local)
        request.external = found
        self.scheduler.allocated(request, request.block_ids, found)
        self.step({})

    def wait(self, request: Asked, promised: int) -> int:
        """Return the computed tokens once a load is over: all that were promised, or fewer."""
        if not request.external:
            return promised
        until = time.monotonic() + 30
        while request.request_id not in (names := self.worker.ended()):
            assert time.monotonic() < until, "a load was never reported"
            time.sleep(0.001)
        unfilled = self.worker.unfilled()
        self.scheduler.stepped(list(names), unfilled)
        bad = [index for index, block in enumerate(request.block_ids) if block in unfilled]
        computed = min([promised, *(index * self.tokens for index in bad)])
        if not computed:  # vLLM asks again, and must not be sent round in circles
            assert self.scheduler.matched(request, 0) == 0
        self.scheduler.allocated(request, request.block_ids, 0)
        return computed

    def compute(self, request: Asked, computed: int, new: int = 0) -> None:
        """Compute the rest in steps, then `new` tokens one by one."""
        first = True
        while computed < request.num_tokens or new:
            if computed == request.num_tokens:
                self.grow(request)
                new -= 1
            count = min(self.step_tokens, request.num_tokens - computed)
            self.step({request.request_id: (request, computed, count, first)})
            computed, first = computed + count, False

    def grow(self, request: Asked) -> None:
        request.all_token_ids.append(int(states(request.all_token_ids)[-1]) % 1000)
        if request.num_tokens > len(request.block_ids) * self.tokens:
            request.block_ids.append(self.free.pop(0))

    def step(self, running: dict[str, tuple[Asked, int, int, bool]]) -> StepPlan:
        """Run one step of the requests (request, computed, tokens, whether it is its first)."""
        plan = self.scheduler.step(self.output(running))
        self.worker.fence(plan)
        for request, computed, count, _ in running.values():
            self.fill(request, computed, computed + count)
        self.worker.begin_loads(plan.loads)
        self.worker.begin_saves(plan.saves)
        if running:
            self.scheduler.stepped([], frozenset())
        return plan

    def output(self, running: dict[str, tuple[Asked, int, int, bool]]) -> Any:
        news = [
            SimpleNamespace(
                req_id=name, block_ids=(list(request.block_ids),), num_computed_tokens=computed
            )
            for name, (request, computed, _, first) in running.items()
            if first
        ]
        on = {name: run for name, run in running.items() if not run[3]}
        cached = SimpleNamespace(
            req_ids=list(on), resumed_req_ids=set(),
            new_block_ids=[self.added(request, computed) for request, computed, *_ in on.values()],
            num_computed_tokens=[computed for _, computed, *_ in on.values()],
        )  # fmt: skip
        return SimpleNamespace(
            scheduled_new_reqs=news, scheduled_cached_reqs=cached,
            num_scheduled_tokens={name: count for name, (_, _, count, _) in running.items()},
        )  # fmt: skip

    def added(self, request: Asked, computed: int) -> tuple[list[int]] | None:
        held = self.scheduler._requests.get(request.request_id)
        known = len(held.blocks) if held is not None else computed // self.tokens
        return (request.block_ids[known:],) if request.block_ids[known:] else None

    def fill(self, request: Asked, start: int, stop: int) -> None:
        """Write the KV of tokens into the request's blocks."""
        values = states(request.all_token_ids)
        for token in range(start, stop):
            block, at = request.block_ids[token // self.tokens], token % self.tokens
            for layer, tensor in enumerate(self.memory.values()):
                tensor[0, block, at] = values[token] + layer
                tensor[1, block, at] = -values[token] - layer

    def check(self, request: Asked) -> None:
        """Assert that the request's KV is that of its tokens."""
        values = states(request.all_token_ids)
        for token in range(request.num_tokens):
            block, at = request.block_ids[token // self.tokens], token % self.tokens
            for layer, tensor in enumerate(self.memory.values()):
                where = f"{request.request_id}: token {token} of {request.num_tokens}"
                assert (tensor[0, block, at] == values[token] + layer).all(), where
                assert (tensor[1, block, at] == -values[token] - layer).all(), where

    def end(self, request: Asked, *, reuse: bool = True) -> None:
        """Finish a request; its blocks are the next to be given to others, or the last."""
        self.scheduler.ended(request)
        self.free = request.block_ids + self.free if reuse else self.free + request.block_ids

    def settle(self) -> None:
        """Wait until no lane has anything to do."""
        until = time.monotonic() + 30
        while any(self.threads.waiting(lane) for lane in ("lookup", "load", "save")):
            assert time.monotonic() < until
            time.sleep(0.001)

    def close(self) -> None:
        self.threads.close(5.0)


def over(store: TierKV, kept: Kept, **options: Any) -> EngineDouble:
    """Return an engine over a store in this process."""
    scheduler = EmbeddedChannel(store, store.host.view, 1)
    worker = EmbeddedChannel(store, store.host.view, 2)
    return EngineDouble(kept, scheduler, worker, **options)


def prompts(seed: int, length: int) -> Iterator[list[int]]:
    """Yield prompts that share nothing."""
    random = np.random.default_rng(seed)
    while True:
        yield random.integers(0, 1000, length).tolist()
