"""The connector with a fault: saves copy slowly, as on a device whose copies are behind.

Loaded by the engine itself: `kv_connector_module_path` "tests.engines.slow_connector".
"""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

from tierkv_connectors.pages import UnitCopier
from tierkv_connectors.vllm.connector import TierKVConnector
from tierkv_connectors.vllm.worker import Worker

COPY_S = 0.005


class SlowConnector(TierKVConnector):
    """Every copy of a block into the arena takes COPY_S more, before it reads anything."""

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        super().register_kv_caches(kv_caches)
        assert isinstance(self._worker, Worker)
        take = UnitCopier.take

        def slow(*arguments: Any) -> Any:
            time.sleep(COPY_S)
            return take(*arguments)

        UnitCopier.take = slow  # type: ignore[assignment,method-assign]
