"""Engine: what of vLLM's own objects the scheduler side reads, and nothing else of them."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol


class Request(Protocol):
    """vLLM's Request."""

    request_id: str
    kv_transfer_params: Mapping[str, Any] | None
    cache_salt: str | None
    lora_request: Any
    """Its adapter, None: it has none."""
    mm_features: list[Any]
    """Media of its prompt."""
    block_hashes: list[Any]
    """Names of its full blocks in the engine's own prefix cache."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Their ids."""

    def update_block_hashes(self) -> None:
        """Add the names that `block_hashes` lacks."""


class New(Protocol):
    """vLLM's NewRequestData: a request that runs for the first time, or again."""

    req_id: str
    block_ids: Sequence[Sequence[int]]
    """By KV cache group."""
    num_computed_tokens: int


class Cached(Protocol):
    """vLLM's CachedRequestData: requests that go on."""

    req_ids: Sequence[str]
    resumed_req_ids: AbstractSet[str]
    """Of these `new_block_ids` are all block ids, of the others those that are new."""
    new_block_ids: Sequence[Sequence[Sequence[int]] | None]
    num_computed_tokens: Sequence[int]


class Output(Protocol):
    """vLLM's SchedulerOutput."""

    scheduled_new_reqs: Sequence[New]
    scheduled_cached_reqs: Cached
    num_scheduled_tokens: Mapping[str, int]
