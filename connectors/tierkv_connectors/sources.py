"""Sources: which tiers the loaded tokens of a match came from."""

from collections.abc import Mapping


def tokens_by_tier(blocks: Mapping[str, int], tokens: int, tokens_per_block: int) -> dict[str, int]:
    """Spread loaded tokens over a match's tiers; what was given up is taken off the last named.

    Args:
        blocks: of the match by tier, as `MatchReply.sources` has them.
        tokens: that were loaded, at most those of the blocks.
        tokens_per_block: tokens of a block.
    """
    found: dict[str, int] = {}
    for tier, count in blocks.items():
        taken = min(count * tokens_per_block, tokens)
        tokens -= taken
        if taken:
            found[tier] = taken
    return found
