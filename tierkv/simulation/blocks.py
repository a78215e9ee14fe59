"""Block-count replay: one tier of equal blocks and no codec, counted as the literature counts.

The service's Catalog and planner run here as they do in the service, one access at a time. A *block
hit* is an access to a resident block. The *usable prefix* is what a request finds on arrival,
before it changes anything: its blocks from the first to the first that is missing. Policies that
touch tail first also meet a prompt's blocks in that order.

Hits in a row are told to the policy in one call. A missing block goes alone, since what it drives
out may be the prompt's next, unless the policy says that it may come in a run.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.catalog import NONE, Catalog, Unit
from tierkv.codec import RAW
from tierkv.errors import invalid
from tierkv.fidelity import Fidelity
from tierkv.key import KEY_BYTES
from tierkv.plan import Move, drops
from tierkv.planner import plan_put
from tierkv.policy import Policy
from tierkv.simulation.policies import Contender
from tierkv.simulation.traces import Accesses
from tierkv.tier import RAM

Ids = npt.NDArray[np.int32]

Progress = Callable[[int, int], None]
"""Called now and then with the requests done and all of them."""

PROGRESS_EVERY = 256
_SIZES = (1,)


class Counts(NamedTuple):
    """What a replay counted, in blocks."""

    requests: int
    accesses: int
    block_hits: int
    prefix_hits: int
    stored: int
    refused: int
    dropped: int
    seconds: float
    """Of one core."""

    @property
    def decisions(self) -> int:
        """Return how often a block was kept at a use, taken in, refused or given up."""
        return self.accesses + self.dropped


class _GivesUp:
    """A policy of one tier as the planner asks it: all it can do is to drop."""

    def __init__(self, policy: Policy) -> None:
        self._victims = policy.victims
        self.offered = policy.offered

    def reclaim(self, view: Catalog, tier: int, need: int, *, at_once: bool) -> list[Move]:
        """Drop what the policy gives up."""
        del at_once
        return drops(view, self._victims(view, tier, need))


class Shelf:
    """One tier of `capacity` blocks of one byte each, and what its policy is told of it."""

    def __init__(self, capacity: int, distinct: int, policy: Policy) -> None:
        self.catalog = Catalog(["host"])
        self.policy = policy
        self._gives_up = _GivesUp(policy)
        self.capacity = self.free = capacity
        self.stored = self.refused = self.dropped = 0
        self.row_of = np.full(distinct, NONE, np.int32)
        self._id_of = [NONE] * capacity

    def want(self, blocks: list[int]) -> None:
        """Take missing blocks of a chain in, as far as the policy would; drop what it names."""
        catalog, row_of, id_of = self.catalog, self.row_of, self._id_of
        keys = [block.to_bytes(KEY_BYTES, "little") for block in blocks]
        known = [False] * len(keys)
        plan = plan_put(self._gives_up, catalog, b"".join(keys), known, _SIZES, RAW, self.free, 1)
        gone, units = [move.row for move in plan.moves], plan.units
        if gone:
            catalog.leave(gone)
            catalog.gone(gone)
            self.policy.forgot(gone)
            for row in gone:
                row_of[id_of[row]] = NONE
        if units:
            rows = catalog.begin(RAM, [_unit(keys[unit]) for unit in units])
            catalog.commit(rows)
            self.policy.touched(catalog, rows)
            for row, unit in zip(rows, units, strict=True):
                id_of[row] = block = blocks[unit]
                row_of[block] = row
        self.free += len(gone) - len(units)
        self.stored += len(units)
        self.dropped += len(gone)
        self.refused += plan.refused

    def meet(self, prompt: Ids, *, tail_first: bool, most: int) -> tuple[int, int]:
        """Use a prompt's blocks one after another; returns block hits and usable prefix.

        At most `most` missing ones are taken in at a time.
        """
        row_of = self.row_of
        prefix = _run(row_of[prompt] != NONE)
        step = -1 if tail_first else 1
        order = prompt[::step]
        hits = at = 0
        while at < len(order):
            rows = row_of[order[at:]]
            run = _run(rows != NONE)
            if run:
                self.policy.touched(self.catalog, rows[:run][::step].tolist())
                hits += run
            else:
                run = _run(rows == NONE)
                missing = order[at : at + run].tolist()
                for start in range(0, run, most):
                    self.want(missing[start : start + most][::step])
            at += run
        return hits, prefix


def _run(holds: npt.NDArray[np.bool_]) -> int:
    """Return how many are true before the first that is not."""
    return len(holds) if holds.all() else int(holds.argmin())


def _unit(key: bytes) -> Unit:
    return Unit(key, 0, RAW.number, Fidelity.EXACT, 0, 1, 1, 0, 0, 0, 0)


def replay(
    accesses: Accesses, capacity: int, contender: Contender, progress: Progress | None = None
) -> Counts:
    """Replay a trace into an empty cache of `capacity` blocks.

    Raises: TierKVError (invalid) when there is no block of capacity.
    """
    if capacity < 1:
        raise invalid(f"a cache has at least one block, not {capacity}")
    capacity = min(capacity, accesses.distinct)
    shelf = Shelf(capacity, accesses.distinct, contender.make(capacity, accesses))
    most = capacity if contender.in_runs else 1
    start = time.process_time()
    hits = prefixes = 0
    bounds = accesses.starts.tolist()
    requests = len(bounds) - 1
    for number, (begin, end) in enumerate(pairwise(bounds)):
        found, prefix = shelf.meet(
            accesses.ids[begin:end], tail_first=contender.tail_first, most=most
        )
        hits += found
        prefixes += prefix
        if progress is not None and number % PROGRESS_EVERY == 0:
            progress(number, requests)
    return Counts(
        requests=requests,
        accesses=len(accesses.ids),
        block_hits=hits,
        prefix_hits=prefixes,
        stored=shelf.stored,
        refused=shelf.refused,
        dropped=shelf.dropped,
        seconds=time.process_time() - start,
    )
