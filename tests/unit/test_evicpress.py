"""EvicPress: the order in which things go, exact sums, and how close it comes to the optimum."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from tests.work import work_of
from tierkv.cost import Rates
from tierkv.policies.configurations import Configurations, Form
from tierkv.policies.evicpress import EvicPress
from tierkv.policies.segments import NONE
from tierkv.policies.worth import losses

RAW = Form("raw", 1.0, float("inf"))
FORMS = [
    RAW,
    Form("int8", 1.88, 200e9, 4e-5),
    Form("kvtc9", 9.0, 40e9, 0.003, progressive=True),
    Form("kvtc18", 18.0, 40e9, 0.008, progressive=True),
]
RATES = [Rates(20e-6, 50e9, 50e9), Rates(100e-6, 6.5e9, 6.5e9)]
BLOCK = 1e6
DENSITY = 40e-6 / 131072
TOKENS = 512


class Service:
    """A policy that is asked for chains of full blocks, and what stays of them."""

    def __init__(self, policy: EvicPress) -> None:
        self.policy = policy
        self.now = 0.0

    def ask(
        self, chain: list[int], pause: float = 1.0, *, closed: bool = False, most_kl: float = np.inf
    ) -> int:
        """Use a chain; return how many of its blocks had a copy."""
        self.now += pause
        ids = np.array(chain, np.int32)
        walk = self.policy.walk(ids)
        found = self.policy.segments.configuration[walk.rows] != 0
        loaded = len(found) if found.all() else int(found.argmin())
        hits = int(self.policy.segments.blocks[walk.rows[:loaded]].sum())
        each = np.full(len(chain), BLOCK)
        worth = DENSITY * (1 + np.arange(len(chain)) / 100)
        tokens = TOKENS * len(chain)
        self.policy.used_chain(
            self.now, walk, ids, tokens, len(chain), each, worth, loaded,
            closed=closed, most_kl=most_kl,
        )  # fmt: skip
        self.check()
        return hits

    def kept(self, chain: list[int]) -> list[int]:
        """Return the blocks of a chain that have a copy."""
        walk = self.policy.walk(np.array(chain, np.int32))
        segments = self.policy.segments
        return [
            block
            for row in walk.rows.tolist()
            if segments.configuration[row]
            for block in range(segments.first[row], segments.first[row] + segments.blocks[row])
        ]

    def check(self) -> None:
        """Every byte is counted, nothing is over its capacity and no tail is without its head."""
        policy, segments = self.policy, self.policy.segments
        rows = np.arange(segments.count)
        stored = policy.configurations.stored[segments.configuration[rows]]
        used = (stored * segments.nbytes[rows, None]).sum(axis=0)
        assert used == pytest.approx(policy.used, abs=1.0)
        assert np.all(policy.used <= policy.capacity + 1)
        here = segments.configuration[rows] != 0
        parents = segments.parents(rows)
        behind = here & (parents != NONE)
        assert np.all(segments.configuration[parents[behind]] != 0)
        children = np.bincount(parents[behind], minlength=segments.count)
        assert np.array_equal(children, segments.children[rows])


def raw_only(blocks: int) -> Service:
    return Service(EvicPress([RAW], RATES[:1], [int(blocks * BLOCK)]))


def test_a_head_in_two_calls_stays_before_its_tail() -> None:
    """R24: room for six blocks, a chain of four in two calls, then four of another session."""
    service = raw_only(6)
    service.ask([0, 1])
    service.ask([0, 1, 2, 3])
    service.ask([4, 5, 6, 7])
    first, second = service.kept([0, 1, 2, 3]), service.kept([4, 5, 6, 7])
    assert first == [0, 1, 2, 3][: len(first)]
    assert second == [4, 5, 6, 7][: len(second)]
    assert 4 <= len(first) + len(second) <= 6


def test_a_use_is_of_the_whole_chain() -> None:
    """R24: hits on the head only must not let the head grow old."""
    service = raw_only(40)
    service.ask(list(range(20)))
    for turn in range(60):
        service.ask(list(range(20)), pause=5.0)
        service.ask([100 + turn * 10 + block for block in range(10)], pause=5.0)
    assert service.kept(list(range(20)))[:1] == [0]


@pytest.mark.parametrize("seed", range(4))
def test_no_head_goes_before_its_tail(seed: int) -> None:
    """`Service.check` looks at every step of a growing and shrinking tree."""
    rng = np.random.default_rng(seed)
    service = Service(EvicPress(FORMS, RATES, [int(8 * BLOCK), int(20 * BLOCK)], seed=seed))
    chains, newest = [[0]], 1
    for _ in range(500):
        old = chains[int(rng.integers(max(0, len(chains) - 30), len(chains)))]
        head = old[: int(rng.integers(0, len(old) + 1))]
        tail = list(range(newest, newest + int(rng.integers(1, 40))))
        newest = tail[-1] + 1
        chains.append(head + tail)
        service.ask(chains[-1], pause=float(rng.exponential(20)))
    assert service.policy.moved["dropped"] > 0
    assert service.policy.moved["demoted"] > 0


def test_what_all_chains_share_stays_and_stays_near() -> None:
    rng = np.random.default_rng(0)
    service = Service(EvicPress(FORMS, RATES, [int(6 * BLOCK), int(30 * BLOCK)]))
    newest = 1
    for _ in range(400):
        tail = list(range(newest, newest + int(rng.integers(5, 30))))
        newest = tail[-1] + 1
        service.ask([0, *tail])
    policy = service.policy
    head = policy.walk(np.array([0], np.int32)).rows[0]
    assert policy.configurations.source[policy.segments.configuration[head], 0] == 0


def test_what_is_closed_takes_no_room() -> None:
    service = raw_only(30)
    for turn in range(20):
        chat = [100 * turn + block for block in range(10)]
        service.ask(chat, closed=turn % 2 == 1)
        assert bool(service.kept(chat)) == (turn % 2 == 0)


def test_a_lower_tier_may_wait_for_a_second_use() -> None:
    """Room near for four blocks: of chats asked for twice some are below, of the others none."""
    policy = EvicPress(FORMS, RATES, [int(4 * BLOCK), int(200 * BLOCK)], second_sight=True)
    service = Service(policy)
    for turn in range(60):
        chat = list(range(100 * turn, 100 * turn + 8))
        service.ask(chat, pause=3.0)
        assert policy.written[1] == 0 or turn > 20
        if turn >= 20 and turn % 2:
            service.ask(chat, pause=1.0)
    segments = policy.segments
    stored = policy.configurations.stored[segments.configuration[: segments.count], 1]
    assert np.all(segments.uses[: segments.count][stored > 0] >= 2)
    assert np.count_nonzero(stored) >= 10


def test_no_copy_is_made_that_a_segment_may_not_have() -> None:
    """Four chains under pressure, each with a floor of its own, that of the last for none."""
    service = Service(EvicPress(FORMS, RATES, [int(3 * BLOCK), int(12 * BLOCK)]))
    known, segments = service.policy.configurations, service.policy.segments
    floors = [0.0, 1e-4, 0.005, np.inf]
    chains = [list(range(100 * one, 100 * one + 20)) for one in range(4)]
    seen = [0.0] * 4
    for turn in range(80):
        for one, chain in enumerate(chains):
            service.ask([*chain, 100 * one + 20 + turn // 4], most_kl=floors[one])
            worst = known.kl[
                segments.configuration[service.policy.walk(np.array(chain, np.int32)).rows]
            ]
            assert worst.max() <= floors[one]
            seen[one] = max(seen[one], float(worst.max()))
    assert 0 < seen[2] < seen[3] == 0.008


def test_dead_categories_make_room_for_live_ones() -> None:
    """Short prompts come once, long ones again after 100 s: only the long are kept."""
    service = raw_only(300)
    waiting: list[list[int]] = []
    newest, hits, most = 0, 0, 0
    for turn in range(600):
        once = list(range(newest, newest + 1))
        chain = list(range(newest + 1, newest + 9))
        newest = chain[-1] + 1
        service.ask(once, pause=0.0)
        service.ask(chain, pause=5.0)
        waiting.append(chain)
        if len(waiting) > 20:
            found = service.ask(waiting.pop(0), pause=0.0)
            hits += found if turn > 300 else 0
            most += 8 if turn > 300 else 0
    assert hits > 0.95 * most


@pytest.mark.parametrize(("rate", "below"), [(0.01, ["kvtc9"]), (0.0, [])])
def test_a_second_copy_goes_down_where_there_is_room(rate: float, below: list[str]) -> None:
    """The plain copy near serves as well without it; what is dead is given up, not moved."""
    known = Configurations(FORMS, RATES)
    both = np.array([known.named(0, "int8") + known.named(0, "kvtc9")])
    steps = known.relief(0, both)
    price, density = np.zeros(2), np.array([DENSITY])
    loss, _ = losses(known, price, 0, np.array([rate]), density, both, steps)
    step = int(steps[0, loss[0].argmin()])
    names = ["int8", "kvtc9", "kvtc18"]
    assert [name for name in names if known.stored[step, 1] == 1 / ratio(known, name)] == below


def ratio(known: Configurations, name: str) -> float:
    return next(form.ratio for form in known.forms if form.name == name)


class Known(EvicPress):
    """The policy with rates that are given, by first block."""

    rates: npt.NDArray[np.float64]

    def rate(self, rows: npt.NDArray[np.int64], now: float) -> npt.NDArray[np.float64]:
        """See `EvicPress`."""
        del now
        return self.rates[self.segments.first[rows]]


@pytest.mark.parametrize("seed", range(12))
def test_utility_is_close_to_the_optimum(seed: int) -> None:
    """Forty contexts of one block, two tiers, four forms, against an integer programme.

    Each is used ten times: what a large one left free is found by what is used next.
    """
    rng = np.random.default_rng(seed)
    count = 40
    size = rng.integers(1, 16, count) * BLOCK
    worth = rng.uniform(32e-6, 100e-6, count) / 131072
    capacity = [int(size.sum() * rng.uniform(0.02, 0.3)) for _ in RATES]
    policy = Known(FORMS, RATES, capacity, seed=seed)
    policy.rates = np.exp(rng.normal(-4, 1.5, count))
    for turn in range(10 * count):
        one = turn % count
        ids = np.array([one], np.int32)
        walk = policy.walk(ids)
        nbytes, density = np.array([size[one]]), np.array([worth[one]])
        policy.used_chain(float(turn), walk, ids, TOKENS, 1, nbytes, density, 0)
    known = policy.configurations
    earned = policy.rates * size
    reached = policy.segments.configuration[:count]
    utility = (earned * np.maximum(worth - known.seconds[reached], 0)).sum()

    choices = np.unique(known.stores(np.array([0]), at_hand=True))
    choices = choices[choices >= 0]
    cost = -earned[:, None] * np.maximum(worth[:, None] - known.seconds[choices], 0)
    limits = lil_matrix((count + 2, count * len(choices)))
    for one in range(count):
        columns = slice(one * len(choices), (one + 1) * len(choices))
        limits[one, columns] = 1
        for tier in range(2):
            limits[count + tier, columns] = known.stored[choices, tier] * size[one]
    best = milp(
        cost.ravel(),
        constraints=LinearConstraint(
            limits.tocsr(),
            np.append(np.ones(count), [-np.inf] * 2),
            np.append(np.ones(count), capacity),
        ),
        integrality=np.ones(cost.size),
        bounds=Bounds(0, 1),
    )
    assert utility >= 0.95 * -best.fun


DECISIONS = 400


def decisions_among(segments: int) -> Callable[[], None]:
    """Return a call that makes room `DECISIONS` times with so many segments in the tier, once."""
    policy = EvicPress([RAW], RATES[:1], [int(segments * 16 * BLOCK)])
    ids = np.arange(16 * segments, dtype=np.int32).reshape(-1, 16)
    each, worth = np.full(16, BLOCK), np.full(16, DENSITY)
    for number, chain in enumerate(ids):
        policy.used_chain(number * 0.01, policy.walk(chain), chain, 8192, 16, each, worth, 0)

    def reclaims() -> None:
        for number in range(DECISIONS):
            chain = np.arange(16, dtype=np.int32) + 16 * (segments + number)
            now = (segments + number) * 0.01
            policy.used_chain(now, policy.walk(chain), chain, 8192, 16, each, worth, 0)

    return reclaims


def test_a_decision_costs_the_same_among_many() -> None:
    few, many = (work_of(decisions_among(segments)).calls for segments in (300, 4000))
    assert many < 1.5 * few
