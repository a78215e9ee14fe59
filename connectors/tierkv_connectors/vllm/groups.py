"""Groups: which of vLLM's cache groups hold which KV group, and what of it a load or save touches.

vLLM deals layers of one kind out to several groups of equal size, each with block ids of its own;
an Identity has one KV group for all layers of one kind. With vLLM's hybrid allocator a sliding
group keeps only the blocks inside its window: the others have id 0. Without it, all layers are in
one group that keeps all blocks, and then a hit needs all of them of every layer: what vLLM holds it
serves at any length. So the hit rule is that of vLLM's group, not that of the layer. Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tierkv.errors import invalid
from tierkv.identity import Identity
from tierkv.windows import window_blocks

Foreign = Any
"""An object of vLLM's own."""

BlockIds = Sequence[Sequence[int]]
"""A request's engine blocks by engine group."""

_SLIDING = "SlidingWindowSpec"
_KINDS = frozenset({"FullAttentionSpec", _SLIDING})


class Share(NamedTuple):
    """The layers of a KV group that are in one engine group, in the model's order.

    `places` are their numbers within the KV group.
    """

    engine_group: int
    names: tuple[str, ...]
    places: tuple[int, ...]


class KvGroup(NamedTuple):
    """One KV group of the Identity as an engine keeps it."""

    number: int
    engine_tokens: int
    """Tokens of an engine block."""
    window: int | None
    """Tokens that the engine keeps of it before the end of a hit; None: all."""
    shares: tuple[Share, ...]

    def blocks_needed(self, tokens: int) -> int:
        """Return the store blocks of `tokens` tokens before the end of a hit; 0: all."""
        return 0 if self.window is None else window_blocks(self.window, tokens)

    def kept_from(self, computed: int) -> int:
        """Return the first token whose block the engine still has when `computed` are computed."""
        if self.window is None:
            return 0
        return max(computed - self.window + 1, 0) // self.engine_tokens * self.engine_tokens


def kv_groups(kv_cache_config: Foreign, identity: Identity) -> tuple[KvGroup, ...]:
    """Return how an engine keeps each KV group of an identity.

    Raises: TierKVError (invalid) for what cannot be kept, saying why.
    """
    groups = kv_cache_config.kv_cache_groups
    windows = check_groups(groups)
    numbered = layer_numbers([name for group in groups for name in group.layer_names])
    places = {
        layer: (group, place)
        for group, members in enumerate(identity.groups)
        for place, layer in enumerate(members)
    }
    found: dict[int, list[tuple[int, int | None, Share]]] = {}
    for number, (group, window) in enumerate(zip(groups, windows, strict=True)):
        members: dict[int, list[str]] = {}
        _check_windows(
            group, window, {identity.layers[numbered[n]].window for n in group.layer_names}
        )
        for name in sorted(group.layer_names, key=lambda one: numbered[one]):
            members.setdefault(places[numbered[name]][0], []).append(name)
        for kv_group, names in members.items():
            at = tuple(places[numbered[name]][1] for name in names)
            share = Share(number, tuple(names), at)
            found.setdefault(kv_group, []).append((group.kv_cache_spec.block_size, window, share))
    return tuple(_joined(number, found[number]) for number in sorted(found))


def _check_windows(group: Foreign, kept: int | None, wanted: set[int | None]) -> None:
    """Refuse a group whose layers look back otherwise than their config says."""
    window = getattr(group.kv_cache_spec, "sliding_window", None)
    # A group that keeps all may have layers with and without the window.
    fits = wanted == {window} if kept is not None else wanted | {None} == {window, None}
    if not fits:
        raise invalid(
            f"layers like {group.layer_names[0]} have the windows {wanted} in their config, and "
            f"{window} in the KV cache"
        )


def _joined(number: int, members: Sequence[tuple[int, int | None, Share]]) -> KvGroup:
    rules = {(tokens, window) for tokens, window, _ in members}
    if len(rules) != 1:
        raise invalid(f"layers of one kind have blocks or windows of {len(rules)} sizes")
    ((tokens, window),) = rules
    return KvGroup(number, tokens, window, tuple(share for _, _, share in members))


def check_groups(groups: Sequence[Foreign]) -> tuple[int | None, ...]:
    """Return the window that each engine group keeps, None for all.

    Raises: TierKVError (invalid) for groups that keep something else than plain KV.
    """
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if not kinds or not set(kinds) <= _KINDS:
        raise invalid(
            f"the KV cache has {len(kinds)} groups ({', '.join(kinds[:8])}): only groups of "
            "full and sliding-window attention are supported"
        )
    return tuple(_window(group) for group in groups)


