"""Lineage: which copies may be made of which, over every pair of profiles, and what Moves free."""

import itertools

import pytest

from tests.frames import WHOLE, key_of
from tierkv import lineage, planner
from tierkv.allowance import Allowed
from tierkv.catalog import Catalog, Unit
from tierkv.codec import BY_NUMBER, INT4, INT8, KVTC, LOSSLESS, RAW, Profile
from tierkv.frame import NO_ARTIFACT
from tierkv.plan import Kind, Move, drops
from tierkv.policies.lru import Lru

PAGE = 4096
ARTIFACT = bytes([7]) * 32
KVTC4, KVTC8, KVTC16, KVTC32 = KVTC
ENDS = {"end1": 900, "end2": 5000, "end3": 9000}


def catalog(
    profile: Profile, *, allowed: tuple[Profile, ...] = tuple(BY_NUMBER.values())
) -> Catalog:
    """One placement of a profile in each tier of three."""
    made = Catalog(["host", "nvme", "redis"])
    made.part_number(WHOLE)
    made.let_encode([NO_ARTIFACT, ARTIFACT])
    artifacts = {one.number: ARTIFACT if one.levels else NO_ARTIFACT for one in allowed}
    number = made.allowances.number(
        {one.number: Allowed(2, 0.1, artifacts[one.number]) for one in allowed if one.lossy}
    )
    ends = ENDS if profile.levels == 4 else {}
    unit = Unit(key_of(1), 0, profile.number, 2, 0, 16_000, 4 * PAGE, 0, 0, 0, 0, number, **ends)
    for tier in 0, 1, 2:
        made.commit(made.begin(tier, [unit]))
    return made


def test_no_lossy_copy_is_ever_encoded_from_a_lossy_one() -> None:
    for old, new in itertools.product(BY_NUMBER.values(), repeat=2):
        if lineage.makes(catalog(old), 0, new.number):
            cut = old.codec_id == new.codec_id and new.levels < old.levels
            assert old == new or cut or not old.lossy, (old.name, new.name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (RAW, LOSSLESS), (RAW, INT8), (RAW, INT4), (LOSSLESS, INT8), (RAW, RAW), (INT8, INT8),
        (KVTC4, KVTC8), (KVTC4, KVTC16), (KVTC4, KVTC32), (RAW, KVTC4), (LOSSLESS, KVTC32),
    ],
    ids=lambda one: one.name,
)  # fmt: skip
def test_what_may_be_made(old: Profile, new: Profile) -> None:
    assert lineage.makes(catalog(old), 0, new.number)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (LOSSLESS, RAW), (INT8, KVTC8), (KVTC8, KVTC4), (INT8, INT4), (INT8, LOSSLESS),
        (KVTC4, INT8), (KVTC8, KVTC32),
    ],
    ids=lambda one: one.name,
)  # fmt: skip
def test_what_may_not_be_made(old: Profile, new: Profile) -> None:
    """The last pair is of a frame whose segments nobody knows."""
    assert not lineage.makes(catalog(old), 0, new.number)


def test_nothing_is_made_that_the_gate_does_not_allow() -> None:
    for old, new in itertools.product(BY_NUMBER.values(), repeat=2):
        made = lineage.makes(catalog(old, allowed=()), 0, new.number)
        assert not made or old == new or not new.lossy
    assert lineage.makes(catalog(KVTC4, allowed=(KVTC16,)), 0, KVTC16.number)
    assert not lineage.makes(catalog(KVTC4, allowed=(KVTC16,)), 0, KVTC8.number)


def test_nothing_is_encoded_where_nobody_can() -> None:
    made = catalog(RAW)
    made.let_encode([])
    assert lineage.makes(made, 0, RAW.number)
    assert not lineage.makes(made, 0, INT8.number)
    assert not lineage.makes(made, 0, LOSSLESS.number)


def test_only_who_has_the_artifact_that_was_measured_encodes_by_it() -> None:
    made = catalog(RAW)
    for artifacts in ([NO_ARTIFACT], [NO_ARTIFACT, bytes([9]) * 32]):
        made.let_encode(artifacts)
        assert lineage.makes(made, 0, INT8.number)
        assert not any(lineage.makes(made, 0, one.number) for one in KVTC)


def test_what_could_not_be_encoded_may_take_what_is_left() -> None:
    made = catalog(RAW)
    made.restate(0, fixed=lineage.NO_CALIBRATED)
    assert lineage.makes(made, 0, INT8.number)
    assert not lineage.makes(made, 0, KVTC8.number)
    made.restate(0, fixed=lineage.NOTHING)
    assert not lineage.makes(made, 0, INT8.number)
    assert lineage.makes(made, 0, RAW.number)


def test_a_profile_nobody_knows_is_only_dropped() -> None:
    made = catalog(RAW)
    made.profile[0] = 0
    assert not lineage.makes(made, 0, RAW.number)
    assert not lineage.lawful(made, Move(Kind.DEMOTE, 0, 1, 0))
    assert lineage.lawful(made, Move(Kind.DROP, 0, 0, 0))


