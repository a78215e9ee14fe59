"""Policies of equal blocks over the tiers of a scenario, on the service's Catalog."""

import msgspec
import numpy as np
import pytest

from tests.sim.test_serving import chats, run
from tierkv.catalog import NONE, READY, Catalog, Unit
from tierkv.policies.lru import Lru
from tierkv.simulation.cascade import MAKES, Cascade, seconds_saved
from tierkv.simulation.scenario import Scenario, read_scenario
from tierkv.simulation.serving import contest, serve


def tight() -> Scenario:
    """Return `small` with less room than the chats ask for: 8 GiB, then 96 GiB."""
    small = read_scenario("small")
    tiers = [
        msgspec.structs.replace(tier, gib=gib)
        for tier, gib in zip(small.tier, (8.0, 96.0), strict=True)
    ]
    return msgspec.structs.replace(small, tier=tiers)


@pytest.mark.parametrize("profile", ["raw", "kvtc9"])
def test_the_lru_of_the_service_does_what_the_model_of_it_does(profile: str) -> None:
    workload, scenario = chats(), tight()
    form = next(form for form in scenario.forms("safe") if form.name == profile)
    real = Cascade(scenario, workload.distinct, form, lambda *_: Lru(len(scenario.tier)))
    found = serve(workload, scenario, "safe", real)
    model = serve(
        workload,
        scenario,
        "safe",
        contest(scenario, f"lru@{profile}", "safe", workload, 0),
    )
    assert found.ttft_s.mean == pytest.approx(model.ttft_s.mean, rel=0.01)
    assert found.prefix_hit == pytest.approx(model.prefix_hit, abs=0.005)
    for tier in model.by_tier:
        assert found.by_tier[tier] == pytest.approx(model.by_tier[tier], abs=0.01)
    assert 0.01 < model.by_tier["host"] < model.prefix_hit


@pytest.mark.parametrize("name", MAKES)
def test_no_tier_holds_more_than_it_can_and_no_block_two_copies(name: str) -> None:
    workload, scenario = chats(150), tight()
    cascade = contest(scenario, f"{name}@int8", "safe", workload, 0)
    assert isinstance(cascade, Cascade)
    catalog = cascade._catalog

    def check(_done: int, _total: int) -> None:
        for tier, capacity in enumerate(scenario.capacity):
            assert sum(catalog.bytes[tier]) <= capacity
        rows = cascade._row_of[cascade._row_of != NONE]
        assert len(set(rows.tolist())) == len(rows)
        assert sum(len(catalog.select(tier, READY)) for tier in range(2)) == len(rows)
        assert not np.any(catalog.column("holds"))

    found = serve(workload, scenario, "safe", cascade, 0, check)
    check(0, 0)
    moved = found.moved
    inside = sum(len(catalog.select(tier, READY)) for tier in range(2))
    assert moved["stored"] == inside + moved["dropped"]
    assert found.decisions == sum(moved.values())
    assert found.written_bytes["host"] > 0
    assert found.prefix_hit > 0


@pytest.mark.parametrize("name", MAKES)
def test_policies_are_chosen_by_name_and_profile(name: str) -> None:
    workload = chats(100)
    raw, packed = (run(workload, policy, "safe") for policy in (name, f"{name}@kvtc9"))
    assert raw.quality_loss_mean == 0
    assert packed.quality_loss_mean > 0
    assert packed.ttft_s.mean < raw.ttft_full_prefill_s.mean


def test_what_a_hit_saves_is_prefill_less_load() -> None:
    scenario = read_scenario("small")
    (form,) = (form for form in scenario.forms("exact") if form.name == "raw")
    saved = seconds_saved(scenario, form)
    catalog = Catalog(["host", "nvme"])
    size = 256 * scenario.model.bytes_per_token
    rows = [
        catalog.begin(tier, [Unit(bytes([tier]) * 32, 0, 1, 4, 0, size, size, 0, 0, 0, 1024)])[0]
        for tier in range(2)
    ]
    prefill = scenario.recompute.seconds(256, 1024)
    assert saved(catalog, rows[0]) == pytest.approx(prefill - size / 50e9)
    assert saved(catalog, rows[1]) == pytest.approx(prefill - size / 6.5e9)
