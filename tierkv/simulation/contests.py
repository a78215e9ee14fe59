"""What a replay over modelled tiers asks of a policy, and the two that answer.

A policy's *pieces* are what it moves: blocks of `lru`, segments of `evicpress`. `find` says which
pieces of a prompt have a copy, from its head to the first that has none, and where the best copy
is; `use` follows with how many of them were loaded.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tierkv.policies.configurations import Form
from tierkv.policies.evicpress import EvicPress
from tierkv.policies.reuse import Reuse
from tierkv.simulation.scenario import Scenario
from tierkv.simulation.stack import Stack

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


class Prompt(NamedTuple):
    """A request: its blocks by number (int32), tokens, and raw bytes and worth of each block.

    `full` counts the full blocks, `density` is seconds of prefill for a raw byte. `closed`: the
    client has said that nobody goes on with it. `most_kl` is the loss that it bears, in nats.
    """

    now: float
    ids: npt.NDArray[np.int32]
    tokens: int
    full: int
    nbytes: Floats
    density: Floats
    closed: bool = False
    most_kl: float = np.inf


class Pieces(NamedTuple):
    """The stored head of a prompt: for each piece its blocks, raw bytes, tier and form."""

    blocks: Numbers
    nbytes: Floats
    tier: Numbers
    form: Numbers


class Contest(Protocol):
    """A policy over the tiers of a scenario."""

    forms: list[Form]

    def find(self, prompt: Prompt) -> Pieces:
        """Return the stored head of a prompt."""

    def use(self, prompt: Prompt, loaded: int) -> None:
        """The first `loaded` pieces were loaded and the rest computed: learn, store, make room."""

    def account(self) -> "Account":
        """Return what was moved so far."""


class Account(NamedTuple):
    """Bytes written to each tier, raw bytes encoded, decisions and moves by kind."""

    written: list[float]
    encoded: float
    decisions: int
    moved: dict[str, int]


class Lru:
    """Tail-first LRU with one profile."""

    def __init__(self, scenario: Scenario, distinct: int, form: Form) -> None:
        self.forms = [form]
        self._tiers = len(scenario.tier)
        self._stack = Stack(scenario.capacity, distinct)
        self._encoded = 0.0
        self._stored = 0

    def find(self, prompt: Prompt) -> Pieces:
        """See `Contest`."""
        tier = self._stack.tiers(prompt.ids)
        gone = tier == self._tiers
        head = int(gone.argmax()) if gone.any() else len(tier)
        return Pieces(
            np.ones(head, np.int64), prompt.nbytes[:head], tier[:head], np.zeros(head, np.int64)
        )

    def use(self, prompt: Prompt, loaded: int) -> None:
        """See `Contest`."""
        form = self.forms[0]
        if form.progressive:
            self._encoded += float(prompt.nbytes[loaded:].sum())
        self._stored += len(prompt.ids)
        self._stack.use(prompt.ids, prompt.nbytes / form.ratio)

    def account(self) -> Account:
        """See `Contest`."""
        written = self._stack.written.tolist()
        return Account(written, self._encoded, self._stored, {"stored": self._stored})


class Joint:
    """The joint policy."""

    def __init__(
        self,
        scenario: Scenario,
        fidelity: str,
        seed: int,
        reuse: Reuse | None = None,
        *,
        second_sight: bool = False,
    ) -> None:
        forms, rates = scenario.forms(fidelity), scenario.rates
        self._policy = EvicPress(
            forms, rates, scenario.capacity, seed, reuse, second_sight=second_sight
        )
        self.forms = self._policy.configurations.forms
        self._kl = np.array([form.kl for form in self.forms])

    def find(self, prompt: Prompt) -> Pieces:
        """See `Contest`."""
        self._walk = walk = self._policy.walk(prompt.ids)
        segments, known = self._policy.segments, self._policy.configurations
        configuration = segments.configuration[walk.rows]
        rows = walk.rows
        if (configuration == 0).any():
            rows = rows[: int((configuration == 0).argmax())]
        source = known.source[segments.configuration[rows]]
        borne = self._kl[source[:, 1]] <= prompt.most_kl
        if not borne.all():
            rows = rows[: int(borne.argmin())]
            source = source[: len(rows)]
        return Pieces(segments.blocks[rows], segments.nbytes[rows], source[:, 0], source[:, 1])

    def use(self, prompt: Prompt, loaded: int) -> None:
        """See `Contest`."""
        self._policy.used_chain(
            prompt.now,
            self._walk,
            prompt.ids,
            prompt.tokens,
            prompt.full,
            prompt.nbytes,
            prompt.density,
            loaded,
            closed=prompt.closed,
            most_kl=prompt.most_kl,
        )

    def account(self) -> Account:
        """See `Contest`."""
        policy = self._policy
        return Account(
            policy.written.tolist(), policy.encoded, policy.decisions, dict(policy.moved)
        )
