"""Own: what the engine's own prefix cache holds of a request's chain.

That cache is the tier above all of ours. What it holds is used by a request like the rest of its
chain, but need be neither leased nor brought to RAM for it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from tierkv_connectors.vllm.engine import Request
from tierkv_connectors.vllm.kept import Kept


class Pool(Protocol):
    """vLLM's BlockPool."""

    def get_cached_block(
        self, block_hash: object, kv_cache_group_ids: list[int], /
    ) -> Sequence[object] | None:
        """Return a block of that name in each group, None where one has none."""


class Own:
    """The engine's own prefix cache, as far as it can be looked into.

    That is where the engine has one group, without a window: then its names are those of its
    blocks, and a hit goes up to the first that is missing.
    """

    def __init__(self, kept: Kept) -> None:
        self.pool: Pool | None = None
        """None: not known, so nothing is said to be held."""
        self._ratio = 0 if kept.fails_whole else kept.ratio(0)

    def blocks(self, request: Request) -> int:
        """Return the store blocks of a request's chain that are held, from the first on.

        The engine gives up the ends of chains first, so it takes few looks to find where one ends.
        Where it does not, or gives more up before it runs the request, this is too many.
        """
        pool, ratio, names = self.pool, self._ratio, request.block_hashes
        if pool is None or not ratio:
            return 0
        return bisect_left(
            range(len(names) // ratio),
            True,  # noqa: FBT003 -- the first that is missing
            key=lambda block: pool.get_cached_block(names[(block + 1) * ratio - 1], [0]) is None,
        )
