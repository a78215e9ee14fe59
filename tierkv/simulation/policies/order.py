"""Prompt order: a policy that is told of every chain back to front.

Policies use a chain from tail to head. Published ones meet blocks as they come, front to back: a
chain turned round is used in that order.
"""

from tierkv.catalog import Catalog, Rows
from tierkv.policy import Policy


class PromptOrder:
    """Another policy in the order of prompts."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = f"{policy.name}-prompt-order"
        self.forgot = policy.forgot
        self.offered = policy.offered
        self.victims = policy.victims

    def touched(self, view: Catalog, rows: Rows) -> None:
        """Turn the chain round."""
        self._policy.touched(view, rows[::-1])
