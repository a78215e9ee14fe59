"""Run by vLLM's own Python: what can be asked of a vLLM without an engine, once for all tests.

Its argument is a model's directory. Writes one line of JSON: the answer of each kind of question,
or its error.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def layout() -> dict[str, str]:
    from tests.engines.vllm_layout import outcomes

    return outcomes()


def seam() -> dict[str, Any]:
    from tests.engines.vllm_seam import answers

    return answers()


def fingerprint() -> str:
    """Return what an engine's config gives as the identity of its KV."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from tierkv_connectors.transformers_identity import TOKENS_PER_BLOCK
    from tierkv_connectors.vllm.identity import identity_of

    transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    config = EngineArgs(
        model=sys.argv[1], dtype="float32", block_size=32, max_model_len=512,
        kv_transfer_config=transfer,
    ).create_engine_config()  # fmt: skip
    model = config.model_config
    count = model.get_num_layers(config.parallel_config)
    names = [f"model.layers.{number}.self_attn.attn" for number in range(count)]
    spec = FullAttentionSpec(
        block_size=32, num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(), dtype=model.dtype,
    )  # fmt: skip
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec(names, spec)])
    return identity_of(config, cache, TOKENS_PER_BLOCK).fingerprint.hex()


QUESTIONS: tuple[Callable[[], Any], ...] = (layout, seam, fingerprint)


def main() -> None:
    found = {}
    for question in QUESTIONS:
        try:
            found[question.__name__] = {"answer": question()}
        except Exception:  # noqa: BLE001 -- the test gets it, whatever it is
            found[question.__name__] = {"error": traceback.format_exc()}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a config has threads that would go on


if __name__ == "__main__":
    main()
