"""Stats: what the connector counts, into vLLM's log and its Prometheus endpoint.

Both sides count; vLLM adds up what they report with every step and hands the sums to `PromMetrics`.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter as PromCounter
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tierkv_connectors.vllm.reports import Report

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TIERS = ("host", "nvme", "redis")
COUNTED = {
    "loads_declined": "Loads that computing was predicted to beat.",
    "loads_failed": "Loads that did not fill all that was promised; the rest was computed.",
    "loads_late": "Loads that their deadline ended.",
    "saved_blocks": "Blocks stored; those that were there already are not counted.",
    "saves_cut_short": "Saves whose blocks were given to other requests before they were copied.",
    "saves_dropped": "Saves that were given up because too much waited to be saved.",
    "pins_refused": "Arenas of which not all could be pinned: copies of a GPU are slower.",
    "errors": "Calls that failed and were answered as misses.",
}
"""Each is the counter `vllm:tierkv_<name>`; loaded tokens are counted by tier beside them."""


@dataclass
class Word(KVConnectorWorkerMetadata, KVConnectorHandshakeMetadata):
    """A worker's word to the scheduler side, at start or with a step."""

    refused: bool = False
    """It keeps nothing."""
    report: Report = field(default_factory=Report)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's word; one that keeps nothing is enough."""
        return Word(self.refused or other.refused, self.report.merge(other.report))


@dataclass
class Stats(KVConnectorStats):
    """Counts by name since the last report."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Begin anew."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another report's counts."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts, for the log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class Fresh:
    """What counters have counted since they were last looked at."""

    def __init__(self, counters: Callable[[], Iterable[Counter[str]]]) -> None:
        self._counters = counters
        self._told: Counter[str] = Counter()

    def fresh(self) -> Stats | None:
        """Return the new counts, None where there are none."""
        now: Counter[str] = Counter()
        for one in self._counters():
            now.update(dict(one))  # a copy: lanes go on counting
        new, self._told = now - self._told, now
        return Stats(data=dict(new)) if new else None


class PromMetrics(KVConnectorPromMetrics):
    """Our counters among vLLM's."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[PromCounter]
        plain = {
            name: make(f"vllm:tierkv_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTED.items()
        }
        loaded = make(
            "vllm:tierkv_loaded_tokens",
            documentation="Prompt tokens that were loaded instead of computed, by tier.",
            labelnames=[*labelnames, "tier"],
        )
        self._of: dict[int, dict[str, Any]] = {}
        for engine, values in per_engine_labelvalues.items():
            mine = {name: counter.labels(*values) for name, counter in plain.items()}
            mine |= {f"loaded_tokens_{tier}": loaded.labels(*values, tier) for tier in TIERS}
            self._of[engine] = mine

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a report's counts."""
        for name, counter in self._of[engine_idx].items():
            counter.inc(transfer_stats_data.get(name, 0))
