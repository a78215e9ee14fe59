"""Reports: what a worker tells of its loads and saves, to vLLM and to the scheduler side."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Ended(NamedTuple):
    """A load that is over, by any outcome."""

    request: str
    unfilled: Sequence[int]
    """Engine blocks that were to be filled and were not."""
    classes: Mapping[int, int]
    """Store blocks that were filled, by the class of what they were filled from."""


class Saved(NamedTuple):
    """A save that is over."""

    offered: bytes
    """Keys of the store blocks that were new with it."""
    stored: bytes
    """Keys of those that it made visible; others had some of them already, or it gave them up."""
    fidelity: int


@dataclass
class Report:
    """What one rank tells the scheduler side with a step."""

    classes: dict[str, Mapping[int, int]] = field(default_factory=dict)
    """By request whose load is over."""
    saves: list[Saved] = field(default_factory=list)

    def merge(self, other: "Report") -> "Report":
        """Return what two ranks tell: of a load, what the one with less fidelity says."""
        both = dict(self.classes)
        for name, classes in other.classes.items():
            if name not in both or min(classes, default=0) < min(both[name], default=0):
                both[name] = classes
        return Report(both, self.saves + other.saves)


class Reports:
    """What became of loads and saves, until it is asked for. A lane may add to it at any time."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._over: deque[Ended] = deque()
        self._saves: deque[Saved] = deque()
        self._classes: dict[str, Mapping[int, int]] = {}
        self._unfilled: set[int] = set()
        self._failed: set[str] = set()

    def ended(self) -> set[str]:
        """Return the requests whose loads are over since the last call."""
        names: set[str] = set()
        while self._over:
            one = self._over.popleft()
            names.add(one.request)
            self._unfilled.update(one.unfilled)
            if one.classes:
                self._classes[one.request] = one.classes
            if one.unfilled:
                self._failed.add(one.request)
        return names

    def failed(self) -> set[str]:
        """Return those of the `ended` whose loads did not fill everything, since the last call."""
        names, self._failed = self._failed, set()
        return names

    def unfilled(self) -> set[int]:
        """Return the engine blocks that loads were to fill and did not, since the last call."""
        blocks, self._unfilled = self._unfilled, set()
        return blocks

    def report(self) -> Report | None:
        """Return what the scheduler side should know of since the last call, None: of nothing."""
        saves = [self._saves.popleft() for _ in range(len(self._saves))]
        classes, self._classes = self._classes, {}
        return Report(classes, saves) if saves or classes else None
