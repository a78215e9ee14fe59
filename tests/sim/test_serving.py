"""Serving over modelled tiers: the arithmetic by hand, LRU against a plain one, pinned figures."""

import math
from collections import OrderedDict

import numpy as np
import pytest

from tierkv.cost import Rates, Recompute, best_prefix
from tierkv.simulation.scenario import Scenario, TierSpec, read_scenario
from tierkv.simulation.serving import Served, Workload, contest, infinite_free, queued, serve
from tierkv.simulation.stack import Stack

BLOCK = 256


def chats(requests: int = 700, seed: int = 1) -> Workload:
    """Make conversations of 1 to 12 turns behind one shared block, 30 to 300 s apart."""
    rng = np.random.default_rng(seed)
    due: list[tuple[float, list[int], int]] = [
        (float(start), [0], int(rng.geometric(0.35))) for start in rng.uniform(0, 1400, requests)
    ]
    newest = 1
    times: list[float] = []
    tokens: list[int] = []
    prompts: list[list[int]] = []
    due.sort(key=lambda one: one[0])
    while due and len(prompts) < requests:
        now, chain, left = due.pop(0)
        grown = int(rng.integers(1, 60))
        chain = chain + list(range(newest, newest + grown))
        newest += grown
        times.append(now)
        tokens.append(len(chain) * BLOCK)
        prompts.append(chain)
        if left > 1:
            due.append((now + float(rng.uniform(30, 300)), chain, left - 1))
            due.sort(key=lambda one: one[0])
    number: dict[int, int] = {}
    ids = [
        np.array([number.setdefault(block, len(number)) for block in chain], np.int32)
        for chain in prompts
    ]
    return Workload(np.array(times), np.array(tokens), ids, len(number), BLOCK)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return chats()


def run(workload: Workload, policy: str, fidelity: str, engines: int = 0, seed: int = 0) -> Served:
    scenario = read_scenario("small")
    chosen = contest(scenario, policy, fidelity, workload, seed)
    return serve(workload, scenario, fidelity, chosen, engines)


def test_the_prefix_that_is_loaded_costs_least() -> None:
    rates = [Rates(0.5, 1.0, 1.0), Rates(4.0, 1.0, 1.0)]
    load = np.array([1.0, 2.0, 1.0])
    ends = np.array([10, 20, 30, 40])
    one = best_prefix(load, np.array([0, 0, 1]), ends, rates, Recompute(0.25, 0.0))
    assert one == (2, 3.5, 5.0)
    all_of_it = best_prefix(load, np.array([0, 0, 1]), ends, rates, Recompute(2.0, 0.0))
    assert all_of_it == (3, 8.5, 20.0)
    assert best_prefix(load, np.array([0, 0, 1]), ends, rates, Recompute(0.01, 0.0))[0] == 0
    none = np.zeros(0, np.int64)
    nothing = best_prefix(np.zeros(0), none, np.array([40]), rates, Recompute(0.0, 1.0))
    assert nothing == (0, 0.0, 800.0)


