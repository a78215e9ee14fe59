"""What prefill costs, learnt from what an engine was seen to take."""

from collections import deque

import numpy as np

OBSERVATIONS = 64
LEAST_TOKENS = 256
"""Shorter runs are mostly fixed cost, which loading does not save."""


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
            self.linear, self.quadratic = _fit(np.array(self._seen))

    def seconds(self, position: int, tokens: int) -> float:
        """Return what such a prefill is expected to take, 0 while that is unknown."""
        return self.linear * tokens + self.quadratic * _pairs(position, tokens)


def _pairs(position: int, tokens: int) -> float:
    return position * tokens + tokens * tokens / 2


def _fit(seen: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[float, float]:
    """Least squares of relative error; neither coefficient may be negative."""
    terms, seconds = seen[:, :2] / seen[:, 2:], np.ones(len(seen))
    if len(np.unique(seen[:, 0] / seen[:, 1])) > 1:
        (linear, quadratic), *_ = np.linalg.lstsq(terms, seconds, rcond=None)
        if linear >= 0 and quadratic >= 0:
            return float(linear), float(quadratic)
    # One kind of term explains what was seen better than both.
    alone = [float(terms[:, i] @ seconds / (terms[:, i] @ terms[:, i])) for i in range(2)]
    errors = [float(np.square(terms[:, i] * alone[i] - 1).sum()) for i in range(2)]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
