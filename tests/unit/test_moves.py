"""Moves on the real store: real codecs, a real log (past the page cache where it can), real Redis.

A downgrade in place, a demotion as it is, as a prefix and encoded again, a promotion; every byte
accounted for, and what a kill leaves at any step.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kvtc_rigs import PART, place_at
from tests.move_rigs import (
    KEYS,
    NVME,
    RAW_BYTES,
    REDIS,
    Commanded,
    Logs,
    MoveRig,
    class_of,
    cut_bytes,
    decoded,
    is_prefix,
    paged,
    used,
)
from tests.redis_server import RedisServer
from tests.stores import PAGE, chain
from tierkv import demotions, frame
from tierkv.catalog import Catalog
from tierkv.codec import INT8, PROFILES
from tierkv.fidelity import Fidelity
from tierkv.plan import Kind, Move
from tierkv.tier import ALIGN, RAM
from tierkv.tiers.redis import RedisSettings, RedisTier
from tierkv_codecs import CODECS, Place

LEVELS = {name: profile.levels for name, profile in PROFILES.items() if profile.levels}

pytestmark = pytest.mark.usefixtures("always_short")


@pytest.fixture
def redis(redis_server: RedisServer, tmp_path: Path) -> Iterator[RedisTier]:
    url = f"unix://{redis_server.socket}"
    tier = RedisTier(RedisSettings(url=url, prefix=tmp_path.name, timeout_s=30.0))
    yield tier
    tier.close()


@pytest.mark.parametrize("name", ["kvtc@8x", "kvtc@16x", "kvtc@32x"])
def test_a_downgrade_in_ram_frees_the_tail_and_leaves_a_whole_frame(
    opened: Logs, name: str
) -> None:
    rig = MoveRig([opened()], write_behind_bytes=1 << 30)
    stored = rig.put_blocks(KEYS, "kvtc@4x")
    assert used(rig, RAM) == sum(paged(cut_bytes(one, 4)) for one in stored)
    rig.downgrade(KEYS, name)
    sizes = [cut_bytes(one, LEVELS[name]) for one in stored]
    assert used(rig, RAM) == sum(map(paged, sizes))
    assert rig.count("downgraded") == 2
    is_prefix(rig, stored, LEVELS[name])
    rig.inline.drain()  # what is written behind is what is left
    rows = [rig.row(key, NVME) for key in KEYS]
    assert [rig.catalog.nbytes[row] for row in rows] == sizes
    assert {rig.catalog.profile[row] for row in rows} == {PROFILES[name].number}
    assert used(rig, NVME) == sum(paged(size, ALIGN) for size in sizes)
    again = MoveRig([opened()])
    is_prefix(again, stored, LEVELS[name])
    again.sound()


def test_a_put_that_waits_for_room_gets_it_from_downgrades(opened: Logs) -> None:
    rig = MoveRig([opened()], pages=20)
    stored = rig.put_blocks(KEYS, "kvtc@4x")
    free = rig.host.space().free
    rig.order(Kind.DOWNGRADE, KEYS, RAM, RAM, "kvtc@32x")
    others = chain(2, 2)
    assert free < 2 * paged(RAW_BYTES + 256) <= free + 2 * PAGE
    rig.put_blocks(others, "raw")
    is_prefix(rig, stored, 1)
    assert len(rig.get_blocks(others)) == 2
    assert rig.count("downgraded") == 2
    rig.idle()


@pytest.mark.parametrize("tier", [NVME, REDIS])
@pytest.mark.parametrize("name", ["kvtc@4x", "kvtc@16x", "kvtc@32x"])
def test_a_demotion_copies_a_prefix_and_a_promotion_brings_it_back(
    opened: Logs, redis: RedisTier, tier: int, name: str
) -> None:
    rig = MoveRig([opened(), redis])
    stored = rig.put_blocks(KEYS, "kvtc@4x")
    rig.order(Kind.DEMOTE, KEYS, tier, RAM, name)
    rig.relieve()
    assert used(rig, RAM)
    assert rig.store._moves.going == used(rig, RAM)
    rig.inline.drain()
    sizes = [cut_bytes(one, LEVELS[name]) for one in stored]
    granule = rig.lower[tier - 1].granule
    assert used(rig, RAM) == rig.store._moves.going == 0
    assert used(rig, tier) == sum(paged(size, granule) for size in sizes)
    assert rig.count("demoted") == 2
    is_prefix(rig, stored, LEVELS[name])
    assert used(rig, RAM) == sum(map(paged, sizes))
    assert rig.count("promoted") == 2
    assert rig.store._store.totals["promoted_bytes"] == sum(sizes)
    assert {rig.catalog.profile[rig.row(key, RAM)] for key in KEYS} == {PROFILES[name].number}
    rig.idle()


@pytest.mark.parametrize(
    ("source", "name"),
    [("raw", "int8"), ("raw", "int4"), ("raw", "lossless"), ("lossless", "int8")],
)
def test_an_exact_copy_is_demoted_encoded_again(
    opened: Logs, redis: RedisTier, source: str, name: str
) -> None:
    rig = MoveRig([opened(), redis])
    rig.encode()
    stored = rig.put_blocks(KEYS, source)
    rig.order(Kind.DEMOTE, KEYS[:1], NVME, RAM, name)
    rig.order(Kind.DEMOTE, KEYS[1:], REDIS, RAM, name)
    rig.relieve()
    rig.inline.drain()
    assert used(rig, RAM) == rig.store._moves.going == 0
    sizes = [rig.catalog.nbytes[rig.row(key, tier)] for key, tier in zip(KEYS, (1, 2), strict=True)]
    assert (used(rig, NVME), used(rig, REDIS)) == (paged(sizes[0], ALIGN), sizes[1])
    found = rig.get_blocks(KEYS)
    codec = CODECS.named(name)
    for (header, block), one, size in zip(found, stored, sizes, strict=True):
        assert header.codec_id == PROFILES[name].codec_id
        assert header.fidelity == class_of(name)
        assert bool(header.flags & frame.LOSSY) == PROFILES[name].lossy
        assert header.frame_bytes == size < RAW_BYTES
        out = torch.empty(codec.bound(RAW_BYTES), dtype=torch.uint8)
        assert sum(codec.encode(one.block, out, place_of(header))) == header.payload_bytes
        expected = decoded(rig.codecs, header, out[: header.payload_bytes].numpy().tobytes())
        assert torch.equal(block, expected)
        assert torch.equal(block, one.block) != PROFILES[name].lossy
    assert rig.count("promoted") == 2
    again = MoveRig([opened()])
    assert [header.codec_id for header, _ in again.get_blocks(KEYS[:1])] == [
        PROFILES[name].codec_id
    ]
    rig.idle()


def place_of(header: frame.Header) -> Place:
    return place_at(header.position)


def test_a_log_forgets_the_tail_of_a_frame_and_reads_the_rest(opened: Logs) -> None:
    rig = MoveRig([opened()], write_behind_bytes=1 << 30)
    stored = rig.put_blocks(KEYS, "kvtc@4x")
    rig.inline.drain()
    rig.store._store.drop([rig.row(key, RAM) for key in KEYS])
    before = rig.lower[0].space()
    rig.order(Kind.DOWNGRADE, KEYS, NVME, NVME, "kvtc@32x")
    rig.store._moves.relieve(NVME, 1 << 30)
    sizes = [cut_bytes(one, 1) for one in stored]
    after = rig.lower[0].space()
    lost = sum(paged(cut_bytes(one, 4), ALIGN) - paged(cut_bytes(one, 1), ALIGN) for one in stored)
    assert (after.free, after.dead) == (before.free, before.dead + lost)
    assert used(rig, NVME) == sum(paged(size, ALIGN) for size in sizes)
    rig.sound()
    is_prefix(rig, stored, 1)
    assert used(rig, RAM) == sum(map(paged, sizes))
    whole = MoveRig([opened()])  # the disk was left as it is
    is_prefix(whole, stored, 4)
    rig.idle()


def test_a_clear_in_the_middle_of_a_demotion_wins(opened: Logs) -> None:
    rig = MoveRig([opened()])
    rig.encode()
    rig.put_blocks(KEYS, "raw")
    rig.order(Kind.DEMOTE, KEYS, NVME, RAM, "int8")
    rig.relieve()
    rig.clear()
    rig.inline.drain()
    assert rig.get_blocks(KEYS) == []
    assert (used(rig, RAM), used(rig, NVME), rig.store._moves.going) == (0, 0, 0)
    rig.idle()


def test_a_kill_in_the_middle_of_moves_loses_nothing_durable(opened: Logs) -> None:
    step, running = 0, True
    while running:
        rig = MoveRig([opened()], write_behind_bytes=1 << 30)
        keys, safe = chain(10 + step, 2), chain(50 + step, 2)
        rig.encode()
        rig.put_blocks(safe, "kvtc@4x")
        assert rig.flush(safe, parts=(PART,)) == b"\1\1"
        rig.put_blocks(keys, "raw")
        rig.inline.jobs.clear()
        rig.store._write_behind.queues[0].running = False
        rig.store._write_behind.clear()
        rig.order(Kind.DEMOTE, keys, NVME, RAM, "int8")
        rig.order(Kind.DEMOTE, safe, NVME, RAM, "kvtc@32x")
        rig.order(Kind.DOWNGRADE, safe, NVME, NVME, "kvtc@16x")
        rig.store._moves.relieve(NVME, 1 << 30)
        rig.relieve()
        for _ in range(step):
            running = rig.inline.step()
        again = MoveRig([opened()])  # the first one's memory is gone with it
        found = again.get_blocks(safe)
        assert [len([n for n in header.segments if n]) for header, _ in found] == [4, 4]
        assert {header.codec_id for header, _ in again.get_blocks(keys)} <= {INT8.codec_id}
        again.idle()
        step += 1
    assert step > 4


def test_an_exact_block_goes_down_as_kvtc_and_is_cut_there(opened: Logs) -> None:
    rig = MoveRig([opened()])
    rig.encode()
    blocks = rig.put_blocks(KEYS, "raw")
    rig.order(Kind.DEMOTE, KEYS, NVME, RAM, "kvtc@4x")
    rig.relieve()
    rig.inline.drain()
    finest = rig.codecs.named("kvtc@4x")
    made = []
    for one in blocks:
        out = torch.empty(finest.bound(RAW_BYTES), dtype=torch.uint8)
        segments = finest.encode(one.block, out, place_at(one.position))
        payload = out[: sum(segments)].numpy().tobytes()
        made.append(one._replace(payload=payload, segments=segments, codec=finest))
    assert used(rig, RAM) == 0
    for levels, name in ((4, "kvtc@4x"), (3, "kvtc@8x"), (1, "kvtc@32x")):
        if levels < 4:
            rig.order(Kind.DOWNGRADE, KEYS, NVME, NVME, name)
            rig.store._moves.relieve(NVME, 1 << 30)
        rows = [rig.row(key, NVME) for key in KEYS]
        assert {PROFILES[name].number} == {rig.catalog.profile[row] for row in rows}
        assert [rig.catalog.nbytes[row] for row in rows] == [cut_bytes(m, levels) for m in made]
        assert used(rig, NVME) == sum(paged(cut_bytes(one, levels), ALIGN) for one in made)
        assert {rig.catalog.fidelity[row] for row in rows} == {class_of(name)}
    found = rig.get_blocks(KEYS)
    for one, (header, block) in zip(made, found, strict=True):
        assert header.artifact == finest.artifact
        assert torch.equal(block, rig.prefix_of(one, 1))
    assert rig.get_blocks(KEYS, Fidelity.NEAR_LOSSLESS) == []


class Counting(Commanded):
    """Counts how often it was asked for what takes I/O."""

    asked = 0

    def reclaim(self, view: Catalog, tier: int, need: int, *, at_once: bool) -> list[Move]:
        self.asked += not at_once
        return super().reclaim(view, tier, need, at_once=at_once)


def test_the_policy_is_asked_when_bytes_came_in_and_less_where_it_had_nothing(
    opened: Logs,
) -> None:
    rig = MoveRig([opened()], pages=512)
    policy = Counting(2)
    rig.store._store.policy = rig.commanded = policy
    capacity = rig.host.space().capacity
    rig.put_blocks(chain(40, 1), "raw")
    for _ in range(5):
        rig.clock.now += 60.0
        rig.store.tick()
    assert policy.asked == 1, "nothing came in"
    asked = []
    for session in range(2, 26):
        rig.put_blocks(chain(session, 1), "raw")
        rig.store.tick()
        asked.append(policy.asked)
    assert asked[:2] == [2, 3]
    late = asked[-1] - asked[-9]
    assert late <= 1 + 8 * RAW_BYTES * 1.2 / (capacity / 8), "it has nothing, again and again"
    rig.put_blocks(KEYS, "raw")
    rig.order(Kind.DEMOTE, KEYS, NVME, RAM, "raw")
    rig.relieve()
    before = policy.asked
    rig.put_blocks(chain(30, 1), "raw")
    rig.store.tick()
    assert policy.asked == before + 1, "as often as before once it had something"
    other = Counting(2)
    rig.store._store.policy = other
    rig.store.tick()
    assert other.asked == 1, "another policy may know better"
    rig.inline.drain()
    rig.idle()


def test_no_more_waits_for_the_encoder_than_it_has_time_for(opened: Logs) -> None:
    rig = MoveRig([opened()], pages=512)
    rig.encode()
    keys = chain(3, 12)
    rig.put_blocks(keys, "raw")
    rig.order(Kind.DEMOTE, keys, NVME, RAM, "int8")
    rig.relieve()
    held = [rig.catalog.holds[rig.row(key, RAM)] for key in keys]
    assert sum(held) == demotions.ENCODES
    rig.inline.drain()
    assert rig.count("encoded") == demotions.ENCODES
    assert len(rig.get_blocks(keys)) == len(keys)
    rig.idle()
