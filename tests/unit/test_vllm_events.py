"""Events: what routers are told, with classes of the shape of vLLM's own."""

from typing import Any

import msgspec
import pytest

from tierkv.fidelity import Fidelity
from tierkv_connectors.vllm import events as events_module
from tierkv_connectors.vllm.events import Asker, Events, Types

TOKENS, HASHED = 8, 4
"""Tokens of a store block, and of a block as vLLM hashes it."""
KEYS = [bytes([number]) * 32 for number in range(1, 5)]
CHAIN = b"".join(KEYS)


class Stored(msgspec.Struct):
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class Removed(msgspec.Struct):
    block_hashes: list[Any]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None


class OldRemoved(msgspec.Struct):
    block_hashes: list[Any]
    medium: str | None


ASKER = Asker([f"h{number}" for number in range(8)], list(range(32)), (3, "cats"), "s1")


def events_of(removed: Any = Removed, writers: int = 1) -> Events:
    return Events(Types(Stored, removed, str.upper), TOKENS, HASHED, writers)


def stored(number: int, medium: str = "CPU", fidelity: str = "exact") -> Stored:
    return Stored(
        [f"H{2 * number}", f"H{2 * number + 1}"], f"H{2 * number - 1}" if number else None,
        list(range(8 * number, 8 * number + 8)), HASHED, 3, medium, "cats", "LOCAL",
        f"tierkv/{fidelity}", "s1",
    )  # fmt: skip


def removed(number: int, medium: str = "CPU") -> Removed:
    hashes = [f"H{2 * number}", f"H{2 * number + 1}"]
    return Removed(hashes, medium, "LOCAL", "tierkv/exact")


def test_a_block_is_told_once_it_is_saved_and_not_before() -> None:
    events = events_of()
    events.offered(ASKER, CHAIN[:64], 0)
    assert list(events.take()) == []
    events.saved(CHAIN[:64], KEYS[0], Fidelity.EXACT)
    assert list(events.take()) == [stored(0)]
    events.saved(CHAIN[:64], CHAIN[:64], Fidelity.EXACT)
    assert list(events.take()) == [], "the second was given up with its save"
    events.offered(ASKER, CHAIN[:96], 2)
    events.saved(CHAIN[:96], KEYS[2], Fidelity.SAFE)
    assert list(events.take()) == [stored(2, fidelity="safe")]


def test_every_rank_has_to_have_saved_its_part() -> None:
    events = events_of(writers=2)
    events.offered(ASKER, CHAIN, 0)
    events.saved(CHAIN, CHAIN[:64], Fidelity.EXACT)
    assert list(events.take()) == []
    events.saved(CHAIN, CHAIN, Fidelity.EXACT)
    assert list(events.take()) == [stored(0), stored(1)]


def test_what_a_match_finds_and_does_not_find() -> None:
    events = events_of()
    events.looked_up(ASKER, CHAIN, 3, [("host", 2), ("nvme", 1)], Fidelity.EXACT)
    assert list(events.take()) == [stored(0), stored(1), stored(2, "STORAGE")]
    events.looked_up(ASKER, CHAIN, 3, [("host", 3)], Fidelity.EXACT)
    assert list(events.take()) == [removed(2, "STORAGE"), stored(2)], "it has moved"
    events.looked_up(ASKER, CHAIN, 1, [("host", 1)], Fidelity.EXACT)
    assert list(events.take()) == [removed(1), removed(2)]


def test_a_lower_class_is_not_gone_when_a_better_one_was_asked_for() -> None:
    events = events_of()
    events.looked_up(ASKER, KEYS[0], 1, [("host", 1)], Fidelity.SAFE)
    events.looked_up(ASKER, KEYS[0], 0, [], Fidelity.EXACT)
    assert list(events.take()) == [stored(0, fidelity="safe")]


def test_all_that_was_told_is_taken_back() -> None:
    events = events_of(OldRemoved)
    events.looked_up(ASKER, CHAIN[:64], 2, [("host", 2)], Fidelity.EXACT)
    events.offered(ASKER, CHAIN, 2)
    events.forgotten()
    events.saved(CHAIN, CHAIN, Fidelity.EXACT)
    gone = [OldRemoved(["H0", "H1"], "CPU"), OldRemoved(["H2", "H3"], "CPU")]
    assert list(events.take())[2:] == gone, "an older version knows fewer fields"


def test_what_vllm_has_not_hashed_has_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of()
    events.looked_up(ASKER._replace(hashes=["h0"]), KEYS[0], 1, [("host", 1)], Fidelity.EXACT)
    assert list(events.take()) == []
    monkeypatch.setattr(events_module, "MAX_ANNOUNCED", 1)
    events.looked_up(ASKER, CHAIN[:64], 2, [("host", 2)], Fidelity.EXACT)
    assert list(events.take()) == [stored(0), stored(1), removed(0)], "followed no longer"
