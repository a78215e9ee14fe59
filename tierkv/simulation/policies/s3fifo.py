"""S3-FIFO (Yang and others, SOSP 2023): a small queue, a main queue and ghosts of the small one.

What is new goes to `small`, a tenth of the tier; what is used there once more moves to `main` when
its turn comes, the rest leaves and is remembered by key. A remembered block goes to `main` at once.
In `main` a used entry goes round again with one use less, of at most three. Sizes are bytes. Chains
are used from tail to head.

Entries whose turn to leave has come stand in `leaving`, in that order, until they are dropped: to
ask what would go must not change what goes.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from tierkv.catalog import READY, Catalog
from tierkv.simulation.policies.queues import ByTier

SMALL_PARTS = 10
"""`small` is one of so many parts of a tier."""
MOST_USES = 3


class _Queue:
    """Rows in the order they came, and their bytes."""

    def __init__(self) -> None:
        self.rows: OrderedDict[int, int] = OrderedDict()
        self.bytes = 0

    def put(self, row: int, size: int) -> None:
        self.rows[row] = size
        self.bytes += size

    def first(self) -> tuple[int, int]:
        row, size = self.rows.popitem(last=False)
        self.bytes -= size
        return row, size

    def remove(self, row: int) -> None:
        self.bytes -= self.rows.pop(row)


class _Tier:
    def __init__(self, capacity: int) -> None:
        self.small_limit = max(capacity // SMALL_PARTS, 1)
        self.ghost_limit = capacity - self.small_limit
        self.small, self.main, self.leaving = _Queue(), _Queue(), _Queue()
        self.ghosts: OrderedDict[bytes, int] = OrderedDict()
        self.ghost_bytes = 0
        self.uses: dict[int, int] = {}
        """Of every row, since it came or went round."""
        self.once: dict[int, bytes] = {}
        """Keys of the rows in `small` or leaving from there."""
        self.returning: set[bytes] = set()
        """What was remembered of the blocks offered last."""

    def enter(self, row: int, key: bytes, size: int) -> None:
        self.uses[row] = 0
        if key in self.returning:
            self.main.put(row, size)
        else:
            self.once[row] = key
            self.small.put(row, size)

    def expect(self, keys: Sequence[bytes]) -> None:
        """Look for blocks among the ghosts before those that make room for them join."""
        self.returning = {key for key in keys if key in self.ghosts}
        for key in self.returning:
            self.ghost_bytes -= self.ghosts.pop(key)

    def use(self, row: int) -> bool:
        """Count a use, and let stay what was to leave; returns False for a row that is new."""
        if row not in self.uses:
            return False
        self.uses[row] = min(self.uses[row] + 1, MOST_USES)
        if row in self.leaving.rows:
            size = self.leaving.rows[row]
            self.leaving.remove(row)
            self.once.pop(row, None)
            self.main.put(row, size)
        return True

    def step(self) -> None:
        """Let the first of a queue move on or leave."""
        from_small = self.small.rows and (
            self.small.bytes >= self.small_limit or not self.main.rows
        )
        row, size = (self.small if from_small else self.main).first()
        if not self.uses[row]:
            self.leaving.put(row, size)
            return
        if from_small:
            self.uses[row] = 0
            del self.once[row]
        else:
            self.uses[row] -= 1
        self.main.put(row, size)

    def leave(self) -> Iterator[int]:
        """Yield rows in the order they leave, as long as there are any."""
        yield from self.leaving.rows
        while self.small.rows or self.main.rows:
            known = len(self.leaving.rows)
            self.step()
            if len(self.leaving.rows) > known:
                yield next(reversed(self.leaving.rows))

    def forget(self, row: int) -> None:
        if row not in self.uses:
            return
        del self.uses[row]
        queue = next(each for each in (self.leaving, self.small, self.main) if row in each.rows)
        size = queue.rows[row]
        queue.remove(row)
        key = self.once.pop(row, None)
        if key is not None:
            self.ghosts[key] = size
            self.ghost_bytes += size
            while self.ghost_bytes > self.ghost_limit:
                self.ghost_bytes -= self.ghosts.popitem(last=False)[1]


class S3Fifo(ByTier[_Tier]):
    """S3-FIFO over blocks of one part.

    Args:
        capacities: bytes of each tier.
    """

    name = "s3fifo"

    def __init__(self, capacities: Sequence[int]) -> None:
        super().__init__(capacities, _Tier)

    def offered(self, view: Catalog, tier: int, keys: Sequence[bytes]) -> int:
        """Take all, and note which are remembered."""
        del view
        self._tiers[tier].expect(keys)
        return len(keys)

    def victims(self, view: Catalog, tier: int, need: int) -> list[int]:
        """Return what leaves first; what is held or unfinished stays in its place."""
        chosen: list[int] = []
        if need <= 0:
            return chosen
        for row in self._tiers[tier].leave():
            if view.state[row] == READY and not view.holds[row]:
                chosen.append(row)
                need -= view.allocated[row]
                if need <= 0:
                    break
        return chosen
