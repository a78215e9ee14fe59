"""Setup: what both sides of the connector begin with, and how they end."""

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from tierkv.client import Client
from tierkv.errors import TierKVError, invalid
from tierkv.executor import Threads
from tierkv.settings import Settings, client_socket, load
from tierkv_connectors.device import Device
from tierkv_connectors.device.host import HostDevice
from tierkv_connectors.edge import Edge
from tierkv_connectors.private import PrivateSidecar, private_socket
from tierkv_connectors.sidecar import SidecarChannel
from tierkv_connectors.vllm.identity import kept_of
from tierkv_connectors.vllm.kept import Kept, check_device, engine_name, options_of
from tierkv_connectors.vllm.scheduler import Scheduler
from tierkv_connectors.vllm.stats import Fresh, PromMetrics, Stats
from tierkv_connectors.vllm.worker import NoWorker, Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger("vllm.tierkv")  # below the logger that vLLM shows


class Setup(KVConnectorBase_V1):
    """One side's options, connection and counters."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Set up what both sides have.

        Raises: TierKVError: options that do not exist or do not fit.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = options_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._edge = Edge()
        self._scheduler: Scheduler | None = None
        self._worker: Worker | NoWorker = NoWorker()
        self._threads: Threads | None = None
        self._client: Client | None = None
        self._device: Device = HostDevice()
        self._private: PrivateSidecar | None = None
        self._stats = Fresh(self._counters)
        self._kept = self._edge.shield(
            "keep", lambda: self._keep(vllm_config, kv_cache_config), None
        )

    def _keep(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Kept | None:
        """Return what is kept of this engine, None when it cannot be and the log says why."""
        try:
            check_device(vllm_config.device_config.device_type, self._options)
            kept = kept_of(vllm_config, kv_cache_config, self._options)
            if kept.fails_whole and not hasattr(KVConnectorBase_V1, "get_transfer_results"):
                raise invalid(
                    "the KV cache has windows or several groups, and this vLLM cannot be told that "
                    "a load of them failed: 0.30 can, or set disable_hybrid_kv_cache_manager"
                )
        except TierKVError as error:
            _log.error("tierkv keeps nothing of this engine: %s", error)
            return None
        return kept

    def _settings(self) -> Settings:
        return load(self._options.settings) if self._options.settings else Settings()

    def _connect(self, *, arena: bool) -> Client:
        if self._options.private:
            path = private_socket(self._kv_transfer_config.engine_id)
        else:
            path = Path(self._options.socket or client_socket())
        channel = SidecarChannel(
            path,
            timeout_s=self._options.timeout_s,
            client=engine_name(),
            arena=arena,
            on_map=self._device.pin,
            on_unmap=self._device.unpin,
        )
        return Client(channel)

    def _counters(self) -> Iterable[Counter[str]]:
        yield self._worker.counters
        yield self._device.counters
        if self._scheduler is not None:
            yield self._scheduler.counters
        yield Counter({"errors": self._edge.failures.total()})

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """Return what was counted on this side since the last call."""
        return self._edge.shield("stats", self._stats.fresh, None)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "KVConnectorStats | None":
        """Return the statistics that `data` came from."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        """Register our counters with vLLM's."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Save what waits still, then let the lanes end, and the connection."""
        self._edge.shield("flush", lambda: self._worker.flush(self._options.flush_s), None)
        if self._threads is not None:
            self._threads.close(self._options.timeout_s)
        if self._client is not None:
            self._client.close()
        if self._private is not None:
            self._private.close()
