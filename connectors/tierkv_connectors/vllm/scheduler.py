"""Scheduler side: what to load before a request runs, and what to save after each step.

Runs in vLLM's one scheduler thread, which no call here keeps waiting: questions are put to the
sidecar by the "lookup" lane, from the moment a request arrives, and asked after again with every
attempt to schedule it. A lease is held from the answer until the load is done, and ends by itself.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from tierkv.calls import MAX_UNITS, MatchReply
from tierkv.client import MISS, Client
from tierkv.errors import TierKVError, invalid
from tierkv.executor import Executor
from tierkv.fidelity import CLASSES, FIDELITIES
from tierkv.key import KEY_BYTES, Extras
from tierkv_connectors.prefill import PrefillCost
from tierkv_connectors.sources import tokens_by_tier
from tierkv_connectors.vllm.apart import Apart
from tierkv_connectors.vllm.asked import Asked, Lookup
from tierkv_connectors.vllm.engine import Output, Request
from tierkv_connectors.vllm.events import Events, asker_of
from tierkv_connectors.vllm.groups import BlockIds, Span, spans_to_fill, spans_to_offer
from tierkv_connectors.vllm.kept import Kept
from tierkv_connectors.vllm.own import Own
from tierkv_connectors.vllm.plan import Load, Save, StepPlan
from tierkv_connectors.vllm.prefills import Prefills
from tierkv_connectors.vllm.reports import Report
from tierkv_connectors.vllm.wishes import wishes_of

WAIT_S = 0.0008
"""Longest that one attempt to schedule a request waits for the sidecar's answer."""
FRESH = 0.5
"""Share of a lease's time after which an answer that was not used is asked for again."""

_log = logging.getLogger("vllm.tierkv")  # below the logger that vLLM shows

ExtrasOf = Callable[[Request], Extras | None]


