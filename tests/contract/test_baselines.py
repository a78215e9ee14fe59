"""What the service's policies are compared with keeps the contract as well."""

import numpy as np
import pytest

from tests.contract.policy_contract import SIZE, PolicyContract, Shelf
from tierkv.catalog import Catalog
from tierkv.policies.lru import Lru
from tierkv.policy import Policy
from tierkv.simulation.policies.arc import Arc
from tierkv.simulation.policies.belady import Belady
from tierkv.simulation.policies.gdsf import Gdsf
from tierkv.simulation.policies.order import PromptOrder
from tierkv.simulation.policies.s3fifo import S3Fifo

CAPACITY = 64 * SIZE


class TestLruInPromptOrder(PolicyContract):
    def make_policy(self, tiers: int) -> Policy:
        return PromptOrder(Lru(tiers))

    def test_a_chain_goes_head_first(self, shelf: Shelf) -> None:
        rows = shelf.chain(8)
        shelf.touch(rows[-1])
        assert shelf.victims(3 * SIZE) == rows[:3]


class TestArc(PolicyContract):
    def make_policy(self, tiers: int) -> Policy:
        return Arc([CAPACITY] * tiers)

    def test_what_is_used_again_outlasts_what_is_not(self, shelf: Shelf) -> None:
        rows = shelf.chain(2)
        shelf.touch(rows[-1])
        shelf.touch(rows[-1])
        later = shelf.chain(6)
        shelf.touch(later[-1])
        assert shelf.victims(8 * SIZE) == [*later[::-1], *rows[::-1]]


class TestS3Fifo(PolicyContract):
    def make_policy(self, tiers: int) -> Policy:
        return S3Fifo([CAPACITY] * tiers)

    def test_a_use_saves_what_was_to_leave(self, shelf: Shelf) -> None:
        rows = shelf.chain(20)
        shelf.touch(rows[-1])
        (first,) = shelf.victims(SIZE)
        shelf.policy.touched(shelf.catalog, [first])
        assert first not in shelf.victims(12 * SIZE)
        assert first in shelf.victims(20 * SIZE)


def one_second(_view: Catalog, _row: int) -> float:
    return 1.0


def by_position(view: Catalog, row: int) -> float:
    return 1.0 + view.locator[row]


class TestGdsf(PolicyContract):
    TAILS_FIRST = True

    def make_policy(self, tiers: int) -> Policy:
        return Gdsf(tiers, one_second)

    def test_what_saves_more_per_byte_stays(self) -> None:
        shelf = Shelf(Gdsf(1, lambda view, row: 5.0 if row == 1 else 1.0))
        rows = [shelf.chain(1, size=size)[0] for size in (SIZE, SIZE, 4 * SIZE)]
        for row in rows:
            shelf.touch(row)
        assert shelf.victims(1 << 40) == [2, 0, 1]

    def test_old_uses_fade(self, shelf: Shelf) -> None:
        often, *others = (shelf.chain(1)[0] for _ in range(12))
        for _ in range(4):
            shelf.touch(often)
        gone: set[int] = set()
        for row in others:
            shelf.touch(row)
            (leaves,) = shelf.victims(SIZE)
            shelf.drop([leaves])
            gone.add(leaves)
        assert often in gone


class TestGdsfOverPositions(PolicyContract):
    """Tails save more than heads here, and still leave first."""

    TAILS_FIRST = True

    def make_policy(self, tiers: int) -> Policy:
        return Gdsf(tiers, by_position)


class TestBelady(PolicyContract):
    def make_policy(self, tiers: int) -> Policy:
        return Belady(1 << 40, np.arange(1, 200_001))

    def test_what_never_comes_again_is_declined(self) -> None:
        policy = Belady(4, np.array([2, 3, 3]))
        view = Catalog(["host"])
        assert policy.offered(view, 0, [b"a"]) == 1
        assert policy.offered(view, 0, [b"b"]) == 0


@pytest.mark.parametrize("policy", [Arc([1, 1]), S3Fifo([1, 1])], ids=lambda each: each.name)
def test_a_tier_smaller_than_a_block_works(policy: Policy) -> None:
    shelf = Shelf(policy, tails_first=False)
    for _ in range(5):
        rows = shelf.chain(3)
        shelf.touch(rows[-1])
        shelf.drop(shelf.victims(1 << 40))
    assert shelf.victims(1) == []
