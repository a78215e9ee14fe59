"""Answers: every call whose answer comes later gets exactly one, at the latest when the store ends.

Jobs that a stop takes off their lanes, and jobs that hang, answer nobody; `end` answers for them.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Reply = TypeVar("Reply")


class Answers:
    """Calls that wait for their answer. For any thread."""

    def __init__(self) -> None:
        self._open: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._ended = False

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def owe(
        self, done: Callable[[Reply], None], otherwise: Callable[[], Reply]
    ) -> Iterator[Callable[[Reply], None]]:
        """Give what answers a call: the first answer counts. A body that raises owes nothing.

        Args:
            done: takes the answer, in any thread.
            otherwise: makes the answer of a store that ends first.
        """
        number = next(self._numbers)

        def answer(reply: Reply) -> None:
            if self._open.pop(number, None) is not None:
                done(reply)

        self._open[number] = lambda: answer(otherwise())
        accepted = False
        try:
            yield answer
            accepted = True
        finally:
            if not accepted:
                self._open.pop(number, None)
        if self._ended:
            self.end()

    def end(self) -> None:
        """Answer every call that is still open, and each later one as soon as it is made."""
        self._ended = True
        for settle in list(self._open.values()):
            settle()
