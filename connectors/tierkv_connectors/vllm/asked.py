"""Asked: one request of vLLM's, and the question about its chain. The scheduler side's, no I/O."""

import threading
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierkv.calls import MatchReply
from tierkv.client import MISS
from tierkv.fidelity import Fidelity
from tierkv.key import KEY_BYTES, chain_keys
from tierkv_connectors.sources import tokens_by_tier
from tierkv_connectors.vllm.engine import Request
from tierkv_connectors.vllm.media import media_extras
from tierkv_connectors.vllm.wishes import NO_HINTS, Hints


class Lookup:
    """One question about a request's chain, answered by the lane."""

    def __init__(self, held: int = 0) -> None:
        self.held = held
        """Store blocks that the engine seemed to hold itself when this was asked."""
        self.answered = threading.Event()
        self.keys = b""
        self.reply = MISS
        self.shards = 1
        """Runs of heads in which the answer's blocks are stored."""
        self.reach = 0
        """Store blocks that KV groups without a window have, as far as is known."""
        self.until = 0.0
        """`time.monotonic` until which the answer may be used."""
        self.followed = False
        """Whether the event stream has been told of the answer."""
        self.computed = 0
        """Tokens that the engine held when it was last told of this answer."""
        self._guard = threading.Lock()
        self._unwanted = False

    def answer(self, reply: MatchReply, until: float) -> int:
        """Take the answer; returns the match to release when nobody wants it any more."""
        with self._guard:
            self.reply, self.until = reply, until
            self.answered.set()
            return reply.match if self._unwanted else 0

    def forget(self) -> int:
        """Want no answer; returns the match to release when there is one already."""
        with self._guard:
            self._unwanted = True
            return self.reply.match


@dataclass(slots=True)
class Asked:
    """What is known of one request until vLLM is done with it."""

    request: Request
    fingerprint: bytes
    root: bytes
    fidelity: Fidelity
    """The least class that it is served, and so the class of what it computes."""
    store: bool
    hints: Hints = NO_HINTS
    keys: bytes = b""
    blocks: list[list[int]] = field(default_factory=list)
    """By engine group; in one with a window those that the engine has given up may still stand."""
    offered: int = 0
    """Store blocks offered so far."""
    reach: int = 0
    """Store blocks that KV groups without a window were found to have: where others went on."""
    lookup: Lookup | None = None
    loading: int = 0
    """Number of the match that is being loaded from."""
    filling: tuple[int, ...] = ()
    """Engine blocks that it fills, in order."""
    failed: bool = False
    """A load did not fill all that it should: what is missing is computed, not loaded again."""
    sources: dict[str, int] = field(default_factory=dict)
    """Tokens of its loads by the tier they came from."""
    classes: dict[str, int] = field(default_factory=dict)
    """Store blocks of its loads by the class of what they were filled from."""
    finished: bool = False

    def extended(self, keys: bytes, tokens: int) -> bytes:
        """Return the keys of all full store blocks of `tokens` tokens; the first are known."""
        count, ids = len(keys) // KEY_BYTES, self.request.all_token_ids
        stop = len(ids) // tokens * tokens
        if stop <= count * tokens:
            return keys
        fresh = np.array(ids[count * tokens : stop], np.int32)
        media = media_extras(self.request.mm_features or (), tokens, count, stop // tokens)
        return keys + chain_keys(keys[-KEY_BYTES:] or self.root, fresh, tokens, media)

    def told(self, tokens: int) -> dict[str, Any]:
        """Return what its answer says, for store blocks of `tokens` tokens."""
        if not self.sources:
            return {}
        loaded = sum(self.sources.values())
        found = {"loaded_tokens": self.sources, "fidelity": self.fidelity.label}
        if self.classes:
            found["loaded_classes"] = tokens_by_tier(self.classes, loaded, tokens)
        return found

    def unfilled(self, blocks: AbstractSet[int], tokens: int) -> None:
        """Note which engine blocks of `tokens` tokens the load did not fill, if any."""
        filled = next((at for at, one in enumerate(self.filling) if one in blocks), None)
        if filled is not None:
            self.failed = True
            self.sources = tokens_by_tier(self.sources, filled * tokens, 1)
