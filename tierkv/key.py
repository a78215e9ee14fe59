"""BlockKey: the name of a block's content, equal in any process and on any machine.

    root  = SHA-256(tagged(format, identity fingerprint, extras))
    key_i = SHA-256(key_{i-1} or root, token ids of block i as int32 little endian, extras of block
    i)

The root covers identity and extras, so every key of the chain does. The token run has a fixed
length under one identity; what follows it is tagged and length-prefixed, so the encoding has one
reading (docs/FORMAT.md section 2). Keys travel as one bytes object of n x 32.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tierkv.errors import invalid
from tierkv.identity import tagged

KEY_BYTES = 32

Extras = Mapping[str, str | bytes]


def root_key(fingerprint: bytes, extras: Extras | None = None) -> bytes:
    """Return the parent of a chain's first block.

    Args:
        fingerprint: 32 bytes of `Identity.fingerprint`.
        extras: what else separates contents, by name: "namespace" (its name; connectors always
            give it), "lora" (name, version or weights digest), "salt" (tenant). Order does not
            matter; an absent name differs from an empty value.

    Raises: TierKVError (invalid) when an extra is neither text nor bytes.
    """
    fields = [("format", b"tierkv.key.1"), ("identity", fingerprint)]
    fields += _extra_fields(extras or {})
    return hashlib.sha256(tagged(fields)).digest()


def chain_keys(
    root: bytes,
    tokens: npt.NDArray[np.int32],
    tokens_per_block: int,
    block_extras: Mapping[int, Extras] | None = None,
) -> bytes:
    """Return the keys of all full blocks of a prompt, n x 32 bytes, head first.

    Linear in blocks; each block is one SHA-256 call in C. To extend a chain pass its last key as
    `root` and only the new tokens.

    Args:
        root: `root_key` or the key of the block before the first one here.
        tokens: 1-D int32 token ids.
        tokens_per_block: the identity's block size.
        block_extras: content ids of blocks that hold more than text (images), by block number.

    Raises: TierKVError (invalid) when tokens are not a 1-D int32 array, or an extra is neither text
    nor bytes.
    """
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise invalid(f"token ids come as a 1-D int32 array, not {tokens.dtype} {tokens.shape}")
    count = len(tokens) // tokens_per_block
    step = tokens_per_block * 4
    data = np.ascontiguousarray(tokens, dtype="<i4").data.cast("B")
    tails = {
        number: tagged(_extra_fields(extras)) for number, extras in (block_extras or {}).items()
    }
    empty = hashlib.sha256().copy  # a copy takes less time than a new one
    keys: list[bytes] = []
    key = root
    for number in range(count):
        state = empty()
        state.update(key)
        state.update(data[number * step : (number + 1) * step])
        if tails:
            state.update(tails.get(number, b""))
        key = state.digest()
        keys.append(key)
    return b"".join(keys)


def _extra_fields(extras: Extras) -> list[tuple[str, bytes]]:
    fields = []
    for name in sorted(extras):
        value = extras[name]
        if not isinstance(value, str | bytes):  # `bytes` of a number would be so many zeros
            raise invalid(f"the extra {name!r} is {value!r}: give text or bytes that name content")
        fields.append((name, value.encode() if isinstance(value, str) else value))
    return fields
