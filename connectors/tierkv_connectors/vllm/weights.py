"""Weights: tells the scheduler side when the engine's weights may have changed.

vLLM tells a connector of a reset and of nothing else. New weights reach the workers by calls that
all pass through the EngineCore of the scheduler's process, so those calls are watched there. What a
call does to the weights is not known, so every one counts that is not known to leave them alone.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

HARMLESS = frozenset({
    "add_lora", "check_health", "checkpoint_prepare", "compute_weight_checksums",
    "get_cache_block_size_bytes", "get_kv_cache_spec", "get_model_inspection",
    "init_weight_transfer_engine", "list_loras", "pin_lora", "profile", "remove_lora",
    "reset_mm_cache", "save_sharded_state", "save_tensorized_model",
    "shutdown_weight_transfer_engine", "supports_draft_weight_updates", "synchronize_device",
    "update_max_model_len",
})  # fmt: skip
"""What may be called on all workers without a doubt about their weights."""
WATCHED = ("collective_rpc", "sleep", "wake_up")
"""Calls of the EngineCore; a version that lacks one has no such way to change weights."""

_MARK = "tierkv_watches"
_listeners: list["weakref.WeakMethod[Callable[[], None]]"] = []


def watch(core: type, changed: Callable[[], None]) -> None:
    """Have `changed` called before and after whatever may change the weights of an engine.

    Args:
        core: vLLM's EngineCore.
        changed: a bound method that does not raise; its object is not kept alive.
    """
    _listeners.append(weakref.WeakMethod(changed))
    for name in WATCHED:
        call = getattr(core, name, None)
        if call is not None and not hasattr(call, _MARK):
            setattr(core, name, _watched(name, call))


def _watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def watched(core: object, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 -- vLLM's own
        method = named.get("method", arguments[0] if arguments else None)
        if name == "collective_rpc" and isinstance(method, str) and method in HARMLESS:
            return call(core, *arguments, **named)
        _tell()
        try:
            return call(core, *arguments, **named)
        finally:
            _tell()  # what was asked for meanwhile may be of either weights

    setattr(watched, _MARK, True)
    return watched


def _tell() -> None:
    for listener in tuple(_listeners):
        changed = listener()
        if changed is not None:
            changed()
        else:
            _listeners.remove(listener)
