"""Reuse: what is known of a context tells how soon it is used again."""

import numpy as np
import pytest

from tierkv.policies.reuse import Reuse
from tierkv.policies.segments import Ids

QUICK, SLOW = 8.0, 100.0
TURNS = 60


def use(reuse: Reuse, now: float, ids: Ids) -> int:
    """Use a chain of whole blocks; return its last segment."""
    each = np.ones(len(ids))
    rows = reuse.use(now, reuse.segments.walk(ids), ids, 4000, len(ids), each, each)
    return int(rows[-1])


def test_who_came_back_soon_comes_back_soon() -> None:
    """Two chats of one length and turn, one asked every 8 seconds, one every 100."""
    reuse = Reuse()
    pauses = enumerate((QUICK, SLOW))
    asks = [(turn * pause, name) for name, pause in pauses for turn in range(TURNS)]
    chats: list[list[int]] = [[], []]
    blocks = 0
    for now, name in sorted(asks):
        chats[name] += [blocks, blocks + 1]
        blocks += 2
        use(reuse, now, np.array(chats[name], np.int32))
    now = TURNS * SLOW
    reuse.hazard.refit(now)
    contexts = []
    for pause in QUICK, SLOW:
        first = np.arange(blocks, blocks + 3, dtype=np.int32)
        blocks += 99
        use(reuse, now, first)
        for turn in range(1, 7):
            more = np.append(first, np.arange(blocks, blocks + 2 * turn, dtype=np.int32))
            use(reuse, now + turn * pause, more)
            first, blocks = more, blocks + 99
        contexts.append((reuse.newest, now + 6 * pause + 1))
    quick, slow = (float(reuse.hazard.rate(np.array([one]), at)[0]) for one, at in contexts)
    assert quick == pytest.approx(1 / QUICK, rel=0.5)
    assert slow == pytest.approx(1 / SLOW, rel=0.5)
