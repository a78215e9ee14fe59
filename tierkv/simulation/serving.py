"""Serving: replay a trace over the tiers of a scenario and time every request.

Time to first token of a request is loading the head of its prompt that is worth loading, then
computing the rest, by the cost model of the service. Clock and tiers are modelled: requests come
when the trace says, copies are moved at no time of their own, and what is written is counted. With
`engines`, requests wait in one queue for the first engine that is free.

Tokens count up to what full and last blocks of the trace hold; a prompt's rest beyond is left out.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tierkv.cost import Floats, Recompute, best_prefix
from tierkv.errors import invalid
from tierkv.simulation.cascade import MAKES, Cascade
from tierkv.simulation.contests import Contest, Joint, Lru, Pieces, Prompt
from tierkv.simulation.foresight import Clairvoyant, Clients
from tierkv.simulation.scenario import Scenario
from tierkv.simulation.traces import Trace, load

Ids = npt.NDArray[np.int32]
Progress = Callable[[int, int], None]
PROGRESS_EVERY = 256
DAY_S = 86400.0
COMPUTED = "computed"
CLAIRVOYANT = "clairvoyant"
SECOND_SIGHT = "evicpress-second-sight"
JOINT = ("evicpress", SECOND_SIGHT, CLAIRVOYANT)


class Spread(msgspec.Struct, frozen=True):
    """Seconds over requests."""

    mean: float
    p50: float
    p99: float


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay found. Shares are of all tokens; losses are KL in nats per token."""

    requests: int
    accesses: int
    block_hit: float
    """Share of blocks that had a copy."""
    prefix_hit: float
    """Share of blocks that were loaded."""
    ttft_s: Spread
    ttft_full_prefill_s: Spread
    ttft_infinite_free_s: Spread
    ttft_queued_s: Spread | None
    by_tier: dict[str, float]
    by_class: dict[str, float]
    written_bytes: dict[str, float]
    written_bytes_per_day: dict[str, float]
    quality_loss_mean: float
    """Over loaded and computed tokens."""
    moved: dict[str, int]
    encode_gpu_s: float
    decode_gpu_s: float
    prefill_saved_s: float
    decisions: int
    seconds_per_million_decisions: float


class Workload(NamedTuple):
    """A trace in columns; `ids` are numbered in the order of first appearance."""

    times_s: Floats
    tokens: npt.NDArray[np.int64]
    ids: list[Ids]
    distinct: int
    block_tokens: int
    clients: Clients = Clients()


def read_workload(trace: Trace) -> Workload:
    """Read a whole trace. Raises: TierKVError (invalid) when it has no block."""
    ids, starts, distinct, times_s, tokens, block_tokens = load(trace)
    return Workload(times_s, tokens, np.split(ids, starts[1:-1]), distinct, block_tokens)


def check_policy(scenario: Scenario, policy: str, fidelity: str) -> None:
    """Raise TierKVError (invalid), naming those that can be, unless a scenario can run a policy."""
    name, _, profile = policy.partition("@")
    forms = [form.name for form in scenario.forms(fidelity)]
    if policy not in JOINT and (name not in {"lru", *MAKES} or (profile or "raw") not in forms):
        choices = ", ".join([*JOINT, "lru", *(f"lru@{form}" for form in forms), *MAKES])
        raise invalid(
            f"policy {policy!r} is not one that a scenario can run at class {fidelity}:"
            f" use one of {choices}"
        )


def contest(
    scenario: Scenario, policy: str, fidelity: str, workload: Workload, seed: int
) -> Contest:
    """Return a policy by name: `evicpress`, or `lru` with raw copies, or `lru@PROFILE`.

    The policies that `lru` is compared with are named and given a profile alike; `clairvoyant` is
    `evicpress` that knows the workload; in `evicpress-second-sight` lower tiers take only what was
    asked for twice. Raises: see `check_policy`.
    """
    check_policy(scenario, policy, fidelity)
    if policy == CLAIRVOYANT:
        return Joint(scenario, fidelity, seed, Clairvoyant(workload.ids, workload.times_s))
    if policy in JOINT:
        return Joint(scenario, fidelity, seed, second_sight=policy == SECOND_SIGHT)
    name, _, profile = policy.partition("@")
    form = next(one for one in scenario.forms(fidelity) if one.name == (profile or "raw"))
    if name in MAKES:
        return Cascade(scenario, workload.distinct, form, MAKES[name])
    return Lru(scenario, workload.distinct, form)


class _Tally:
    """Sums over the requests served so far."""

    def __init__(self, tiers: int, forms: int) -> None:
        self.loaded = np.zeros((tiers, forms))
        self.tokens = self.accesses = self.stored = self.blocks = 0
        self.decode_s = self.saved_s = self.loss = 0.0

    def add(self, prompt: Prompt, pieces: Pieces, taken: int, decode_s: Floats, kl: Floats) -> None:
        """Count a request that loaded so many pieces; `kl` of each form to its session."""
        np.add.at(self.loaded, (pieces.tier[:taken], pieces.form[:taken]), pieces.nbytes[:taken])
        self.loss += float((pieces.nbytes * kl[pieces.form])[:taken].sum())
        self.decode_s += float((pieces.nbytes * decode_s[pieces.form])[:taken].sum())
        self.stored += int(pieces.blocks.sum())
        self.blocks += int(pieces.blocks[:taken].sum())
        self.tokens += prompt.tokens
        self.accesses += len(prompt.ids)


