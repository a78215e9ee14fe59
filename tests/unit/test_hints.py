"""Hints of matches and puts sway what the joint policy gives up, and nothing else."""

from typing import Any

import pytest

from tests.stores import Rig, chain
from tierkv import calls
from tierkv.catalog import READY
from tierkv.errors import TierKVError

BLOCKS = 8


class Chats:
    """A store with room for three chains of eight blocks, and clients that ask and then put."""

    def __init__(self) -> None:
        self.rig = Rig(3 * BLOCKS, [], policy="evicpress")

    def ask(self, number: int, pause: float = 5.0, **hints: Any) -> int:
        """Ask for a chat's chain and put all of it; return the blocks that were there."""
        rig, keys = self.rig, chain(number, BLOCKS)
        rig.clock.now += pause
        reply = rig.match(keys, linear=1e-3, **hints)
        rig.store.release(1, calls.ReleaseCall(match=reply.match))
        rig.put(keys, b"chat")
        rig.store.tick()
        rig.sound()
        return reply.blocks

    def kept(self, session: int) -> int:
        reply = self.rig.store.match(1, self.rig.match_call(chain(session, BLOCKS)))
        self.rig.store.release(1, calls.ReleaseCall(match=reply.match))
        return reply.blocks


def test_without_hints_what_was_asked_for_longest_ago_goes() -> None:
    chats = Chats()
    for session in 1, 2, 3:
        chats.ask(session, pause=100.0)
    chats.ask(4, pause=100.0)
    assert chats.kept(4) == BLOCKS
    assert chats.kept(1) < BLOCKS


@pytest.mark.parametrize("hint", [{"closed": True}, {"ttl_s": 3.0}])
def test_a_chain_that_nobody_will_ask_for_goes_first(hint: dict[str, Any]) -> None:
    chats = Chats()
    for session in 1, 2:
        chats.ask(session)
    chats.ask(3, **hint)  # the youngest
    chats.ask(4)
    assert [chats.kept(session) for session in (1, 2, 4)] == [BLOCKS] * 3
    assert chats.kept(3) == 0


def test_a_life_goes_on_with_each_call() -> None:
    chats = Chats()
    for session in 1, 2:
        chats.ask(session, ttl_s=1000.0)
    chats.ask(3, ttl_s=6.0)
    chats.ask(3, ttl_s=1000.0)
    for session in 4, 5:
        chats.ask(session, closed=True)
    assert chats.kept(3) == BLOCKS


def test_what_others_share_with_a_closed_session_stays() -> None:
    """The first blocks are everybody's system prompt."""
    chats = Chats()
    rig = chats.rig
    shared = chain(9, 4)
    for session in range(1, 6):
        keys = [*shared, *chain(session, 4)]
        rig.clock.now += 5.0
        reply = rig.match(keys, linear=1e-3, closed=True)
        rig.store.release(1, calls.ReleaseCall(match=reply.match))
        rig.put(keys, b"chat")
    for session in range(10, 14):
        chats.ask(session)
        reply = rig.match(shared)
        rig.store.release(1, calls.ReleaseCall(match=reply.match))
    assert reply.blocks == len(shared)


def test_a_pin_is_given_up_last() -> None:
    chats = Chats()
    chats.ask(1, pin=True)
    for session in range(2, 12):
        chats.ask(session, pause=60.0)
    assert chats.kept(1) == BLOCKS
    chats.rig.clock.now += calls.PIN_S
    for session in range(20, 24):
        chats.ask(session)
    assert chats.kept(1) < BLOCKS


def test_pins_refuse_nobody() -> None:
    chats = Chats()
    for session in range(1, 8):
        assert chats.ask(session, pin=True) == 0
        assert chats.kept(session) == BLOCKS


def test_a_session_that_goes_on_elsewhere_leaves_its_chain() -> None:
    """A client that rewrites its history asks for a chain that shares nothing with the last."""
    chats = Chats()
    chats.ask(1)
    chats.ask(2, session="chat")
    chats.ask(3, session="chat")
    chats.ask(4)
    assert chats.kept(2) == 0
    assert [chats.kept(session) for session in (1, 3, 4)] == [BLOCKS] * 3


def test_what_nobody_will_ask_for_is_not_stored() -> None:
    chats = Chats()
    for session in 1, 2:
        chats.ask(session)
    keys = chain(3, BLOCKS)
    assert chats.rig.put(keys, b"chat", closed=True) == 0
    chats.ask(4)
    assert chats.kept(1) == BLOCKS


def test_a_put_of_what_is_known_tells_too() -> None:
    """The end of a session is known when its answer is: with the last put."""
    chats = Chats()
    for session in 1, 2, 3:
        chats.ask(session)
    assert chats.rig.put(chain(3, BLOCKS), b"chat", closed=True) == 0
    chats.ask(4)
    assert chats.kept(3) == 0
    assert [chats.kept(session) for session in (1, 2, 4)] == [BLOCKS] * 3


def test_lower_tiers_may_wait_for_a_second_sight() -> None:
    """What is asked for again goes below, what comes once does not; without the setting both do."""
    for second_sight in (False, True):
        rig = Rig(8 * BLOCKS, policy="evicpress", second_sight=second_sight)
        for turn in range(2):
            for number in (1, 2) if turn else (1, 2, 3, 4):
                rig.clock.now += 5.0
                reply = rig.match(chain(number, BLOCKS), linear=1e-3)
                rig.store.release(1, calls.ReleaseCall(match=reply.match))
                rig.put(chain(number, BLOCKS), b"chat")
                rig.inline.drain()
                rig.sound()
            catalog = rig.store._store.catalog
            below = {catalog.key(row) for row in catalog.select(1, READY).tolist()}
            again = {key for number in (1, 2) for key in chain(number, BLOCKS)}
            once = {key for number in (3, 4) for key in chain(number, BLOCKS)}
            assert below == ((again if turn else set()) if second_sight else again | once)


def test_a_second_sight_is_of_the_joint_policy() -> None:
    with pytest.raises(TierKVError, match="second_sight is of policy evicpress, not of lru"):
        Rig(8, policy="lru", second_sight=True)
