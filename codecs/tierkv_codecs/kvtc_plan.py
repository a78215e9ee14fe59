"""The bit plan of `kvtc`: which components are coded, and how finely, by dynamic programming.

Components stand in order of falling variance and are cut into consecutive groups of 1, 16, 64, 256
or 1024; a group has one type (a shift, or none). The plan minimises the summed squared error of
held-out rows subject to a budget in bits per token that counts what the entropy stage really
writes (KVTC, arXiv 2511.01815, section 3; its per-token scales are not needed, because a step is
calibrated once). Nested plans keep every component at least as fine as the coarser plan has it.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

SIZES = (1, 16, 64, 256, 1024)
ALIGNED = 16
Floats = NDArray[np.float64]
Types = NDArray[np.int8]


class Choices(NamedTuple):
    """What each type of each component costs: float64 [components, types] each.

    error: squared error of one token; bits: code length of one token. Both of held-out rows. Types
    stand from the finest to the coarsest; the last is not coding it at all.
    """

    error: Floats
    bits: Floats

    def nested(self, coarser: Types) -> "Choices":
        """Return the choices when no component may be coarser than it is in `coarser` [r]."""
        index = np.minimum(np.arange(self.error.shape[1])[None, :], coarser[:, None])
        return Choices(
            np.take_along_axis(self.error, index, 1), np.take_along_axis(self.bits, index, 1)
        )


class Table(NamedTuple):
    """The dynamic program of one side, solved for every budget up to one.

    error: float64 [budget + 1], the least error within each budget.
    picks: int8 [components + 1, budget + 1], the number of the last group's size and type.
    costs: int64 [sizes, components, types], of a group by its start; in units of the budget.
    """

    error: Floats
    picks: NDArray[np.int8]
    costs: NDArray[np.int64]

    def plan(self, budget: int) -> Types:
        """Return the type of each component, int8 [components], for one budget."""
        position = len(self.picks) - 1
        plan = np.empty(position, np.int8)
        while position:
            number, kind = divmod(int(self.picks[position, budget]), self.costs.shape[2])
            start = position - SIZES[number]
            plan[start:position] = kind
            budget -= int(self.costs[number, start, kind])
            position = start
        return plan


def solve(choices: Choices, budget: int, unit: int = 1) -> Table:
    """Solve for all budgets of 0 to `budget` units of so many bits per token.

    The cost of a group is rounded up to whole units, so small groups pay for being small. Groups
    of more than one component start at multiples of ALIGNED.
    """
    components, types = choices.error.shape
    costs = np.zeros((len(SIZES), components, types), np.int64)
    errors = np.zeros((len(SIZES), components, types))
    for number, size in enumerate(SIZES):
        window = max(components - size + 1, 0)
        sums = [np.concatenate([np.zeros((1, types)), np.cumsum(part, 0)]) for part in choices]
        error, bits = (total[size:][:window] - total[:window] for total in sums)
        errors[number, :window] = error
        costs[number, :window] = np.ceil(bits / unit - 1e-6)
    best, picks = _solve(errors, costs, budget, np.array(SIZES))
    return Table(best, picks, costs)


@njit(nogil=True, cache=True)
def _solve(errors, costs, budget, sizes):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    numbers, components, types = errors.shape
    rows = sizes.max() + 1
    best = np.full((rows, budget + 1), np.inf)
    best[0] = 0.0
    picks = np.zeros((components + 1, budget + 1), np.int8)
    for stop in range(1, components + 1):
        row = best[stop % rows]
        row[:] = np.inf
        for number in range(numbers):
            start = stop - sizes[number]
            if start < 0 or (sizes[number] > 1 and start % ALIGNED):
                continue
            before = best[start % rows]
            for kind in range(types):
                cost, error = costs[number, start, kind], errors[number, start, kind]
                pick = number * types + kind
                for spent in range(cost, budget + 1):
                    found = before[spent - cost] + error
                    if found < row[spent]:
                        row[spent] = found
                        picks[stop, spent] = pick
    return best[components % rows].copy(), picks


def split(first: Table, second: Table, budget: int) -> tuple[int, int]:
    """Return how much each of two sides gets so that their errors together are least."""
    most = [len(table.error) - 1 for table in (first, second)]
    pairs = [(one, budget - one) for one in range(budget + 1)]
    return min(
        (pair for pair in pairs if pair[0] <= most[0] and pair[1] <= most[1]),
        key=lambda pair: first.error[pair[0]] + second.error[pair[1]],
    )