@pytest.mark.parametrize("seed", range(3))
def test_the_stack_is_lru_in_each_tier(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = [30, 50, 20]
    stack = Stack(capacity, 400)
    plain: list[OrderedDict[int, int]] = [OrderedDict() for _ in capacity]
    written = [0, 0, 0]
    for _ in range(300):
        start, count = int(rng.integers(0, 380)), int(rng.integers(1, 20))
        ids = np.arange(start, start + count, dtype=np.int32)
        expected = [
            next((tier for tier, one in enumerate(plain) if block in one), 3)
            for block in ids.tolist()
        ]
        assert stack.tiers(ids).tolist() == expected
        stack.use(ids, np.ones(count))
        written[0] += sum(tier > 0 for tier in expected)
        for block in reversed(ids.tolist()):
            for one in plain:
                one.pop(block, None)
            plain[0][block] = 1
        for tier, room in enumerate(capacity):
            while len(plain[tier]) > room:
                block, _ = plain[tier].popitem(last=False)
                if tier < 2:
                    plain[tier + 1][block] = 1
                    written[tier + 1] += 1
        # A block that rose left its tier early: what one stack moves less, plain LRU never moves.
        assert stack.written[0] == written[0]
    assert np.all(stack.written[1:] <= written[1:])


def test_one_request_by_hand() -> None:
    scenario = read_scenario("small")
    workload = Workload(
        np.array([0.0, 10.0]),
        np.array([512, 612]),
        [np.array([0, 1], np.int32), np.array([0, 1, 2], np.int32)],
        3,
        BLOCK,
    )
    served = serve(workload, scenario, "exact", contest(scenario, "lru", "exact", workload, 0))
    raw = 512 * 131072
    first = 32e-6 * 512 + 1.05e-9 * 512**2 / 2
    second = 20e-6 + raw / 50e9 + 32e-6 * 100 + 1.05e-9 * (512 * 100 + 100**2 / 2)
    assert served.ttft_s.mean == pytest.approx((first + second) / 2)
    assert served.prefix_hit == 2 / 5
    assert served.by_tier == {"host": pytest.approx(512 / 1124), "nvme": 0.0}
    assert served.written_bytes["host"] == pytest.approx(612 * 131072)
    free = infinite_free(workload, scenario.recompute)
    assert free == pytest.approx([first, second - 20e-6 - raw / 50e9])


def test_the_joint_policy_beats_lru_with_any_profile(workload: Workload) -> None:
    for fidelity in ("exact", "safe"):
        joint = run(workload, "evicpress", fidelity)
        scenario = read_scenario("small")
        others = [f"lru@{form.name}" for form in scenario.forms(fidelity)]
        least = min(run(workload, policy, fidelity).ttft_s.mean for policy in others)
        assert joint.ttft_s.mean < least
        assert joint.ttft_infinite_free_s.mean < joint.ttft_s.mean


def test_figures_stay_as_they_are(workload: Workload) -> None:
    """Pinned: a change of these is a change of the policy."""
    found = {
        (policy, fidelity): run(workload, policy, fidelity)
        for policy, fidelity in (("lru", "exact"), ("evicpress", "safe"), ("evicpress", "economy"))
    }
    assert {what: round(served.ttft_s.mean, 4) for what, served in found.items()} == PINNED_TTFT
    joint = found["evicpress", "safe"]
    assert math.isclose(sum(joint.by_class.values()), 1.0)
    assert 0 < joint.quality_loss_mean < 0.003
    assert joint.encode_gpu_s + joint.decode_gpu_s < joint.prefill_saved_s / 4


PINNED_TTFT = {
    ("lru", "exact"): 0.5313,
    ("evicpress", "safe"): 0.3588,
    ("evicpress", "economy"): 0.3535,
}


def test_the_same_seed_gives_the_same(workload: Workload) -> None:
    one, other = (run(workload, "evicpress", "safe", engines=2, seed=5) for _ in range(2))
    assert without_time(one) == without_time(other)


def without_time(served: Served) -> dict[str, object]:
    fields = {name: getattr(served, name) for name in served.__struct_fields__}
    del fields["seconds_per_million_decisions"]
    return fields


def test_requests_wait_for_an_engine() -> None:
    times, service = np.array([0.0, 0.0, 1.0, 9.0]), np.array([2.0, 3.0, 1.0, 1.0])
    assert queued(times, service, 1).tolist() == [2.0, 5.0, 5.0, 1.0]
    assert queued(times, service, 2).tolist() == [2.0, 3.0, 2.0, 1.0]


def test_a_prefix_is_never_less_than_lru_finds_without_codecs(workload: Workload) -> None:
    small = read_scenario("small")
    raw = [spec for spec in small.profile if spec.name == "raw"]
    for gib in (1, 4, 16, 64):
        scenario = Scenario(model=small.model, tier=[_sized(small, gib)], profile=raw)
        joint, lru = (
            serve(
                workload,
                scenario,
                "exact",
                contest(scenario, policy, "exact", workload, 0),
            )
            for policy in ("evicpress", "lru")
        )
        assert joint.block_hit >= lru.block_hit - 0.005


def _sized(scenario: Scenario, gib: int) -> TierSpec:
    tier = scenario.tier[0]
    return TierSpec(name="host", gib=gib, gb_per_s=tier.gb_per_s, latency_us=tier.latency_us)
