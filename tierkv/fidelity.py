"""Fidelity: what a copy of a block promises about its values."""

import enum


class Fidelity(enum.IntEnum):
    """Classes in rising order; a reader that asks for one accepts it and everything above.

    The numbers are written in frames (docs/FORMAT.md) and never change meaning.
    """

    ECONOMY = 1
    SAFE = 2
    NEAR_LOSSLESS = 3
    EXACT = 4

    @property
    def label(self) -> str:
        """The name in settings, files and reports."""
        return self.name.lower()


FIDELITIES = {int(fidelity): fidelity for fidelity in Fidelity}
"""By number; ten times faster than asking the enum, and frames come by the thousand."""
CLASSES = {fidelity.label: fidelity for fidelity in reversed(Fidelity)}
"""By label, the best first."""
