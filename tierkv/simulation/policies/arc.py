"""ARC (Megiddo and Modha, FAST 2003): two LRU lists, and two of what they gave up lately.

`recent` holds what was used once, `frequent` what was used again. A miss that a ghost list still
remembers moves the share of the tier that `recent` may take, towards the list that would have had
it. Sizes are bytes; with equal blocks it is the published rule. Chains are used from tail to head.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tierkv.catalog import NONE, READY, Catalog
from tierkv.simulation.policies.queues import ByTier


class _Kept(NamedTuple):
    key: bytes
    size: int


class _List:
    """Entries by row or, of ghosts, by key, the longest unused first, and their bytes."""

    def __init__(self) -> None:
        self.entries: OrderedDict[int | bytes, _Kept] = OrderedDict()
        self.bytes = 0

    def __contains__(self, name: int | bytes) -> bool:
        return name in self.entries

    def add(self, name: int | bytes, kept: _Kept) -> None:
        self.entries[name] = kept
        self.bytes += kept.size

    def take(self, name: int | bytes) -> _Kept:
        kept = self.entries.pop(name)
        self.bytes -= kept.size
        return kept

    def drop_oldest(self) -> None:
        self.bytes -= self.entries.popitem(last=False)[1].size


class _Tier:
    """The four lists of a tier."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.recent, self.frequent = _List(), _List()
        self.recent_ghosts, self.frequent_ghosts = _List(), _List()
        self.target = 0.0
        """Bytes that `recent` may take."""
        self.returns = False
        """What comes next was given up by `frequent`."""

    def use(self, row: int) -> bool:
        """Make a row the last of `frequent`; returns False for one that is new."""
        if row in self.frequent:
            self.frequent.entries.move_to_end(row)
        elif row in self.recent:
            self.frequent.add(row, self.recent.take(row))
        else:
            return False
        return True

    def enter(self, row: int, key: bytes, size: int) -> None:
        kept = _Kept(key, size)
        for ghosts in (self.recent_ghosts, self.frequent_ghosts):
            if kept.key in ghosts:
                ghosts.take(kept.key)
                self.frequent.add(row, kept)
                return
        self.recent.add(row, kept)
        self.trim()

    def trim(self) -> None:
        """Remember no more than a tier's worth of once used, and two tiers' worth in all."""
        once, often = self.recent_ghosts, self.frequent_ghosts
        while once.bytes and self.recent.bytes + once.bytes > self.capacity:
            once.drop_oldest()
        held = self.recent.bytes + self.frequent.bytes
        while often.bytes and held + once.bytes + often.bytes > 2 * self.capacity:
            often.drop_oldest()

    def expect(self, key: bytes) -> None:
        """Learn from a miss that a ghost list remembers."""
        once, often = self.recent_ghosts, self.frequent_ghosts
        self.returns = key in often
        if key in once:
            step = once.entries[key].size * max(1.0, often.bytes / once.bytes)
            self.target = min(self.capacity, self.target + step)
        elif self.returns:
            step = often.entries[key].size * max(1.0, once.bytes / often.bytes)
            self.target = max(0.0, self.target - step)

    def forget(self, row: int) -> None:
        if row in self.recent:
            kept = self.recent.take(row)
            self.recent_ghosts.add(kept.key, kept)
        elif row in self.frequent:
            kept = self.frequent.take(row)
            self.frequent_ghosts.add(kept.key, kept)
        else:
            return
        self.trim()


class Arc(ByTier[_Tier]):
    """Adaptive replacement, over blocks of one part.

    Args:
        capacities: bytes of each tier.
    """

    name = "arc"

    def __init__(self, capacities: Sequence[int]) -> None:
        super().__init__(capacities, _Tier)

    def offered(self, view: Catalog, tier: int, keys: Sequence[bytes]) -> int:
        """Learn from what comes back; take all."""
        del view
        for key in keys:
            self._tiers[tier].expect(key)
        return len(keys)

    def victims(self, view: Catalog, tier: int, need: int) -> list[int]:
        """Return the oldest of `recent` while that has more than its share, else of `frequent`."""
        mine = self._tiers[tier]
        once, often = (_ready(view, entries) for entries in (mine.recent, mine.frequent))
        left, chosen = mine.recent.bytes, list[int]()
        while need > 0:
            over = left > mine.target or (mine.returns and left >= mine.target)
            first, second = (once, often) if over else (often, once)
            row = next(first, NONE)
            row = next(second, NONE) if row == NONE else row
            if row == NONE:
                break
            chosen.append(row)
            need -= view.allocated[row]
            left -= view.allocated[row] if row in mine.recent else 0
        return chosen


def _ready(view: Catalog, entries: _List) -> Iterator[int]:
    for row in entries.entries:
        assert isinstance(row, int)
        if view.state[row] == READY and not view.holds[row]:
            yield row
