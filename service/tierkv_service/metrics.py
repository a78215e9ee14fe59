"""Metrics: one stat of the store as Prometheus text, in base units. See docs/OPERATIONS.md."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tierkv.stat import StoreStat, TierStat


class Column(NamedTuple):
    """One metric and the attribute it shows; a dot goes into a nested struct."""

    name: str
    attribute: str
    text: str
    total: bool = False


STORE = (
    Column("tierkv_uptime_seconds", "uptime_s", "Seconds since the sidecar started."),
    Column("tierkv_matches", "matches", "Match calls.", total=True),
    Column("tierkv_asked_blocks", "asked_blocks", "Blocks that matches asked for.", total=True),
    Column("tierkv_miss_blocks", "miss_blocks", "Blocks asked for and not found.", total=True),
    Column("tierkv_put_blocks", "put_blocks", "Blocks that became visible.", total=True),
    Column("tierkv_known_blocks", "known_blocks", "Blocks offered, there already.", total=True),
    Column("tierkv_refused_blocks", "refused_blocks", "Blocks offered, not taken.", total=True),
    Column("tierkv_served_bytes", "served_bytes", "Encoded bytes handed to engines.", total=True),
    Column("tierkv_stored_bytes", "stored_bytes", "Encoded bytes engines wrote.", total=True),
    Column("tierkv_saved_seconds", "saved_s", "Time saved by loads that were faster.", total=True),
    Column("tierkv_lost_seconds", "lost_s", "Time lost by loads that were slower.", total=True),
    Column("tierkv_clients", "holds.clients", "Connected clients."),
    Column("tierkv_open_matches", "holds.matches", "Matches that hold a lease."),
    Column("tierkv_open_transfers", "holds.transfers", "Transfers that engines read."),
    Column("tierkv_open_reservations", "holds.reservations", "Reservations that engines write."),
    Column("tierkv_held_bytes", "holds.held_bytes", "Bytes in RAM that cannot be evicted now."),
    Column("tierkv_queue_frames", "write_behind.queued_frames", "Frames waiting to go down."),
    Column("tierkv_queue_bytes", "write_behind.queued_bytes", "Bytes waiting to go down."),
    Column("tierkv_queue_limit_bytes", "write_behind.limit_bytes", "Bound of that queue."),
    Column("tierkv_queue_oldest_seconds", "write_behind.oldest_s", "Longest wait in that queue."),
)
TIER = (
    Column("tierkv_tier_capacity_bytes", "capacity_bytes", "Size of a tier, 0: not bounded."),
    Column("tierkv_tier_used_bytes", "used_bytes", "Allocated to frames."),
    Column("tierkv_tier_dead_bytes", "dead_bytes", "Free only after a reclaim."),
    Column("tierkv_tier_free_bytes", "free_bytes", "Free now."),
    Column("tierkv_tier_placements", "placements", "Copies of frames that are ready."),
    Column("tierkv_tier_read_bytes", "read_bytes", "Bytes read from a tier.", total=True),
    Column("tierkv_tier_written_bytes", "written_bytes", "Bytes written to a tier.", total=True),
    Column("tierkv_tier_read_bytes_per_second", "read_bps", "Bandwidth that decisions use."),
    Column("tierkv_tier_write_bytes_per_second", "write_bps", "Bandwidth that decisions use."),
    Column("tierkv_tier_latency_seconds", "latency_s", "Until the first byte of a read."),
    Column("tierkv_tier_expected_read_seconds", "expected_read_s", "As predicted.", total=True),
    Column("tierkv_tier_read_seconds", "read_s", "What the same reads took.", total=True),
    Column("tierkv_tier_read_error_seconds", "read_error_s", "Difference of each.", total=True),
)
OTHERS = {
    "tierkv_up": "1 when the data loop answered this scrape; all others are absent when it is 0.",
    "tierkv_info": "Always 1; the label says the release.",
    "tierkv_tier_state": "1 for the state that a tier is in: ok, degraded or lost.",
    "tierkv_hit_blocks": "Blocks found, by the tier they were in when asked for.",
    "tierkv_events": "Refusals and failures by name; docs/OPERATIONS.md has their meaning.",
}


def exposition(stat: StoreStat | None, accept: str = "") -> tuple[bytes, str]:
    """Return the text and its content type; `stat` None: the data loop did not answer."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(stat))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Snapshot(Collector):
    def __init__(self, stat: StoreStat | None) -> None:
        self._stat = stat

    def collect(self) -> Iterator[Metric]:
        stat = self._stat
        yield GaugeMetricFamily("tierkv_up", OTHERS["tierkv_up"], value=float(stat is not None))
        if stat is None:
            return
        info = GaugeMetricFamily("tierkv_info", OTHERS["tierkv_info"], labels=["version"])
        info.add_metric([stat.version], 1.0)
        yield info
        for column in STORE:
            family = _family(column, ())
            family.add_metric([], _value(stat, column.attribute))
            yield family
        tiers = [tier for tier in stat.tiers if tier.state != "off"]
        for column in TIER:
            family = _family(column, ("tier",))
            for tier in tiers:
                family.add_metric([tier.name], _value(tier, column.attribute))
            yield family
        yield _states(tiers)
        yield _counted("tierkv_hit_blocks", "tier", stat.hits_by_tier_blocks.items())
        yield _counted("tierkv_events", "event", stat.counters.items())


def _family(column: Column, labels: tuple[str, ...]) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if column.total else GaugeMetricFamily
    return kind(column.name, column.text, labels=labels)


def _value(source: object, attribute: str) -> float:
    for name in attribute.split("."):
        source = getattr(source, name)
    assert isinstance(source, int | float)
    return float(source)


def _states(tiers: Iterable[TierStat]) -> Metric:
    family = GaugeMetricFamily(
        "tierkv_tier_state", OTHERS["tierkv_tier_state"], labels=["tier", "state"]
    )
    for tier in tiers:
        for state in ("ok", "degraded", "lost"):
            family.add_metric([tier.name, state], float(tier.state == state))
    return family


def _counted(name: str, label: str, items: Iterable[tuple[str, int]]) -> Metric:
    family = CounterMetricFamily(name, OTHERS[name], labels=[label])
    for key, count in items:
        family.add_metric([key], count)
    return family
