"""The joint policy on a real store under pressure: what it serves beside LRU, and its own books."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.nvme_tiers import opening
from tests.stores import PAGE, Rig, chain
from tests.unit.test_gate import domain, entry
from tests.work import Work, work_of
from tierkv import calls, frame
from tierkv.catalog import READY, Catalog
from tierkv.codec import PROFILES, Profile
from tierkv.cost import HOST_RATES, Recompute
from tierkv.fidelity import Fidelity
from tierkv.gate import Gate
from tierkv.part import Part
from tierkv.policies.joint import Joint
from tierkv.policies.placed import Placed
from tierkv.policies.putting import Putting
from tierkv.policies.segments import NONE
from tierkv.policy import Picked
from tierkv.reservation import Written
from tierkv.tier import DurableTier
from tierkv.use import Use

RAW = 8 * PAGE - frame.header_bytes(1)
TOKENS = 128
FAMILY = b"f" * 32
ARTIFACT = b"a" * 32
PROFILES_OF_ENGINE = ("raw", "int8", "kvtc@4x", "kvtc@8x", "kvtc@16x")
RECOMPUTE: dict[str, Any] = {"linear": 4e-4, "quadratic": 1e-9}
NEW_CHATS, TURNS = 0.2, 6
ONCE = 1 << 20
"""Sessions from here on ask once."""


def gate() -> Gate:
    """Return a gate that allows int8 and kvtc to 8x for class safe, 16x for economy."""
    kl = {"int8": 1e-4, "kvtc@4x": 0.001, "kvtc@8x": 0.005, "kvtc@16x": 0.03}
    return Gate(
        entries=tuple(
            entry(
                domain(kl_mean=loss, kl_hi=loss),
                profile=name,
                family=FAMILY.hex(),
                artifact=ARTIFACT.hex() if name.startswith("kvtc") else "",
            )
            for name, loss in kl.items()
        )
    )


class Request(NamedTuple):
    at: float
    session: int
    blocks: int


def traffic(seed: int, seconds: float) -> Iterator[Request]:
    """Chats of six turns with a minute between them; four prompts in five come once."""
    rng = random.Random(seed)
    waiting: list[tuple[float, int, int]] = []
    newest, now = 0, 0.0
    while now < seconds:
        now += rng.expovariate(1 / 4.0)
        newest += 1
        if rng.random() < NEW_CHATS:
            heapq.heappush(waiting, (now, newest, 0))
        else:
            yield Request(now, ONCE + newest, 5)
        while waiting and waiting[0][0] <= now:
            at, session, turn = heapq.heappop(waiting)
            yield Request(at, session, 4 + 2 * turn)
            if turn + 1 < TURNS:
                heapq.heappush(waiting, (at + rng.expovariate(1 / 60.0), session, turn + 1))


def made(profile: Profile) -> Written:
    """Return a block of the size that a profile says."""
    levels = max(profile.levels, 1)
    return Written(profile.number, (int(RAW / profile.ratio) // levels,) * levels)


class Engine:
    """Asks for each request's chain and puts all of it, encoded to the sizes of the profiles."""

    def __init__(self, rig: Rig, offered: Sequence[str]) -> None:
        self.rig = rig
        self.fields: dict[str, Any] = {"fidelity": int(Fidelity.SAFE), "tokens_per_block": TOKENS}
        self.put_fields: dict[str, Any] = {
            "raw": RAW, "profiles": tuple(offered), "family": FAMILY,
            "artifacts": tuple(
                ARTIFACT if name.startswith("kvtc") else b"" for name in offered
            ),
        }  # fmt: skip
        self.hits = self.asked = 0

    def serve(self, request: Request) -> None:
        rig = self.rig
        rig.clock.now = max(rig.clock.now, 1000.0 + request.at)
        keys = chain(request.session, request.blocks)
        reply = rig.match(keys, raw_bytes=RAW, **self.fields, **RECOMPUTE)
        if reply.match:
            got = rig.store.get(1, calls.GetCall(match=reply.match, blocks=reply.blocks))
            rig.store.release(1, calls.ReleaseCall(transfer=got.transfer))
        self.asked += request.blocks
        self.hits += reply.blocks
        held = rig.offer(keys, **self.fields, **self.put_fields)
        if held is not None:
            units = [made(PROFILES[held.profile])] * len(held.units)
            beside = [made(held.beside)] * len(held.units) if held.beside else []
            held.commit_written(units, beside=beside)
        rig.inline.drain()
        rig.store.tick()


