"""Page runs: whatever order frames come and go in, free pages can be used."""

import random

import pytest

from tierkv.tiers.runs import PageRuns, Run

PAGE = 16 << 10
PAGES = 16_384
"""256 MiB of 16 KiB pages."""


class Pages:
    """Checks each take and add against the set of pages that are taken."""

    def __init__(self, count: int) -> None:
        self.runs = PageRuns()
        self.runs.add(0, count)
        self.count = count
        self.taken: set[int] = set()

    def take(self, count: int) -> list[Run] | None:
        free = self.runs.free
        found = self.runs.take(count)
        if found is None:
            assert count > free == self.runs.free
            return None
        pages = pages_of(found)
        assert len(pages) == count
        assert len(set(pages)) == count
        assert self.taken.isdisjoint(pages)
        assert 0 <= min(pages) <= max(pages) < self.count
        self.taken.update(pages)
        assert self.runs.free == self.count - len(self.taken)
        return found

    def take_all(self, count: int, frames: int) -> list[list[Run]] | None:
        free = self.runs.free
        found = self.runs.take_all(count, frames)
        if found is None:
            assert count * frames > free == self.runs.free
            return None
        assert [sum(length for _, length in runs) for runs in found] == [count] * frames
        pages = [page for runs in found for page in pages_of(runs)]
        assert len(set(pages)) == count * frames
        assert self.taken.isdisjoint(pages)
        self.taken.update(pages)
        assert self.runs.free == self.count - len(self.taken)
        return found

    def add(self, runs: list[Run]) -> None:
        for start, count in runs:
            self.taken.difference_update(range(start, start + count))
        self.runs.add_all(runs)
        assert self.runs.free == self.count - len(self.taken)


def pages_of(runs: list[Run]) -> list[int]:
    return [page for start, count in runs for page in range(start, start + count)]


def test_runs_coalesce_on_both_sides() -> None:
    pages = Pages(30)
    taken = [pages.take(10) for _ in range(3)]
    for index in 0, 2, 1:
        runs = taken[index]
        assert runs is not None
        pages.add(runs)
    assert pages.take(30) == [(0, 30)]
    assert pages.take(1) is None


def test_one_run_is_preferred() -> None:
    pages = Pages(32)
    first = [pages.take(4) for _ in range(8)]
    for index in 0, 2, 4, 5, 6:
        pages.add(first[index] or [])
    found = pages.take(10)
    assert found == [(16, 10)]


def test_pieces_are_taken_when_no_run_is_long_enough() -> None:
    pages = Pages(32)
    taken = [pages.take(1) for _ in range(32)]
    for index in range(0, 32, 2):
        pages.add(taken[index] or [])
    assert pages.take(17) is None
    found = pages.take(16)
    assert found is not None
    assert sorted(found) == [(page, 1) for page in range(0, 32, 2)]


def test_the_longest_pieces_come_first() -> None:
    pages = Pages(100)
    taken = [pages.take(10) for _ in range(10)]
    for index in 0, 3, 4, 7:
        pages.add(taken[index] or [])
    found = pages.take(35)
    assert found is not None
    assert found[0] == (30, 20)
    assert len(found) == 3


def test_frames_of_one_call_lie_side_by_side() -> None:
    pages = Pages(100)
    assert pages.take_all(7, 3) == [[(0, 7)], [(7, 7)], [(14, 7)]]
    assert pages.take_all(40, 2) is None
    pages.add([(7, 7)])
    # What fits no longer run goes where it fits, in as few places as it can.
    assert pages.take_all(39, 2) == [[(21, 39)], [(60, 39)]]
    assert pages.take_all(2, 4) == [[(7, 2)], [(9, 2)], [(11, 2)], [(13, 1), (99, 1)]]
    assert pages.take_all(1, 1) is None


@pytest.mark.parametrize("seed", range(4))
def test_frames_taken_together_come_back_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    pages = Pages(600)
    held: list[list[Run]] = []
    for _ in range(300):
        found = pages.take_all(rng.randint(1, 12), rng.randint(1, 20))
        held += found or []
        rng.shuffle(held)
        keep = rng.randrange(len(held) + 1)
        pages.add([run for runs in held[keep:] for run in runs])
        del held[keep:]
    pages.add([run for runs in held for run in runs])
    assert pages.take(600) == [(0, 600)]


def sizes(rng: random.Random) -> int:
    """Return frame bytes, log-uniform from 128 KiB to 4 MiB."""
    return int(2 ** rng.uniform(17, 22))


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_refused_while_a_tenth_is_free(seed: int) -> None:
    rng = random.Random(seed)
    pages = Pages(PAGES)
    held: list[tuple[int, list[Run]]] = []
    asked = given = refused = 0
    for _ in range(1500):
        nbytes = sizes(rng)
        need = -(-nbytes // PAGE)
        while held and pages.runs.free - need < PAGES * (0.1 if rng.random() < 0.9 else 0.3):
            pages.add(held.pop(rng.randrange(len(held)))[1])
        runs = pages.take(need)
        refused += runs is None
        if runs is not None:
            held.append((nbytes, runs))
            asked, given = asked + nbytes, given + need * PAGE
        if held and rng.random() < 0.3:
            index = rng.randrange(len(held))
            held[index] = truncated(pages, *held[index], rng)
    assert refused == 0
    assert given <= asked * 1.05
    for _, runs in held:
        pages.add(runs)
    assert pages.take(PAGES) == [(0, PAGES)]


def truncated(
    pages: Pages, nbytes: int, runs: list[Run], rng: random.Random
) -> tuple[int, list[Run]]:
    """Give back the tail of a frame, as a progressive codec lets us."""
    nbytes = max(int(nbytes * rng.uniform(0.3, 1)), 1)
    keep, kept = -(-nbytes // PAGE), []
    for start, count in runs:
        mine = min(keep, count)
        keep -= mine
        if mine:
            kept.append((start, mine))
        if mine < count:
            pages.add([(start + mine, count - mine)])
    return nbytes, kept


def test_frames_stay_in_few_runs() -> None:
    """Half full and churning, most frames are one run: a copy out is one copy."""
    rng = random.Random(9)
    pages = Pages(PAGES)
    held: list[list[Run]] = []
    counts = []
    for _ in range(1200):
        while held and pages.runs.free < PAGES * 0.25:
            pages.add(held.pop(rng.randrange(len(held))))
        runs = pages.take(-(-sizes(rng) // PAGE))
        assert runs is not None
        counts.append(len(runs))
        held.append(runs)
    assert sum(count == 1 for count in counts) > 0.9 * len(counts)
