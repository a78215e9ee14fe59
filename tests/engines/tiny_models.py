"""Small models with random weights, saved as real ones are: shapes that no small real one has."""

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

WINDOW = 256
_SIZES: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip


def gemma(directory: Path) -> Path:
    """Save a Gemma 3 of six layers, of which five have a window of `WINDOW` tokens."""
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    config = Gemma3TextConfig(
        **_SIZES, num_hidden_layers=6, sliding_window=WINDOW, layer_types=layers
    )
    return _saved(Gemma3ForCausalLM, config, directory)


def llama(directory: Path) -> Path:
    """Save a Llama whose heads can be spread over 1, 2 or 4 workers."""
    return _saved(LlamaForCausalLM, LlamaConfig(**_SIZES, num_hidden_layers=4), directory)


def _saved(kind: Any, config: Any, directory: Path) -> Path:
    torch.manual_seed(7)
    # Larger than usual: with the usual ones every prompt has the same answer.
    config.initializer_range = 0.15
    kind(config).float().save_pretrained(directory)
    return directory
