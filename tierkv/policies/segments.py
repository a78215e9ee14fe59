"""Segments: the tree of what was asked, in runs of blocks that have one history.

A segment is a run of one chain between branch points, at most `SEGMENT_BLOCKS` long: the unit that
a joint policy values and moves. Blocks are named by numbers that rise as they are first met, so a
segment is a range of them. Where a chain leaves a segment in its middle, the segment is split.

A *context* is what one request used last: its chain but for what a later one has used since. It is
a run of segments up to a tail, and all of it has the same age.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]

SEGMENT_BLOCKS = 16
"""2 GiB of an 8B model in blocks of 1,024 tokens: small beside a host tier, large beside a call."""
NONE = -1

COLUMNS = {
    "first": np.int64,
    "blocks": np.int64,
    "before": np.int64,
    "position": np.int64,
    "nbytes": np.float64,
    "density": np.float64,
    "partial": np.bool_,
    "context": np.int64,
    "children": np.int64,
    "configuration": np.int64,
    "foreign": np.float64,
    "foreign_at": np.float64,
    "pinned": np.float64,
    "most_kl": np.float64,
    "uses": np.int64,
}


class Walk(NamedTuple):
    """What a chain meets: its segments so far, how many of its blocks they are, what was split."""

    rows: Numbers
    blocks: int
    split: int = NONE
    """The row that a segment of the chain was split into, NONE where none was."""


class Segments:
    """Columns over segments, by row. Sizes in bytes, positions in blocks from the chain's head.

    Attributes:
        before: the block ahead of the segment's first, NONE at a head.
        density: seconds of prefill that a raw byte stands for.
        context: the request that used it last.
        children: segments behind it that have a copy.
        pinned: until when somebody wants it given up last.
        most_kl: loss that no copy of it may pass, in nats.
        uses: requests that used it.
        foreign: uses by requests that did not go on with its context, decayed since `foreign_at`.
    """

    first: Numbers
    blocks: Numbers
    before: Numbers
    position: Numbers
    nbytes: npt.NDArray[np.float64]
    density: npt.NDArray[np.float64]
    partial: npt.NDArray[np.bool_]
    context: Numbers
    children: Numbers
    configuration: Numbers
    foreign: npt.NDArray[np.float64]
    foreign_at: npt.NDArray[np.float64]
    pinned: npt.NDArray[np.float64]
    most_kl: npt.NDArray[np.float64]
    uses: Numbers

    def __init__(self, most_blocks: int = SEGMENT_BLOCKS) -> None:
        self.count = 0
        self._most_blocks = most_blocks
        self._of_block = np.full(1024, NONE, np.int64)
        self.tail = np.full(1024, NONE, np.int64)
        for name, dtype in COLUMNS.items():
            setattr(self, name, np.zeros(1024, dtype))

    def parents(self, rows: Numbers) -> Numbers:
        """Return the segment ahead of each, NONE for heads."""
        before = self.before[rows]
        return np.where(before == NONE, NONE, self._of_block[before])

    def parent(self, row: int) -> int:
        """Return the segment ahead of one, NONE for a head."""
        before = int(self.before[row])
        return NONE if before == NONE else int(self._of_block[before])

    def walk(self, ids: Ids) -> Walk:
        """Follow a chain (n,) as far as it was ever asked for; split where it leaves a segment."""
        top = int(ids.max()) + 1 if len(ids) else 0
        if top > len(self._of_block):
            more = np.full(max(top, len(self._of_block)), NONE, np.int64)
            self._of_block = np.append(self._of_block, more)
        of = self._of_block[ids]
        new = of == NONE
        known = int(new.argmax()) if new.any() else len(ids)
        if not known:
            return Walk(np.zeros(0, np.int64), 0)
        of = of[:known]
        starts = np.append(0, np.nonzero(of[1:] != of[:-1])[0] + 1)
        rows = of[starts]
        inside = known - int(starts[-1])
        if inside == self.blocks[rows[-1]]:
            return Walk(rows, known)
        return Walk(rows, known, self._split(int(rows[-1]), inside))

    def grow(
        self,
        ids: Ids,
        at: int,
        full: int,
        nbytes: npt.NDArray[np.float64],
        density: npt.NDArray[np.float64],
    ) -> Numbers:
        """Add the blocks of a chain from `at` on; return their rows.

        Args:
            ids: the whole chain.
            at: blocks that are known.
            full: blocks that are full; one behind them stands alone.
            nbytes: raw bytes of each block of the chain.
            density: of each block.
        """
        starts = np.arange(at, full, self._most_blocks)
        if full < len(ids):
            starts = np.append(starts, full)
        ends = np.append(starts[1:], len(ids))
        rows = self._take(len(starts))
        self.first[rows], self.blocks[rows] = ids[starts], ends - starts
        self.before[rows] = np.where(starts > 0, ids[starts - 1], NONE)
        self.position[rows] = starts
        self.nbytes[rows] = np.add.reduceat(nbytes, starts)
        worth = np.add.reduceat(nbytes * density, starts)
        self.density[rows] = worth / self.nbytes[rows]
        self.partial[rows] = starts >= full
        self.most_kl[rows], self.uses[rows] = np.inf, 1
        self._of_block[ids[at:]] = np.repeat(rows, ends - starts)
        return rows

    def lengthen(self, row: int, ids: Ids, nbytes: float, density: float) -> int:
        """Let a segment go on with blocks that were never met; returns how many it took.

        Args:
            row: of the segment.
            ids: of the blocks behind it; those that follow its own numbers are taken.
            nbytes: raw bytes of each.
            density: of each.
        """
        end, before = int(self.first[row] + self.blocks[row]), float(self.nbytes[row])
        room = ids[: max(0, SEGMENT_BLOCKS - int(self.blocks[row]))]
        count = int((room == np.arange(end, end + len(room))).cumprod().sum())
        if count:
            self.blocks[row] += count
            self.nbytes[row] = before + count * nbytes
            mixed = before * self.density[row] + count * nbytes * density
            self.density[row] = mixed / self.nbytes[row]
            self._of_block[end : end + count] = row
        return count

    def of(self, ids: Ids) -> Numbers:
        """Return the segments of blocks (n,) that were asked for."""
        return self._of_block[ids]

    def keep(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Forget all other segments, of which none is ahead of one that is kept.

        Args:
            rows: (n,) to keep, by rising first block.

        Returns: the old numbers of blocks by their new ones, and the old contexts by theirs.
        """
        blocks = np.concatenate([np.zeros(0, np.int64), *map(self._range, rows.tolist())])
        number = np.full(len(self._of_block), NONE, np.int64)
        number[blocks] = np.arange(len(blocks))
        contexts, context = np.unique(self.context[rows], return_inverse=True)
        tails, place = self.tail[contexts], np.full(self.count + 1, NONE, np.int64)
        place[rows] = np.arange(len(rows))
        before = self.before[rows]
        for name in COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.append(column[rows], np.zeros_like(column[:1024])))
        every = slice(0, len(rows))
        self.first[every] = np.cumsum(self.blocks[every]) - self.blocks[every]
        self.before[every] = np.where(before == NONE, NONE, number[before])
        self.context[every] = context
        self.tail = np.append(place[tails], np.full(1024, NONE))
        self._of_block = np.append(np.repeat(np.arange(len(rows)), self.blocks[every]), NONE)
        self.count = len(rows)
        return blocks, contexts

    def _range(self, row: int) -> Numbers:
        return np.arange(self.first[row], self.first[row] + self.blocks[row])

    def at(self, block: int) -> int:
        """Return the segment of one block that was asked for."""
        return int(self._of_block[block])

    def _take(self, count: int) -> Numbers:
        while self.count + count > len(self.first):
            for name in COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.append(column, np.zeros_like(column)))
        rows = np.arange(self.count, self.count + count)
        self.count += count
        return rows

    def _split(self, row: int, keep: int) -> int:
        """Let a segment end after `keep` blocks; return the row of what is behind them."""
        new = int(self._take(1)[0])
        share = keep / self.blocks[row]
        for name in COLUMNS:
            getattr(self, name)[new] = getattr(self, name)[row]
        self.first[new] = self.first[row] + keep
        self.blocks[new], self.blocks[row] = self.blocks[row] - keep, keep
        self.before[new] = self.first[new] - 1
        self.position[new] = self.position[row] + keep
        self.nbytes[row] *= share
        self.nbytes[new] -= self.nbytes[row]
        self.children[row] = int(self.configuration[row] != 0)
        self._of_block[self.first[new] : self.first[new] + self.blocks[new]] = new
        if self.tail[self.context[row]] == row:
            self.tail[self.context[row]] = new
        return new

    def use(self, context: int, rows: Numbers) -> None:
        """A request, number `context`, has used a whole chain (rows, head first)."""
        if context >= len(self.tail):
            self.tail = np.append(self.tail, np.full_like(self.tail, NONE))
        self.context[rows] = context
        self.tail[context] = rows[-1]

    def end(self, context: int) -> int:
        """Return the last segment of a context that has a copy, NONE where none has.

        What was never stored, or not yet, is no end from which a chain can be given up.
        """
        row = int(self.tail[context])
        while row != NONE and not self.configuration[row] and self.context[row] == context:
            row = self.parent(row)
        self.tail[context] = row
        return row

    def ends(self, contexts: Numbers) -> Numbers:
        """Return the `end` of each context (n,)."""
        tails = self.tail[contexts]
        for context in set(contexts[(tails != NONE) & (self.configuration[tails] == 0)].tolist()):
            self.end(context)
        return self.tail[contexts]

    def gained(self, rows: Numbers) -> None:
        """Segments have a copy that had none."""
        self._count_children(rows, 1)
        rows = rows[np.argsort(self.position[rows], kind="stable")]
        context = self.context[rows]
        tails = self.tail[context]
        passed = (tails == NONE) | (self.context[tails] != context)
        passed |= self.position[tails] < self.position[rows]
        self.tail[context[passed]] = rows[passed]

    def lost(self, rows: Numbers) -> None:
        """Segments, the ends of chains, have no copy any more; contexts end ahead of them."""
        rows = rows[np.argsort(-self.position[rows], kind="stable")]
        parents = self._count_children(rows, -1)
        # Of a context that loses several, the one nearest the head comes last and says where.
        ending = np.isin(self.tail[self.context[rows]], rows)
        self.tail[self.context[rows[ending]]] = parents[ending]

    def _count_children(self, rows: Numbers, change: int) -> Numbers:
        parents = self.parents(rows)
        np.add.at(self.children, parents[parents != NONE], change)
        return parents
