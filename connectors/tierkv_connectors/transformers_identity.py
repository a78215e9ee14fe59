"""Which transformers models can be kept, and what identifies them."""

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tierkv.errors import invalid
from tierkv.identity import Identity
from tierkv.key import Extras
from tierkv_connectors.identities import layer_specs, name_model
from tierkv_connectors.pages import DTYPE_NAMES

TOKENS_PER_BLOCK = 128
"""Half a block of every prompt is computed again on average, so smaller is better for short
prompts; but a block should be worth a disk read, and 128 tokens are 16 MiB of an 8B model in bf16
(1 MiB once compressed 16 times), 3 MB of a 135M one. Every usual page size divides it too."""

_ANGLES_MOVE = frozenset({"dynamic", "longrope"})
"""RoPE whose angles change with the length of the whole prompt: KV is not a prefix's own."""


def identity_of(
    model: PreTrainedModel, tokens_per_block: int = TOKENS_PER_BLOCK, weights: str | None = None
) -> Identity:
    """Return what makes this model's KV interchangeable.

    Args:
        model: as loaded; a PEFT adapter on it is not part of the identity (see `PrefixCache`).
        tokens_per_block: the size of blocks; two sizes never share any.
        weights: names the weights where neither a hub commit nor files do, or where they were
            changed in memory.

    Raises: TierKVError (invalid) for models whose KV cannot be kept, saying why.
    """
    name, weights = name_model(model.config, weights)
    layers = layer_specs(model.config)
    dtype = DTYPE_NAMES.get(model.dtype)
    if dtype is None:
        raise invalid(
            f"{model.dtype} is no KV dtype: load the model in bfloat16, float16 or float32"
        )
    return Identity(
        model=name,
        weights=weights,
        kv_dtype=dtype,
        tokens_per_block=tokens_per_block,
        layers=layers,
    )


def refuse_unsafe(model: PreTrainedModel, identity: Identity, extras: Extras) -> None:
    """Refuse a model whose cache is not what the store would make of it.

    Raises: TierKVError (invalid) naming what is in the way.
    """
    kind = model.config.model_type
    if len(identity.groups) > 1 or any(layer.window for layer in identity.layers):
        raise invalid(
            f"{kind} has {len(identity.groups)} KV group(s), some of sliding-window layers: only "
            "models of one group with full attention are supported here for now"
        )
    if model.training:
        raise invalid(f"{kind} is in training mode, where KV is random: call eval() first")
    moving = {layer.rope.kind for layer in identity.layers} & _ANGLES_MOVE
    if moving:
        raise invalid(f"{kind} has {moving.pop()} RoPE: its keys depend on what follows them")
    for part in ("vision_config", "audio_config"):
        if getattr(model.config, part, None) is not None:
            raise invalid(
                f"{kind} takes more than text ({part}): token ids do not name its content"
            )
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", False):
        raise invalid(f"{kind} attends to later tokens: its KV is not a prefix's own")
    odd = {
        type(layer).__name__
        for layer in DynamicCache(config=model.config).layers
        if type(layer) is not DynamicLayer
    }
    if odd or getattr(model, "_is_stateful", False):
        raise invalid(f"{kind} keeps {', '.join(sorted(odd)) or 'a state'}, not plain KV")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise invalid(f"{kind} is spread over several devices: load it on one")
    adapted = getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False)
    if adapted and not extras.get("lora"):
        raise invalid(
            f"{kind} has an adapter: pass extras={{'lora': 'name@weights digest'}}, or merge it "
            "and pass weights="
        )