class Served(NamedTuple):
    """The share of blocks hit, the ledger's seconds, bytes written below RAM."""

    hit: float
    saved_s: float
    written: int


def serve(
    policy: str, offered: Sequence[str], seed: int, lower: Sequence[DurableTier] = ()
) -> Served:
    """Serve twenty minutes of traffic, with every book audited on the way."""
    rig = Rig(8 * (20 if lower else 40), list(lower), gate=gate(), policy=policy)
    engine = Engine(rig, offered)
    for request in traffic(seed, 1200.0):
        engine.serve(request)
        rig.sound()
        audit(rig)
    stat = rig.stat()
    rig.idle()
    rig.store.close(0.0)
    written = sum(tier["written_bytes"] for tier in stat["tiers"][1:])
    return Served(engine.hits / engine.asked, stat["saved_s"] - stat["lost_s"], written)


def audit(rig: Any, *, sound: bool = True) -> None:
    """Assert that what the policy believes of placements is what the catalog says.

    And that heads stay longer than tails; not where media are not `sound`: a head that they lose
    leaves its tails, which the next put of it makes useful again.
    """
    store = rig.store._store
    policy, catalog = store.policy, store.catalog
    if not isinstance(policy, Joint):
        return
    placed, segments = policy.placed, policy.placed.segments
    there = [row for row in range(len(catalog)) if catalog.state[row]]
    known = [row for row in range(len(placed._place)) if placed.knows(row)]
    assert set(known) <= set(there)
    ready = {row for row in there if catalog.state[row] == READY}
    assert ready <= set(known), "all but what is on its way down"
    there = known
    assert sorted(row for pool in placed.pools for row in pool.rows) == there
    copies: Counter[int] = Counter()
    for row in there:
        block = placed.block(row)
        if block == NONE:  # found when the policy changed, and not asked for since
            continue
        assert placed.keys(block, 1) == catalog.key(row)
        copies[block] += 1
    assert all(placed.copies(block, 1) == [copies[block]] for block in range(len(placed._numbers)))
    live = np.arange(segments.count)
    has = np.array([placed._any(row) for row in live.tolist()], np.bool_)
    assert np.array_equal(has, segments.configuration[live] != 0)
    parents = segments.parents(live)
    behind = has & (parents != NONE)
    children = np.bincount(parents[behind], minlength=segments.count)
    assert np.array_equal(children, segments.children[live])
    if not sound:
        return
    assert has[parents[behind]].all(), "a head is gone before its tail"
    for segment in np.flatnonzero(has).tolist():
        first, blocks = int(segments.first[segment]), int(segments.blocks[segment])
        there = [count > 0 for count in placed.copies(first, blocks)]
        assert there == sorted(there, reverse=True), "a head is gone before its tail"


@pytest.mark.parametrize("seed", range(2))
def test_it_serves_more_than_lru(seed: int) -> None:
    """Same gate, same offers, RAM alone: what is dead makes room, and what lives is made small."""
    gained = []
    for offered in ("raw",), ("raw", "int8"), PROFILES_OF_ENGINE:
        lru, joint = serve("lru", offered, seed), serve("evicpress", offered, seed)
        assert joint.hit > 1.1 * lru.hit
        assert joint.saved_s > 1.1 * lru.saved_s
        gained.append(joint.hit / lru.hit)
    assert gained[-1] > 2


@pytest.mark.parametrize("offered", [("raw",), ("raw", "int8"), PROFILES_OF_ENGINE])
def test_a_disk_serves_more_and_is_written_less(tmp_path: Path, offered: tuple[str, ...]) -> None:
    """A real disk whose log goes round: what would earn nothing there is not written there."""
    with opening(tmp_path / "lru") as tier:
        lru = serve("lru", offered, 0, [tier(regions=12)])
    with opening(tmp_path / "joint") as tier:
        joint = serve("evicpress", offered, 0, [tier(regions=12)])
    assert joint.hit > 1.3 * lru.hit
    assert joint.saved_s > 1.3 * lru.saved_s
    assert joint.written < 0.5 * lru.written


def test_of_two_copies_the_small_one_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    """RAM alone, and every block put twice: more is hit than where there is only the large one."""
    alone = serve("evicpress", ("raw",), 0)

    def picks(self: Putting, _: bytes, __: Any, choices: Any, **___: Any) -> Picked:
        self._picked, self._choices = PROFILES["kvtc@4x"], choices
        return Picked(PROFILES["raw"].number, PROFILES["kvtc@4x"].number)

    monkeypatch.setattr(Putting, "picks", picks)
    both = serve("evicpress", PROFILES_OF_ENGINE, 0)
    assert both.hit > 1.5 * alone.hit


