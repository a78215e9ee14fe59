"""Connector: vLLM's calls, each handed to the side that it is for.

vLLM makes two of these, one in its scheduler's process and one in each worker's; they share nothing
but the plan that goes with every step. An engine that cannot be kept is told why once, and runs on
without tierkv. After the constructor nothing raises into the engine.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from tierkv.client import Client
from tierkv.errors import TierKVError
from tierkv.executor import Threads
from tierkv.part import Part
from tierkv.settings import Settings, client_socket, load
from tierkv_connectors.calibrated import codecs_with
from tierkv_connectors.device import Device
from tierkv_connectors.device.cuda import CudaDevice
from tierkv_connectors.device.host import HostDevice
from tierkv_connectors.edge import Edge
from tierkv_connectors.private import PrivateSidecar, private_socket
from tierkv_connectors.sidecar import SidecarChannel
from tierkv_connectors.vllm.identity import LoraNames, identity_of, request_extras
from tierkv_connectors.vllm.kept import Kept, block_tokens, check_device, engine_name, options_of
from tierkv_connectors.vllm.layout import layout_of
from tierkv_connectors.vllm.plan import StepPlan
from tierkv_connectors.vllm.scheduler import Scheduler
from tierkv_connectors.vllm.selftest import attention_of, self_test
from tierkv_connectors.vllm.stats import Fresh, PromMetrics, Refused, Stats
from tierkv_connectors.vllm.worker import NoWorker, Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

LOOKUPS = 4
"""Questions to the sidecar under way at once; one may wait for a stage as long as its deadline."""

_SOURCES = {"host": "host", "nvme": "disk"}
_CAREFUL = StepPlan(overwritten=None)
"""Of a step that could not be planned: nothing is loaded or saved, and saves stop."""

_log = logging.getLogger("vllm.tierkv")  # below the logger that vLLM shows


@dataclass
class Metadata(KVConnectorMetadata):
    """The plan of one step, in vLLM's wrapping."""

    plan: StepPlan


class TierKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV in a sidecar. See `kept.Options` for `kv_connector_extra_config`."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        """Set up one side.

        Raises: TierKVError: options that do not exist or do not fit; a private sidecar that does
            not start.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = options_of(transfer.kv_connector_extra_config)
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
        if self._kept is not None and role == KVConnectorRole.SCHEDULER:
            if self._options.private:
                self._private = PrivateSidecar(self._settings(), transfer.engine_id)
            self._client = self._connect(arena=False)
            self._threads = Threads({"lookup": LOOKUPS})
            extras_of = partial(request_extras, loras=LoraNames())
            self._scheduler = Scheduler(self._kept, self._client, self._threads, extras_of)
            if transfer.kv_load_failure_policy != "recompute":
                _log.warning(
                    "kv_load_failure_policy is %r: a block that is lost while it is loaded fails "
                    "its request; set it to 'recompute'",
                    transfer.kv_load_failure_policy,
                )

    def _keep(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Kept | None:
        """Return what is kept of this engine, None when it cannot be and the log says why."""
        try:
            check_device(vllm_config.device_config.device_type, self._options)
            engine_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            tokens = block_tokens(engine_tokens, self._options.tokens_per_block)
            identity = identity_of(vllm_config, kv_cache_config, tokens)
        except TierKVError as error:
            _log.error("tierkv keeps nothing of this engine: %s", error)
            return None
        return Kept(identity, Part.whole(identity), engine_tokens, self._options)

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

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the KV lies, and prove it."""
        self._edge.shield("register", lambda: self._register(kv_caches), None)

    def _register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._kept is None:
            return
        try:
            layers = self._vllm_config.compilation_config.static_forward_context
            attention = attention_of(layers, list(kv_caches))
            layout = layout_of(self._kv_cache_config, kv_caches, attention)
            cuda = layout.device.type == "cuda"
            self._device = CudaDevice(layout.device) if cuda else HostDevice()
            self_test(layout, kv_caches, layers, self._device)
            codecs = codecs_with(self._options.artifact, self._kept.identity, self._kept.part)
            for name in self._options.profiles:
                codecs.named(name)
        except TierKVError as error:
            _log.error("tierkv keeps nothing of this engine: %s", error)
            return
        self._client = self._connect(arena=True)
        self._threads = Threads({"load": 1, "save": 1})
        self._worker = Worker(
            self._kept, self._client, self._threads, layout, self._device, self._edge, codecs
        )
        _log.info("tierkv keeps blocks of %d tokens of this engine", self._kept.tokens)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Stop saves from reading what the step overwrites."""
        self._fence(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's plan; engines that never call `handle_preemptions` are fenced here."""
        super().bind_connector_metadata(connector_metadata)
        self._fence(connector_metadata)

    def _fence(self, metadata: KVConnectorMetadata) -> None:
        if isinstance(metadata, Metadata):
            self._worker.fence(metadata.plan)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Queue the step's loads."""
        del forward_context, kwargs
        metadata = self._connector_metadata
        if isinstance(metadata, Metadata):
            self._worker.begin_loads(metadata.plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing: no request runs before its loads are over."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: object,
        **kwargs: object,
    ) -> None:
        """Save nothing yet: blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Queue the saves of what the step has written."""
        metadata = self._connector_metadata
        if isinstance(metadata, Metadata):
            self._worker.begin_saves(metadata.plan.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report the requests whose loads are over."""
        del finished_req_ids
        return None, self._worker.ended()

    def build_connector_worker_meta(self) -> "KVConnectorWorkerMetadata | None":
        """Let the scheduler side know when nothing can be kept here."""
        return Refused() if isinstance(self._worker, NoWorker) else None

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

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report the blocks that loads did not fill."""
        return self._worker.unfilled()

    # Scheduler side.

    def on_new_request(self, request: "Request") -> None:
        """Begin to look a request's prompt up."""
        scheduler = self._scheduler
        if scheduler is not None:
            self._edge.shield("arrived", lambda: scheduler.arrived(request), None)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens to load beyond the engine's own; None: ask again."""
        scheduler = self._scheduler
        if scheduler is None:
            return 0, False
        nothing: int | None = 0
        found = self._edge.shield(
            "matched", lambda: scheduler.matched(request, num_computed_tokens), nothing
        )
        return found, bool(found)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plan the load of what was promised."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        ids = blocks.get_block_ids()[0]
        planned = self._edge.shield(
            "allocated", lambda: scheduler.allocated(request, ids, num_external_tokens), None
        )
        if num_external_tokens and not planned:
            scheduler.fail(request, ids)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Return the step's plan."""
        scheduler = self._scheduler
        if scheduler is None:
            return Metadata(StepPlan())
        return Metadata(
            self._edge.shield("step", lambda: scheduler.step(scheduler_output), _CAREFUL)
        )

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Hear what became of loads."""
        scheduler, received = self._scheduler, connector_output.finished_recving or ()
        unfilled = connector_output.invalid_block_ids or frozenset()
        if scheduler is not None:
            if isinstance(connector_output.kv_connector_worker_meta, Refused):
                scheduler.refused = True
            self._edge.shield("stepped", lambda: scheduler.stepped(received, unfilled), None)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks need not be kept for us.

        Its answer says in `kv_transfer_params` what was loaded for it.
        """
        del block_ids
        scheduler, nothing = self._scheduler, dict[str, Any]()
        if scheduler is None:
            return False, None
        told = self._edge.shield("ended", lambda: scheduler.ended(request), nothing)
        return False, {"tierkv": told} if told else None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks need not be kept for us."""
        return self.request_finished(request, block_ids[0])

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict["CacheHitSource", int]:
        """Tell vLLM's metrics where loaded tokens come from; asked by versions that know."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        scheduler, found = self._scheduler, dict[CacheHitSource, int]()
        for tier, tokens in (scheduler.sources(request) if scheduler is not None else {}).items():
            source = CacheHitSource(_SOURCES.get(tier, "external_unspecified"))
            found[source] = found.get(source, 0) + tokens
        assert sum(found.values()) == num_external_tokens
        return found

    def reset_cache(self) -> bool | None:
        """Find nothing of what was kept until now; other engines' blocks stay theirs."""
        scheduler = self._scheduler
        if scheduler is None:
            return None
        scheduler.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        """Return no events."""
        return ()

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a save that is dropped is a later miss and nothing else."""
        return False

    def shutdown(self) -> None:
        """Let the lanes end, and the connection."""
        if self._threads is not None:
            self._threads.close(self._options.timeout_s)
        if self._client is not None:
            self._client.close()
        if self._private is not None:
            self._private.close()


# MultiConnector finds the statistics of its children by their registered names only, in processes
# that have no connector but import it; a name that is not there ends the engine.
with suppress(ValueError):
    KVConnectorFactory.register_connector("TierKVConnector", __name__, "TierKVConnector")
