"""Worker calls: what vLLM asks of the connector in the process of each worker."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_transfer_state import (
    get_kv_transfer_group,
    has_kv_transfer_group,
)

from tierkv.errors import TierKVError
from tierkv.executor import Threads
from tierkv_connectors.device.cuda import CudaDevice
from tierkv_connectors.device.host import HostDevice
from tierkv_connectors.vllm.group_layout import group_layouts
from tierkv_connectors.vllm.plan import StepPlan
from tierkv_connectors.vllm.selftest import self_test
from tierkv_connectors.vllm.setup import Setup
from tierkv_connectors.vllm.stats import Word
from tierkv_connectors.vllm.worker import NoWorker, Worker

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
    )

_log = logging.getLogger("vllm.tierkv")  # below the logger that vLLM shows


@dataclass
class Metadata(KVConnectorMetadata):
    """The plan of one step, in vLLM's wrapping."""

    plan: StepPlan


class WorkerCalls(Setup):
    """The worker side's calls."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the KV lies, and prove it."""
        self._edge.shield("register", lambda: self._register(kv_caches), None)

    def _register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._kept is None:
            return
        try:
            layers = self._vllm_config.compilation_config.static_forward_context
            layouts = group_layouts(self._kept.groups, self._kv_cache_config, kv_caches, layers)
            where = layouts[0].layouts[0].device
            self._device = CudaDevice(where) if where.type == "cuda" else HostDevice()
            for layout in (one for group in layouts for one in group.layouts):
                self_test(layout, kv_caches, layers, self._device)
            codecs = self._kept.codecs()
        except TierKVError as error:
            _log.error("tierkv keeps nothing of this engine: %s", error)
            return
        self._client = self._connect(arena=True)
        self._threads = Threads({"load": 1, "save": 1})
        self._worker = Worker(
            self._kept, self._client, self._threads, layouts, self._device, self._edge, codecs
        )
        _log.info("tierkv keeps blocks of %d tokens of this engine", self._kept.tokens)

    def get_handshake_metadata(self) -> "KVConnectorHandshakeMetadata | None":
        """Let the scheduler side know before the first request when nothing can be kept here.

        Among several connectors vLLM passes the first one's word on and no other: theirs may matter
        more.
        """
        alone = has_kv_transfer_group() and get_kv_transfer_group() is self
        return Word(refused=True) if alone and isinstance(self._worker, NoWorker) else None

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

    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        """Report the requests whose loads are over, and which of these failed as a whole.

        Asked by versions that know; the others have no engines where a load fails as a whole.
        """
        results = super().get_transfer_results(finished_req_ids)
        failed = self._worker.failed()
        if self._kept is not None and self._kept.fails_whole:
            results.failed_recving = failed
        return results

    def build_connector_worker_meta(self) -> "KVConnectorWorkerMetadata | None":
        """Let the scheduler side know what loads and saves were, or that nothing is kept here."""
        if isinstance(self._worker, NoWorker):
            return Word(refused=True)
        report = self._worker.report()
        return Word(report=report) if report is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report the blocks that loads did not fill, unless these fail as a whole."""
        unfilled = self._worker.unfilled()
        return set() if self._kept is not None and self._kept.fails_whole else unfilled
