"""The simulation holds for some seeds, decides alike twice, and notices a store that is wrong."""

import random
import subprocess
import sys

import pytest

from tierkv.simulation.disk import ModelTier
from tierkv.simulation.engine import content
from tierkv.simulation.world import World, simulate
from tierkv.store import Store
from tierkv.tier import DONE, Item, Outcome

STEPS = 600


def simulate_many() -> None:
    for seed in range(40):
        simulate(seed, STEPS)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_wrong_is_returned_lost_or_left(seed: int) -> None:
    result = simulate(seed, STEPS)
    assert result.steps == STEPS
    assert result.verified > 0


def test_a_seed_ends_in_the_same_state_twice() -> None:
    first, second = simulate(3, STEPS), simulate(3, STEPS)
    assert first == second
    assert simulate(4, STEPS).digest != first.digest


def test_the_seeds_reach_every_tier_and_most_faults() -> None:
    results = [simulate(seed, 400) for seed in range(20, 26)]
    counters = sum((result.counters for result in results[1:]), results[0].counters)
    faults = sum((result.faults for result in results[1:]), results[0].faults)
    assert min(counters[f"hit_{tier}"] for tier in ("host", "nvme", "redis")) > 0
    assert {"crash", "hang", "evict", "server_lost", "write_torn", "write_lost"} <= set(faults)


def test_a_wrong_byte_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were reads not verified, a torn write would be served."""
    monkeypatch.setattr("tierkv.wrap.check", lambda item: DONE)
    monkeypatch.setattr("tierkv.moves.Moves.describe", lambda *_: DONE)
    with pytest.raises(AssertionError) as caught:
        simulate_many()
    assert "simulation: seed" in caught.value.__notes__[0]


def test_a_clear_that_is_no_clear_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "answers", lambda *_: True)
    with pytest.raises(AssertionError, match=r"cleared|lower class|another tenant"):
        simulate_many()


def test_a_promise_that_is_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_tier: ModelTier, items: list[Item]) -> list[Outcome]:
        return [DONE] * len(items)

    monkeypatch.setattr(ModelTier, "write", write)
    with pytest.raises(AssertionError, match="promised"):
        simulate_many()


def test_a_lease_that_is_left_is_noticed() -> None:
    world = World(5)
    world.run(50)
    node = world.nodes[0]
    node.engines[0].turn()
    for _ in range(200):
        node.engines[0].turn()
    with pytest.raises(AssertionError, match=r"left|not counted|still on its way"):
        node.sidecar.audit_rest()
    world.close()


def test_content_differs_by_name_and_version() -> None:
    rng = random.Random(1)
    names = [rng.randbytes(42) for _ in range(20)]
    payloads = {content(name, version, 500) for name in names for version in range(3)}
    assert len(payloads) == 60
    assert content(names[0], 1, 500) == content(names[0], 1, 9000)[:500]


def test_the_command_prints_a_summary() -> None:
    command = [sys.executable, "-m", "tierkv.simulation", "--seed", "3", "--steps", "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("seed 3: 50 steps")
    assert "1 seeds, 50 steps in" in done.stdout
