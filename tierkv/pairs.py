"""Pairs: the two copies that a unit may have in RAM, one of each family. Pure.

A plain copy (raw, lossless, a fixed rate) loads quickest and may serve exact readers. A progressive
one is small, and all that is coarser is cut from it: it can go down without being encoded, and may
stay when the plain one goes. Of a family RAM has at most one copy of a unit, in any state. A lower
tier, which finds a frame by its unit alone, has one in all.
"""

import numpy as np

from tierkv.catalog import NONE, READY, Catalog
from tierkv.codec import BY_NUMBER
from tierkv.tier import RAM

PROGRESSIVE = frozenset(number for number, profile in BY_NUMBER.items() if profile.levels)
"""Numbers of the profiles of that family; all others are plain."""
PROGRESSIVES = np.isin(np.arange(128), list(PROGRESSIVE))
"""The same, by number."""


def place(view: Catalog, head: int, profile: int, *, but: int = NONE) -> int:
    """Return who but one has the place in RAM of a copy of a profile; NONE where it is free."""
    progressive, tiers, profiles = profile in PROGRESSIVE, view.tier, view.profile
    for row in view.copies(head):
        if row != but and tiers[row] == RAM and (profiles[row] in PROGRESSIVE) == progressive:
            return row
    return NONE


def beside(view: Catalog, row: int) -> int:
    """Return the other copy in RAM of a placement's unit, in any state; NONE where there is none.

    Of a placement that lies below: the first one.
    """
    for copy in view.copies(view.head(view.key(row), view.part[row])):
        if copy != row and view.tier[copy] == RAM:
            return copy
    return NONE


def down(view: Catalog, row: int) -> int:
    """Return which copy in RAM is to be written below for a ready one.

    That is the progressive one, as far as the readers of the plain one may have it: what is made
    of both below is the same, and it is smaller. Else it is the plain one, which serves all.
    """
    other = beside(view, row)
    if other == NONE or view.state[other] != READY or not _same(view, row, other):
        return row
    small, plain = (row, other) if view.profile[row] in PROGRESSIVE else (other, row)
    return small if view.profile[small] in view.allowed(plain) else plain


def _same(view: Catalog, one: int, other: int) -> bool:
    return (view.namespace[one], view.generation[one]) == (
        view.namespace[other],
        view.generation[other],
    )
