"""PageRuns: which pages of an arena are free, and how to take a frame's worth of them.

Pure bookkeeping. Free pages are kept as maximal runs, found by either end, and by size class (the
bit length of their count). A request takes one run when any is long enough and else the longest
pieces there are, so nothing is refused while enough pages are free.
"""

from collections.abc import Iterable

Run = tuple[int, int]
"""(first page, count of pages)"""

_LOOK = 8


class PageRuns:
    """Free runs of pages, coalesced."""

    def __init__(self) -> None:
        self.free = 0
        self._count: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._classes: list[dict[int, None]] = [{} for _ in range(64)]

    def add(self, start: int, count: int) -> None:
        """Make pages free; they were not."""
        self.free += count
        before = self._start_of_end.get(start)
        if before is not None:
            length = self._count[before]
            self._remove(before, length)
            start, count = before, length + count
        after = start + count
        length = self._count.get(after, 0)
        if length:
            self._remove(after, length)
            count += length
        self._insert(start, count)

    def add_all(self, runs: Iterable[Run]) -> None:
        """Make the pages of runs free; those that touch enter as one."""
        start = stop = 0
        for first, count in sorted(runs):
            if first != stop:
                if stop > start:
                    self.add(start, stop - start)
                start = first
            stop = first + count
        if stop > start:
            self.add(start, stop - start)

    def take(self, count: int) -> list[Run] | None:
        """Take `count` pages as few runs, in the order a frame uses them.

        None when too few are free.
        """
        taken = self.take_all(count, 1)
        return taken[0] if taken else None

    def take_all(self, count: int, frames: int) -> list[list[Run]] | None:
        """Take `count` pages for each of some frames, side by side where it can be; see `take`."""
        if count * frames > self.free:
            return None
        out: list[list[Run]] = []
        while len(out) < frames:
            left = frames - len(out)
            start = self._fitting(count * left)
            if start is None and left > 1:
                start = self._fitting(count)
            if start is None:
                out.append(self._scraps(count))
                continue
            fit = min(self._count[start] // count, left)
            first, _ = self._cut(start, fit * count)
            out += [[(at, count)] for at in range(first, first + fit * count, count)]
        return out

    def _scraps(self, count: int) -> list[Run]:
        """Take pages where no run is long enough: the longest pieces there are."""
        out: list[Run] = []
        for pieces in reversed(self._classes):
            while pieces and count:
                run = self._cut(next(reversed(pieces)), count)
                out.append(run)
                count -= run[1]
            if not count:
                break
        return out

    def _fitting(self, count: int) -> int | None:
        """Return the start of a run of at least `count` pages: a near fit before a long one."""
        for looked, start in enumerate(self._classes[count.bit_length()]):
            if self._count[start] >= count:
                return start
            if looked == _LOOK:
                break
        for longer in self._classes[count.bit_length() + 1 :]:
            if longer:
                return next(iter(longer))
        return next((s for s in self._classes[count.bit_length()] if self._count[s] >= count), None)

    def _cut(self, start: int, count: int) -> Run:
        length = self._count[start]
        self._remove(start, length)
        count = min(count, length)
        if length > count:
            self._insert(start + count, length - count)
        self.free -= count
        return start, count

    def _insert(self, start: int, count: int) -> None:
        self._count[start] = count
        self._start_of_end[start + count] = start
        self._classes[count.bit_length()][start] = None

    def _remove(self, start: int, count: int) -> None:
        del self._count[start]
        del self._start_of_end[start + count]
        del self._classes[count.bit_length()][start]
