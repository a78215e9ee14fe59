"""The client over a real store: what it is given it gives back, and nothing it meets raises."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.stores import BLOCK, PAGE, TWO, Rig, chain, fill, packed, pattern
from tierkv import calls, frame
from tierkv.channel import EmbeddedChannel
from tierkv.client import Client, Transfer


class Channel(EmbeddedChannel):
    """Over a store whose jobs run when a client waits; may be gone, and remembers its borrows."""

    def __init__(self, rig: Rig, owner: int = 1) -> None:
        super().__init__(rig.store, rig.host.view, owner, timeout_s=0.05)
        self.rig = rig
        self.gone = False
        self.silent: set[type[calls.Call]] = set()

    @property
    def borrows(self) -> int:
        return self._borrows

    def call(self, call: calls.Call, timeout_s: float | None = None) -> Any | None:
        if self.gone or type(call) in self.silent:
            return None
        self._due = 0.0
        return super().call(call, timeout_s)

    def borrow(self) -> memoryview | None:
        return None if self.gone else super().borrow()


class Side:
    """A store, its channel and its client."""

    def __init__(self, pages: int = 16, **settings: Any) -> None:
        self.rig = Rig(pages, **settings)
        self.channel = Channel(self.rig)
        self.client = Client(self.channel)

    def put(self, keys: list[bytes], **fields: Any) -> int:
        held = self.client.put(self.rig.put_call(keys, **fields))
        if held is None:
            return 0
        for index, unit in enumerate(held.units):
            fill(held.payload(index), block(keys, unit))
        return held.commit([BLOCK] * len(held.units))

    def idle(self) -> None:
        assert self.channel.borrows == 0
        assert not self.client._open
        self.rig.idle()


def block(keys: list[bytes], unit: int) -> bytes:
    return pattern(keys[unit % len(keys)], BLOCK)


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side()
    yield made
    made.idle()


def test_what_was_put_comes_back(side: Side) -> None:
    keys = chain(1, 4)
    assert side.put(keys) == 4
    reply = side.client.match(side.rig.match_call(keys))
    assert (reply.blocks, reply.pending) == (4, False)
    transfer = side.client.get(reply.match, 4)
    assert transfer is not None
    with transfer:
        assert transfer.units == 4
        for unit in range(4):
            header = transfer.header(unit)
            assert header is not None
            assert b"".join(transfer.payload(unit, header)) == block(keys, unit)
            assert transfer.unchanged(unit)
    transfer.close()


@pytest.mark.parametrize("staged", [False, True])
def test_a_match_may_bring_its_transfer(side: Side, staged: bool) -> None:
    keys = chain(1, 4)
    side.put(keys)
    side.rig.inline.drain()
    if staged:
        side.put(chain(2, 16))
        side.rig.inline.drain()
    reply = side.client.match(side.rig.match_call(keys, fetch=True))
    if reply.pending:
        side.rig.inline.drain()
        reply = side.client.wait(reply.match, 1.0)
    transfer = side.client.get(reply.match, reply.blocks)
    assert transfer is not None
    assert transfer.units == 4
    transfer.close()


def test_a_match_that_brought_its_transfer_can_be_released(side: Side) -> None:
    side.put(chain(1, 4))
    reply = side.client.match(side.rig.match_call(chain(1, 4), fetch=True))
    assert side.channel.borrows == 1
    side.client.release(reply.match)
    side.client.release(reply.match)


def test_part_of_a_match_may_be_fetched(side: Side) -> None:
    side.put(chain(1, 4))
    reply = side.client.match(side.rig.match_call(chain(1, 4)))
    transfer = side.client.get(reply.match, 2)
    assert transfer is not None
    assert transfer.units == 2
    transfer.close()


def test_a_miss_holds_nothing(side: Side) -> None:
    reply = side.client.match(side.rig.match_call(chain(1, 4)))
    assert (reply.match, reply.blocks) == (0, 0)
    assert side.client.get(reply.match, 1) is None
    side.client.release(0)


@pytest.mark.parametrize("blocks", [0, -1, 5])
def test_a_wrong_get_lets_go_of_its_lease(side: Side, blocks: int) -> None:
    side.put(chain(1, 4))
    reply = side.client.match(side.rig.match_call(chain(1, 4)))
    assert side.client.get(reply.match, blocks) is None


def test_a_wait_that_ends_in_nothing_is_forgotten(side: Side) -> None:
    side.put(chain(1, 4))
    side.rig.inline.drain()
    side.put(chain(2, 16))
    side.rig.inline.drain()
    reply = side.client.match(side.rig.match_call(chain(1, 4)))
    assert reply.pending
    assert side.client.wait(reply.match, 0.01).blocks == 0
    side.rig.inline.drain()


def test_a_get_before_the_end_of_a_stage_lets_go(side: Side) -> None:
    side.put(chain(1, 4))
    side.rig.inline.drain()
    side.put(chain(2, 16))
    side.rig.inline.drain()
    reply = side.client.match(side.rig.match_call(chain(1, 4)))
    assert side.client.get(reply.match, 1) is None
    side.rig.inline.drain()


def test_a_reservation_ends_once(side: Side) -> None:
    held = side.client.put(side.rig.put_call(chain(1, 2)))
    assert held is not None
    held.abort()
    held.abort()
    assert held.commit([1, 1]) == 0
    again = side.client.put(side.rig.put_call(chain(1, 2)))
    assert again is not None
    assert again.commit([5, 0]) == 1
    assert again.commit([5, 5]) == 0
    again.abort()


def test_known_blocks_are_not_asked_for(side: Side) -> None:
    side.put(chain(1, 4))
    assert side.client.put(side.rig.put_call(chain(1, 4))) is None
    held = side.client.put(side.rig.put_call(chain(1, 6)))
    assert held is not None
    assert (held.units, held.known, held.refused) == ([4, 5], 4, 0)
    held.abort()


@pytest.mark.parametrize(
    "change",
    [
        {"key": bytes(32)}, {"fingerprint": bytes(32)}, {"part": TWO[0]}, {"namespace": bytes(16)},
        {"fidelity": 2},
    ],
)  # fmt: skip
def test_r02_a_header_that_names_anything_else_is_a_miss(
    side: Side, change: dict[str, Any]
) -> None:
    with fetched(side) as transfer:
        header = transfer.header(0)
        assert header is not None
        other = frame.pack(msgspec.structs.replace(header, **change))
        transfer._frames[0][0][: len(other)] = other
        assert transfer.header(0) is None
        assert transfer.header(1) is not None


def test_a_reader_that_was_overtaken_notices(side: Side) -> None:
    """A freed frame loses its magic first; a new one there names other content."""
    with fetched(side) as transfer:
        head = transfer._frames[0][0]
        assert not transfer.unchanged(0), "its header was never read"
        assert transfer.header(0) is not None
        assert transfer.unchanged(0)
        magic = bytes(head[:4])
        head[:4] = bytes(4)
        assert not transfer.unchanged(0)
        assert transfer.header(0) is None
        head[:4] = magic
        head[70] ^= 1
        assert not transfer.unchanged(0)


def test_sealing_meanwhile_is_no_change(side: Side) -> None:
    with fetched(side) as transfer:
        assert transfer.header(0) is not None
        side.rig.inline.drain()
        assert transfer.unchanged(0)
        header = transfer.header(0)
        assert header is not None
        assert header.checksums


def test_payloads_are_checked_on_every_read_when_told_so() -> None:
    side = Side(verify="always")
    assert side.put(chain(1, 4)) == 4
    with fetched(side, put=False) as transfer:
        header = transfer.header(1)
        assert header is not None
        assert header.checksums
        transfer._frames[1][0][5000] ^= 1
        assert transfer.header(1) is None
    side.idle()


@pytest.mark.parametrize("verify", ["arrival", "always"])
def test_r21_what_a_reader_found_damaged_in_ram_is_dropped_and_heals(verify: str) -> None:
    """Else the store would know the block, take no put of it, and serve it damaged for ever."""
    side = Side(verify=verify)
    with fetched(side) as transfer:
        transfer._frames[1][0][5000 if verify == "always" else 20] ^= 1
        assert transfer.header(0) is not None
        assert transfer.header(1) is None
        assert transfer.header(2) is not None
    side.idle()
    found = side.client.match(side.rig.match_call(chain(1, 4)))
    side.client.release(found.match)
    assert found.blocks == 1
    assert side.rig.stat()["counters"]["corrupt"] == 1
    assert side.put(chain(1, 4)) == 1, "it is taken again"
    with fetched(side, put=False) as transfer:
        assert len(transfer.headers()) == 4


def test_a_question_that_does_not_fit_a_frame_harms_nobody_elses(side: Side) -> None:
    side.put(chain(1, 4))
    call = msgspec.structs.replace(side.rig.match_call(chain(1, 4)), fingerprint=bytes(32))
    transfer = side.client.get(side.client.match(call).match, 4)
    assert transfer is not None
    with transfer:
        assert transfer.header(0) is None
    with fetched(side, put=False) as transfer:
        assert len(transfer.headers()) == 4


def fetched(side: Side, *, put: bool = True) -> Transfer:
    if put:
        side.put(chain(1, 4))
    reply = side.client.match(side.rig.match_call(chain(1, 4)))
    transfer = side.client.get(reply.match, 4)
    assert transfer is not None
    return transfer


def test_a_store_that_is_gone_is_a_miss(side: Side) -> None:
    side.put(chain(1, 2))
    reply = side.client.match(side.rig.match_call(chain(1, 2)))
    held = side.client.put(side.rig.put_call(chain(2, 2)))
    assert held is not None
    side.channel.gone = True
    assert side.client.match(side.rig.match_call(chain(1, 2))).blocks == 0
    assert side.client.wait(reply.match, 0.01).blocks == 0
    assert side.client.get(reply.match, 1) is None
    assert side.client.put(side.rig.put_call(chain(3, 2))) is None
    assert held.commit([1, 1]) == 0
    call = calls.FlushCall(namespace="one", keys=b"k" * 64, parts=packed(TWO), deadline_s=0.01)
    assert side.client.flush(call) == bytes(4)
    assert side.client.clear("one", 0.01) is None
    assert side.client.stat() is None
    side.channel.gone = False
    side.rig.store.disown(1)


@pytest.mark.parametrize("silent", [calls.GetCall, calls.CommitCall, calls.PutCall])
def test_an_answer_that_is_lost_leaves_no_borrow(side: Side, silent: type[calls.Call]) -> None:
    side.put(chain(1, 2))
    side.channel.silent = {silent}
    reply = side.client.match(side.rig.match_call(chain(1, 2)))
    transfer = side.client.get(reply.match, 2)
    if transfer is not None:
        transfer.close()
    assert side.put(chain(2, 2)) == (0 if silent is not calls.GetCall else 2)
    assert side.channel.borrows == 0
    side.rig.store.disown(1)


def test_wrong_arguments_are_a_miss_with_a_reason(side: Side) -> None:
    call = side.rig.match_call(chain(1, 1), namespace="no such/name")
    assert side.client.match(call).blocks == 0
    assert "namespace" in side.channel.last_error
    assert side.client.put(side.rig.put_call(chain(1, 1), fidelity=9)) is None
    assert "fidelity" in side.channel.last_error


def test_two_parts_go_and_come_in_block_order(side: Side) -> None:
    keys = chain(1, 3)
    held = side.client.put(side.rig.put_call(keys, parts=TWO, raw=100))
    assert held is not None
    for index in range(6):
        fill(held.payload(index), b"%d" % index * 100)
    assert held.commit([100] * 6) == 6
    reply = side.client.match(side.rig.match_call(keys, parts=TWO))
    assert reply.blocks == 3
    transfer = side.client.get(reply.match, 3)
    assert transfer is not None
    with transfer:
        for unit in range(6):
            header = transfer.header(unit)
            assert header is not None
            assert header.part == TWO[unit % 2]
            assert b"".join(transfer.payload(unit, header)) == b"%d" % unit * 100


def test_frames_in_many_runs_are_read_in_order() -> None:
    side = Side(pages=17)
    for session in range(16):
        assert side.put(chain(session, 1)) == 1
    for session in range(0, 16, 2):
        store = side.rig.store._store
        store.drop([store.catalog.in_tier(store.catalog.head(chain(session, 1)[0], 0), 0)])
    raw = 5 * PAGE
    held = side.client.put(side.rig.put_call(chain(50, 1), raw=raw))
    assert held is not None
    assert len(held.payload(0)) >= 5
    data = pattern(b"long", raw)
    fill(held.payload(0), data)
    assert held.commit([raw]) == 1
    assert side.rig.read(chain(50, 1)) == [data]
    side.idle()


def test_a_closed_client_holds_nothing() -> None:
    side = Side()
    side.put(chain(1, 4))
    transfer = fetched(side, put=False)
    side.client.match(side.rig.match_call(chain(1, 2)))
    side.client.close()
    assert side.rig.stat()["holds"]["matches"] == 0
    assert side.rig.stat()["holds"]["transfers"] == 1, "it may still be copying"
    transfer.close()
    side.rig.idle()
