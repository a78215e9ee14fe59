"""vLLM: the connector that pages KV blocks in and out of its attention memory.

--kv-transfer-config '{"kv_connector": "TierKVConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "tierkv_connectors.vllm", "kv_load_failure_policy": "recompute"}'
"""

from typing import Any


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class
    """Import the connector when vLLM asks for it: all else here works without vLLM."""
    if name == "TierKVConnector":
        from tierkv_connectors.vllm.connector import TierKVConnector

        return TierKVConnector
    raise AttributeError(name)
