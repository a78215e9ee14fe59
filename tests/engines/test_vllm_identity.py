"""What a real vLLM says of itself gives the identity that transformers gives the same files."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.vllm_engine import environment, needs_vllm, python
from tierkv_connectors.transformers_identity import TOKENS_PER_BLOCK, identity_of

pytestmark = pytest.mark.timeout(600)

PROGRAM = """
import sys
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from tierkv_connectors.vllm.identity import identity_of
transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
config = EngineArgs(model=sys.argv[1], dtype="float32", block_size=32, max_model_len=512,
                    kv_transfer_config=transfer).create_engine_config()
model = config.model_config
count = model.get_num_layers(config.parallel_config)
names = [f"model.layers.{number}.self_attn.attn" for number in range(count)]
spec = FullAttentionSpec(block_size=32, num_kv_heads=model.get_num_kv_heads(config.parallel_config),
                         head_size=model.get_head_size(), dtype=model.dtype)
cache = KVCacheConfig(8, [], [KVCacheGroupSpec(names, spec)])
print(identity_of(config, cache, int(sys.argv[2])).fingerprint.hex(), flush=True)
os._exit(0)
"""


def test_vllm_and_transformers_agree(model_dir: Path) -> None:
    needs_vllm()
    command = [str(python()), "-c", f"import os{PROGRAM}", str(model_dir), str(TOKENS_PER_BLOCK)]
    done = subprocess.run(
        command, env=os.environ | environment(), capture_output=True, text=True, check=False
    )
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    theirs = identity_of(model).fingerprint.hex()
    assert done.stdout.splitlines()[-1:] == [theirs], done.stderr[-3000:]
