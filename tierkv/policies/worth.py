"""Worth: what a set of copies earns, and what a step away from it loses. Pure, per raw byte.

rate * max(T_recompute - T_load, 0)  -  sum over tiers of price * stored bytes
"""

import numpy as np
import numpy.typing as npt

from tierkv.policies.configurations import ABSENT, Configurations

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

MEMORY = 0.05
"""Weight of the newest price."""
FLOOR = 0.03
"""The share of sampled segments that earn less than the price of a full tier at rest."""

MOVE = 1e-30
"""What a move of what is dead loses a byte: less than anything that can be lost."""


def moved(price: float, worth: float, given_up: int) -> float:
    """Return a tier's price when so many were given up, each worth so much a byte."""
    fade: float = (1 - MEMORY) ** given_up
    return fade * price + (1 - fade) * worth


def gains(
    known: Configurations,
    price: Floats,
    rate: Floats,
    density: Floats,
    current: Numbers,
    choices: Numbers,
) -> Floats:
    """Return what each choice earns more than the current rent, a second: (n, choices).

    Args:
        known: the configurations.
        price: of a stored byte in each tier, per second.
        rate: (n,) uses per second.
        density: (n,) seconds of prefill that a raw byte stands for.
        current: (n,) configurations.
        choices: (n, choices) configurations, ABSENT where there is none: minus infinity then.
    """
    saved = np.maximum(density[:, None] - known.seconds[choices], 0)
    rent = known.stored[choices] @ price - (known.stored[current] @ price)[:, None]
    return np.where(choices == ABSENT, -np.inf, rate[:, None] * saved - rent)


def losses(
    known: Configurations,
    price: Floats,
    tier: int,
    rate: Floats,
    density: Floats,
    current: Numbers,
    steps: Numbers,
) -> tuple[Floats, Floats]:
    """Return what each step loses per byte that it frees in a tier, and the bytes it frees there.

    Args: as `gains`; `steps` (n, steps). Infinity where there is no step, or it frees nothing.

    Of steps that lose the same the first is to be taken, which may be a move to a tier that has
    room: it holds a second copy for nothing. What nobody will use is not worth a move.
    """
    before = np.maximum(density - known.seconds[current], 0)[:, None]
    lost = rate[:, None] * (before - np.maximum(density[:, None] - known.seconds[steps], 0))
    change = known.stored[steps] - known.stored[current][:, None]
    freed = -change[:, :, tier]
    rent = change @ np.where(np.arange(len(price)) == tier, 0.0, price)
    loss = (lost + rent) / np.where(freed > 0, freed, np.inf)
    dead = rate == 0
    loss[dead] += MOVE * (change[dead] > 0).any(axis=2)
    loss[(steps == ABSENT)] = np.inf
    return loss, freed
