"""Connector: vLLM's calls, each handed to the side that it is for.

vLLM makes two of these, one in its scheduler's process and one in each worker's; they share nothing
but the plan that goes with every step. An engine that cannot be kept is told why once, and runs on
without tierkv. After the constructor nothing raises into the engine.
"""

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from tierkv.executor import Threads
from tierkv_connectors.private import PrivateSidecar
from tierkv_connectors.vllm.identity import LoraNames, request_extras
from tierkv_connectors.vllm.plan import StepPlan
from tierkv_connectors.vllm.scheduler import Scheduler
from tierkv_connectors.vllm.stats import Word
from tierkv_connectors.vllm.stream import events_of
from tierkv_connectors.vllm.weights import watch
from tierkv_connectors.vllm.worker_calls import Metadata, WorkerCalls

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
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


class TierKVConnector(WorkerCalls, SupportsHMA):
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
        if self._kept is not None and role == KVConnectorRole.SCHEDULER:
            if self._options.private:
                self._private = PrivateSidecar(self._settings(), transfer.engine_id)
            self._client = self._connect(arena=False)
            self._threads = Threads({"lookup": LOOKUPS})
            extras_of = partial(request_extras, loras=LoraNames())
            self._scheduler = Scheduler(self._kept, self._client, self._threads, extras_of)
            self._edge.shield("watch", self._watch_weights, None)
            self._scheduler.events = self._edge.shield(
                "events", partial(events_of, vllm_config, kv_cache_config, self._kept), None
            )
            if transfer.kv_load_failure_policy != "recompute":
                _log.warning(
                    "kv_load_failure_policy is %r: a block that is lost while it is loaded fails "
                    "its request; set it to 'recompute'",
                    transfer.kv_load_failure_policy,
                )

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Hear at start of the engine's own prefix cache."""
        if self._scheduler is not None:
            self._scheduler.own.pool = gpu_block_pool

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
        ids = blocks.get_block_ids()
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
            word = connector_output.kv_connector_worker_meta
            if isinstance(word, Word):
                scheduler.refused |= word.refused
                self._edge.shield("heard", lambda: scheduler.heard(word.report), None)
            failed = frozenset(getattr(connector_output, "failed_recving", None) or ())
            self._edge.shield(
                "stepped", lambda: scheduler.stepped(received, unfilled, failed), None
            )

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

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, object]) -> None:
        """Hear at start from the workers that cannot keep their KV."""
        refused = any(isinstance(one, Word) and one.refused for one in metadata.values())
        if refused and self._scheduler is not None:
            self._scheduler.refused = True

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, object]) -> None:
        """Hear the same of every pipeline rank."""
        self.set_xfer_handshake_metadata(metadata)

    def _watch_weights(self) -> None:
        from vllm.v1.engine.core import EngineCore

        watch(EngineCore, self._weights_changed)

    def _weights_changed(self) -> None:
        self._edge.shield("reset", self.reset_cache, None)

    def take_events(self) -> Iterable[Any]:
        """Return what is to be said of blocks in the sidecar."""
        events = self._scheduler.events if self._scheduler is not None else None
        return events.take() if events is not None else ()

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a save that is dropped is a later miss and nothing else."""
        return False


# MultiConnector finds the statistics of its children by their registered names only, in processes
# that have no connector but import it; a name that is not there ends the engine.
with suppress(ValueError):
    KVConnectorFactory.register_connector("TierKVConnector", __name__, "TierKVConnector")
