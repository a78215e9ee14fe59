"""Models for the lab's tests: a tiny Llama and a tiny Gemma of random weights; tokens are bytes."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

LAYERS = 3
KV_HEADS = 2
HEAD_DIM = 32
WINDOW = 48


def tiny_llama(folder: Path, seed: int = 0) -> Path:
    """Write a model directory; the same weights for a seed at every call."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    byte_tokenizer(folder)
    return folder


def tiny_gemma(folder: Path, layers: int = 3, head_dim: int = 64) -> Path:
    """Write a Gemma 3: sliding windows beside full attention, two RoPE bases, one KV head."""
    torch.manual_seed(0)
    full = 1 if layers == LAYERS else layers - 1
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        sliding_window=WINDOW,
        layer_types=[
            "full_attention" if number == full else "sliding_attention" for number in range(layers)
        ],
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    Gemma3ForCausalLM(config).eval().save_pretrained(folder)
    byte_tokenizer(folder)
    return folder


def byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
