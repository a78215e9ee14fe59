"""Joint: EvicPress over the Catalog of a service. What is there is the Catalog's to say.

The same reuse (`reuse`), worth (`worth`) and sets of copies (`configurations`) as in the replay.
There a segment has one set of copies; here blocks come and go one by one, by puts that were
refused, regions that were reclaimed and clears, so that a set of copies is read off the Catalog
for the few placements that a decision looks at, and what follows is done to its segment.

What differs from the replay, because a store cannot do it: a put makes one copy, in RAM, of one
profile, and no other is ever made beside it. Behind the put go copies to the lower tiers, of what
would be worth it there alone.

Rates and prices are as old as the last use of a chain that was told: there is no other clock.
"""

from collections.abc import Container, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from tierkv.calls import PIN_S
from tierkv.catalog import NONE, Catalog, Rows
from tierkv.codec import Profile
from tierkv.cost import Rates
from tierkv.explain import Dropped, Terms
from tierkv.plan import Kind, Move
from tierkv.policies.placed import Placed
from tierkv.policies.putting import Putting
from tierkv.policies.reuse import SIGHTS
from tierkv.policies.search import Candidate, Search
from tierkv.policies.steps import Steps
from tierkv.policies.stranded import stranded
from tierkv.policies.telling import Facts, tell
from tierkv.policies.worth import FLOOR, MEMORY, gains, losses, moved
from tierkv.policy import Picked
from tierkv.tier import RAM
from tierkv.use import Use

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

KEEP_FROM = 0.75
"""A reclaimed region's survivors earn more than this share of what the tier has."""
FULL = 0.98
"""A tier with more room than this leaves, and no need for long, loses its price."""
REST_USES = 8
"""Uses of chains between two looks at the price of a tier that gives up nothing."""
SLACK_DECAY = 0.9**REST_USES
PINNED = 1e9
"""Loss per byte that a pin adds: more than anything else, less than being refused."""
SAMPLED = 64
RATES_APART = 1.2
"""A bandwidth that is off by less changes no decision that matters."""
MAX_SESSIONS = 65536
MOST_TOLD = 32


def _apart(new: Rates, old: Rates) -> bool:
    return not 1 / RATES_APART < new.read_bps / old.read_bps < RATES_APART


