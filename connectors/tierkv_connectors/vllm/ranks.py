"""Ranks: which heads of a layer a tensor-parallel worker has, and so which parts it keeps.

The store has no ranks: a worker writes and reads the parts of its own heads. Where there are more
workers than heads several have the same ones; the first of them stores them.
"""

from typing import NamedTuple

from tierkv.errors import invalid
from tierkv.identity import Identity
from tierkv.part import Part


class Ranks(NamedTuple):
    """How an engine spreads heads, and which of them this process has."""

    shards: int = 1
    """Runs of heads that its workers have, of equal size."""
    shard: int = 0
    """This worker's; the scheduler's process has none of its own."""
    writes: bool = True
    """Whether it is this worker that stores them."""

    def own(self, identity: Identity, group: int) -> Part:
        """Return the part of a KV group that this worker has."""
        return parts_of(identity, group, self.shards)[self.shard]


ALONE = Ranks()
"""The one worker of an engine without tensor parallelism."""


def ranks_of(size: int, rank: int, heads: int, heads_here: int) -> Ranks:
    """Return where a worker stands.

    Args:
        size: tensor-parallel size.
        rank: of the worker.
        heads: KV heads of a layer of the model.
        heads_here: KV heads of a layer in one worker.

    Raises: TierKVError (invalid) when these do not fit together.
    """
    shards, rest = divmod(heads, heads_here)
    if rest or size % shards:
        raise invalid(
            f"{heads} KV heads on {size} tensor-parallel workers, {heads_here} on each: which has "
            "which is not known"
        )
    copies = size // shards
    return Ranks(shards, rank // copies, rank % copies == 0)


def parts_of(identity: Identity, group: int, shards: int) -> tuple[Part, ...]:
    """Return the parts of a KV group whose heads are stored in so many equal runs."""
    whole = Part.whole(identity, group)
    step = whole.head_stop // shards
    return tuple(
        whole._replace(head_start=at, head_stop=at + step) for at in range(0, whole.head_stop, step)
    )


def shared_heads(mine: Part, other: Part) -> tuple[int, int]:
    """Return the first head that two parts of a KV group share and the one after their last."""
    return max(mine.head_start, other.head_start), min(mine.head_stop, other.head_stop)
