"""The joint policy's picture of a store follows the Catalog, whatever clients and media do."""

from types import SimpleNamespace

import pytest

from tests.unit.test_joint_store import audit
from tierkv.policies.placed import Placed
from tierkv.simulation.sidecar import Sidecar
from tierkv.simulation.world import simulate

STEPS = 300


@pytest.mark.parametrize("seed", range(4))
def test_the_books_agree_after_every_step(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With crashes, faults, clears, two tiers below; and chains that are soon forgotten."""
    shrunk: list[int] = []
    look, renumber = Sidecar.audit, Placed._renumber

    def look_closer(sidecar: Sidecar) -> None:
        look(sidecar)
        audit(SimpleNamespace(store=sidecar), sound=False)

    def note(placed: Placed, blocks: object) -> None:
        renumber(placed, blocks)  # type: ignore[arg-type]
        shrunk.append(len(placed._numbers))

    monkeypatch.setattr("tierkv.simulation.node.POLICIES", ("evicpress",))
    monkeypatch.setattr("tierkv.policies.placed.LEAST_BLOCKS", 12)
    monkeypatch.setattr(Sidecar, "audit", look_closer)
    monkeypatch.setattr(Placed, "_renumber", note)
    assert simulate(seed, STEPS).steps == STEPS
    assert shrunk