class Scheduler:
    """The scheduler's part.

    Args:
        kept: the engine's KV.
        client: of the sidecar; needs no arena.
        executor: has a lane "lookup".
        extras_of: what else separates a request's content; None: it is left alone.
    """

    def __init__(self, kept: Kept, client: Client, executor: Executor, extras_of: ExtrasOf) -> None:
        self.cost = PrefillCost()
        self.counters: Counter[str] = Counter()
        self.refused = False
        """A worker cannot keep its KV: nothing is looked up, loaded or saved."""
        self._kept = kept
        self._client = client
        self._executor = executor
        self._extras_of = extras_of
        self.own = Own(kept)
        self._apart = Apart(kept.fidelity)
        self._fingerprint = kept.identity.fingerprint
        self.problems: dict[str, str] = {}
        """What is wrong with the wishes of requests, by their ids."""
        self.events: Events | None = None
        """Where vLLM's event stream is told of blocks, if it is on."""
        self._requests: dict[str, Asked] = {}
        self._loads: list[Load] = []
        self._sizes = {
            share.engine_group: group.engine_tokens
            for group in kept.groups
            for share in group.shares
        }
        """Tokens of an engine block by engine group."""
        self._prefills = Prefills(self.cost)

    def arrived(self, request: Request) -> None:
        """Take note of a request and ask the sidecar about its prompt.

        One whose wishes cannot be read is left alone: it may have wished not to be kept.
        """
        name = request.request_id
        if self.refused or name in self._requests or name in self.problems:
            return
        extras = self._extras_of(request)
        if extras is None:
            self._apart.left_alone(request)
            return
        lora = str(extras.get("lora", ""))
        try:
            wishes = wishes_of(request.kv_transfer_params)
        except TierKVError as error:
            _log.warning("request %s is neither loaded nor stored: %s", name, error)
            self.problems[name] = str(error)
            self._apart.separate(request, self._kept.fidelity, lora)
        else:
            store = self._kept.options.save and wishes.store
            fidelity = CLASSES[wishes.fidelity] if wishes.fidelity else self._kept.fidelity
            self._apart.separate(request, fidelity, lora)
            root = self._kept.root(self._fingerprint, extras)
            hints = wishes.hints(getattr(request, "session_id", None))
            held = Asked(request, self._fingerprint, root, fidelity, store, hints)
            self._requests[name] = held
            self._look(held)

    def matched(self, request: Request, computed: int) -> int | None:
        """Return the tokens to load beyond the `computed` ones; None: ask again later.

        At least one token is left to compute, and nothing is promised below `computed`.
        """
        self.arrived(request)
        held = self._requests.get(request.request_id)
        if held is None or held.loading or held.failed:
            return 0
        lookup = held.lookup or self._look(held)
        usable = (request.num_tokens - 1) // self._kept.tokens
        enough = computed >= usable * self._kept.tokens
        if not lookup.answered.wait(0.0 if enough else WAIT_S):
            return 0 if enough else None
        late = not enough and lookup.reply.match and time.monotonic() > lookup.until
        if late or computed < min(lookup.held, usable) * self._kept.tokens:
            self._forget(held)
            self._look(held, computed // self._kept.tokens)
            return None
        held.reach = max(held.reach, lookup.reach)
        self._follow(held, lookup)
        blocks = min(lookup.reply.blocks, usable)
        external = blocks * self._kept.tokens - computed
        # Windows are those before the answer's end, and no other.
        if external <= 0 or (self._kept.windows and blocks < lookup.reply.blocks):
            return 0
        reply = lookup.reply
        if reply.recompute_s and reply.load_s >= reply.recompute_s:  # as far as both are known
            self.counters["loads_declined"] += 1
            return 0
        lookup.computed = computed
        return external

    def allocated(self, request: Request, blocks: BlockIds, external: int) -> bool:
        """Plan the load of `external` tokens into a request's engine blocks; 0: none is wanted.

        Returns: whether a load was planned.
        Raises: TierKVError (invalid) when the blocks are not what was promised.
        """
        held = self._requests.get(request.request_id)
        if held is None or held.loading:
            return False
        held.blocks = [list(ids) for ids in blocks]
        lookup = held.lookup
        if lookup is not None and lookup.answered.is_set():
            held.keys = max(held.keys, lookup.keys, key=len)
        if lookup is None or not lookup.reply.match or not external:
            self._forget(held)
            return False
        kept, stop = self._kept, lookup.computed + external
        if stop % kept.tokens:
            raise invalid(f"a load of {stop} tokens does not end between two blocks")
        load = Load(
            request=request.request_id,
            match=lookup.reply.match,
            shards=lookup.shards,
            fingerprint=held.fingerprint,
            keys=lookup.keys[: stop // kept.tokens * KEY_BYTES],
            fidelity=held.fidelity,
            spans=spans_to_fill(kept.groups, kept.tokens, blocks, lookup.computed, stop),
            deadline=time.monotonic() + kept.options.deadline_s,
        )
        held.lookup = None
        held.loading = lookup.reply.match
        held.sources = tokens_by_tier(lookup.reply.sources, external, kept.tokens)
        held.filling = load.blocks
        self._loads.append(load)
        return True

    def fail(self, request: Request, blocks: BlockIds) -> None:
        """Let a load that was promised and could not be planned be reported as not filled."""
        held = self._requests.get(request.request_id)
        if held is not None:  # what it was promised cannot be given: nothing is, any more
            self._forget(held)
            held.failed = True
        nothing = Span(0, 0, 0, (tuple(blocks[0]),))
        self._loads.append(
            Load(request.request_id, 0, 1, b"", b"", self._kept.fidelity, (nothing,), 0.0)
        )

    def step(self, output: Output) -> StepPlan:
        """Return what the worker side is to do beside a step."""
        saves: list[Save] = []
        overwritten: set[int] = set()
        for new in output.scheduled_new_reqs:
            held = self._requests.get(new.req_id)
            overwritten.update(self._behind(new.block_ids, new.num_computed_tokens))
            if held is not None:
                held.blocks = [list(ids) for ids in new.block_ids]
                self._save(held, new.num_computed_tokens, output, saves)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            held = self._requests.get(name)
            computed, new_ids = cached.num_computed_tokens[index], cached.new_block_ids[index]
            resumed = name in cached.resumed_req_ids
            if new_ids:
                overwritten.update(self._behind(new_ids, computed if resumed else 0))
            if held is not None:
                if new_ids and resumed:
                    held.blocks = [list(ids) for ids in new_ids]
                elif new_ids:
                    for ids, more in zip(held.blocks, new_ids, strict=True):
                        ids.extend(more)
                self._save(held, computed, output, saves)
        loads, self._loads = tuple(self._loads), []
        for load in loads:
            overwritten.update(load.blocks)
        self._prefills.begins(output)
        return StepPlan(loads, tuple(saves), frozenset(overwritten))

    def _behind(self, blocks: BlockIds, computed: int) -> Iterator[int]:
        """Go through the engine blocks of all groups behind the computed tokens."""
        for group, ids in enumerate(blocks):
            yield from ids[computed // self._sizes[group] :]

    def stepped(
        self,
        received: Iterable[str],
        unfilled: AbstractSet[int],
        failed: AbstractSet[str] = frozenset(),
    ) -> None:
        """Hear that a step has ended.

        Args:
            received: requests whose loads are over.
            unfilled: engine blocks that loads did not fill.
            failed: requests whose loads are worth nothing, of engines where these count as a whole.
        """
        if unfilled:
            for one in self._requests.values():
                one.unfilled(unfilled, self._sizes[0])
        for name in failed & self._requests.keys():
            self._requests[name].failed, self._requests[name].sources = True, {}
        self._prefills.ends()
        for name in received:
            held = self._requests.get(name)
            if held is not None:
                self._client.release(held.loading)
                held.loading, held.filling = 0, ()
                self.counters.update(
                    {f"loaded_tokens_{tier}": n for tier, n in held.sources.items()}
                )
                if held.finished:
                    del self._requests[name]

    def sources(self, request: Request) -> dict[str, int]:
        """Return the tokens of a request's load by the tier they came from."""
        held = self._requests.get(request.request_id)
        return held.sources if held is not None else {}

    def ended(self, request: Request) -> dict[str, Any]:
        """Forget a request; one that is being loaded for is kept until that has been reported.

        Returns: what its answer says: tokens that were loaded by tier and class, and the class that
            was served at least, or its `problem`.
        """
        problem = self.problems.pop(request.request_id, "")
        if problem:
            return {"problem": problem}
        held = self._requests.get(request.request_id)
        if held is None:
            return {}
        self._forget(held)
        held.finished = True
        if not held.loading:
            del self._requests[request.request_id]
        if held.hints.closed and not self.refused:
            self._executor.submit("lookup", lambda: self._close_session(held))
        return held.told(self._kept.tokens)

    def heard(self, report: Report) -> None:
        """Hear what a step's loads and saves were, before it is heard that the step has ended."""
        for name, classes in report.classes.items():
            if name in self._requests:
                labels = {FIDELITIES[number].label: count for number, count in classes.items()}
                self._requests[name].classes = labels
        if self.events is not None:
            for save in report.saves:
                self.events.saved(save.offered, save.stored, save.fidelity)

    def reset(self) -> None:
        """Find nothing any more of what was kept until now: the weights may be others.

        Requests that are under way get and give nothing any more: what they compute from now on
        stands on what they had before.
        """
        self._fingerprint = self._kept.fingerprint(time.time_ns())
        for held in self._requests.values():
            self._forget(held)
            held.store, held.failed = False, True
        self._loads = [replace(load, match=0) for load in self._loads]
        if self.events is not None:
            self.events.forgotten()

    def _close_session(self, held: Asked) -> None:
        """Tell the sidecar that no call of a request's session follows; a job of the lane."""
        most = MAX_UNITS // len(self._kept.groups) * KEY_BYTES
        keys = held.extended(held.keys, self._kept.tokens)[:most]
        if keys:
            call = self._kept.match_call(
                held.fingerprint, keys, held.fidelity, 0.0, self.cost, self._kept.stored_shards[0]
            )
            self._client.release(self._client.match(held.hints.on(call)).match)

    def _look(self, held: Asked, computed: int | None = None) -> Lookup:
        """Begin to ask for a chain, of which the engine has `computed` store blocks itself."""
        own = self.own.blocks(held.request) if computed is None else computed
        held.lookup = lookup = Lookup(0 if self._kept.windows else own)
        tokens = held.request.num_tokens
        if not self._kept.options.load or (tokens - 1) // self._kept.tokens < 1:
            lookup.answered.set()
            return lookup
        known = held.keys
        self._executor.submit("lookup", lambda: self._ask(held, lookup, known))
        return lookup

    def _ask(self, held: Asked, lookup: Lookup, known: bytes) -> None:
        """Hash a request's tokens and match them; a job of the lane."""
        deadline_s, reply = self._kept.options.deadline_s, MISS
        try:
            lookup.keys = keys = held.extended(known, self._kept.tokens)
            usable = (held.request.num_tokens - 1) // self._kept.tokens
            asked = keys[: usable * KEY_BYTES]
            until = time.monotonic() + deadline_s
            for shards in self._kept.stored_shards:
                found = self._match(held, asked, until, shards, lookup.held)
                lookup.reach = max(lookup.reach, found.reach)
                if found.blocks > reply.blocks:
                    found, reply, lookup.shards = reply, found, shards
                self._client.release(found.match)
                if max(reply.blocks, lookup.held) >= usable:
                    break
        finally:
            self._client.release(lookup.answer(reply, time.monotonic() + deadline_s * FRESH))

    def _match(self, held: Asked, keys: bytes, until: float, shards: int, own: int) -> MatchReply:
        """Ask for a chain as stored in so many runs of heads; waits for what is below RAM."""
        most = MAX_UNITS // (shards * len(self._kept.groups))
        left_s = max(until - time.monotonic(), 0.0)
        call = self._kept.match_call(
            held.fingerprint, keys[: most * KEY_BYTES], held.fidelity, left_s, self.cost, shards,
            own,
        )  # fmt: skip
        reply = self._client.match(held.hints._replace(closed=False).on(call))
        return self._client.wait(reply.match, left_s) if reply.pending else reply

    def _follow(self, held: Asked, lookup: Lookup) -> None:
        """Let the event stream know, once, what a match has found."""
        if self.events is not None and lookup.keys and not lookup.followed:
            lookup.followed, reply = True, lookup.reply
            usable = (held.request.num_tokens - 1) // self._kept.tokens * KEY_BYTES
            self.events.looked_up(
                asker_of(held.request), lookup.keys[:usable], reply.blocks,
                reply.sources.items(), held.fidelity, lookup.held,
            )  # fmt: skip

    def _forget(self, held: Asked) -> None:
        """End the lease of an answer that is not used, now or when it comes."""
        lookup, held.lookup = held.lookup, None
        if lookup is not None:
            self._client.release(lookup.forget())

    def _save(self, held: Asked, computed: int, output: Output, saves: list[Save]) -> None:
        """Offer what a step seals: only tokens that are known now, so no drafts."""
        kept = self._kept
        done = computed + output.num_scheduled_tokens[held.request.request_id]
        sealed = min(done, len(held.request.all_token_ids)) // kept.tokens
        if not held.store or sealed <= held.offered:
            return
        held.keys = held.extended(held.keys, kept.tokens)
        # Where others went on another way, more will: a hit may end there too from now on. And the
        # same prompt again leaves a token to compute, so one of whole blocks ends a block earlier.
        again = (len(held.request.all_token_ids) - 1) // kept.tokens
        ends = sorted({end for end in (held.reach, again) if held.offered < end < sealed})
        spans = spans_to_offer(kept.groups, kept.tokens, held.blocks, [*ends, sealed], computed)
        fresh, held.offered = sealed - held.offered, sealed
        if spans:
            keys = held.keys[: sealed * KEY_BYTES]
            saves.append(Save(held.fingerprint, keys, held.fidelity, spans, fresh, held.hints))
            if self.events is not None:
                self.events.offered(asker_of(held.request), keys, sealed - fresh)
