"""What tests of reports about Redis share: a tier with a clock of their own, frames in and out."""

from tests.frames import Sample, content, empty_item
from tierkv.tier import DONE, Outcome
from tierkv.tiers.redis import RedisSettings, RedisTier

MIB = 1 << 20


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def open_tier(
    url: str, prefix: str = "reports", timeout_s: float = 30.0, clock: Clock | None = None
) -> RedisTier:
    settings = RedisSettings(
        url=url, prefix=prefix, max_bytes=64 * MIB, ttl_s=600, timeout_s=timeout_s,
        connect_timeout_s=timeout_s,
    )  # fmt: skip
    return RedisTier(settings, clock=clock or Clock(), draw=lambda: 1.0)


def get(tier: RedisTier, frame: Sample) -> Outcome:
    """Read a frame and check its bytes."""
    item = empty_item(frame.id, 0, frame.nbytes)
    outcome = tier.read([item])[0]
    assert outcome != DONE or content(item) == frame.data
    return outcome


def put(tier: RedisTier, frame: Sample) -> Outcome:
    return tier.write([frame.item(0)])[0]