class Joint:
    """The joint policy of a service.

    Args:
        rates: of each tier, nearest first.
        capacity: bytes of each tier, 0 where it has no bound.
        granule: bytes of each tier's allocations.
        second_sight: lower tiers take only what was asked for twice.
    """

    name = "evicpress"

    def __init__(
        self, rates: Sequence[Rates], capacity: Sequence[int], granule: Sequence[int],
        *, second_sight: bool = False,
    ) -> None:  # fmt: skip
        self.steps = Steps(rates)
        self.known = self.steps.known
        self.placed = Placed(len(rates))
        self.price = np.zeros(len(rates))
        self._rates, self._sights = list(rates), SIGHTS if second_sight else 0
        self._capacity = capacity
        self._granule = granule
        self._uses = 0
        self._pressed = [0 for _ in rates]
        """By tier: uses at the last time that it needed room."""
        self._told: list[Use] = []
        """Not learnt from yet."""
        self._putting = Putting(self.steps, self.placed, self._gains)
        self._worth: dict[int, float] = {}
        self._sessions: dict[str, int] = {}
        self._given: Facts | None = None
        """Of the last drop."""

    # what is told

    def used(self, view: Catalog, use: Use) -> None:
        """Note a chain that was asked for, to learn from it later: a match does not wait for it.

        What is being put is learnt at once: the decisions that follow are about it.
        """
        if use.keys:
            self._told.append(use)
            if not use.asked or len(self._told) >= MOST_TOLD:
                self._learn(view)

    def _learn(self, view: Catalog) -> None:
        """Learn from what was told since the last time."""
        told, self._told = self._told, []
        for use in told:
            self._learn_one(view, use)
            if self.placed.shrink():
                self._sessions.clear()

    def _learn_one(self, view: Catalog, use: Use) -> None:
        placed, reuse = self.placed, self.placed.reuse
        placed.now = max(placed.now, use.now)
        before = reuse.newest
        placed.use(view, use)
        self._uses += 1
        if reuse.newest > before and use.session:
            earlier = self._sessions.pop(use.session, reuse.newest)
            if earlier != reuse.newest:
                reuse.end(earlier, use.now)
            self._sessions[use.session] = reuse.newest
            if len(self._sessions) > MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        self._hint(use)
        if self._uses % REST_USES == 0:
            for tier in range(len(self.price)):
                self._rest(view, tier)

    def _hint(self, use: Use) -> None:
        if not (use.closed or use.pin or use.ttl_s is not None):
            return
        segments, now = self.placed.segments, use.now
        rows = segments.of(self.placed.find(use.keys))
        context = int(segments.context[rows[-1]])
        if use.closed or use.ttl_s is not None:
            self.placed.reuse.end(context, now if use.closed else now + (use.ttl_s or 0.0))
        if use.pin:
            segments.pinned[rows] = now + (PIN_S if use.ttl_s is None else use.ttl_s)

    def touched(self, view: Catalog, rows: Rows) -> None:
        """Take in placements that are new."""
        if not all(map(self.placed.knows, rows)):
            self._learn(view)
        self.placed.enter(view, rows)

    def found(self, view: Catalog, rows: Rows) -> None:
        """Take in placements that were there at start."""
        self._learn(view)
        self.placed.enter_orphans(view, rows)

    def forgot(self, rows: Rows) -> None:
        """Placements are gone."""
        self.placed.leave(rows)

    def measured(self, view: Catalog, rates: Sequence[Rates]) -> None:
        """Believe other rates of the tiers, when they differ by much; catch up on what was told."""
        self._learn(view)
        if any(_apart(new, old) for new, old in zip(rates, self._rates, strict=True)):
            self._rates = list(rates)
            self.known.measured(rates)

    # what is asked

    def picks(self, keys: bytes, known: Sequence[bool], choices: Sequence[Profile]) -> Picked:
        """Return the profiles whose best future earns most, once RAM has a price.

        Until then a block lives longest where the planner looks: in the slowest tier in use.
        """
        return self._putting.picks(keys, known, choices, priced=bool(self.price[RAM]))

    def offered(self, view: Catalog, tier: int, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a chain earn more than they cost, from the first on."""
        del view, tier
        return self._putting.offered(keys)

    def _gains(self, segments: Numbers, current: Numbers, choices: Numbers) -> Floats:
        rate = self.placed.reuse.rate(segments, self.placed.now)
        density = self.placed.segments.density[segments]
        return gains(self.known, self.price, rate, density, current, choices)

    def admits(self, view: Catalog, tier: int, rows: Rows) -> list[bool]:
        """Return which placements would earn something in a lower tier alone."""
        self._learn(view)
        blocks = np.array([self.placed.block(row) for row in rows], np.int32)
        profiles = [view.profile[row] for row in rows]
        worth = np.ones(len(rows), np.bool_)
        mine = np.flatnonzero(blocks != NONE)
        if len(mine):
            segments = self.placed.segments.of(blocks[mine])
            choices = np.array([self.steps.alone[tier][profiles[at]] for at in mine])[:, None]
            gain = self._gains(segments, np.zeros_like(segments), choices)[:, 0]
            worth[mine] = (gain > 0) & (self.placed.segments.uses[segments] >= self._sights)
        return [bool(one) for one in worth]

    def victims(self, view: Catalog, tier: int, need: int) -> list[int]:
        """Return the rows of drops alone."""
        self._learn(view)
        search = self._search(view, tier, need)
        search.run(partial(self._judge, view, tier, {Kind.DROP}))
        return [move.row for move in search.moves]

    def reclaim(self, view: Catalog, tier: int, need: int, *, at_once: bool) -> list[Move]:
        """Return the steps that lose least per byte."""
        self._learn(view)
        kinds = {Kind.DROP, Kind.DOWNGRADE} | (set() if at_once else {Kind.DEMOTE})
        search = self._search(view, tier, need)
        search.run(partial(self._judge, view, tier, kinds))
        if tier == RAM and not at_once:  # the others wait until the room is wanted
            return [move for move in search.moves if move.kind is Kind.DEMOTE]
        self._pressed[tier] = self._uses
        drop = next((move for move in search.moves if move.kind is Kind.DROP), None)
        if drop is not None:
            self._given = self._facts(view, drop.row)
        lost = [max(loss, 0.0) for loss in search.losses if loss < PINNED]
        if lost:
            self.price[tier] = moved(self.price[tier], float(np.mean(lost)), len(lost))
        return search.moves

    def _search(self, view: Catalog, tier: int, need: int) -> Search:
        return Search(view, self.placed, tier, need, self._granule[tier], self._uses << 16)

    def _judge(
        self, view: Catalog, tier: int, kinds: set[Kind],
        rows: list[int], inside: list[bool], going: Container[int],
    ) -> list[Candidate]:  # fmt: skip
        """Return the best step of each placement, where there is one."""
        if not rows:
            return []
        current = np.array([self.steps.there(view, row, going) for row in rows])
        steps = self.known.relief(tier, current)
        loss = self._losses(tier, rows, current, steps)
        allowed = np.array([self.steps.allowed(view, row) for row in rows])
        loss[self.steps.barred(tier, allowed, current, steps, kinds)] = np.inf
        loss[self.steps.of_another(view, rows, current, steps)] = np.inf
        if self._sights:
            early = np.array([self.placed.uses(row) < self._sights for row in rows])[:, None]
            down = self.steps.barred(tier, allowed, current, steps, kinds - {Kind.DEMOTE})
            loss[early & down] = np.inf
        loss[(steps == 0) & np.array(inside)[:, None]] = np.inf
        best = loss.argmin(axis=1)
        found = []
        for at, (row, place) in enumerate(zip(rows, best.tolist(), strict=True)):
            if not current[at]:  # of no use to anybody
                found.append(Candidate(row, Kind.DROP, tier, 0, 0.0))
            elif loss[at, place] < np.inf:
                step = self.steps.read(tier, int(current[at]), int(steps[at, place]))
                found.append(Candidate(row, *step, float(loss[at, place])))
        return found

    def _losses(self, tier: int, rows: list[int], current: Numbers, steps: Numbers) -> Floats:
        rate, density, pinned = self._value(rows)
        loss, _ = losses(self.known, self.price, tier, rate, density, current, steps)
        loss[pinned] += PINNED
        return loss

    def _value(self, rows: list[int]) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        """Return rate, density and whether somebody pinned it, of placements.

        An orphan is as an old context. What lies behind a head that is gone cannot be hit.
        """
        placed, segments = self.placed, self.placed.segments
        blocks = np.array([placed.block(row) for row in rows], np.int32)
        orphan = blocks == NONE
        rate, density = np.zeros(len(rows)), np.zeros(len(rows))
        rate[orphan] = placed.reuse.rate_of_unknown(placed.now - placed.found_at)
        density[orphan] = self._dense()
        mine = segments.of(blocks[~orphan])
        ahead = segments.parents(mine)
        cut_off = (ahead != NONE) & (segments.configuration[ahead] == 0)
        rate[~orphan] = np.where(cut_off, 0.0, placed.reuse.rate(mine, placed.now))
        density[~orphan] = segments.density[mine]
        pinned = np.zeros(len(rows), np.bool_)
        pinned[~orphan] = segments.pinned[mine] > placed.now
        return rate, density, pinned

    def _dense(self) -> float:
        segments = self.placed.segments
        return float(segments.density[: max(segments.count, 1)][-256:].mean())

    def terms(self, view: Catalog, row: int) -> Terms:
        """Say what a placement's block earns as it is, and what each other step would leave."""
        self._learn(view)
        return tell(self.steps, self._facts(view, row))

    @property
    def last_drop(self) -> Dropped | None:
        """The last placement that was given up for room."""
        if self._given is None:
            return None
        given = self._given
        name = given.tiers[given.tier]
        return Dropped(given.key, name, given.nbytes, tell(self.steps, given))

    def _facts(self, view: Catalog, row: int) -> Facts:
        segments, block = self.placed.segments, self.placed.block(row)
        rate, density, pinned = self._value([row])
        raw = 0.0
        if block != NONE:
            segment = self.placed.segment(block)
            raw = float(segments.nbytes[segment] / segments.blocks[segment])
        return Facts(
            view.key(row), view.tiers, view.tier[row], view.allocated[row],
            self.steps.there(view, row), self.steps.allowed(view, row), float(rate[0]),
            float(density[0]), bool(pinned[0]), raw, self.placed.behind(row), self.price.copy(),
        )  # fmt: skip

    def keeps(self, view: Catalog, tier: int, rows: Rows) -> list[bool]:
        """Return which rows earn more than KEEP_FROM of what the tier has."""
        if not rows:
            return []
        self._learn(view)
        self._pressed[tier] = self._uses
        sampled = self.placed.pools[tier].sample(SAMPLED, self._uses)
        least = float(np.quantile(self._dropped(view, tier, sampled), KEEP_FROM)) if sampled else 0
        loss = self._dropped(view, tier, list(rows))
        gone = loss <= least
        if gone.any():
            self.price[tier] += MEMORY * (float(loss[gone].mean()) - self.price[tier])
        self._worth = dict(zip(rows, loss.tolist(), strict=True))
        return [bool(one) for one in ~gone]

    def stranded(self, view: Catalog, rows: Rows) -> list[int]:
        """Return what lies behind blocks that are lost with these rows."""
        return stranded(view, self.placed, rows)

    def _dropped(self, view: Catalog, tier: int, rows: list[int]) -> Floats:
        """Return the loss per byte of giving placements up, what lies behind them included."""
        current = np.array([self.steps.there(view, row) for row in rows])
        mine = [self.steps.alone[tier].get(view.profile[row], 0) for row in rows]
        without = np.maximum(current - np.array(mine, np.int64), 0)
        loss = self._losses(tier, rows, current, without[:, None])[:, 0]
        loss = np.where(np.isfinite(loss), np.maximum(loss, 0.0), 0.0)
        behind = np.array([self.placed.behind(row) for row in rows])
        worth: Floats = loss * (1 + np.where(without == 0, behind, 0))
        return worth

    def oldest(self, rows: Rows) -> list[int]:
        """Return rows by what they earn, what lies behind them included."""
        if not rows:
            return []
        rate, density, pinned = self._value(list(rows))
        behind = np.array([self.placed.behind(row) for row in rows])
        worth = rate * density * (1 + behind) + pinned * PINNED
        if all(row in self._worth for row in rows):  # of a region that was just looked at
            worth = np.array([self._worth[row] for row in rows])
        order = np.argsort(worth, kind="stable").tolist()
        return [rows[at] for at in order]

    def _rest(self, view: Catalog, tier: int) -> None:
        """Move the price of a tier that gives up nothing."""
        capacity, idle = self._capacity[tier], self._uses - self._pressed[tier]
        rows = self.placed.pools[tier].sample(SAMPLED, self._uses)
        if not capacity or idle < REST_USES or not rows:
            return
        if sum(view.bytes[tier][1:]) <= capacity * FULL:
            self.price[tier] *= SLACK_DECAY if idle > REST_USES * REST_USES else 1.0
            return
        worth = float(np.quantile(self._dropped(view, tier, rows), FLOOR))
        self.price[tier] += (1 - (1 - MEMORY) ** REST_USES) * (worth - self.price[tier])
