"""Foresight: what a trace tells of its future, and what hints, floors and futures are worth."""

import numpy as np
import numpy.typing as npt
import pytest

from tests.sim.test_serving import BLOCK, chats, without_time
from tierkv.policies.segments import NONE
from tierkv.simulation.contests import Joint, Pieces, Prompt
from tierkv.simulation.foresight import (
    Clairvoyant,
    Clients,
    clients_of,
    closing,
    goes_on_with,
    next_uses,
    sensitivities,
    sessions,
)
from tierkv.simulation.scenario import read_scenario
from tierkv.simulation.serving import Served, Workload, contest, serve

Ids = npt.NDArray[np.int32]


def prompts(*chains: list[int]) -> list[Ids]:
    return [np.array(chain, np.int32) for chain in chains]


TREE = prompts(
    [0, 1, 2],
    [0, 3, 4],  # shares one block: of nobody
    [0, 1, 2, 5],  # goes on with the first
    [0, 3, 6],  # leaves the second in its middle
    [0, 1, 2, 5],  # the third once more
    [],
)


def test_conversations_are_read_off_the_chains() -> None:
    goes_on = goes_on_with(TREE)
    assert goes_on.tolist() == [NONE, NONE, 0, 1, 2, NONE]
    assert closing(goes_on).tolist() == [False, False, False, True, True, True]
    assert sessions(goes_on).tolist() == [0, 1, 0, 1, 0, 5]


def test_the_next_use_of_a_block_is_known() -> None:
    times = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    never = np.inf
    found = [one.tolist() for one in next_uses(TREE, times)]
    assert found[0] == [1.0, 2.0, 2.0]
    assert found[1] == [2.0, 3.0, never]
    assert found[2] == [3.0, 4.0, 4.0, 4.0]
    assert found[3:] == [[4.0, never, never], [never] * 4, []]


def test_a_rate_is_that_of_the_next_use() -> None:
    chains = prompts([0, 1], [2, 3], [0, 4])
    reuse = Clairvoyant(chains, np.array([0.0, 10.0, 20.0]))
    for now, ids in zip((0.0, 10.0), chains, strict=False):
        each = np.ones(2)
        reuse.use(now, reuse.segments.walk(ids), ids, 2 * BLOCK, 2, each, each)
    # Of the first chain one block of two comes again, in ten seconds; of the other none.
    assert reuse.rate(np.array([0, 1]), 10.0).tolist() == [0.05, 0.0]


def test_sessions_differ_in_what_they_bear_and_not_in_themselves() -> None:
    many = np.full(4000, NONE)
    drawn = sensitivities(many, 0.4, seed=1)
    assert drawn.mean() == pytest.approx(1.0, abs=0.03)
    assert drawn.std() == pytest.approx(0.4, abs=0.03)
    assert np.array_equal(drawn, sensitivities(many, 0.4, seed=1))
    assert not np.array_equal(drawn, sensitivities(many, 0.4, seed=2))
    tree = sensitivities(goes_on_with(TREE), 0.4, seed=0)
    assert tree[0] == tree[2] == tree[4] != tree[1] == tree[3]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return chats()


def run(workload: Workload, policy: str = "evicpress", fidelity: str = "safe") -> Served:
    small = read_scenario("small")
    return serve(workload, small, fidelity, contest(small, policy, fidelity, workload, 0))


def test_who_knows_more_waits_less(workload: Workload) -> None:
    """Of the gap to everything kept in RAM, hints leave 69% and the future 60%."""
    plain = run(workload, fidelity="exact")
    told = run(
        workload._replace(clients=Clients(closing(goes_on_with(workload.ids)))), fidelity="exact"
    )
    known = run(workload, "clairvoyant", "exact")
    least = plain.ttft_infinite_free_s.mean
    gap = plain.ttft_s.mean - least
    assert told.ttft_s.mean - least < 0.75 * gap
    assert known.ttft_s.mean - least < 0.65 * gap
    assert without_time(known) == without_time(run(workload, "clairvoyant", "exact"))


class Watched(Joint):
    """The joint policy, and the greatest loss that each prompt could be served."""

    def find(self, prompt: Prompt) -> Pieces:
        """See `Joint`."""
        pieces = super().find(prompt)
        self.worst = [*getattr(self, "worst", []), max(self._kl[pieces.form], default=0.0)]
        return pieces


def served_with(workload: Workload, clients: Clients) -> tuple[Served, list[float]]:
    small = read_scenario("small")
    policy = Watched(small, "economy", 0)
    served = serve(workload._replace(clients=clients), small, "economy", policy)
    return served, policy.worst


def test_no_session_is_served_what_it_does_not_bear(workload: Workload) -> None:
    clients = clients_of(workload.ids, closed=False, variation=0.4, most_kl=0.01, seed=3)
    served, worst = served_with(workload, clients)
    assert clients.sensitivity is not None
    losses = np.array(worst) * clients.sensitivity
    assert losses.max() <= 0.01
    assert len(set(worst)) > 2  # sessions that bear more get coarser copies
    free, coarse = served_with(workload, Clients())
    assert max(coarse) > 0.01
    assert served.quality_loss_mean < free.quality_loss_mean
    assert served.ttft_s.mean >= free.ttft_s.mean - 1e-4


def test_a_loss_is_as_large_as_the_session_feels_it(workload: Workload) -> None:
    twice = Clients(sensitivity=np.full(len(workload.ids), 2.0))
    one, other = served_with(workload, Clients())[0], served_with(workload, twice)[0]
    assert other.quality_loss_mean == pytest.approx(2 * one.quality_loss_mean)
    assert other.ttft_s == one.ttft_s
