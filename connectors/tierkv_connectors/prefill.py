"""What prefill costs, learnt from what an engine was seen to take."""

from collections import deque
from collections.abc import Iterable

OBSERVATIONS = 64
LEAST_TOKENS = 256
"""Shorter runs are mostly fixed cost, which loading does not save."""
ALIKE = 1e-12
"""Prefills of nearly one length and position do not tell two terms apart."""


class PrefillCost:
    """Fits seconds = linear * n + quadratic * (p * n + n * n / 2) for n tokens after p others.

    `linear` and `quadratic` are 0 until something was seen.
    """

    def __init__(self) -> None:
        self.linear = 0.0
        self.quadratic = 0.0
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=OBSERVATIONS)

    def observe(self, position: int, tokens: int, seconds: float) -> None:
        """Learn from one prefill."""
        if tokens >= LEAST_TOKENS and seconds > 0:
            self._seen.append((tokens, _pairs(position, tokens), seconds))
            self.linear, self.quadratic = _fit(self._seen)

    def seconds(self, position: int, tokens: int) -> float:
        """Return what such a prefill is expected to take, 0 while that is unknown."""
        return self.linear * tokens + self.quadratic * _pairs(position, tokens)


def _pairs(position: int, tokens: int) -> float:
    return position * tokens + tokens * tokens / 2


def _fit(seen: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Least squares of relative error; neither coefficient may be negative.

    Runs behind every prefill, before its first token is given out: a few sums, where numpy's
    functions take three times as long once a step has emptied the caches.
    """
    first = second = squares = products = other_squares = 0.0
    for tokens, pairs, seconds in seen:
        one, other = tokens / seconds, pairs / seconds
        first, second = first + one, second + other
        squares, products = squares + one * one, products + one * other
        other_squares += other * other
    apart = squares * other_squares - products * products
    if apart > ALIKE * squares * other_squares:
        linear = (first * other_squares - second * products) / apart
        quadratic = (second * squares - first * products) / apart
        if linear >= 0 and quadratic >= 0:
            return linear, quadratic
    # One kind of term explains what was seen better than both.
    linear, quadratic = first / squares, second / other_squares
    return (linear, 0.0) if linear * first >= quadratic * second else (0.0, quadratic)