def test_what_a_downgrade_frees_is_exact_in_the_granule() -> None:
    made = catalog(KVTC4)
    for profile, kept in ((KVTC8, 9000), (KVTC16, 5000), (KVTC32, 900)):
        assert lineage.cut(made, 0, profile.number) == kept
        move = Move(Kind.DOWNGRADE, 0, 0, profile.number)
        assert lineage.lawful(made, move)
        assert lineage.freed(made, move, PAGE) == 4 * PAGE - (kept + PAGE - 1) // PAGE * PAGE
    assert lineage.freed(made, Move(Kind.DROP, 0, 0, 0), PAGE) == 4 * PAGE
    assert lineage.freed(made, Move(Kind.DEMOTE, 0, 1, KVTC4.number), PAGE) == 4 * PAGE


@pytest.mark.parametrize("move", list(Kind))
def test_only_what_is_ready_moves(move: Kind) -> None:
    made = catalog(KVTC4)
    made.leave([0, 1, 2])
    assert not lineage.lawful(made, Move(move, 0, 0, KVTC8.number))


def test_what_is_held_is_not_cut_and_goes_nowhere_upwards() -> None:
    made = catalog(KVTC4)
    made.hold([0])
    assert not lineage.lawful(made, Move(Kind.DOWNGRADE, 0, 0, KVTC8.number))
    assert not lineage.lawful(made, Move(Kind.DEMOTE, 1, 0, KVTC4.number))
    assert not lineage.lawful(made, Move(Kind.DEMOTE, 0, 0, KVTC4.number))
    assert not lineage.lawful(made, Move(Kind.DEMOTE, 0, 3, KVTC4.number))
    assert not lineage.lawful(made, Move(Kind.DOWNGRADE, 0, 1, KVTC8.number))


def test_a_promotion_replaces_only_what_is_worse() -> None:
    made = catalog(KVTC4)
    assert not lineage.lawful(made, Move(Kind.PROMOTE, 1, 0, KVTC4.number))
    made.fidelity[0] = 1
    assert lineage.lawful(made, Move(Kind.PROMOTE, 1, 0, KVTC4.number))
    assert not lineage.lawful(made, Move(Kind.PROMOTE, 1, 0, KVTC8.number))
    made.fidelity[0] = 2
    assert not lineage.lawful(made, Move(Kind.PROMOTE, 1, 0, KVTC4.number))
    made.namespace[0] = 1
    assert lineage.lawful(made, Move(Kind.PROMOTE, 1, 0, KVTC4.number))
    made.hold([0])
    assert not lineage.lawful(made, Move(Kind.PROMOTE, 1, 0, KVTC4.number))
    made.unhold([0])
    made.leave([0])
    made.gone([0])
    assert lineage.lawful(made, Move(Kind.PROMOTE, 1, 0, KVTC4.number))


class Asked(Lru):
    """Answers what it is told to."""

    def __init__(self, moves: list[Move]) -> None:
        super().__init__(3)
        self.moves = moves

    def reclaim(self, view: Catalog, tier: int, need: int, *, at_once: bool) -> list[Move]:
        return self.moves


def test_a_plan_takes_what_may_be_until_it_is_enough() -> None:
    made = catalog(KVTC4)
    moves = [
        Move(Kind.DOWNGRADE, 0, 0, INT8.number),  # no such cut
        Move(Kind.DROP, 1, 1, 0),  # frees nothing here
        Move(Kind.DEMOTE, 0, 1, KVTC4.number),  # not at once
        Move(Kind.DOWNGRADE, 0, 0, KVTC8.number),
        *drops(made, [0]),
    ]
    plan = planner.plan_reclaim(Asked(moves), made, 0, 1, PAGE, at_once=True)
    assert (plan.moves, plan.freed, plan.refused) == (moves[3:4], PAGE, 3)
    plan = planner.plan_reclaim(Asked(moves), made, 0, 1, PAGE, at_once=False)
    assert (plan.moves, plan.freed, plan.refused) == (moves[2:3], 4 * PAGE, 2)
    assert planner.plan_reclaim(Asked(moves), made, 0, 0, PAGE, at_once=True).moves == []


def test_equal_allowances_have_one_number() -> None:
    made = Catalog(["host"])
    assert made.allowances.number({}) == 0
    one, other = Allowed(2, 0.1), Allowed(1, 0.2)
    first = made.allowances.number({3: one, 6: other})
    assert first == made.allowances.number({6: other, 3: one}) == 1
    assert made.allowances.number({3: one}) == 2
    assert made.allowances[1] == {3: one, 6: other}


def test_a_coarser_copy_promises_what_the_gate_measured_and_no_more_than_its_source() -> None:
    made = catalog(KVTC4)
    assert lineage.fidelity(made, 0, KVTC4.number) == 2
    made.allowance[0] = made.allowances.number({KVTC8.number: Allowed(1, 0.1)})
    assert lineage.fidelity(made, 0, KVTC8.number) == 1
    made.allowance[0] = made.allowances.number({KVTC8.number: Allowed(3, 0.1)})
    assert lineage.fidelity(made, 0, KVTC8.number) == 2
