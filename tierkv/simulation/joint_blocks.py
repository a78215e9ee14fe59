"""The joint policy with one tier of equal blocks and no codec, counted as every other policy.

A block is worth one second wherever it lies, so what is left to decide is what is used again. A
prompt is met whole: a block hit is one that is there on arrival, which no head without its tail
makes other than the usable prefix.
"""

import time
from itertools import pairwise

import numpy as np

from tierkv.cost import Rates
from tierkv.errors import invalid
from tierkv.policies.configurations import Form
from tierkv.policies.evicpress import EvicPress
from tierkv.policies.reuse import Reuse
from tierkv.policies.segments import SEGMENT_BLOCKS
from tierkv.simulation import blocks
from tierkv.simulation.blocks import PROGRESS_EVERY, Counts, Progress
from tierkv.simulation.policies import CONTENDERS
from tierkv.simulation.traces import Accesses

JOINT = "evicpress"
_RAW = Form("raw", 1.0, float("inf"))
_FREE = Rates(0.0, float("inf"), float("inf"))
_SHARE = 64
"""A segment is at most this part of the cache, or one block."""


def check_policy(name: str) -> None:
    """Raise TierKVError (invalid), naming the known policies, unless a name is one of them."""
    if name != JOINT and name not in CONTENDERS:
        raise invalid(f"policy {name!r} is not known; use one of {', '.join([*CONTENDERS, JOINT])}")


def count_blocks(
    accesses: Accesses, capacity: int, policy: str, progress: Progress | None = None
) -> Counts:
    """Replay a trace into a cache of `capacity` blocks under a policy by name.

    Raises: TierKVError (invalid) for a name that is not known, or no block of capacity.
    """
    check_policy(policy)
    if policy != JOINT:
        return blocks.replay(accesses, capacity, CONTENDERS[policy], progress)
    if capacity < 1:
        raise invalid(f"a cache has at least one block, not {capacity}")
    most = max(1, min(SEGMENT_BLOCKS, capacity // _SHARE))
    joint = EvicPress([_RAW], [_FREE], [capacity], reuse=Reuse(most))
    start = time.process_time()
    bounds = accesses.starts.tolist()
    requests, hits = len(bounds) - 1, 0
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            hits += _meet(joint, accesses, number, slice(begin, end))
        if progress is not None and number % PROGRESS_EVERY == 0:
            progress(number, requests)
    stored = round(float(joint.written[0]))
    return Counts(
        requests=requests,
        accesses=len(accesses.ids),
        block_hits=hits,
        prefix_hits=hits,
        stored=stored,
        refused=len(accesses.ids) - hits - stored,
        dropped=stored - round(float(joint.used[0])),
        seconds=time.process_time() - start,
    )


def _meet(joint: EvicPress, accesses: Accesses, number: int, prompt: slice) -> int:
    """Serve a request; returns how many of its blocks were there."""
    ids, tokens = accesses.ids[prompt], int(accesses.tokens[number])
    walk = joint.walk(ids)
    there = joint.segments.configuration[walk.rows] != 0
    loaded = len(there) if there.all() else int(there.argmin())
    hits = int(joint.segments.blocks[walk.rows[:loaded]].sum())
    each = np.ones(len(ids))
    now, full = float(accesses.times_s[number]), tokens // accesses.tokens_per_block
    joint.used_chain(now, walk, ids, tokens, full, each, each, loaded)
    return hits
