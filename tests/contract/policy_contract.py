"""The contracts that policies keep, as suites to inherit.

class TestLru(ServicePolicyContract):
    def make_policy(self, tiers: int) -> ServicePolicy: ...

`PolicyContract` is for all; `ServicePolicyContract` adds what the service relies on: of a chain the
tail goes before the head. What the literature publishes does not know chains.
"""

import random
from collections.abc import Iterator

import pytest

from tests.frames import WHOLE, key_of
from tests.work import Work, work_of
from tierkv.catalog import READY, Catalog, Unit
from tierkv.policy import Policy, ServicePolicy

SIZE = 4096


class Shelf:
    """A catalog with chains of placements, and a policy that is told of them.

    Args:
        policy: under test.
        tails_first: every answer must leave no tail behind its head.
    """

    def __init__(self, policy: Policy, *, tails_first: bool = True) -> None:
        self.policy = policy
        self.tails_first = tails_first
        self.catalog = Catalog(["host", "nvme"])
        self.catalog.part_number(WHOLE)
        self.parent: dict[int, int] = {}
        self._next = 0

    def add(self, count: int, *, tier: int = 0, size: int = SIZE, ready: bool = True) -> list[int]:
        """Make placements."""
        numbers = range(self._next, self._next + count)
        self._next += count
        units = [Unit(key_of(n), 0, 1, 4, 0, size, size, n, 0, 0, 0) for n in numbers]
        rows = self.catalog.begin(tier, units)
        if ready:
            self.catalog.commit(rows)
        return rows

    def chain(self, count: int, behind: int = -1, *, tier: int = 0, size: int = SIZE) -> list[int]:
        """Make a chain, or a branch behind a placement; untouched."""
        rows = self.add(count, tier=tier, size=size)
        for row, parent in zip(rows, [behind, *rows[:-1]], strict=True):
            self.parent[row] = parent
        return rows

    def mirror(self, rows: list[int], tier: int) -> list[int]:
        """Make copies of a chain in another tier, untouched."""
        keys = [self.catalog.key(row) for row in rows]
        copies = self.catalog.begin(
            tier, [Unit(key, 0, 1, 4, 0, SIZE, SIZE, n, 0, 0, 0) for n, key in enumerate(keys)]
        )
        self.catalog.commit(copies)
        for row, parent in zip(copies, [-1, *copies[:-1]], strict=True):
            self.parent[row] = parent
        return copies

    def path(self, row: int) -> list[int]:
        """Return a placement and all before it, head first."""
        out: list[int] = []
        while row != -1:
            out.insert(0, row)
            row = self.parent[row]
        return out

    def touch(self, row: int) -> None:
        """Use the chain that ends here."""
        self.policy.touched(self.catalog, self.path(row))

    def drop(self, rows: list[int]) -> None:
        """Give placements up."""
        self.catalog.leave(rows)
        self.catalog.gone(rows)
        self.policy.forgot(rows)
        for row in rows:
            self.parent.pop(row, None)
        for row, parent in self.parent.items():
            if parent in rows:  # only where tails need not go first
                self.parent[row] = -1

    def victims(self, need: int, tier: int = 0) -> list[int]:
        """Ask, and check what every answer keeps."""
        rows = self.policy.victims(self.catalog, tier, need)
        sizes = self.catalog.allocated
        assert len(set(rows)) == len(rows)
        for row in rows:
            assert self.catalog.state[row] == READY
            assert not self.catalog.holds[row]
            assert self.catalog.tier[row] == tier
        if need > 0 and rows:
            assert sum(sizes[row] for row in rows[:-1]) < need, "more than was asked for"
        for row, parent in self.parent.items() if self.tails_first else ():
            usable = self.catalog.state[row] == READY and not self.catalog.holds[row]
            assert parent not in rows or row in rows or not usable, "a head goes before its tail"
        return rows


