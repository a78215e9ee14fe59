"""Namespaces: names that are safe everywhere, digests, and generations that only rise."""

import numpy as np
import pytest

from tierkv.errors import TierKVError
from tierkv.namespace import DIGEST_BYTES, Namespaces, digest_of


def test_a_digest_is_the_same_in_every_release() -> None:
    assert digest_of("default").hex() == "ba741e33b31a4735b55a436c8a4338c6"


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 128])
def test_good_names(name: str) -> None:
    assert len(digest_of(name)) == DIGEST_BYTES


@pytest.mark.parametrize(
    "name", ["", "x" * 129, "a b", "a/b", "../x", "a\n", "é", "a:b", "\0", "%2e", "٣"]
)
def test_names_that_could_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(TierKVError, match="namespace"):
        digest_of(name)


def test_names_differ() -> None:
    names = [f"n{number}" for number in range(200)]
    assert len({digest_of(name) for name in names}) == 200


def test_numbers_are_dense_and_lead_back() -> None:
    spaces = Namespaces()
    digests = [digest_of(f"n{number}") for number in range(100)]
    assert [spaces.number(digest) for digest in digests] == list(range(100))
    assert [spaces.digest(number) for number in range(100)] == digests
    assert spaces.number(digests[40]) == 40


def test_numbers_of_many_are_those_of_each() -> None:
    spaces = Namespaces()
    digests = [digest_of("a"), digest_of("b"), digest_of("a")]
    found = spaces.numbers(np.frombuffer(b"".join(digests), "u1").reshape(-1, DIGEST_BYTES))
    assert found.tolist() == [spaces.number(digest) for digest in digests]
    assert spaces.numbers(np.empty((0, DIGEST_BYTES), "u1")).tolist() == []


def test_generations_only_rise() -> None:
    spaces = Namespaces()
    one, two = digest_of("one"), digest_of("two")
    assert spaces.generation(one) == 0
    spaces.raise_to(one, 5)
    spaces.raise_to(one, 3)
    assert (spaces.generation(one), spaces.generation(two)) == (5, 0)
    spaces.raise_to(two, 1)
    assert [spaces.minimum[spaces.number(digest)] for digest in (one, two)] == [5, 1]
