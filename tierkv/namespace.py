"""Namespaces: names, digests and minimum generations, as numbers that columns can hold."""

import functools
import hashlib
import re

import numpy as np
import numpy.typing as npt

from tierkv.errors import invalid

DIGEST_BYTES = 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@functools.lru_cache(1024)
def digest_of(name: str) -> bytes:
    """Return the 16 bytes that frames carry. Raises: TierKVError (invalid) for a bad name."""
    if not _NAME.fullmatch(name):
        raise invalid(f"a namespace is 1 to 128 of A-Z a-z 0-9 . _ -, not {name[:140]!r}")
    return hashlib.sha256(b"tierkv.namespace.1" + name.encode()).digest()[:DIGEST_BYTES]


class Namespaces:
    """Interned namespaces; a frame whose generation is below its namespace's minimum is a miss."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._digests: list[bytes] = []
        self.minimum: list[int] = []

    def number(self, digest: bytes) -> int:
        """Return the number of a namespace, making one at first sight."""
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = len(self._digests)
            self._digests.append(digest)
            self.minimum.append(0)
        return number

    def numbers(self, digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        """Return the numbers of (n, 16) digests."""
        unique, inverse = np.unique(digests, axis=0, return_inverse=True)
        numbers = np.array([self.number(row.tobytes()) for row in unique], np.int32)
        return numbers[inverse.reshape(-1)] if len(unique) else np.empty(0, np.int32)

    def digest(self, number: int) -> bytes:
        """Return the digest of a number."""
        return self._digests[number]

    def minima(self) -> dict[bytes, int]:
        """Return the minimum of every namespace that was ever cleared."""
        return {d: self.minimum[n] for d, n in self._numbers.items() if self.minimum[n]}

    def generation(self, digest: bytes) -> int:
        """Return the minimum generation."""
        return self.minimum[self.number(digest)]

    def raise_to(self, digest: bytes, generation: int) -> None:
        """Raise the minimum; a lower value changes nothing."""
        number = self.number(digest)
        self.minimum[number] = max(self.minimum[number], generation)