class PolicyContract:
    """Inherit and implement `make_policy`."""

    TAILS_FIRST = False

    def make_policy(self, tiers: int) -> Policy:
        """Return a policy that was told of nothing."""
        raise NotImplementedError

    @pytest.fixture
    def shelf(self) -> Iterator[Shelf]:
        shelf = Shelf(self.make_policy(2), tails_first=self.TAILS_FIRST)
        yield shelf
        shelf.victims(1 << 40)

    def test_nothing_is_given_up_for_nothing(self, shelf: Shelf) -> None:
        rows = shelf.chain(4)
        shelf.touch(rows[-1])
        assert shelf.victims(0) == []
        assert shelf.victims(-1) == []
        assert shelf.victims(1, tier=1) == []

    def test_enough_is_given_up_or_all(self, shelf: Shelf) -> None:
        rows = shelf.chain(10)
        shelf.touch(rows[-1])
        for need, count in (1, 1), (SIZE, 1), (SIZE + 1, 2), (10 * SIZE, 10), (1 << 50, 10):
            assert len(shelf.victims(need)) == count

    def test_asking_changes_nothing(self, shelf: Shelf) -> None:
        rows = shelf.chain(10)
        shelf.touch(rows[-1])
        assert shelf.victims(3 * SIZE) == shelf.victims(3 * SIZE)

    def test_held_and_unfinished_placements_stay(self, shelf: Shelf) -> None:
        rows = shelf.chain(6)
        shelf.touch(rows[-1])
        writing = shelf.add(2, ready=False)
        shelf.policy.touched(shelf.catalog, writing)
        shelf.catalog.hold(rows[:4])
        assert set(shelf.victims(1 << 40)) == set(rows[4:])
        shelf.catalog.unhold(rows[:4])
        assert set(shelf.victims(1 << 40)) == set(rows)
        shelf.catalog.commit(writing)
        assert set(shelf.victims(1 << 40)) == set(rows) | set(writing)

    def test_tiers_are_kept_apart(self, shelf: Shelf) -> None:
        rows = shelf.chain(4)
        below = shelf.mirror(rows, 1)
        shelf.policy.touched(
            shelf.catalog, [row for pair in zip(rows, below, strict=True) for row in pair]
        )
        assert len(shelf.victims(2 * SIZE, tier=1)) == 2
        assert set(shelf.victims(1 << 40, tier=1)) == set(below)
        assert set(shelf.victims(1 << 40)) == set(rows)

    def test_a_row_that_comes_back_is_another(self, shelf: Shelf) -> None:
        old = shelf.chain(4)
        shelf.touch(old[-1])
        shelf.drop(old)
        assert shelf.victims(1 << 40) == []
        new = shelf.chain(4)
        assert set(new) == set(old)
        shelf.touch(new[-1])
        assert len(shelf.victims(2 * SIZE)) == 2
        assert set(shelf.victims(1 << 40)) == set(new)

    def test_rows_may_go_before_they_were_ever_touched(self, shelf: Shelf) -> None:
        rows = shelf.add(3000, ready=False)
        shelf.catalog.abort(rows)
        shelf.policy.forgot(rows)
        assert shelf.victims(1) == []

    def test_an_offer_is_answered_with_how_many(self, shelf: Shelf) -> None:
        keys = [key_of(number) for number in range(900, 905)]
        assert 0 <= shelf.policy.offered(shelf.catalog, 0, keys) <= len(keys)
        assert shelf.policy.offered(shelf.catalog, 0, []) == 0

    @pytest.mark.parametrize("seed", range(6))
    def test_answers_hold_over_a_growing_and_shrinking_tree(self, shelf: Shelf, seed: int) -> None:
        """`Shelf.victims` looks at every answer; what is left is still known at the end."""
        rng = random.Random(seed)
        for _ in range(400):
            alive = list(shelf.parent)
            act = rng.random()
            if act < 0.35 or not alive:
                behind = rng.choice([-1, *alive])
                shelf.policy.offered(shelf.catalog, 0, [key_of(rng.randrange(1000))])
                rows = shelf.chain(rng.randint(1, 4), behind, size=SIZE * rng.randint(1, 4))
                shelf.touch(rows[-1])
            elif act < 0.7:
                shelf.touch(rng.choice(alive))
            else:
                shelf.drop(shelf.victims(SIZE * rng.randint(1, 12)))
        assert set(shelf.victims(1 << 40)) == set(shelf.parent)

    def test_many_uses_stay_cheap(self, shelf: Shelf) -> None:
        """A decision costs what it gives up, however much was used before."""
        chains = [shelf.chain(50) for _ in range(20)]

        def work_after(uses: int) -> Work:
            for turn in range(uses):
                shelf.touch(chains[turn * 7 % 20][-1])
            shelf.victims(SIZE)  # the first one may tidy up what the uses left, once
            return work_of(lambda: [shelf.policy.victims(shelf.catalog, 0, SIZE) for _ in range(9)])

        few, many = work_after(40), work_after(2000)
        assert many.calls <= 1.2 * few.calls
        assert many.nbytes <= 1.2 * few.nbytes


class ServicePolicyContract(PolicyContract):
    """Inherit and implement `make_policy`."""

    TAILS_FIRST = True

    def make_policy(self, tiers: int) -> ServicePolicy:
        raise NotImplementedError

    def test_a_chain_goes_tail_first(self, shelf: Shelf) -> None:
        rows = shelf.chain(8)
        shelf.touch(rows[-1])
        assert set(shelf.victims(3 * SIZE)) == set(rows[5:])

    def test_a_head_in_two_calls_stays_before_its_tail(self, shelf: Shelf) -> None:
        """R24: the head came in an earlier call than the tail."""
        rows = shelf.chain(2)
        shelf.touch(rows[-1])
        tail = shelf.chain(2, behind=rows[-1])
        shelf.touch(tail[-1])
        assert set(shelf.victims(2 * SIZE)) == set(tail)

    def test_a_branch_keeps_its_trunk(self, shelf: Shelf) -> None:
        trunk = shelf.chain(3)
        one, two = shelf.chain(3, behind=trunk[-1]), shelf.chain(3, behind=trunk[-1])
        shelf.touch(one[-1])
        shelf.touch(two[-1])
        assert not set(shelf.victims(6 * SIZE)) & set(trunk)

    def test_each_tier_goes_tail_first(self, shelf: Shelf) -> None:
        rows = shelf.chain(4)
        below = shelf.mirror(rows, 1)
        shelf.policy.touched(
            shelf.catalog, [row for pair in zip(rows, below, strict=True) for row in pair]
        )
        assert set(shelf.victims(2 * SIZE, tier=1)) == set(below[2:])
        assert set(shelf.victims(2 * SIZE)) == set(rows[2:])

    def test_answers_about_rows_fit_the_rows(self) -> None:
        policy = self.make_policy(2)
        shelf = Shelf(policy)
        rows = shelf.chain(8)
        shelf.touch(rows[-1])
        assert sorted(policy.oldest(rows)) == sorted(rows)
        assert policy.oldest([]) == []
        assert len(policy.keeps(shelf.catalog, 0, rows)) == len(rows)
        assert policy.keeps(shelf.catalog, 0, []) == []
