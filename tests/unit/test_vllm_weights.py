"""Weights: what may change them makes the scheduler side forget, and nothing else does."""

import gc
from typing import Any

import pytest

from tierkv_connectors.vllm import weights


def core_of(log: list[str]) -> type[Any]:
    class Core:
        """The calls of vLLM's EngineCore."""

        def collective_rpc(self, method: Any, timeout: float | None = None) -> str:
            log.append(f"rpc {timeout}")
            if method == "raise":
                raise ValueError(method)
            return "done"

        def sleep(self, level: int = 1) -> None:
            log.append(f"sleep {level}")

    return Core


class Side:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def changed(self) -> None:
        self._log.append("changed")


def test_what_may_change_weights_is_told_before_and_after() -> None:
    log: list[str] = []
    core, side = core_of(log), Side(log)
    weights.watch(core, side.changed)
    weights.watch(core, side.changed)  # of another engine in this process: one watch is enough
    weights._listeners.pop()
    one: Any = core()
    calls: list[tuple[list[Any], dict[str, Any]]] = [
        (["reload_weights"], {"timeout": 3.0}),
        ([], {"method": "what_is_this", "timeout": 3.0}),
        ([print, 3.0], {}),
    ]
    for arguments, named in calls:
        assert one.collective_rpc(*arguments, **named) == "done"
        assert log == ["changed", "rpc 3.0", "changed"]
        log.clear()
    one.sleep(2)
    assert log == ["changed", "sleep 2", "changed"]
    log.clear()
    with pytest.raises(ValueError, match="raise"):
        one.collective_rpc("raise")
    assert log == ["changed", "rpc None", "changed"], "half a change is one"


def test_what_leaves_weights_alone_is_not_told() -> None:
    log: list[str] = []
    core, side = core_of(log), Side(log)
    weights.watch(core, side.changed)
    assert core().collective_rpc("check_health") == "done"
    assert log == ["rpc None"]


def test_a_side_that_is_gone_is_told_nothing() -> None:
    log: list[str] = []
    core, side = core_of(log), Side(log)
    weights.watch(core, side.changed)
    del side
    gc.collect()
    core().sleep()
    assert log == ["sleep 1"]
    assert all(one() is not None for one in weights._listeners)
