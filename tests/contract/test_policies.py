"""The policies of the service keep the contract; LRU is exact besides."""

import random
from collections import OrderedDict

import pytest

from tests.contract.policy_contract import SIZE, ServicePolicyContract, Shelf
from tierkv.policies.lru import KEEP_FROM, Lru


class TestLru(ServicePolicyContract):
    def make_policy(self, tiers: int) -> Lru:
        return Lru(tiers)

    @pytest.mark.parametrize("seed", range(4))
    def test_the_longest_unused_goes_first(self, seed: int) -> None:
        policy = Lru(2)
        shelf = Shelf(policy)
        rng = random.Random(seed)
        model: OrderedDict[int, None] = OrderedDict()
        for _ in range(3000):
            if rng.random() < 0.1 or not model:
                rows = shelf.chain(rng.randint(1, 5))
            else:
                rows = shelf.path(rng.choice(list(model)))
            policy.touched(shelf.catalog, rows)
            for row in reversed(rows):
                model[row] = None
                model.move_to_end(row)
            if len(model) > 60:
                gone = policy.victims(shelf.catalog, 0, 20 * SIZE)
                assert gone == list(model)[:20]
                shelf.drop(gone)
                for row in gone:
                    del model[row]
        assert policy.oldest(list(model)) == list(model)

    def test_what_was_used_lately_survives_a_reclaim(self) -> None:
        policy = Lru(2)
        shelf = Shelf(policy)
        rows = shelf.add(100, tier=1)
        for row in rows:
            policy.touched(shelf.catalog, [row])
        kept = policy.keeps(shelf.catalog, 1, rows)
        assert kept == [index > 100 * KEEP_FROM for index in range(100)]

    def test_what_was_lost_does_not_make_the_rest_hot(self) -> None:
        """A log frees whole regions, and asks for no victims meanwhile."""
        policy = Lru(2)
        shelf = Shelf(policy)
        rows = shelf.add(1000, tier=1)
        for row in rows:
            policy.touched(shelf.catalog, [row])
        shelf.drop(rows[:900])
        kept = policy.keeps(shelf.catalog, 1, rows[900:])
        assert kept == [index > 100 * KEEP_FROM for index in range(100)]

    def test_the_queue_stays_as_long_as_what_it_names(self) -> None:
        policy = Lru(1)
        shelf = Shelf(policy)
        rows = shelf.chain(100)
        for _ in range(1000):
            shelf.touch(rows[-1])
        assert len(policy._queues[0].rows) < 10_000
