"""The connector with a clock: how long its calls keep vLLM's scheduler.

Loaded by the engine (`kv_connector_module_path`); appends one line of JSON for each step, the
seconds of its calls, to the file that TIERKV_BENCH_CALLS names. Its threads have their names in the
kernel too, where the benchmark looks for what they used.
"""

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tierkv_connectors.vllm.connector import TierKVConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.kv_cache_interface import KVCacheConfig

P = ParamSpec("P")
T = TypeVar("T")

CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "update_connector_output",
    "request_finished_all_groups",
    "build_connector_meta",
)
"""On the scheduler side; the last one ends a step."""


class TimedConnector(TierKVConnector):
    """Every scheduler-side call is timed."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._named = 0
        if self._scheduler is None:
            return
        self._times: list[tuple[str, float]] = []
        self._out = Path(os.environ["TIERKV_BENCH_CALLS"])
        for name in CALLS:
            setattr(self, name, self._timed(name, getattr(self, name)))

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """Name threads that are new; asked on both sides with every step."""
        # One that is only being started has no number yet.
        running = [one for one in threading.enumerate() if one.native_id is not None]
        ours = [one for one in running if one.name.startswith("tierkv-")]
        if len(ours) != self._named:
            self._named = len(ours)
            for thread in ours:
                with suppress(FileNotFoundError):  # it has ended since
                    Path(f"/proc/self/task/{thread.native_id}/comm").write_text(thread.name)
        return super().get_kv_connector_stats()

    def _timed(self, name: str, call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def timed(*arguments: P.args, **named: P.kwargs) -> T:
            started = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._times.append((name, time.perf_counter() - started))
                if name == CALLS[-1]:
                    with self._out.open("a") as out:
                        out.write(json.dumps(self._times) + "\n")
                    self._times = []

        return timed
