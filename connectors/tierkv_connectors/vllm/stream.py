"""Stream: whether vLLM publishes KV events, and in what classes. Differs between its versions."""

from typing import TYPE_CHECKING

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tierkv_connectors.vllm.events import Events, Types
from tierkv_connectors.vllm.kept import Kept

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def events_of(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", kept: Kept
) -> Events | None:
    """Return what tells the engine's event stream of blocks; None where it is off.

    None too where part of a block is kept only inside a window: its hit depends on where it ends,
    which no event can say.
    """
    config = getattr(vllm_config, "kv_events_config", None)
    if config is None or not config.enable_kv_cache_events or kept.windows:
        return None
    group = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or group.block_size
    if kept.tokens % hash_tokens:
        return None
    types = Types(BlockStored, BlockRemoved, maybe_convert_block_hash)
    return Events(types, kept.tokens, hash_tokens, kept.ranks.shards)
