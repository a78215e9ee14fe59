"""An engine double: schedules like vLLM, computes KV that any wrong token or block would betray.

After a request every value in its blocks is compared with what computing the whole prompt gives.
It may have several groups, groups that keep only a window, and several ranks (`vllm_memory`).
"""

import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.vllm_memory import LAYERS, Rank, config_of, following, states
from tierkv.cache import TierKV
from tierkv.channel import EmbeddedChannel
from tierkv.client import Channel, Client
from tierkv.executor import Threads
from tierkv_connectors.device import Device
from tierkv_connectors.device.host import HostDevice
from tierkv_connectors.edge import Edge
from tierkv_connectors.vllm.kept import Kept
from tierkv_connectors.vllm.plan import StepPlan
from tierkv_connectors.vllm.reports import Report
from tierkv_connectors.vllm.scheduler import Scheduler


@dataclass
class Asked:
    """A request."""

    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    block_hashes: list[Any] = field(default_factory=list)
    block_ids: list[list[int]] = field(default_factory=list)
    """By group; 0 where a window has moved on."""
    external: int = 0
    """Tokens that were loaded."""
    session_id: str | None = None
    drafts: list[int] = field(default_factory=list)
    """Tokens behind the known ones that the next step computes too."""

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def update_block_hashes(self) -> None:
        """Name blocks as the engine's own prefix cache would, in one name for all."""
        self.block_hashes.append((self.cache_salt, tuple(self.all_token_ids)))


