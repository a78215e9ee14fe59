"""Prefills: learns what computing costs from the steps that do nothing but compute one request."""

import time

from tierkv_connectors.prefill import PrefillCost
from tierkv_connectors.vllm.engine import Output


class Prefills:
    """Watches an engine's steps for `cost`."""

    def __init__(self, cost: PrefillCost) -> None:
        self._cost = cost
        self._under_way: tuple[int, int, float] | None = None
        """Position, tokens and start of such a step."""

    def begins(self, output: Output) -> None:
        """Look at a step that begins."""
        if len(output.num_scheduled_tokens) == 1:
            (tokens,) = output.num_scheduled_tokens.values()
            computed = [new.num_computed_tokens for new in output.scheduled_new_reqs]
            computed += output.scheduled_cached_reqs.num_computed_tokens
            self._under_way = computed[0], tokens, time.monotonic()

    def ends(self) -> None:
        """Learn from the step that was looked at."""
        if self._under_way is not None:
            position, tokens, start = self._under_way
            self._cost.observe(position, tokens, time.monotonic() - start)
            self._under_way = None
