"""Placed: the tree of what was asked for, and which placements of the Catalog stand for its blocks.

Blocks have numbers in the order in which they were first asked for; their keys are looked up as the
Catalog looks up units. A placement is known by its row: the block that it is a copy of, and its
place in its tier's pool, from which candidates are sampled. How many placements each block has is
counted, so that a segment knows whether anything of it, and of what lies behind it, is left.

A placement whose chain nobody has asked for yet is an *orphan*: found at start, for the most part.
"""

from array import array

import numpy as np
import numpy.typing as npt

from tierkv.catalog import Catalog, Rows
from tierkv.cost import Recompute
from tierkv.key import KEY_BYTES
from tierkv.policies.reuse import Reuse
from tierkv.policies.segments import NONE
from tierkv.units import Units
from tierkv.use import Use

Numbers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

UNKNOWN_DENSITY = 1e-7
"""Seconds of prefill for a raw byte while no match has told: more than any load takes."""
MAX_MODELS = 64
LEAST_BLOCKS = 1 << 16
"""Fewer are never forgotten."""
_KEY = np.dtype((np.void, KEY_BYTES))
_WEYL = np.arange(1, 257, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class Pool:
    """Rows of one tier, in no order."""

    def __init__(self) -> None:
        self.rows = array("i")

    def sample(self, count: int, salt: int) -> list[int]:
        """Return distinct rows, at most `count`: the same ones for the same salt."""
        known = len(self.rows)
        if known <= count:
            return self.rows.tolist()
        mixed = _WEYL[:count] + np.uint64(salt * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        places = np.unique((mixed >> np.uint64(32)).astype(np.int64) % known).tolist()
        return [self.rows[place] for place in places]


class Placed:
    """Blocks, segments and placements, over tiers by number."""

    def __init__(self, tiers: int) -> None:
        self.reuse = Reuse()
        self.segments = self.reuse.segments
        self.pools = [Pool() for _ in range(tiers)]
        self.orphans = 0
        self.now = self.found_at = 0.0
        self.windowed: set[int] = set()
        """Parts that some hit needs only the last blocks of."""
        self._recompute: dict[bytes, Recompute] = {}
        self._look_at = LEAST_BLOCKS
        self._part = array("h")
        self._numbers = Units(self._part)
        self._copies = np.zeros(1024, np.int32)
        self._block = array("i")
        self._place = array("i")
        self._tier = array("b")
        self._parts: list[tuple[int, ...]] = []
        self._parts_of = np.full(1024, NONE, np.int32)

    def block(self, row: int) -> int:
        """Return the number of a placement's block, NONE for an orphan."""
        return self._block[row]

    def knows(self, row: int) -> bool:
        """Return whether a placement was told of."""
        return row < len(self._place) and self._place[row] != NONE

    def segment(self, block: int) -> int:
        """Return a block's segment."""
        return self.segments.at(block)

    def uses(self, row: int) -> float:
        """Return how often a placement's chain was asked for; an orphan's may have been, often."""
        block = self._block[row]
        return np.inf if block == NONE else float(self.segments.uses[self.segment(block)])

    def keys(self, first: int, blocks: int) -> bytes:
        """Return the keys of blocks whose numbers follow each other."""
        return self._numbers.keys(first, first + blocks)

    def parts(self, block: int) -> tuple[int, ...]:
        """Return the numbers of the parts that a block was asked for with."""
        return self._parts[int(self._parts_of[block])]

    def copies(self, first: int, blocks: int) -> list[int]:
        """Return how many placements each of the blocks has."""
        counts: list[int] = self._copies[first : first + blocks].tolist()
        return counts

    def behind(self, row: int) -> int:
        """Return how many blocks lie behind a placement, as far as its segment tells."""
        block, segments = self.block(row), self.segments
        if block == NONE:
            return 0
        segment = self.segment(block)
        more = int(segments.blocks[segment]) * int(segments.children[segment])
        return int(segments.first[segment] + segments.blocks[segment]) - block - 1 + more

    def find(self, keys: bytes) -> Ids:
        """Return the numbers of blocks, NONE where nobody has asked."""
        return self._numbers.find(keys, 0)

    def use(self, view: Catalog, use: Use) -> Numbers:
        """Take in a chain; returns its segments, head first: none when nothing is new."""
        count = len(use.keys) // KEY_BYTES
        self.windowed.update(use.windowed)
        ids = self.find(use.keys)
        gaps = np.flatnonzero(ids == NONE)
        known = int(gaps[0]) if len(gaps) else count
        if use.recompute.known:
            self._recompute[use.model] = use.recompute
            if len(self._recompute) > MAX_MODELS:
                del self._recompute[next(iter(self._recompute))]
        moved = len(gaps) < count - known
        if known < count:
            ids = np.append(ids[:known], self._name(use.keys[known * KEY_BYTES :]))
        self._join_parts(ids, use.parts)
        if not use.asked and known == count:
            return np.zeros(0, np.int64)
        rows = self._enter_chain(use, ids, known)
        if self.orphans or moved:
            self._adopt(view, use, ids)
        return rows

    def enter(self, view: Catalog, rows: Rows) -> None:
        """Take in placements, in order; a chain that nobody has asked for begins with them."""
        self._fit(len(view))
        new = [row for row in rows if self._place[row] == NONE]
        if not new:
            return
        if (self.find(b"".join(map(view.key, new))) == NONE).any():
            keys = b"".join(dict.fromkeys(map(view.key, rows)))
            parts = tuple(sorted({view.part[row] for row in rows}))
            head = rows[0]
            self.use(view, Use(self.now, keys, parts, view.position[head], 1, view.nbytes[head]))
        self._enter(view, new)

    def enter_orphans(self, view: Catalog, rows: Rows) -> None:
        """Take in placements of which nothing is known."""
        self._fit(len(view))
        self.found_at = self.now
        for row in rows:
            self._put_in(view, row)
        self.orphans += len(rows)

    def leave(self, rows: Rows) -> None:
        """Placements are gone."""
        blocks = [self._take_out(row) for row in rows if self.knows(row)]
        mine = np.array([block for block in blocks if block != NONE], np.int32)
        self.orphans -= len(blocks) - len(mine)
        self._count(mine, -1)

    def shrink(self) -> bool:
        """Forget chains that have nothing left, all but the latest; returns whether any were.

        Looked at when there are twice as many blocks as the last time: what is known stays a
        multiple of what is placed.
        """
        count = len(self._numbers)
        if count < self._look_at:
            return False
        segments, reuse = self.segments, self.reuse
        rows = np.arange(segments.count)
        placed = int(segments.blocks[rows][segments.configuration[rows] != 0].sum())
        age = reuse.hazard.start[segments.context[rows]]
        latest = np.argsort(-age, kind="stable")
        within = np.cumsum(segments.blocks[latest]) <= max(placed, LEAST_BLOCKS // 2)
        keep = segments.configuration[rows] != 0
        keep[latest[within]] = True
        keep |= segments.context[rows] == reuse.newest
        while True:  # what is ahead of what is kept is kept
            parents = segments.parents(rows[keep])
            missing = parents[(parents != NONE) & ~keep[parents]]
            if not len(missing):
                break
            keep[missing] = True
        kept = rows[keep]
        self._renumber(reuse.keep(kept[np.argsort(segments.first[kept])], self.now))
        self._look_at = max(LEAST_BLOCKS, 2 * len(self._numbers))
        return True

    def _renumber(self, blocks: Numbers) -> None:
        """Give blocks their new numbers, which are the places of their old ones."""
        number = np.full(len(self._numbers) + 1, NONE, np.int64)
        number[blocks] = np.arange(len(blocks))
        every = np.frombuffer(self._numbers.keys(0, len(self._numbers)), _KEY)
        keys = every[blocks].tobytes()
        leading = np.flatnonzero([self._numbers.leads(one) for one in blocks.tolist()])
        self._part = array("h", bytes(2 * len(blocks)))
        self._numbers = Units(self._part)
        self._numbers.extend(keys)
        self._numbers.lead(leading.astype(np.int32))
        self._copies = np.append(self._copies[blocks], np.zeros(1024, np.int32))
        self._parts_of = np.append(self._parts_of[blocks], np.full(1024, NONE, np.int32))
        old = np.frombuffer(self._block, np.int32)
        self._block = array("i", np.where(old == NONE, NONE, number[old]).astype("i").tobytes())

    def _enter_chain(self, use: Use, ids: Ids, known: int) -> Numbers:
        """Give a chain its segments, those of its blocks that are new included."""
        count, segments = len(ids), self.segments
        nbytes, density = np.full(count, float(use.raw_bytes)), self._density(use, count)
        goes_on = not use.asked and self.reuse.continues(ids, known)
        walk = segments.walk(ids)
        if walk.split != NONE:
            self._divide(int(walk.rows[-1]), walk.split)
        if goes_on:
            self.reuse.go_on(walk, ids, nbytes, density)
            return np.unique(segments.of(ids[known:]))
        rows = self.reuse.use(use.now, walk, ids, count * use.tokens, count, nbytes, density)
        self.reuse.refit(use.now)
        if use.recompute.known:
            at = use.position + (segments.position[rows] + segments.blocks[rows] / 2) * use.tokens
            linear, quadratic = use.recompute
            segments.density[rows] = (linear + quadratic * at) * use.tokens / use.raw_bytes
        return rows

    def _density(self, use: Use, count: int) -> Floats:
        """Return seconds of prefill for a raw byte of each block."""
        if use.model not in self._recompute:
            return np.full(count, UNKNOWN_DENSITY)
        middle = use.position + (np.arange(count) + 0.5) * use.tokens
        linear, quadratic = self._recompute[use.model]
        seconds = linear + quadratic * middle.astype(np.float64)
        density: Floats = np.asarray(seconds * (use.tokens / use.raw_bytes), np.float64)
        return density

    def _name(self, keys: bytes) -> Ids:
        """Give blocks the next numbers. One that had a number, behind a gap, gets another."""
        first, new = len(self._numbers), len(keys) // KEY_BYTES
        self._part.extend(array("h", bytes(2 * new)))
        self._numbers.extend(keys)
        ids = np.arange(first, first + new, dtype=np.int32)
        self._numbers.lead(ids)
        while first + new > len(self._copies):
            self._copies = np.append(self._copies, np.zeros_like(self._copies))
            self._parts_of = np.append(self._parts_of, np.full_like(self._parts_of, NONE))
        return ids

    def _join_parts(self, ids: Ids, parts: tuple[int, ...]) -> None:
        """Note that blocks were asked for with these parts too."""
        there = self._parts_of[ids]
        for number in np.unique(there).tolist():
            known = () if number == NONE else self._parts[number]
            joined = tuple(sorted({*known, *parts}))
            if joined not in self._parts:
                self._parts.append(joined)
            self._parts_of[ids[there == number]] = self._parts.index(joined)

    def _adopt(self, view: Catalog, use: Use, ids: Ids) -> None:
        """Let placements of a chain's blocks stand for them that stood for none, or for others."""
        for part in use.parts:
            for head, block in zip(view.find(use.keys, part).tolist(), ids.tolist(), strict=True):
                for row in view.copies(head):
                    if self.knows(row) and self._block[row] != block:
                        self.leave([row])
                        self._enter(view, [row])

    def _divide(self, row: int, new: int) -> None:
        """A segment that had placements was split: say which of the two has any."""
        segments = self.segments
        if not segments.configuration[row]:
            return
        for one in (new, row):
            if not self._any(one):
                segments.configuration[one] = 0
                segments.lost(np.array([one]))

    def _any(self, row: int) -> bool:
        first, blocks = int(self.segments.first[row]), int(self.segments.blocks[row])
        return bool(self._copies[first : first + blocks].any())

    def _enter(self, view: Catalog, rows: Rows) -> None:
        ids = self.find(b"".join(map(view.key, rows)))
        for row, block in zip(rows, ids.tolist(), strict=True):
            self._put_in(view, row)
            self._block[row] = block
        self._count(ids, 1)

    def _count(self, blocks: Ids, change: int) -> None:
        """Blocks have so many placements more each; segments note what was gained or lost."""
        np.add.at(self._copies, blocks, change)
        segments = self.segments
        for row in np.unique(segments.of(blocks)).tolist():
            has = self._any(row)
            if has != bool(segments.configuration[row]):
                segments.configuration[row] = int(has)
                (segments.gained if has else segments.lost)(np.array([row]))

    def _put_in(self, view: Catalog, row: int) -> None:
        tier = view.tier[row]
        pool = self.pools[tier].rows
        self._place[row], self._block[row], self._tier[row] = len(pool), NONE, tier
        pool.append(row)

    def _take_out(self, row: int) -> int:
        """Take a placement out of its pool; returns its block."""
        pool, place, block = self.pools[self._tier[row]].rows, self._place[row], self._block[row]
        last = pool.pop()
        if last != row:
            pool[place] = last
            self._place[last] = place
        self._place[row] = self._block[row] = NONE
        return block

    def _fit(self, rows: int) -> None:
        more = rows - len(self._place)
        if more > 0:
            self._place.extend(array("i", [NONE]) * more)
            self._block.extend(array("i", [NONE]) * more)
            self._tier.extend(array("b", bytes(more)))
