"""Namespaces: names, digests and minimum generations, as numbers that columns can hold."""

import functools
import hashlib
import re
from typing import Any

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


def distinct(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
    """Return the distinct rows of an array, and for each row the number of its like.

    As `np.unique` over axis 0, which compares rows as bytes and needs seconds for a million; here
    columns are sorted as words, and only when there are two different rows at all.
    """
    if (rows[1:] == rows[:1]).all():
        return rows[:1], np.zeros(len(rows), np.intp)
    wide = np.zeros((len(rows), -(-rows[:1].nbytes // 8) * 8), np.uint8)
    wide[:, : rows[:1].nbytes] = np.ascontiguousarray(rows).view(np.uint8)
    words = wide.view(np.uint64)
    order = np.lexsort(words.T)
    starts = np.ones(len(rows), np.bool_)
    starts[1:] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    inverse = np.empty(len(rows), np.intp)
    inverse[order] = np.cumsum(starts) - 1
    return rows[order[starts]], inverse


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
        unique, inverse = distinct(digests)
        return np.array([self.number(row.tobytes()) for row in unique], np.int32)[inverse]

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