def serve(
    workload: Workload,
    scenario: Scenario,
    fidelity: str,
    chosen: Contest,
    engines: int = 0,
    progress: Progress | None = None,
) -> Served:
    """Replay a workload; the same arguments give the same figures, but for the time they took."""
    rates, recompute = scenario.rates, scenario.recompute
    spread = np.array(
        [
            [1 / (form.ratio * rate.read_bps) + 1 / form.decode_bps for form in chosen.forms]
            for rate in rates
        ]
    )
    decode_s = np.array([1 / form.decode_bps for form in chosen.forms])
    kl = np.array([form.kl for form in chosen.forms])
    tally = _Tally(len(rates), len(chosen.forms))
    ttft, deciding = np.zeros(len(workload.ids)), 0.0
    for number in range(len(workload.ids)):
        prompt = _prompt(workload, number, scenario)
        began = time.process_time()
        pieces = chosen.find(prompt)
        load = pieces.nbytes * spread[pieces.tier, pieces.form]
        ends = np.minimum(np.cumsum(pieces.blocks) * workload.block_tokens, prompt.tokens)
        best = best_prefix(load, pieces.tier, np.append(ends, prompt.tokens), rates, recompute)
        chosen.use(prompt, best.pieces)
        deciding += time.process_time() - began
        ttft[number] = best.load_s + best.recompute_s
        tally.saved_s += recompute.seconds(prompt.tokens, 0) - best.recompute_s
        borne = kl * workload.clients.sensitivity_of(number)
        tally.add(prompt, pieces, best.pieces, decode_s, borne)
        if progress and number % PROGRESS_EVERY == 0:
            progress(number, len(workload.ids))
    return _result(workload, scenario, fidelity, chosen, tally, ttft, engines, deciding)


def _prompt(workload: Workload, number: int, scenario: Scenario) -> Prompt:
    ids, tokens = workload.ids[number], int(workload.tokens[number])
    size, per_token = workload.block_tokens, scenario.model.bytes_per_token
    at = np.arange(len(ids)) * size
    held = np.minimum(size, tokens - at)
    recompute = scenario.recompute
    worth = recompute.linear + recompute.quadratic * (at + held / 2)
    return Prompt(
        float(workload.times_s[number]),
        ids,
        tokens,
        tokens // size,
        held * float(per_token),
        worth / per_token,
        workload.clients.closes(number),
        workload.clients.most_kl / workload.clients.sensitivity_of(number),
    )


def queued(times_s: Floats, service_s: Floats, engines: int) -> Floats:
    """Return seconds from arrival to first token with so many engines and one queue."""
    free = np.zeros(engines)
    result = np.zeros(len(times_s))
    for number, (now, seconds) in enumerate(zip(times_s, service_s, strict=True)):
        engine = int(free.argmin())
        free[engine] = max(free[engine], now) + seconds
        result[number] = free[engine] - now
    return result


def infinite_free(workload: Workload, recompute: Recompute) -> Floats:
    """Return seconds when everything is kept and loads take no time: what no policy can beat."""
    seconds, newest = np.zeros(len(workload.ids)), -1
    for number, (ids, tokens) in enumerate(
        zip(workload.ids, workload.tokens.tolist(), strict=True)
    ):
        known = int(np.count_nonzero(ids <= newest))
        newest = max(newest, int(ids.max(initial=-1)))
        at = min(known * workload.block_tokens, tokens)
        seconds[number] = recompute.seconds(tokens - at, at)
    return seconds


def _spread(seconds: Floats) -> Spread:
    p50, p99 = np.percentile(seconds, [50, 99])
    return Spread(float(seconds.mean()), float(p50), float(p99))


def _result(
    workload: Workload,
    scenario: Scenario,
    fidelity: str,
    chosen: Contest,
    tally: _Tally,
    ttft: Floats,
    engines: int,
    deciding: float,
) -> Served:
    account = chosen.account()
    names = [tier.name for tier in scenario.tier]
    written = dict(zip(names, account.written, strict=True))
    days = max(float(workload.times_s[-1] - workload.times_s[0]), 1.0) / DAY_S
    every = tally.tokens * scenario.model.bytes_per_token
    shares = tally.loaded / every
    by_form = shares.sum(axis=0)
    classes = {spec.name: spec.fidelity for spec in scenario.allowed(fidelity)}
    by_class = {COMPUTED: 1 - float(by_form.sum())}
    for form, share in zip(chosen.forms, by_form.tolist(), strict=True):
        by_class[classes[form.name]] = by_class.get(classes[form.name], 0.0) + share
    encode_bps = {(spec.encode_gb_per_s or float("inf")) * 1e9 for spec in scenario.profile}
    recompute = scenario.recompute
    return Served(
        requests=len(ttft),
        accesses=tally.accesses,
        block_hit=tally.stored / tally.accesses,
        prefix_hit=tally.blocks / tally.accesses,
        ttft_s=_spread(ttft),
        ttft_full_prefill_s=_spread(
            np.array([recompute.seconds(tokens, 0) for tokens in workload.tokens.tolist()])
        ),
        ttft_infinite_free_s=_spread(infinite_free(workload, recompute)),
        ttft_queued_s=_spread(queued(workload.times_s, ttft, engines)) if engines else None,
        by_tier=dict(zip(names, shares.sum(axis=1).tolist(), strict=True)),
        by_class=by_class,
        written_bytes=written,
        written_bytes_per_day={name: nbytes / days for name, nbytes in written.items()},
        quality_loss_mean=tally.loss / every,
        moved=account.moved,
        encode_gpu_s=account.encoded / min(encode_bps),
        decode_gpu_s=tally.decode_s,
        prefill_saved_s=tally.saved_s,
        decisions=account.decisions,
        seconds_per_million_decisions=deciding / max(account.decisions, 1) * 1e6,
    )
