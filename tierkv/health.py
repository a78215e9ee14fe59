"""Health: every tier tried by its own bounded probe; one that hangs delays no other answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tierkv.store import Store
from tierkv.tier import Tier

DEADLINE_S = 1.5
_HANGS = f"the medium did not answer within {DEADLINE_S} s"

Answer = Callable[[dict[str, str]], None]


@dataclass(slots=True)
class _Round:
    deadline: float
    answer: Answer
    waiting: set[str]
    problems: dict[str, str] = field(default_factory=dict)


def lane(tier: Tier) -> str:
    """Return the lane of a tier's probes; it has one thread."""
    return f"{tier.name}-probe"


class Health:
    """Rounds of probes under way. Called under the store's lock."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rounds: list[_Round] = []

    def probe(self, answer: Answer) -> None:
        """Try every tier; `answer` gets what is wrong by tier name, within the deadline."""
        store = self._store
        tiers: list[Tier] = [store.host, *(low.tier for low in store.lower)]
        names = {tier.name for tier in tiers}
        started = _Round(store.clock() + DEADLINE_S, answer, names)
        self._rounds.append(started)
        for tier in tiers:
            if store.executor.waiting(lane(tier)):
                self._note(started, tier.name, _HANGS)
            else:
                store.executor.submit(lane(tier), partial(self._try, started, tier))

    def tick(self) -> None:
        """Answer rounds past their deadline."""
        for late in [one for one in self._rounds if one.deadline <= self._store.clock()]:
            for name in sorted(late.waiting):
                self._note(late, name, _HANGS)

    def _try(self, started: _Round, tier: Tier) -> None:
        problem = tier.probe()
        with self._store.lock:
            self._note(started, tier.name, problem)

    def _note(self, started: _Round, name: str, problem: str) -> None:
        if name not in started.waiting:
            return
        started.waiting.discard(name)
        if problem:
            started.problems[name] = problem
        if not started.waiting:
            self._rounds.remove(started)
            started.answer(started.problems)
