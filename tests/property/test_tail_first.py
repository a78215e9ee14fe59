"""Heads never leave before tails, wherever their copies lie: a tree of chains over a log.

The joint policy on a real store and a real disk whose regions are reclaimed all the time. After
every request each unit that has a copy has one of the block before it, of the same part.
"""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.nvme_tiers import opening
from tests.stores import ONE, PAGE, TWO, Rig
from tierkv import calls, frame
from tierkv.catalog import ABSENT, NONE, READY
from tierkv.codec import RAW
from tierkv.part import Part
from tierkv.reservation import Written

BLOCK_BYTES = 8 * PAGE - frame.header_bytes(1)
RECOMPUTE: dict[str, Any] = {"linear": 4e-4, "quadratic": 1e-9}
TRUNKS, TRUNK, BRANCHES, MOST = 5, 3, 8, 9


def path(trunk: int, branch: int, blocks: int) -> list[bytes]:
    """Return a chain's keys: those of one trunk begin alike."""
    names = [f"{trunk}.{n}" if n < TRUNK else f"{trunk}.{branch}.{n}" for n in range(blocks)]
    return [hashlib.sha256(name.encode()).digest() for name in names]


class Tree:
    """Requests for paths of the tree, and what must hold after each."""

    def __init__(self, rig: Rig, parts: Sequence[Part], seed: int) -> None:
        self.rig = rig
        self.parts = tuple(parts)
        self.rng = random.Random(seed)
        self.parents: dict[bytes, bytes] = {}
        self.trunk = 0

    def serve(self) -> None:
        """Ask for a path and put it again; trunks are used for a while, and then no more."""
        rng, rig = self.rng, self.rig
        rig.clock.now += rng.expovariate(1 / 3.0)
        self.trunk += rng.random() < 0.05
        trunk = self.trunk - int(rng.paretovariate(1.0)) % TRUNKS
        keys = path(trunk, rng.randrange(BRANCHES), rng.randint(1, MOST))
        self.parents |= dict(zip(keys[1:], keys, strict=False))
        fields: dict[str, Any] = {"parts": self.parts}
        raw = len(self.parts) * BLOCK_BYTES
        reply = rig.match(keys, raw_bytes=raw, **dict(fields), **RECOMPUTE)
        if reply.match:
            rig.store.release(1, calls.ReleaseCall(match=reply.match))
        held = rig.offer(keys, raw=BLOCK_BYTES, **fields)
        if held is not None:
            if rng.random() < 0.3:  # regions are reclaimed while somebody writes
                rig.inline.drain()
            held.commit_written([Written(RAW.number, (BLOCK_BYTES,))] * len(held.units))
        rig.inline.drain()
        rig.store.tick()

    def check(self) -> None:
        rig, catalog = self.rig, self.rig.store._store.catalog
        rig.sound()
        for row, state in enumerate(catalog.state):
            before = self.parents.get(catalog.key(row)) if state == READY else None
            if before is None:
                continue
            head = catalog.head(before, catalog.part[row])
            assert head != NONE, "a head is gone before its tail"
            assert any(catalog.state[one] != ABSENT for one in catalog.copies(head))


@pytest.mark.parametrize("parts", [ONE, TWO], ids=["one part", "two parts"])
@pytest.mark.parametrize("seed", range(3))
def test_heads_never_leave_before_tails(tmp_path: Path, seed: int, parts: Sequence[Part]) -> None:
    with opening(tmp_path) as tier:
        rig = Rig(8 * 14 * len(parts), [tier(regions=8 * len(parts))], policy="evicpress")
        tree = Tree(rig, parts, seed)
        for _ in range(250):
            tree.serve()
            tree.check()
        assert rig.store._store.totals["regions_reclaimed"] > 10
        rig.idle()
