"""Cost model: predicted seconds of a load and of a recompute, from measured rates.

    T_load      = latency + stored bytes / bandwidth + raw bytes / decode rate     (one run of one
    tier) T_recompute = linear * n + quadratic * (p * n + n^2 / 2)                       (n tokens
    at position p)

Source: KV load against recompute, as in Mooncake's reuse condition, with live rates in place of
peaks.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tierkv.codec import Profile


class Rates(NamedTuple):
    """Measured behaviour of a tier: seconds before the first byte, bytes per second."""

    latency_s: float
    read_bps: float
    write_bps: float


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
