"""Small models with random weights, saved as real ones are: shapes that no small real one has."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

WINDOW = 256
WORDS = 500
"""Tokens of `idefics` that mean nothing in particular: 0 to 499."""
IMAGE, _FAKE, _GLOBAL, _PAD = range(WORDS, WORDS + 4)
SEEN = [_FAKE, _GLOBAL, *[IMAGE] * 16, _FAKE]
"""What an `IMAGE` of a prompt becomes."""
SIDE = 112
"""Pixels of an image's side."""
_LLAMA_LAYERS = 4
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
    return _saved(
        LlamaForCausalLM, LlamaConfig(**_SIZES, num_hidden_layers=_LLAMA_LAYERS), directory
    )


def idefics(directory: Path) -> Path:
    """Save an Idefics 3, whose processor wants no torchvision: a Llama that sees images."""
    names = {IMAGE: "<image>", _FAKE: "<fake_token_around_image>", _GLOBAL: "<global-img>"}
    names |= {_PAD: "<pad>"} | {number: f"w{number}" for number in range(WORDS)}
    spoken = Tokenizer(models.WordLevel({name: at for at, name in names.items()}, unk_token="w0"))
    spoken.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=spoken, unk_token="w0", pad_token="<pad>",
        additional_special_tokens=[names[one] for one in (IMAGE, _FAKE, _GLOBAL)],
    )  # fmt: skip
    edge = {"longest_edge": SIDE}
    seen = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(seen, tokenizer, image_seq_len=SEEN.count(IMAGE)).save_pretrained(directory)
    text: dict[str, Any] = _SIZES | {"vocab_size": 512, "num_hidden_layers": _LLAMA_LAYERS}
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": SIDE, "patch_size": 14, "initializer_range": 0.15,
    }  # fmt: skip
    config = Idefics3Config(
        vision_config=vision, text_config=text | {"initializer_range": 0.15},
        image_token_id=IMAGE, scale_factor=2,
    )  # fmt: skip
    return _saved(Idefics3ForConditionalGeneration, config, directory)


def lora_of(directory: Path, seed: int) -> Path:
    """Save a LoRA adapter for `llama` that changes what it answers."""
    directory.mkdir(exist_ok=True)
    rank, dim = 8, _SIZES["head_dim"]
    widths = {"q_proj": dim * _SIZES["num_attention_heads"]}
    widths["v_proj"] = dim * _SIZES["num_key_value_heads"]
    draw, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer in range(_LLAMA_LAYERS):
        for name, width in widths.items():
            head = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora"
            low = torch.randn(rank, _SIZES["hidden_size"], generator=draw)
            high = torch.randn(width, rank, generator=draw)
            tensors |= {f"{head}_A.weight": 0.2 * low, f"{head}_B.weight": 0.2 * high}
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*widths]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _saved(kind: Any, config: Any, directory: Path) -> Path:
    torch.manual_seed(7)
    # Larger than usual: with the usual ones every prompt has the same answer.
    config.initializer_range = 0.15
    kind(config).float().save_pretrained(directory)
    return directory