@pytest.mark.parametrize("least", [40, 400])
def test_what_it_knows_stays_a_multiple_of_what_is_there(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """Chains that have nothing left are forgotten; what was learnt of reuse stays."""
    before = serve("evicpress", PROFILES_OF_ENGINE, 0).hit
    monkeypatch.setattr("tierkv.policies.placed.LEAST_BLOCKS", least)
    known: list[int] = []
    renumber = Placed._renumber

    def note(placed: Placed, blocks: Any) -> None:
        renumber(placed, blocks)
        known.append(len(placed._numbers))

    monkeypatch.setattr(Placed, "_renumber", note)
    after = serve("evicpress", PROFILES_OF_ENGINE, 0).hit
    assert len(known) > 2
    assert max(known) < 1000
    assert after > 0.8 * before


@pytest.mark.parametrize("headed", [False, True], ids=["head in an earlier call", "head in HBM"])
def test_r24_what_survives_of_a_prompt_is_a_prefix(headed: bool) -> None:
    """Room for six; a chain of four in two calls, then four of another session."""
    rig = Rig(6, [], policy="evicpress")
    one, two = chain(1, 4), chain(2, 4)
    assert rig.put(one[:2], b"one") == 2
    assert rig.put(one, b"one") == 2
    if headed:  # only the tail is fetched from us, and the whole chain is named all the same
        reply = rig.match(one, linear=1e-3)
        rig.store.release(1, calls.ReleaseCall(match=reply.match))
    rig.put(two, b"two")
    for keys in one, two:
        found = [
            rig.store._store.ready_in(0, int(head), 4, rig.store._store.catalog.namespace[0])
            for head in rig.store._store.heads(b"".join(keys), [0])
        ]
        kept = [row != NONE for row in found]
        assert kept == sorted(kept, reverse=True), "a tail stays behind a head that is gone"
    rig.idle()
    audit(rig)


def test_a_head_stays_while_somebody_reads_its_tail() -> None:
    """What cannot go itself keeps what lies before it, though that is what is wanted."""
    rig = Rig(8, [], policy="evicpress")
    one = chain(1, 6)
    assert rig.put(one, b"one") == 6
    reply = rig.match(one, linear=1e-3)
    tail = rig.claim(reply.match, 4, rig.match_call(one[4:]), owner=1)
    assert tail is not None
    rig.store.release(1, calls.ReleaseCall(match=reply.match))
    rig.put(chain(2, 8), b"two")
    assert len(rig.read(one)) == 6
    tail.close()
    assert rig.put(chain(3, 8), b"three") > 2
    rig.idle()


def test_a_decision_costs_the_same_among_many_placements() -> None:
    """The work of reclaims beside that among twenty times as many placements."""

    def reclaims(placements: int) -> Work:
        once = reclaim_among(placements)
        return work_of(lambda: [once() for _ in range(40)])

    few, many = reclaims(10_240), reclaims(204_800)
    assert many.calls < 1.5 * few.calls
    assert many.nbytes < 1.5 * few.nbytes


def reclaim_among(placements: int) -> Callable[[], None]:
    """Return a call that makes room for four blocks in RAM, among so many."""
    length, size = 256, 4096
    catalog, rng = Catalog(["host"]), np.random.default_rng(0)
    part = catalog.part_number(Part(0, 0, 2, 0, 2))
    policy = Joint([HOST_RATES], [placements * size], [size])
    for number in range(placements // length):
        keys = rng.bytes(32 * length)
        use = Use(float(number), keys, (part,), 0, 64, 1 << 16, b"m", Recompute(1e-4, 1e-9))
        policy.used(catalog, use)
        columns: dict[str, Any] = {
            "profile": 1, "fidelity": 4, "flags": 0, "nbytes": size, "allocated": size,
            "locator": np.arange(length), "namespace": 0, "generation": 0, "position": 0,
        }  # fmt: skip
        rows = catalog.begin_alike(0, part, keys, columns)
        catalog.commit(rows)
        policy.touched(catalog, rows)

    def reclaim() -> None:
        moves = policy.reclaim(catalog, 0, 4 * size, at_once=True)
        assert len(moves) == 4
        gone = [move.row for move in moves]
        catalog.leave(gone)
        catalog.gone(gone)
        policy.forgot(gone)

    return reclaim
