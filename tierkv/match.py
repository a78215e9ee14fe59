"""Match: one client's question for a chain, until its lease ends. See `matches`."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierkv import windows
from tierkv.calls import MatchCall, MatchReply
from tierkv.catalog import NONE
from tierkv.cost import Recompute
from tierkv.key import KEY_BYTES
from tierkv.store import Numbers
from tierkv.windows import Windows

Done = Callable[[MatchReply], None]


@dataclass(slots=True)
class Match:
    """One client's question until its lease ends."""

    number: int
    owner: int
    call: MatchCall
    namespace: int
    asked: int
    """Blocks of the chain."""
    parts: list[int]
    deadline: float
    asked_at: float
    """Clock when it was asked, in seconds."""
    minimum: int
    """Minimum generation of its namespace then."""
    windows: Windows = ()
    """By part; (): no part has one."""
    reach: int = 0
    """With windows: blocks that the parts without one have, as far as is known."""
    ahead: int = 0
    """Blocks from the first on that its client has: nothing is held of them here."""
    rows: "array[int]" = field(default_factory=lambda: array("i"))
    """RAM placements held, by unit; NONE while a unit is on its way, of blocks ahead, and, with
    windows, where none is held."""
    awaited: dict[int, int] = field(default_factory=dict)
    """RAM rows on their way that this match wants -> unit."""
    pending: bool = False
    answer: MatchReply | None = None
    """The final answer."""
    eta_s: float = 0.0
    waited_s: float = 0.0
    sources: dict[str, int] = field(default_factory=dict)
    """Units held, by the tier they came from."""
    waiters: list[Done] = field(default_factory=list)
    entered: bool = False
    """It is in the ledger: of several claims the first one counts."""

    def keys(self, start: int, stop: int) -> list[bytes]:
        """Return the keys of some of the chain's blocks."""
        packed, end = self.call.keys, min(stop, self.asked) * KEY_BYTES
        return [packed[at : at + KEY_BYTES] for at in range(start * KEY_BYTES, end, KEY_BYTES)]

    @property
    def blocks(self) -> int:
        """Blocks of the longest hit that is held; 0 where the client has as many."""
        if self.windows:
            return windows.longest(self.grid(self.rows) != NONE, self.windows)
        gap, start = len(self.rows), self.ahead * len(self.parts)
        if self.pending and NONE in self.rows[start:]:
            gap = self.rows.index(NONE, start)
        found = gap // len(self.parts)
        return found if found > self.ahead else 0

    @property
    def whole(self) -> bool:
        """Whether an answer has every unit from the chain's first one on."""
        return not (self.windows or self.ahead)

    def behind(self, blocks: int) -> int:
        """Return how many of a hit's blocks are not those that the client has."""
        return max(blocks - self.ahead, 0)

    def recompute_s(self, blocks: int) -> float:
        """Return the seconds of computing so many blocks behind those that the client has."""
        call, tokens = self.call, self.call.tokens_per_block
        cost = Recompute(call.linear, call.quadratic)
        return cost.seconds(blocks * tokens, call.position + self.ahead * tokens)

    def grid(self, units: Sequence[int]) -> Numbers:
        """Return what is given by unit as (blocks, parts)."""
        return np.array(units, np.int32).reshape(-1, len(self.parts))

    def by_tier(self, blocks: int) -> dict[str, int]:
        """Return how many of `blocks` blocks came from each tier."""
        if not self.windows:
            return {name: units // len(self.parts) for name, units in self.sources.items()}
        found, seen, total = dict[str, int](), 0, max(sum(self.sources.values()), 1)
        for name, units in self.sources.items():
            found[name] = (seen + units) * blocks // total - seen * blocks // total
            seen += units
        return found
