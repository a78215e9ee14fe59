"""Passages: what a model reads in an evaluation, a prefix and a continuation in tokens.

A document gives as many sequences as fit into it, one behind the other; documents take turns, so
that few sequences still see every document. A needle is a pass key hidden in other text: the
continuation asks for it and has the answer, and only the answer's tokens are looked at.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from tierkv.errors import invalid
from tierkv_codecs.lab.texts import Document

NEEDLE = "needle"

Tokens = Callable[[str], list[int]]

_DIGITS = 5
_SHALLOWEST, _DEEPEST = 0.15, 0.8
"""Where needles lie, in shares of the prefix; spread evenly between."""
_HIDDEN = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
_ASKED = "\n\nWhat is the pass key? The pass key is"
_ANSWER = " {key}."


class Passage(NamedTuple):
    """Token ids. `targets[i]` is what truly follows `continuation[i]`.

    `scored` is the range of the continuation's tokens whose predictions are looked at.
    """

    domain: str
    document: str
    prefix: list[int]
    continuation: list[int]
    targets: list[int]
    scored: range


def of_documents(
    documents: Sequence[Document], tokens: Tokens, count: int, context: int, length: int
) -> list[Passage]:
    """Return the first `count` sequences of documents of one domain.

    Args:
        documents: in the order of their turns.
        tokens: the model's tokenizer.
        count: of sequences.
        context: tokens of each prefix.
        length: tokens of each continuation.

    Raises: TierKVError (invalid): the documents are too short.
    """
    cut = [list(_cut(document, tokens, context, length)) for document in documents]
    turns = max(map(len, cut), default=0)
    found = [one[turn] for turn in range(turns) for one in cut if turn < len(one)]
    if len(found) < count:
        domain = documents[0].domain if documents else "none"
        raise invalid(
            f"the documents of domain {domain!r} give {len(found)} sequences of"
            f" {context + length + 1} tokens, {count} are needed: give longer or more texts"
        )
    return found[:count]


def _cut(document: Document, tokens: Tokens, context: int, length: int) -> Iterator[Passage]:
    ids = tokens(document.text)
    size = context + length + 1
    for start in range(0, len(ids) - size + 1, size):
        run = ids[start : start + size]
        yield Passage(
            document.domain,
            document.name,
            run[:context],
            run[context:-1],
            run[context + 1 :],
            range(length),
        )


def needles(
    documents: Sequence[Document], tokens: Tokens, count: int, context: int
) -> list[Passage]:
    """Return pass keys hidden in the ends of documents; seeded, so always the same.

    Raises: TierKVError (invalid): no document is long enough to hide one in.
    """
    hay = [(one.name, ids) for one in documents if len(ids := tokens(one.text)) >= context]
    if not hay:
        raise invalid(f"no document has the {context} tokens to hide a needle in: give longer ones")
    # A space that every answer begins with is a matter of style, which no needle decides.
    asked = _alike([tokens(_ASKED + _ANSWER.format(key=digit)) for digit in "0123456789"])
    draw = random.Random(0)
    found = []
    for number in range(count):
        name, ids = hay[number % len(hay)]
        key = "".join(draw.choice("0123456789") for _ in range(_DIGITS))
        depth = _SHALLOWEST + (_DEEPEST - _SHALLOWEST) * number / max(count - 1, 1)
        hidden = tokens(_HIDDEN.format(key=key))
        answer = tokens(_ASKED + _ANSWER.format(key=key))[len(asked) :]
        room = context - len(hidden)
        text, at = ids[-room:], int(room * depth)
        prefix = text[:at] + hidden + text[at:]
        run = asked + answer
        # What stands behind the last digit is not asked for.
        scored = range(len(asked) - 1, len(run) - 2)
        found.append(Passage(NEEDLE, name, prefix, run[:-1], run[1:], scored))
    return _even(found)


def _alike(runs: list[list[int]]) -> list[int]:
    """Return what all runs begin with."""
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*runs, strict=False))
    return [column[0] for column in columns]


def _even(found: list[Passage]) -> list[Passage]:
    """Repeat the last tokens of shorter continuations, so that all go through a model together."""
    length = max(len(one.continuation) for one in found)

    def longer(ids: list[int]) -> list[int]:
        return ids + ids[-1:] * (length - len(ids))

    return [
        one._replace(continuation=longer(one.continuation), targets=longer(one.targets))
        for one in found
    ]
