"""Which of vLLM's cache groups are kept, and what loads and saves touch of them. Plain data."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm_memory import FullAttentionSpec, SlidingWindowSpec, config_of, kept_of
from tierkv.errors import TierKVError
from tierkv_connectors.vllm.groups import (
    KvGroup,
    Share,
    Span,
    kv_groups,
    layer_numbers,
    spans_to_fill,
    spans_to_offer,
)

WINDOW = 9
GEMMA = (WINDOW, WINDOW, None)
"""Two groups of sliding layers and one of the others, as vLLM deals out a pattern of three."""
ENGINE, STORE = 4, 8

FULL = KvGroup(0, ENGINE, None, (Share(1, ("f",), (0,)),))
SLIDING = KvGroup(1, ENGINE, WINDOW, (Share(0, ("a",), (0,)), Share(2, ("b",), (1,))))


def test_layers_of_one_kind_are_one_kv_group_however_they_were_dealt() -> None:
    sliding, full = kept_of(ENGINE, STORE, GEMMA).groups
    assert (sliding.window, full.window) == (WINDOW, None)
    assert [share.engine_group for share in sliding.shares] == [0, 1]
    assert [share.places for share in sliding.shares] == [(0, 2), (1, 3)]
    assert sliding.shares[1].names == ("model.layers.1.attn", "model.layers.4.attn")
    assert [share.places for share in full.shares] == [(0, 1)]


def test_without_the_hybrid_allocator_all_blocks_of_all_layers_are_needed() -> None:
    kept = kept_of(ENGINE, STORE, GEMMA)
    config = config_of(ENGINE, [None])
    (group,) = config.kv_cache_groups
    group.layer_names = [f"model.layers.{number}.attn" for number in range(6)]
    group.kv_cache_spec.sliding_window = WINDOW
    sliding, full = kv_groups(config, kept.identity)
    assert (sliding.window, full.window) == (None, None)
    assert sliding.shares[0].places == (0, 1, 2, 3)
    assert {share.engine_group for share in (*sliding.shares, *full.shares)} == {0}


def wrong(change: Any, windows: Any = GEMMA) -> str:
    kept, config = kept_of(ENGINE, STORE, windows), config_of(ENGINE, windows)
    change(config.kv_cache_groups)
    with pytest.raises(TierKVError) as caught:
        kv_groups(config, kept.identity)
    return str(caught.value)


def sets(number: int, **fields: Any) -> Any:
    return lambda groups: groups[number].__dict__.update(fields)


def sets_spec(number: int, **fields: Any) -> Any:
    return lambda groups: groups[number].kv_cache_spec.__dict__.update(fields)


class MambaSpec(SimpleNamespace):
    pass


def test_what_keeps_no_plain_kv_is_refused_by_name() -> None:
    assert "MambaSpec" in wrong(sets(1, kv_cache_spec=MambaSpec()))
    assert "draft model" in wrong(sets(2, is_eagle_group=True))
    assert "host memory" in wrong(sets(0, host_resident=True))
    assert "must not be loaded" in wrong(sets(0, enable_kv_transfer=False))
    assert "speculative decoding" in wrong(sets_spec(0, extra_retained_tokens=3))
    assert "chunked" in wrong(sets_spec(2, attention_chunk_size=64))
    assert "later tokens" in wrong(sets_spec(2, non_causal=True))
    assert "one state" in wrong(sets_spec(2, tokens_per_state=4))
    assert "windows {9} in their config, and 8" in wrong(sets_spec(0, sliding_window=8))
    assert "windows {None} in their config, and 9" in wrong(sets_spec(2, sliding_window=9))
    assert "2 sizes" in wrong(sets_spec(1, block_size=8))
    assert "0 groups" in wrong(lambda groups: groups.clear())


def test_a_layer_that_is_kept_whole_and_in_windows_is_refused() -> None:
    spec = FullAttentionSpec(block_size=ENGINE, num_kv_heads=2, head_size=4, sliding_window=WINDOW)
    assert "2 sizes" in wrong(sets(1, kv_cache_spec=spec))


@pytest.mark.parametrize("names", [["m.0.a", "m.0.b"], ["m.1.a"], ["m.a"], ["a.0.h.0"], []])
def test_layers_are_numbered_once_from_0(names: list[str]) -> None:
    with pytest.raises(TierKVError, match="numbered"):
        layer_numbers(names)


def ids(group: int, count: int, gone: int = 0) -> list[int]:
    return [0] * gone + list(range(100 * group + gone, 100 * group + count))


def test_a_load_fills_what_lies_in_the_windows() -> None:
    """40 tokens: the next one looks back at 32 to 39, which are engine blocks 8 and 9."""
    blocks = [ids(1, 10, gone=8), ids(2, 10), ids(3, 10, gone=8)]
    full, sliding = spans_to_fill((FULL, SLIDING), STORE, blocks, 0, 40)
    assert full == Span(0, 0, 0, (tuple(range(200, 210)),))
    assert sliding == Span(1, 4, 0, ((108, 109), (308, 309)))
    full, sliding = spans_to_fill((FULL, SLIDING), STORE, blocks, 12, 40)
    assert full == Span(0, 1, 1, (tuple(range(203, 210)),)), "the engine has three blocks itself"
    assert sliding == Span(1, 4, 0, ((108, 109), (308, 309)))
    full, sliding = spans_to_fill((FULL, SLIDING), STORE, blocks, 36, 40)
    assert (full.start, full.skip, sliding.start, sliding.skip) == (4, 1, 4, 1)
    assert sliding.blocks == ((109,), (309,))


def test_a_window_that_is_longer_than_the_prefix_is_filled_from_the_head() -> None:
    blocks = [ids(1, 2), ids(2, 2), ids(3, 2)]
    full, sliding = spans_to_fill((FULL, SLIDING), STORE, blocks, 0, 8)
    assert (full.start, sliding.start, sliding.skip) == (0, 0, 0)
    assert sliding.blocks == ((100, 101), (300, 301))


@pytest.mark.parametrize("gone", [7, 9])
def test_a_load_into_blocks_that_the_rules_do_not_give_is_refused(gone: int) -> None:
    """One more than the window is given up; one less is no doubt (the engine may keep more)."""
    blocks = [ids(1, 10, gone=gone), ids(2, 10), ids(3, 10, gone=8)]
    if gone < 8:
        assert spans_to_fill((FULL, SLIDING), STORE, blocks, 0, 40)[1].blocks[0] == (108, 109)
        return
    with pytest.raises(TierKVError, match="KV group 1 are not those of 40 tokens"):
        spans_to_fill((FULL, SLIDING), STORE, blocks, 0, 40)
    with pytest.raises(TierKVError, match="KV group 0"):
        spans_to_fill((FULL,), STORE, [[], ids(2, 9)], 0, 40)


def test_a_save_offers_the_windows_before_its_ends() -> None:
    blocks = [ids(1, 10), ids(2, 10), ids(3, 10)]
    full, sliding = spans_to_offer((FULL, SLIDING), STORE, blocks, [5], 0)
    assert full == Span(0, 0, 0, (tuple(range(200, 210)),))
    assert sliding == Span(1, 4, 0, ((108, 109), (308, 309)))
    _, first, last = spans_to_offer((FULL, SLIDING), STORE, blocks, [2, 5], 0)
    assert (first.start, first.blocks[0], last.start) == (1, (102, 103), 4)
    wide = SLIDING._replace(window=17)
    _, first, last = spans_to_offer((FULL, wide), STORE, blocks, [4, 5], 0)
    assert (first.start, len(first.blocks[0])) == (2, 4)
    assert (last.start, len(last.blocks[0])) == (4, 2), "nothing is offered twice"


def test_a_save_offers_nothing_that_the_engine_has_given_up() -> None:
    """33 tokens were computed before: blocks up to 6 may be anybody's, whatever ids still say."""
    blocks = [ids(1, 12), ids(2, 12), ids(3, 12)]
    wide = SLIDING._replace(window=33)
    spans = spans_to_offer((FULL, wide), STORE, blocks, [6], 41)
    assert (spans[1].start, spans[1].blocks[0][0]) == (2, 104)
    gone = [ids(1, 12, gone=9), ids(2, 12), ids(3, 12, gone=9)]
    assert len(spans_to_offer((FULL, wide), STORE, gone, [6], 0)) == 1


def test_specs_are_named_as_vllm_s() -> None:
    assert [type(group.kv_cache_spec) for group in config_of(4, GEMMA).kv_cache_groups] == [
        SlidingWindowSpec, SlidingWindowSpec, FullAttentionSpec,
    ]  # fmt: skip