class EngineDouble:
    """One engine with a scheduler side and a worker side for each rank, as clients of a store."""

    def __init__(
        self,
        kept: Kept,
        scheduler: Channel,
        *workers: Channel,
        blocks: int = 64,
        step: int = 64,
        device: Device | None = None,
        where: str = "cpu",
    ) -> None:
        self.kept, self.tokens, self.step_tokens = kept, kept.groups[0].engine_tokens, step
        self.free = list(range(1, blocks))
        self.patient = False
        """Steps wait for saves: what a window has left goes to others at once here."""
        count = 1 + max(share.engine_group for group in kept.groups for share in group.shares)
        self.windows: list[int | None] = [None] * count
        for group in kept.groups:
            for share in group.shares:
                self.windows[share.engine_group] = group.window
        heads = kept.identity.layers[0].kv_heads // kept.ranks.shards
        config = config_of(self.tokens, self.windows, blocks, heads)
        self.edge = Edge()
        lanes = {f"{lane}{at}": 1 for lane in ("load", "save") for at in range(len(workers))}
        self.threads = Threads({"lookup": 2, "load": 1, "save": 1} | lanes)
        self.scheduler = Scheduler(kept, Client(scheduler), self.threads, lambda _: {})
        self.ranks: list[Rank] = []
        for shard, channel in enumerate(workers):
            mine = replace(kept, ranks=kept.ranks._replace(shard=shard))
            self.ranks.append(Rank(mine, config, device or HostDevice(), where))
            threads: Any = self.threads if shard == 0 else _Lanes(self.threads, shard)
            self.ranks[-1].work(channel, threads, self.edge)
        self.worker = self.ranks[0].worker
        self._numbers = itertools.count()

    def made(self, tokens: Sequence[int], **wishes: object) -> Asked:
        """Return a request that has not arrived yet."""
        params = {"tierkv": wishes} if wishes else None
        return Asked(f"r{next(self._numbers)}", list(tokens), params)

    def ask(self, tokens: Sequence[int], **wishes: object) -> Asked:
        request = self.made(tokens, **wishes)
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
        request.external = found
        self.allocate(request, local + found, local)
        self.scheduler.allocated(request, request.block_ids, found)
        self.step({})

    def allocate(self, request: Asked, computed: int, local: int) -> None:
        """Give a request blocks for all of its tokens; its own hit is filled, as far as it is kept.

        A group with a window has none for the tokens that nothing behind `computed` looks back at.
        """
        request.block_ids = []
        for window in self.windows:
            count = -(-request.num_tokens // self.tokens)
            gone = 0 if window is None else max(computed - window + 1, 0) // self.tokens
            ids = [0] * min(gone, count)
            request.block_ids.append(ids + [self.free.pop(0) for _ in range(count - len(ids))])
        self.fill(request, 0, local)

    def wait(self, request: Asked, promised: int) -> int:
        """Return the computed tokens once a load is over: all that were promised, or fewer."""
        if not request.external:
            return promised
        until = time.monotonic() + 30
        waiting, failed, unfilled = list(self.ranks), False, set[int]()
        while waiting:
            for rank in list(waiting):
                if request.request_id in rank.worker.ended():
                    waiting.remove(rank)
                    failed |= request.request_id in rank.worker.failed()
                    unfilled |= rank.worker.unfilled()
            assert time.monotonic() < until, "a load was never reported"
            time.sleep(0.001)
        whole = self.kept.fails_whole
        name = request.request_id
        lost = frozenset([name]) if failed and whole else frozenset[str]()
        self.hear()
        self.scheduler.stepped([name], set() if whole else unfilled, lost)
        if lost:
            return self.again(request)
        bad = [] if whole else [
            index for index, block in enumerate(request.block_ids[0]) if block in unfilled
        ]  # fmt: skip
        computed = min([promised, *(index * self.tokens for index in bad)])
        if not computed:  # vLLM asks again, and must not be sent round in circles
            assert self.scheduler.matched(request, 0) == 0
        self.scheduler.allocated(request, request.block_ids, 0)
        return computed

    def again(self, request: Asked) -> int:
        """Give a request new blocks, as vLLM does after a load that failed as a whole."""
        self.release(request)
        assert self.scheduler.matched(request, 0) == 0, "it is not sent round in circles"
        self.allocate(request, 0, 0)
        self.scheduler.allocated(request, request.block_ids, 0)
        return 0

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
        request.all_token_ids.append(following(request.all_token_ids))
        for ids in request.block_ids:
            while request.num_tokens + len(request.drafts) > len(ids) * self.tokens:
                ids.append(self.free.pop(0))

    def move_windows(self, request: Asked, computed: int) -> None:
        """Take blocks away that no token behind `computed` looks back at, for others at once."""
        for window, ids in zip(self.windows, request.block_ids, strict=True):
            gone = 0 if window is None else max(computed - window + 1, 0) // self.tokens
            for at in range(min(gone, len(ids))):
                if ids[at]:
                    self.free.insert(0, ids[at])
                    ids[at] = 0

    def step(self, running: dict[str, tuple[Asked, int, int, bool]]) -> StepPlan:
        """Run one step of the requests (request, computed, tokens, whether it is its first)."""
        for request, computed, _, first in running.values():
            if not first:
                self.move_windows(request, computed)
        plan = self.scheduler.step(self.output(running))
        for rank in self.ranks:
            rank.worker.fence(plan)
        for request, computed, count, _ in running.values():
            self.fill(request, computed, computed + count)
        for rank in self.ranks:
            rank.worker.begin_loads(plan.loads)
            rank.worker.begin_saves(plan.saves)
        if self.patient:
            self.settle()
        if running:
            self.scheduler.stepped([], frozenset())
        return plan

    def output(self, running: dict[str, tuple[Asked, int, int, bool]]) -> Any:
        news = [
            SimpleNamespace(
                req_id=name,
                block_ids=tuple(map(list, request.block_ids)),
                num_computed_tokens=computed,
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

    def added(self, request: Asked, computed: int) -> tuple[list[int], ...] | None:
        held = self.scheduler._requests.get(request.request_id)
        known = len(held.blocks[0]) if held is not None else computed // self.tokens
        new = tuple(ids[known:] for ids in request.block_ids)
        return new if new[0] else None

    def places(self, request: Asked, token: int) -> Iterator[tuple[int, Rank, torch.Tensor, int]]:
        """Yield each layer's number, rank and memory for a token, and its block; 0: it has none."""
        count = len(self.windows)
        for rank in self.ranks:
            for layer in range(LAYERS * count):
                ids = request.block_ids[layer % count]
                memory = rank.memory[f"model.layers.{layer}.attn"]
                yield layer, rank, memory, ids[token // self.tokens]

    def fill(self, request: Asked, start: int, stop: int) -> None:
        """Write the KV of tokens, and of drafts behind them, into the request's blocks."""
        values = states([*request.all_token_ids, *request.drafts]).tolist()
        for token in range(start, stop):
            for layer, rank, memory, block in self.places(request, token):
                if block:
                    keys = rank.vectors(values[token], layer)
                    memory[:, block, token % self.tokens] = torch.stack([keys, -keys])

    def check(self, request: Asked) -> None:
        """Assert that the request's KV is that of its tokens, wherever the next one looks."""
        values = states(request.all_token_ids).tolist()
        for token in range(request.num_tokens):
            for layer, rank, memory, block in self.places(request, token):
                window = self.windows[layer % len(self.windows)]
                if window is not None and token < request.num_tokens - window + 1:
                    continue
                where = (
                    f"{request.request_id}: token {token} of {request.num_tokens}, layer {layer}"
                )
                assert block, where
                keys = rank.vectors(values[token], layer)
                found = memory[:, block, token % self.tokens]
                assert torch.equal(found.cpu(), torch.stack([keys, -keys])), where

    def end(self, request: Asked, *, reuse: bool = True) -> None:
        """Finish a request; its blocks are the next to be given to others, or the last."""
        self.scheduler.ended(request)
        self.release(request, reuse=reuse)

    def release(self, request: Asked, *, reuse: bool = True) -> None:
        ids = [block for group in request.block_ids for block in group if block]
        self.free = ids + self.free if reuse else self.free + ids

    def hear(self) -> None:
        """Let the scheduler side hear what the workers have to tell."""
        reports = [found for rank in self.ranks if (found := rank.worker.report()) is not None]
        if reports:
            self.scheduler.heard(functools.reduce(Report.merge, reports))

    def settle(self) -> None:
        """Wait until no lane has anything to do."""
        until = time.monotonic() + 30
        lanes = [f"{lane}{at}" for lane in ("load", "save") for at in range(len(self.ranks))]
        while any(self.threads.waiting(lane) for lane in ("lookup", "load", "save", *lanes)):
            assert time.monotonic() < until
            time.sleep(0.001)

    def close(self) -> None:
        self.threads.close(5.0)


class _Lanes:
    """The lanes of another rank."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self._rank = threads, rank

    def submit(self, lane: str, job: Any) -> None:
        self._threads.submit(f"{lane}{self._rank}", job)


def over(store: TierKV, kept: Kept, **options: Any) -> EngineDouble:
    """Return an engine over a store in this process."""
    channels = [
        EmbeddedChannel(store, store.host.view, 1 + at) for at in range(1 + kept.ranks.shards)
    ]
    return EngineDouble(kept, *channels, **options)


def finish(engine: EngineDouble) -> None:
    """Let an engine end, which nothing must have failed in."""
    engine.settle()
    engine.close()
    assert not engine.edge.failures


def prompts(seed: int, length: int) -> Iterator[list[int]]:
    """Yield prompts that share nothing."""
    random = np.random.default_rng(seed)
    while True:
        yield random.integers(0, 1000, length).tolist()
