"""Keys: the same everywhere for the same content, different for anything that changes KV."""

import hashlib
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import TierKVError
from tierkv.identity import Identity, LayerSpec, Rope, tagged
from tierkv.key import KEY_BYTES, Extras, chain_keys, root_key
from tierkv.part import Part

ROPE = Rope(kind="default", theta=10000.0, rotary_dim=64)
LAYER = LayerSpec(kv_heads=4, k_dim=64, v_dim=64, rope=ROPE)
IDENTITY = Identity(
    model="org/model", weights="hub:abc", kv_dtype="bf16", tokens_per_block=4, layers=(LAYER,) * 2
)
TOKENS = np.arange(8, dtype=np.int32)

ONE_PROCESS = """
import numpy as np
from tierkv.identity import Identity, LayerSpec, Rope
from tierkv.key import chain_keys, root_key
layer = LayerSpec(kv_heads=4, k_dim=64, v_dim=64,
                  rope=Rope(kind="default", theta=10000.0, rotary_dim=64))
identity = Identity(model="org/model", weights="hub:abc", kv_dtype="bf16", tokens_per_block=4,
                    layers=(layer, layer))
root = root_key(identity.fingerprint, {extras})
print(chain_keys(root, np.arange(8, dtype=np.int32), 4).hex())
"""


def keys(identity: Identity = IDENTITY, extras: Extras | None = None) -> bytes:
    return chain_keys(root_key(identity.fingerprint, extras), TOKENS, 4)


def changed(**changes: Any) -> Identity:
    return msgspec.structs.replace(IDENTITY, **changes)


def with_layers(**changes: Any) -> Identity:
    return changed(layers=(msgspec.structs.replace(LAYER, **changes),) * 2)


def with_rope(**changes: Any) -> Identity:
    return with_layers(rope=msgspec.structs.replace(ROPE, **changes))


