"""An engine that waits without a busy loop, so that its CPU time is what its work takes.

vLLM's processes spin for a second after each message: as long as a prompt of `bench.vllm` is
computed, the same whatever a connector does, and so a difference from it would look half as large.
Loaded by every engine and each of its processes as one of vLLM's general plugins.
"""

from pathlib import Path

LOOK_MS = 5
"""A writer drops what wakes a reader when it wakes it twice in a row: so readers look by themselves
too, or stand still until they time out."""


def installed(folder: Path) -> Path:
    """Write what lets an engine find the plugin; returns what its PYTHONPATH needs."""
    about = folder / "plugins" / "tierkv_bench-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tierkv-bench\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\ntierkv_bench = {__name__}:wait_for_messages\n"
    )
    return about.parent


def wait_for_messages() -> None:
    """Let readers of messages be woken by them."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = 0.0
        spins_or_waits(self, LOOK_MS if timeout_ms is None else min(timeout_ms, LOOK_MS))

    spins_or_waits = SpinCondition.wait
    SpinCondition.wait = wait
