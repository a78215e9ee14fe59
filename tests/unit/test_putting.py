"""What a put is encoded with: a second copy where it pays, and nowhere else."""

import numpy as np
import numpy.typing as npt
import pytest

from tests.stores import chain
from tierkv.catalog import Catalog
from tierkv.codec import PROFILES
from tierkv.cost import Rates, Recompute
from tierkv.policies.placed import Placed
from tierkv.policies.putting import Putting
from tierkv.policies.steps import Steps
from tierkv.policies.worth import gains
from tierkv.policy import Picked
from tierkv.use import Use

Numbers = npt.NDArray[np.int64]
HOST, DISK = Rates(2e-5, 50e9, 50e9), Rates(1e-4, 2e9, 2e9)
KEYS = b"".join(chain(1, 4))
RAW_BYTES = 1 << 20
OFFERED = ("raw", "int8", "kvtc@4x", "kvtc@8x")


def picked(
    linear: float, price: list[float], offered: tuple[str, ...] = OFFERED, lower: int = 1
) -> Picked:
    """Return what is picked for a chain that was asked for, at prices of a byte in each tier."""
    rates = [HOST, *[DISK] * lower]
    steps, placed = Steps(rates), Placed(len(rates))
    view = Catalog(["host", "nvme"][: len(rates)])
    placed.use(view, Use(1.0, KEYS, (0,), 0, 128, RAW_BYTES, b"m", Recompute(linear, 0.0)))
    density = placed.segments.density

    def gain(rows: Numbers, current: Numbers, choices: Numbers) -> npt.NDArray[np.float64]:
        rate = np.full(len(rows), 0.01)
        return gains(steps.known, np.array(price), rate, density[rows], current, choices)

    putting = Putting(steps, placed, gain)
    choices = [PROFILES[name] for name in offered]
    return putting.picks(KEYS, [False] * 4, choices, priced=True)


def numbers(*names: str) -> Picked:
    return Picked(*(PROFILES[name].number for name in names))


CHEAP, DEAR = 1e-12, 1e-9
SLOW = 4e-3
"""Seconds of prefill for a token, beside which kvtc's decoding is nothing."""


@pytest.mark.parametrize(
    ("linear", "price", "expected"),
    [
        (SLOW, [CHEAP, DEAR], ("raw", "kvtc@4x")),  # room near and none below
        (SLOW, [CHEAP, CHEAP], ("raw",)),
        (SLOW, [DEAR, DEAR], ("kvtc@4x",)),
    ],
)
def test_two_copies_are_made_where_each_earns_most_in_its_place(
    linear: float, price: list[float], expected: tuple[str, ...]
) -> None:
    assert picked(linear, price) == numbers(*expected)


def test_there_is_one_copy_where_two_do_not_pay() -> None:
    pair = numbers("raw", "kvtc@4x")
    assert picked(SLOW, [CHEAP, DEAR]) == pair
    assert picked(SLOW / 20, [CHEAP, DEAR]).beside == 0, "decoding takes as long as it saves"
    assert picked(SLOW, [CHEAP], lower=0).beside == 0, "nothing goes down"
    assert picked(SLOW, [CHEAP, DEAR], ("raw", "int8")).beside == 0
    assert picked(SLOW, [CHEAP, DEAR], ("kvtc@8x",)) == numbers("kvtc@8x")
