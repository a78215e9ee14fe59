"""Laws of keys: a longer prompt has the shorter's keys first, different content never meets."""

import itertools

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tierkv.key import KEY_BYTES, Extras, chain_keys, root_key

ROOT = root_key(b"f" * 32)
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=60)
EXTRAS = st.dictionaries(
    st.sampled_from(["lora", "salt", "image", "a"]), st.text("abX|:\0", max_size=4), max_size=3
)


def keys_of(tokens: list[int], step: int, root: bytes = ROOT) -> list[bytes]:
    data = chain_keys(root, np.array(tokens, np.int32), step)
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_a_chain_starts_with_the_chain_of_its_prefix(
    head: list[int], tail: list[int], step: int
) -> None:
    short, long = keys_of(head, step), keys_of(head + tail, step)
    assert long[: len(short)] == short
    assert len(long) == (len(head) + len(tail)) // step


@given(TOKENS, st.integers(1, 9), st.data())
def test_a_chain_in_steps_is_the_chain_at_once(
    tokens: list[int], step: int, data: st.DataObject
) -> None:
    whole = keys_of(tokens, step)
    cut = data.draw(st.integers(0, len(whole)))
    first = keys_of(tokens[: cut * step], step)
    root = first[-1] if first else ROOT
    assert first + keys_of(tokens[cut * step :], step, root) == whole


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_chains_part_where_tokens_differ(one: list[int], two: list[int], step: int) -> None:
    first, second = keys_of(one, step), keys_of(two, step)
    for block, (a, b) in enumerate(zip(first, second, strict=False), 1):
        assert (a == b) == (one[: block * step] == two[: block * step])


@given(TOKENS, st.integers(1, 5))
def test_no_key_comes_twice_in_a_chain(tokens: list[int], step: int) -> None:
    found = keys_of(tokens, step)
    assert len(set(found)) == len(found)


@given(EXTRAS, EXTRAS)
def test_r05_different_extras_have_different_roots(one: Extras, two: Extras) -> None:
    same = dict(one) == dict(two)
    assert (root_key(b"f" * 32, one) == root_key(b"f" * 32, two)) == same


@given(st.dictionaries(st.integers(0, 3), EXTRAS), st.dictionaries(st.integers(0, 3), EXTRAS))
def test_r05_extras_of_blocks_stay_with_their_block(
    one: dict[int, Extras], two: dict[int, Extras]
) -> None:
    tokens = np.arange(16, dtype=np.int32)
    filled = [{n: dict(extras) for n, extras in each.items() if extras} for each in (one, two)]
    assume(filled[0] != filled[1])
    a, b = (chain_keys(ROOT, tokens, 4, each) for each in (one, two))
    assert a != b


R05: list[Extras] = [
    {"lora": "X"}, {"salt": "X"}, {"lora": "a", "salt": "b"}, {"lora": "ab"}, {"salt": "a|b"},
    {"lora": "a|b"}, {"lora": "", "salt": "ab"}, {"lora": "ab", "salt": ""}, {"salt": ""},
    {"lora": ""}, {}, {"lora": "a"}, {"salt": "b"}, {"lorasalt": "ab"}, {"lora": "salt"},
    {"lora": b"\1\0\0\0X"}, {"image": "X"}, {"salt": "lora"},
]  # fmt: skip


def test_r05_names_and_values_never_run_into_each_other() -> None:
    roots = {root_key(b"f" * 32, extras) for extras in R05}
    assert len(roots) == len(R05)
    for one, two in itertools.pairwise(([1, 23], [12, 3], [123, 0], [0, 123])):
        assert keys_of(one, 2) != keys_of(two, 2)
