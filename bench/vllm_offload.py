"""vLLM's own tiered offload on a machine without a GPU: the part that it only has for CUDA.

Loaded by the engine (`spec_module_path`); runs in vLLM's environment.
"""

import time

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Ids = npt.NDArray[np.int64]


class CpuWorker(OffloadingWorker):
    """Copies engine blocks to and from the region, one after the other."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs = [
            (one.tensor, region.create_next_worker_view(one.page_size_bytes))
            for one in kv_caches.tensors
        ]
        self._over: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec
    ) -> bool:
        self._copy(job_id, src_spec.block_ids, dst_spec.block_ids, store=True)
        return True

    def submit_load(
        self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        self._copy(job_id, dst_spec.block_ids, src_spec.block_ids, store=False)
        return True

    def _copy(self, job_id: int, blocks: Ids, rows: Ids, *, store: bool) -> None:
        assert len(blocks) == len(rows), "a row of the region holds one engine block"
        started, nbytes = time.monotonic(), 0
        for block, row in zip(blocks, rows, strict=True):
            for tensor, region in self._pairs:
                mine, other = tensor[int(block)].reshape(-1), region[int(row)]
                (other if store else mine).copy_(mine if store else other)
                nbytes += other.numel()
        self._over.append(TransferResult(job_id, True, nbytes, time.monotonic() - started))  # noqa: FBT003

    def get_finished(self) -> list[TransferResult]:
        over, self._over = self._over, []
        return over

    def wait(self, job_ids: set[int]) -> None:
        del job_ids

    def shutdown(self) -> None:
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """The stock spec with a worker for memory that is the host's already."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuWorker(kv_caches, region)
        return self._worker