@pytest.mark.parametrize("seed", [None, "0", "random"])
def test_r01_keys_are_equal_in_fresh_interpreters(seed: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        env["PYTHONHASHSEED"] = seed
    for extras in ("None", "{}"):
        script = ONE_PROCESS.replace("{extras}", extras)
        done = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == keys().hex()


@pytest.mark.parametrize("value", [None, 0, 5, 1.5, ["a"]])
def test_r01_an_extra_that_names_no_content_is_refused(value: Any) -> None:
    with pytest.raises(TierKVError, match=r"'lora'.*give text or bytes"):
        root_key(IDENTITY.fingerprint, {"lora": value})
    with pytest.raises(TierKVError, match=r"'image'.*give text or bytes"):
        chain_keys(root_key(IDENTITY.fingerprint), TOKENS, 4, {1: {"image": value}})


def test_r01_the_bytes_of_keys_are_fixed() -> None:
    assert IDENTITY.fingerprint.hex() == (
        "6958c845f6cd85f5fa8fa96aa63b39eeacfd74698e8f27c480009fb770939742"
    )
    assert keys().hex()[:64] == "618f116b28c82a6c4a15c3085819add271e2e1c0250d79e3f99d3fef00d01c62"
    assert keys().hex()[64:] == "361f9f42f78b390656a4545fbb8a6a8ac502ed5fc64a9f90c5816db1bcfeabf1"


OTHER_FORMATS = {
    "dtype": changed(kv_dtype="fp16"),
    "fp8 of the same size": msgspec.structs.replace(
        with_layers(k_dim=128, v_dim=128), kv_dtype="fp8_e4m3"
    ),
    "fp8 kind": changed(kv_dtype="fp8_e5m2"),
    "scales": changed(kv_scales="per-tensor"),
    "block size": changed(tokens_per_block=8),
    "layer count": changed(layers=(LAYER,) * 3),
    "heads for layers": changed(layers=(msgspec.structs.replace(LAYER, kv_heads=8),)),
    "heads for dims": with_layers(kv_heads=8, k_dim=32, v_dim=32),
    "K for V": with_layers(k_dim=96, v_dim=32),
    "weights": changed(weights="hub:abd"),
    "epoch": changed(epoch=1),
    "model": changed(model="org/model2"),
}


def test_r02_every_field_of_the_format_changes_every_key() -> None:
    found = [keys(identity) for identity in [IDENTITY, *OTHER_FORMATS.values()]]
    singles = {run[at : at + KEY_BYTES] for run in found for at in range(0, len(run), KEY_BYTES)}
    assert len(singles) == len(found) * 2


def test_r02_parts_of_other_parallel_sizes_are_other_units() -> None:
    whole = Part.whole(IDENTITY)
    ranks = [whole._replace(head_start=start, head_stop=start + 2) for start in (0, 2)]
    layers = [whole._replace(layer_start=at, layer_stop=at + 1) for at in (0, 1)]
    packed = {part.pack() for part in [whole, *ranks, *layers]}
    assert len(packed) == 5
    assert whole.raw_bytes(IDENTITY) == sum(part.raw_bytes(IDENTITY) for part in ranks)


OTHER_POSITIONS = {
    "factor": with_rope(kind="linear", scaling='{"factor":1.0}'),
    "factor 2": with_rope(kind="linear", scaling='{"factor":2.0}'),
    "kind": with_rope(kind="yarn"),
    "theta": with_rope(theta=20000.0),
    "partial": with_rope(rotary_dim=32),
    "interleaved": with_rope(interleaved=True),
    "window": with_layers(window=512),
    "another window": with_layers(window=1024),
    "window of zero": with_layers(window=0),
    "one layer only": changed(layers=(LAYER, msgspec.structs.replace(LAYER, window=512))),
    "the other layer": changed(layers=(msgspec.structs.replace(LAYER, window=512), LAYER)),
}


def test_r03_every_setting_of_positions_changes_every_key() -> None:
    found = {keys(identity)[:KEY_BYTES] for identity in [IDENTITY, *OTHER_POSITIONS.values()]}
    assert len(found) == 1 + len(OTHER_POSITIONS)


def test_r04_adapters_do_not_share_keys() -> None:
    extras: list[Extras] = [
        {"lora": "a@1111"},
        {"lora": "b@1111"},
        {},
        {"lora": "a@2222"},
        {"lora": ""},
    ]
    assert len({keys(extras=extra) for extra in extras}) == len(extras)


def test_r05_fields_do_not_run_into_each_other() -> None:
    extras: list[Extras] = [
        {"lora": "X"},
        {"salt": "X"},
        {"lora": "a", "salt": "b"},
        {"lora": "ab"},
        {"salt": "a|b"},
        {"lora": "a|b"},
        {"lora": "b", "salt": "a"},
        {"lora": "a", "salt": ""},
        {"lora": "a"},
        {"loras": "alt"},
    ]
    assert len({keys(extras=extra) for extra in extras}) == len(extras)


def test_r05_token_ids_and_names_do_not_run_into_each_other() -> None:
    root = root_key(IDENTITY.fingerprint)
    pairs = [(1, 23), (12, 3), (0, 123), (123, 0), (1 << 24, 0), (1, 1 << 16)]
    found = {chain_keys(root, np.array(pair, np.int32), 2) for pair in pairs}
    assert len(found) == len(pairs)
    models = [
        changed(model="org/a-b"),
        changed(model="org-a/b"),
        changed(model="org/a", weights="-b"),
    ]
    assert len({keys(identity) for identity in models}) == len(models)


def test_order_of_extras_does_not_matter() -> None:
    assert keys(extras={"lora": "a", "salt": "b"}) == keys(extras={"salt": "b", "lora": "a"})
    assert keys(extras={"lora": b"a"}) == keys(extras={"lora": "a"})


def test_block_extras_change_that_block_and_all_after_it() -> None:
    root = root_key(IDENTITY.fingerprint)
    plain = chain_keys(root, TOKENS, 2)
    image = chain_keys(root, TOKENS, 2, {1: {"image": "cat"}})
    other = chain_keys(root, TOKENS, 2, {1: {"image": "dog"}})
    assert plain[:32] == image[:32] == other[:32]
    for at in range(32, len(plain), 32):
        assert len({run[at : at + 32] for run in (plain, image, other)}) == 3


@pytest.mark.parametrize("tokens", [np.arange(8), np.zeros((2, 4), np.int32)])
def test_other_arrays_are_refused(tokens: Any) -> None:
    with pytest.raises(TierKVError, match="1-D int32"):
        chain_keys(root_key(IDENTITY.fingerprint), tokens, 4)


@dataclass(frozen=True)
class Cut:
    tokens: list[int]
    size: int
    at: int


cuts = st.builds(
    Cut,
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=64),
    size=st.integers(1, 16),
    at=st.integers(0, 16),
)


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


