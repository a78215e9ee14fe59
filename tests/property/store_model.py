"""What a store may answer, as a plain dict: the model beside the state machine."""

import itertools
from dataclasses import dataclass, field

from tierkv import calls
from tierkv.client import Transfer
from tierkv.reservation import Reservation

Unit = tuple[bytes, bytes]
"""Key and packed part."""
Copy = tuple[int, bytes]
"""Fidelity and payload."""


@dataclass
class Model:
    """Every copy that may be served, by namespace and unit; and what must be found again."""

    copies: dict[str, dict[Unit, list[Copy]]] = field(default_factory=dict)
    unanswered: dict[str, dict[Unit, list[Copy]]] = field(default_factory=dict)
    """What clears took that were not answered yet: a crash may bring it back."""
    cleared: dict[str, int] = field(default_factory=dict)
    durable: set[tuple[str, Unit]] = field(default_factory=set)
    serial: "itertools.count[int]" = field(default_factory=itertools.count)

    def add(self, namespace: str, unit: Unit, copy: Copy) -> None:
        """Note a commit; what it replaces need not be found again."""
        self.copies.setdefault(namespace, {}).setdefault(unit, []).append(copy)
        self.durable = {(space, known) for space, known in self.durable if known != unit}

    def allowed(self, namespace: str, unit: Unit, fidelity: int) -> list[bytes]:
        found = self.copies.get(namespace, {}).get(unit, [])
        return [data for served, data in found if served >= fidelity]

    def is_alone(self, namespace: str, unit: Unit) -> bool:
        """Whether no copy of another namespace or class may take a unit's place below RAM."""
        others = {space for space, units in self.copies.items() if unit in units}
        classes = {fidelity for fidelity, _ in self.copies.get(namespace, {}).get(unit, [])}
        return others == {namespace} and len(classes) == 1

    def generation(self, namespace: str) -> int:
        return self.cleared.get(namespace, 0)

    def clear(self, namespace: str) -> None:
        """From the call on nothing of before is served by this process."""
        old = self.copies.pop(namespace, {})
        kept = self.unanswered.setdefault(namespace, {})
        for unit, copies in old.items():
            kept.setdefault(unit, []).extend(copies)
        self.cleared[namespace] = self.generation(namespace) + 1
        self.durable = {(space, unit) for space, unit in self.durable if space != namespace}

    def crash(self) -> None:
        """Clears without an answer may or may not have happened."""
        for namespace, units in self.unanswered.items():
            for unit, copies in units.items():
                self.copies.setdefault(namespace, {}).setdefault(unit, []).extend(copies)
        self.unanswered.clear()


@dataclass
class OpenPut:
    """A reservation that nobody ended yet."""

    owner: int
    held: Reservation
    namespace: str
    fidelity: int
    units: list[Unit]
    raw: int
    generation: int


@dataclass
class OpenMatch:
    """A match that nobody ended yet, as far as its client knows."""

    owner: int
    call: calls.MatchCall
    reply: calls.MatchReply


@dataclass
class OpenTransfer:
    """A transfer with what it showed when it was opened."""

    owner: int
    transfer: Transfer
    seen: list[tuple[list[memoryview], bytes]]

    def unchanged(self) -> bool:
        return all(b"".join(pieces) == data for pieces, data in self.seen)
