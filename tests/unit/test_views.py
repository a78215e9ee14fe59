"""Views: recency serves what LRU serves, a rate that pays takes over, and gives way again."""

from itertools import pairwise

import numpy as np
import pytest

from tests.traces import SMALL, trace_path
from tierkv.cost import Rates
from tierkv.policies.configurations import Form
from tierkv.policies.evicpress import EvicPress
from tierkv.policies.reuse import Reuse
from tierkv.policies.views import MEMORY_USES, RATE, RECENCY, SAMPLED, Gone, Views
from tierkv.simulation.joint_blocks import count_blocks
from tierkv.simulation.traces import Accesses, Trace, load

POINT = 0.01
RAW, FREE = Form("raw", 1.0, float("inf")), Rates(0.0, float("inf"), float("inf"))


@pytest.fixture(scope="module", params=SMALL)
def small(request: pytest.FixtureRequest) -> Accesses:
    return load(Trace(trace_path(request.param)))


class Told(Views):
    """Views that sum up what each would have served."""

    def __init__(self, reuse: Reuse, capacity: float) -> None:
        super().__init__(reuse, capacity)
        self.total = np.zeros(2)

    def _found(self, *given: object) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        found = super()._found(*given)  # type: ignore[arg-type]
        self.total += found
        return found


def asked(policy: EvicPress, chain: list[int], now: float) -> None:
    """Ask for a chain of full blocks."""
    ids, each = np.array(chain, np.int32), np.ones(len(chain))
    walk = policy.walk(ids)
    there = policy.segments.configuration[walk.rows] != 0
    loaded = len(there) if there.all() else int(there.argmin())
    policy.used_chain(now, walk, ids, 512 * len(chain), len(chain), each, each, loaded)


@pytest.mark.parametrize("capacity", [3, 28, SAMPLED])
def test_what_recency_would_serve_is_what_lru_serves(
    small: Accesses, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever decides: here the rate does, always."""
    monkeypatch.setattr("tierkv.policies.evicpress.Views", Told)
    policy = EvicPress([RAW], [FREE], [capacity], reuse=Reuse(1))
    views = policy._views
    assert isinstance(views, Told)
    for number, (begin, end) in enumerate(pairwise(small.starts.tolist())):
        views.deciding = RATE
        asked(policy, small.ids[begin:end].tolist(), float(small.times_s[number]))
    lru = count_blocks(small, capacity, "lru").prefix_hits
    assert views.total[RECENCY] == pytest.approx(lru, abs=0.5 * POINT * len(small.ids))


def test_the_better_view_decides_and_gives_way_again() -> None:
    """Prompts that come once drive out long ones that come again; then chains grow turn by turn."""
    policy = EvicPress([RAW], [FREE], [240])
    views = policy._views
    assert views is not None
    assert views.deciding == RECENCY
    waiting: list[list[int]] = []
    newest, now = 0, 0.0
    for _ in range(600):
        now += 5.0
        once, chain = [newest], list(range(newest + 1, newest + 9))
        newest = chain[-1] + 1
        asked(policy, once, now)
        asked(policy, chain, now)
        waiting.append(chain)
        if len(waiting) > 27:
            asked(policy, waiting.pop(0), now)
    assert views.deciding == RATE
    for _ in range(12 * MEMORY_USES):
        chain = list(range(newest, newest + 200))
        newest += 200
        for end in (40, 80, 120, 160, 200):
            now += 0.5
            asked(policy, chain[:end], now)
    assert views.deciding == RECENCY


def test_what_went_is_known_as_far_back_as_it_matters() -> None:
    gone, rng = Gone(500.0), np.random.default_rng(0)
    went: list[int] = []
    for _ in range(3000):
        rows = rng.choice(300, int(rng.integers(0, 20)), replace=False)
        gone.add(rows, np.full(len(rows), 2.0))
        went += rows.tolist()
        first, end = gone.lately
        known = gone.at(np.arange(first, end)).tolist()
        assert sorted(known) == sorted(set(went[-250:]))
    assert len(gone._rows) <= 2048
