"""Passages: documents take turns, targets are what follows, needles can be found."""

import pytest

from tierkv.errors import TierKVError
from tierkv_codecs.lab.passages import NEEDLE, needles, of_documents
from tierkv_codecs.lab.texts import Document


def tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def numbered(name: str, length: int) -> Document:
    return Document("prose", name, "".join(chr(0x4E00 + i) for i in range(length)))


def test_documents_take_turns() -> None:
    documents = [numbered("a", 33), numbered("b", 70), numbered("c", 22)]
    found = of_documents(documents, tokens, 7, 8, 2)
    assert [one.document for one in found] == ["a", "b", "c", "a", "b", "c", "a"]
    starts = [one.prefix[0] - 0x4E00 for one in found]
    assert starts == [0, 0, 0, 11, 11, 11, 22]


def test_targets_follow_the_continuation() -> None:
    (one,) = of_documents([numbered("a", 11)], tokens, 1, 8, 2)
    run = [0x4E00 + i for i in range(11)]
    assert one.prefix == run[:8]
    assert one.continuation == run[8:10]
    assert one.targets == run[9:11]
    assert list(one.scored) == [0, 1]


def test_too_little_text_is_said() -> None:
    with pytest.raises(TierKVError, match="give 3 sequences of 11 tokens, 4 are needed"):
        of_documents([numbered("a", 43)], tokens, 4, 8, 2)
    with pytest.raises(TierKVError, match="hide a needle"):
        needles([numbered("a", 255)], tokens, 1, 256)


def test_needles_are_hidden_asked_for_and_answered() -> None:
    hay = [numbered("a", 600), numbered("short", 100), numbered("b", 600)]
    found = needles(hay, tokens, 8, 256)
    assert found == needles(hay, tokens, 8, 256)
    assert [one.document for one in found[:3]] == ["a", "b", "a"]
    assert len({len(one.continuation) for one in found}) == 1
    depths, keys = [], set()
    for one in found:
        assert one.domain == NEEDLE
        prefix, answer = text_of(one.prefix), [one.targets[i] for i in one.scored]
        key = text_of(answer)
        assert len(one.prefix) == 256
        assert len(key) == 5
        assert key.isdigit()
        assert prefix.count(key) == 2
        depths.append(prefix.index(key) / 256)
        keys.add(key)
        assert text_of(one.continuation[: one.scored.start + 1]).endswith("The pass key is ")
        assert text_of(one.targets[one.scored.start :]).rstrip(".") == key
    assert len(keys) == 8
    assert depths == sorted(depths)
    assert depths[0] < 0.25
    assert depths[-1] > 0.6


def test_shorter_needles_are_lengthened_behind_what_is_scored() -> None:
    def uneven(text: str) -> list[int]:
        """Take each run of two equal digits for one token."""
        for digit in "0123456789":
            text = text.replace(digit * 2, chr(0x100 + int(digit)))
        return tokens(text)

    found = needles([numbered("a", 600)], uneven, 32, 256)
    assert len({len(one.continuation) for one in found}) == 1
    assert len({len(one.scored) for one in found}) > 1
    assert all(one.scored.stop < len(one.targets) for one in found)