@given(cuts)
def test_a_chain_goes_on_from_any_of_its_keys(cut: Cut) -> None:
    root = root_key(IDENTITY.fingerprint)
    tokens = np.array(cut.tokens, np.int32)
    whole = chain_keys(root, tokens, cut.size)
    count = len(tokens) // cut.size
    assert len(whole) == count * KEY_BYTES
    head = chain_keys(root, tokens[: cut.at * cut.size], cut.size)
    assert whole.startswith(head)
    tail = chain_keys(head[-KEY_BYTES:] or root, tokens[cut.at * cut.size :], cut.size)
    assert head + tail == whole


@given(cuts, st.integers(0, 63), st.integers(1, 2**31 - 1))
def test_one_token_changes_its_block_and_all_after_it(cut: Cut, at: int, by: int) -> None:
    if at >= len(cut.tokens):
        return
    root = root_key(IDENTITY.fingerprint)
    tokens = np.array(cut.tokens, np.int32)
    other = tokens.copy()
    other[at] ^= by
    ours, theirs = (split(chain_keys(root, run, cut.size)) for run in (tokens, other))
    same = [mine == yours for mine, yours in zip(ours, theirs, strict=True)]
    assert same == [number < at // cut.size for number in range(len(same))]


@given(
    st.lists(st.tuples(st.text(max_size=8), st.binary(max_size=8)), max_size=4),
    st.lists(st.tuples(st.text(max_size=8), st.binary(max_size=8)), max_size=4),
)
def test_tagged_fields_have_one_reading(
    ours: list[tuple[str, bytes]], theirs: list[tuple[str, bytes]]
) -> None:
    assert (tagged(ours) == tagged(theirs)) == (ours == theirs)


def test_the_fingerprint_sees_every_field() -> None:
    """A field added to these structs without entering the fingerprint fails here."""
    assert Identity.__struct_fields__ == (
        "model", "weights", "epoch", "kv_dtype", "kv_scales", "tokens_per_block", "layers",
    )  # fmt: skip
    assert LayerSpec.__struct_fields__ == ("kv_heads", "k_dim", "v_dim", "rope", "window")
    assert Rope.__struct_fields__ == ("kind", "theta", "rotary_dim", "interleaved", "scaling")
    every = [IDENTITY, *OTHER_FORMATS.values(), *OTHER_POSITIONS.values()]
    for one, two in itertools.combinations(every, 2):
        assert one.fingerprint != two.fingerprint


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_dtype": "int7"}, "int7"),
        ({"layers": ()}, "layers"),
        ({"tokens_per_block": 0}, "tokens per block"),
        ({"tokens_per_block": 5000}, "tokens per block"),
    ],
)
def test_identities_that_cannot_be_stored_are_refused(changes: dict[str, Any], says: str) -> None:
    fields = {name: getattr(IDENTITY, name) for name in IDENTITY.__struct_fields__}
    with pytest.raises(TierKVError, match=says):
        Identity(**fields | changes)


def test_a_million_tokens_cost_one_hash_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the key before and the block's own tokens: linear, and in C."""
    sha256, hashed = hashlib.sha256, []

    class Counted:
        def __init__(self) -> None:
            self.state, self.fed = sha256(), list[int]()

        def copy(self) -> "Counted":
            return Counted()

        def update(self, data: bytes) -> None:
            self.fed.append(len(data))
            self.state.update(data)

        def digest(self) -> bytes:
            hashed.append(tuple(self.fed))
            return self.state.digest()

    monkeypatch.setattr(hashlib, "sha256", Counted)
    keys = chain_keys(bytes(32), np.arange(1_000_000, dtype=np.int32), 256)
    assert hashed == [(32, 1024)] * (len(keys) // 32)
    assert len(keys) // 32 == 1_000_000 // 256