def _window(group: Foreign) -> int | None:
    spec = group.kv_cache_spec
    if getattr(group, "is_eagle_group", False):
        raise invalid("a KV cache group belongs to a draft model, whose KV is not one of a prefix")
    if getattr(group, "host_resident", False):
        raise invalid("a KV cache group lives in host memory: not supported")
    if not getattr(group, "enable_kv_transfer", True):
        raise invalid("a KV cache group is a copy that must not be loaded")
    if getattr(spec, "attention_chunk_size", None):
        raise invalid("chunked attention is not supported")
    if getattr(spec, "non_causal", False):
        raise invalid("the model attends to later tokens: its KV is not a prefix's own")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise invalid("the KV cache holds more or less than one state for each token")
    if getattr(spec, "extra_retained_tokens", 0):
        raise invalid("a window is kept longer for speculative decoding: not supported")
    # A FullAttentionSpec may have a window too: the layers look no further, but all is kept.
    return int(spec.sliding_window) if type(spec).__name__ == _SLIDING else None


def layer_numbers(names: Sequence[str]) -> dict[str, int]:
    """Return the number of each layer, from names like model.layers.12.self_attn.attn.

    Raises: TierKVError (invalid) unless they number the layers of one model from 0.
    """
    numbered = {}
    for name in names:
        numbers = [int(part) for part in name.split(".") if part.isdecimal()]
        if len(numbers) == 1:
            numbered[name] = numbers[0]
    if sorted(numbered.values()) != list(range(len(names))) or not names:
        raise invalid(f"layers {', '.join(names[:3])}... are not numbered 0 to {len(names) - 1}")
    return numbered


class Span(NamedTuple):
    """Store blocks of one KV group, and the engine blocks that hold them.

    `skip` engine blocks of the first store block are left out.
    """

    group: int
    start: int
    """First store block."""
    skip: int
    blocks: tuple[tuple[int, ...], ...]
    """Engine blocks by share, in order."""

    @property
    def ids(self) -> Iterator[int]:
        """All engine blocks."""
        return (block for ids in self.blocks for block in ids)


def spans_to_fill(
    groups: Iterable[KvGroup], tokens: int, blocks: BlockIds, first: int, stop: int
) -> tuple[Span, ...]:
    """Return what a load fills for the tokens from `first` up to `stop`.

    Args:
        groups: of the engine.
        tokens: of a store block.
        blocks: of the request; those outside a window have id 0.
        first: where the engine's own hit ends.
        stop: where the load's hit ends, a whole number of store blocks.

    Raises: TierKVError (invalid) when the blocks are not what the groups' rules say.
    """
    spans = []
    for group in groups:
        start, end = first // group.engine_tokens, stop // group.engine_tokens
        ids = [blocks[share.engine_group][start:end] for share in group.shares]
        start = max(start, group.kept_from(stop) // group.engine_tokens)
        ids = [one[len(one) - (end - start) :] for one in ids]
        if not all(len(one) == end - start and all(one) for one in ids):
            raise invalid(f"the blocks of KV group {group.number} are not those of {stop} tokens")
        at, skip = divmod(start, tokens // group.engine_tokens)
        spans.append(Span(group.number, at, skip, tuple(map(tuple, ids))))
    return tuple(spans)


def spans_to_offer(
    groups: Iterable[KvGroup],
    tokens: int,
    blocks: BlockIds,
    ends: Iterable[int],
    computed: int,
) -> tuple[Span, ...]:
    """Return what a save offers so that hits may end at these store blocks.

    Of a KV group without a window that is the chain from its head to the last end; of one with a
    window, the windows before the ends, as far as the engine still has them.

    Args:
        groups: of the engine.
        tokens: of a store block.
        blocks: of the request.
        ends: in store blocks, ascending; all of it is computed when the step is over.
        computed: tokens that were computed before the step.
    """
    spans = []
    for group in groups:
        ratio, needed = tokens // group.engine_tokens, group.blocks_needed(tokens)
        kept, done = -(-group.kept_from(computed) // tokens), 0
        for end in ends if needed else [*ends][-1:]:
            start = max(end - needed, kept, done) if needed else 0
            rows = [
                tuple(blocks[share.engine_group][start * ratio : end * ratio])
                for share in group.shares
            ]
            whole = all(len(ids) == (end - start) * ratio and all(ids) for ids in rows)
            if start < end and whole:
                spans.append(Span(group.number, start, 0, tuple(rows)))
                done = end
    return tuple(spans)
