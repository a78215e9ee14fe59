"""Allowance: the lossy profiles that a block may take, each with its class and its loss.

The gate is asked once, when a block is put, since only then model, artifact, context and readers
are all known; what it says is noted by number beside the block's placements. Blocks of many puts
have equal allowances, which have one number.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tierkv.frame import NO_ARTIFACT


class Allowed(NamedTuple):
    """What a block promises in a profile, a number of `Fidelity`, and its nats lost per token.

    `artifact` is the digest of the calibration with which that was measured.
    """

    fidelity: int
    kl: float
    artifact: bytes = NO_ARTIFACT


Allowance = Mapping[int, Allowed]
"""By the profile's number."""

MOST = 1 << 15
"""They differ as the gate's entries do, by model and length of context; beyond it: nothing."""


class Allowances:
    """Allowances by number; 0 is that of nothing."""

    def __init__(self) -> None:
        self._every: list[Allowance] = [{}]
        self._numbers: dict[frozenset[tuple[int, Allowed]], int] = {frozenset(): 0}

    def __getitem__(self, number: int) -> Allowance:
        """Return the allowance of a number."""
        return self._every[number]

    def __len__(self) -> int:
        """Return the count of numbers."""
        return len(self._every)

    def number(self, allowance: Allowance) -> int:
        """Return the number of an allowance."""
        name = frozenset(allowance.items())
        number = self._numbers.get(name)
        if number is None:
            if len(self) >= MOST:
                return 0
            number = self._numbers[name] = len(self)
            self._every.append(allowance)
        return number
