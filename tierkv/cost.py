"""Cost model: predicted seconds of a load and of a recompute, from measured rates.

    T_load      = latency + stored bytes / bandwidth + raw bytes / decode rate     (one run of one
    tier) T_recompute = linear * n + quadratic * (p * n + n^2 / 2)                       (n tokens
    at position p)

Source: KV load against recompute, as in Mooncake's reuse condition, with live rates in place of
peaks.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tierkv.codec import Profile

LATENCY_BYTES = 256 << 10
"""A read of fewer bytes tells how long a tier takes to begin."""
RATE_BYTES = 1 << 20
"""Fewer bytes do not tell how fast it goes on."""
_SMOOTH = 0.2
_MOST_BPS = 1e13
_MOST_COPY_S = 600.0
_SLOWEST = 1 / 4

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


class Rates(NamedTuple):
    """Measured behaviour of a tier: seconds before the first byte, bytes per second."""

    latency_s: float
    read_bps: float
    write_bps: float

    def with_read(self, read_bps: float) -> Self:
        """Return the rates after a read at `read_bps`."""
        return self._replace(read_bps=_blend(self.read_bps, read_bps))

    def with_write(self, write_bps: float) -> Self:
        """Return the rates after a write at `write_bps`."""
        return self._replace(write_bps=_blend(self.write_bps, write_bps))

    def with_told(self, op: Literal["read", "write"], nbytes: int, seconds: float) -> Self:
        """Return the rates after a copy that a client tells of; a figure that cannot be: the same.

        RAM is copied from and to by clients, so only they can measure it. A copy that takes far
        longer than `HOST_RATES` has waited for a core: it counts as one at `_SLOWEST` of that.
        """
        if nbytes <= 0 or not nbytes / _MOST_BPS < seconds < _MOST_COPY_S:
            return self
        if nbytes >= RATE_BYTES:
            rate = nbytes / seconds
            if op == "read":
                return self.with_read(max(rate, HOST_RATES.read_bps * _SLOWEST))
            return self.with_write(max(rate, HOST_RATES.write_bps * _SLOWEST))
        if op == "read" and nbytes < LATENCY_BYTES:
            return self.with_latency(min(seconds, HOST_RATES.latency_s / _SLOWEST))
        return self

    def with_latency(self, seconds: float) -> Self:
        """Return the rates after a small read that took `seconds`."""
        return self._replace(latency_s=_blend(self.latency_s, seconds))


HOST_RATES = Rates(2e-5, 8e9, 8e9)
"""What is assumed of RAM until clients tell what their copies take."""


class Recompute(NamedTuple):
    """Seconds of prefill: linear per token, quadratic per token and position; zeros are unknown."""

    linear: float
    quadratic: float

    @property
    def known(self) -> bool:
        """Whether the caller told anything."""
        return self.linear > 0 or self.quadratic > 0

    def seconds(self, tokens: int, position: int) -> float:
        """Return the seconds to compute `tokens` tokens from `position` on."""
        return self.linear * tokens + self.quadratic * (position * tokens + tokens * tokens / 2)


def load_seconds(stored: int, raw: int, rates: Rates, decode_bps: float) -> float:
    """Return the seconds to bring one run of `stored` bytes up and decode it to `raw` bytes."""
    if not stored:
        return 0.0
    return rates.latency_s + stored / rates.read_bps + raw / decode_bps


def pick_profile(profiles: Sequence[Profile], read_bps: float) -> Profile:
    """Return the profile whose blocks load fastest from the tier they are likely to be read from.

    A block reads at bandwidth * ratio and decodes at decode rate: lossless pays only on a tier
    slower than decode_bps * (ratio - 1) / ratio. Ties go to the first.
    """

    def seconds_per_raw_byte(profile: Profile) -> float:
        return 1 / (profile.ratio * read_bps) + 1 / profile.decode_bps

    return min(profiles, key=seconds_per_raw_byte)


class Prefix(NamedTuple):
    """How many pieces of a chain to load; seconds to load them and to compute the rest."""

    pieces: int
    load_s: float
    recompute_s: float


def best_prefix(
    load_s: Floats, tier: Numbers, ends: Numbers, rates: Sequence[Rates], recompute: Recompute
) -> Prefix:
    """Choose the part of a chain's stored head that minimises loading plus computing the rest.

    Args:
        load_s: (n,) seconds to transfer and decode each piece, head first.
        tier: (n,) where each is read from; a tier's latency counts once.
        ends: (n + 1,) tokens up to each piece's end; the last is the whole prompt.
        rates: by tier.
        recompute: seconds of prefill.
    """
    loads = np.cumsum(load_s)
    for number, rate in enumerate(rates):
        loads += rate.latency_s * np.maximum.accumulate(tier == number)
    loads = np.append(0.0, loads)
    at = np.append(0, ends[:-1])
    rest = ends[-1] - at
    computing = recompute.linear * rest + recompute.quadratic * (at * rest + rest * rest / 2)
    pieces = int(np.argmin(loads + computing))
    return Prefix(pieces, float(loads[pieces]), float(computing[pieces]))


def _blend(old: float, new: float) -> float:
    return old + (new - old) * _SMOOTH
