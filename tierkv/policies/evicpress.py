"""EvicPress: one decision for keep, compress, move and drop, over every tier.

What a segment earns in a configuration, in seconds per second, is

    rate * max(T_recompute - T_load, 0)  -  sum over tiers of price * stored bytes

with the rate of its context's hazard plus that of uses that branch off, and T_recompute and T_load
per raw byte. Three things follow:

- *store*: when a chain was used, every segment of it takes the configuration that earns most, among
  those that can be made of what is at hand and that keep what is there;
- *reclaim*: a tier over its capacity takes the steps that lose least per byte freed, out of
  `SAMPLED` segments, drops only at the end of a chain: a decision costs the same however many
  segments there are;
- *price*: of a byte in a tier, per second: what the last bytes that it gave up earned, and while it
  gives up none, what the least of its sampled segments earn; nothing while there is room.

Gain must exceed `price` to move anything, so that a tier does not fill with what it would give up
first; what is stored stays until a reclaim finds it worth least, which is the hysteresis.

Source: EvicPress (arXiv 2512.14946), section 2 of its selection, with utility lost per byte freed,
recompute in place of a constant, and prices in place of a comparison with every stored context.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.cost import Rates
from tierkv.policies.configurations import Configurations, Form
from tierkv.policies.reuse import SIGHTS, Reuse
from tierkv.policies.segments import NONE, Ids, Walk
from tierkv.policies.views import RECENCY, Views
from tierkv.policies.worth import FLOOR, MEMORY, gains, losses, moved

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

SAMPLED = 64
TAKEN = 32
"""Of so many looked at one is given up at most before others are sampled: with more, what is live
goes where the sample happens to have little that is dead."""
NEAR = 128
"""So many that nearly went are looked at again beside the next sample."""
FULL = 0.995
"""A tier with more room than this leaves has no price, after a while."""
SLACK_DECAY = 0.9


class Counts(NamedTuple):
    """Segments moved since the start, by kind."""

    stored: int
    downgraded: int
    demoted: int
    dropped: int


class EvicPress:
    """The joint policy over segments of chains.

    Args:
        forms: the profiles that may be used.
        rates: of each tier, nearest first.
        capacity: bytes of each tier.
        seed: of the sampling.
        reuse: what tells how soon a segment is used again; by default it is learnt.
        second_sight: lower tiers take only what was used twice.
    """

    name = "evicpress"

    def __init__(
        self,
        forms: Sequence[Form],
        rates: Sequence[Rates],
        capacity: Sequence[int],
        seed: int = 0,
        reuse: Reuse | None = None,
        *,
        second_sight: bool = False,
    ) -> None:
        self.configurations = Configurations(forms, rates)
        self.reuse = reuse or Reuse()
        self.segments = self.reuse.segments
        self._second_sight = second_sight
        self._bars = second_sight
        """Whether any choice may be barred; some may from the first floor on."""
        only = self.configurations.stored.shape == (2, 1)
        self._views = Views(self.reuse, float(capacity[0])) if only else None
        """Where there is one way to keep a segment, so that what stays is all there is to say."""
        self.capacity = np.array(capacity, np.float64)
        self.used = np.zeros(len(rates))
        self.written = np.zeros(len(rates))
        self.price = np.zeros(len(rates))
        self.encoded = 0.0
        """Raw bytes that a progressive copy was made of."""
        self.decisions = 0
        """Blocks that something was decided of; a segment's blocks share a decision."""
        self.moved = dict.fromkeys(Counts._fields, 0)
        self._random = np.random.default_rng(seed)
        self._pools = [np.zeros(1024, np.int64) for _ in rates]
        self._pooled = [0 for _ in rates]
        self._in_pool = np.zeros((1024, len(rates)), np.bool_)
        self._near = [np.zeros(0, np.int64) for _ in rates]

    def walk(self, ids: Ids) -> Walk:
        """Return what a chain meets; told `used` next, with nothing between."""
        walk = self.segments.walk(ids)
        if walk.split != NONE:
            split = np.array([walk.split])
            for tier in range(len(self.price)):
                stored = self.configurations.stored[self.segments.configuration[split], tier]
                self._pool(tier, split[stored > 0])
        return walk

    def used_chain(  # noqa: PLR0913 -- what a request is, in full
        self,
        now: float,
        walk: Walk,
        ids: Ids,
        tokens: int,
        full: int,
        nbytes: Floats,
        density: Floats,
        loaded: int,
        *,
        closed: bool = False,
        most_kl: float = np.inf,
    ) -> None:
        """A request has used a chain: learn from it, store what pays and make room.

        Args:
            now: seconds.
            walk: of the chain.
            ids: of its blocks, (n,) int32, head first.
            tokens: of the prompt.
            full: blocks that are full.
            nbytes: raw bytes of each block.
            density: seconds of prefill for a raw byte of each block.
            loaded: segments of the walk that were loaded; the rest was computed.
            closed: nobody will go on with the chain, as far as the caller knows.
            most_kl: loss in nats that no copy made of it from now on may pass.
        """
        views = self._views
        if views is not None:
            there = self._pools[0][: self._pooled[0]]
            views.judge(now, walk.rows, loaded, float(nbytes.sum()), there, self._random)
        rows = self.reuse.use(now, walk, ids, tokens, full, nbytes, density)
        if closed:
            self.reuse.end(self.reuse.newest, now)
        if most_kl < np.inf:
            self._bars = True
            self.segments.most_kl[rows] = np.minimum(self.segments.most_kl[rows], most_kl)
        computed = np.arange(len(rows)) >= loaded
        self._store(now, rows, computed)
        for tier in range(len(self.price)):
            self._reclaim(now, tier)
        if views is not None and (self._lately or self._pooled[0] <= SAMPLED):
            # Nothing need be kept out where all that is there is looked at, or what is new stays.
            self.price[0] = 0.0
        self.reuse.refit(now)

    @property
    def _lately(self) -> bool:
        """Whether what was used longest ago goes first, whatever it earns."""
        return self._views is not None and self._views.deciding == RECENCY

    def rate(self, rows: Numbers, now: float) -> Floats:
        """Return expected uses per second of segments (n,)."""
        return self.reuse.rate(rows, now)

    def _store(self, now: float, rows: Numbers, computed: npt.NDArray[np.bool_]) -> None:
        segments, known = self.segments, self.configurations
        current = segments.configuration[rows]
        best = current.copy()
        # Where there is one way to keep a segment, what was loaded can have no more.
        for fresh in (False, True) if self._views is None else (True,):
            mine = np.nonzero(computed == fresh)[0]
            if not len(mine):
                continue
            choices = known.stores(current[mine], at_hand=fresh)
            gain = self._gain(now, rows[mine], current[mine], choices)
            best[mine] = choices[np.arange(len(mine)), gain.argmax(axis=1)]
        gap = best == 0
        if gap.any():
            best[int(gap.argmax()) :] = 0
        if self._views is not None:
            self._views.gave_up(rows[best == 0][::-1])
        changed = best != current
        self._change(rows[changed], best[changed])
        anew = known.progressive[best] & ~known.progressive[current]
        self.encoded += float(segments.nbytes[rows[anew]].sum())
        self.moved["stored"] += int(np.count_nonzero(changed))
        self.decisions += int(segments.blocks[rows].sum())

    def _gain(self, now: float, rows: Numbers, current: Numbers, choices: Numbers) -> Floats:
        """Return what each choice earns more than the current configuration, a second."""
        rate, density = self.rate(rows, now), self.segments.density[rows]
        gain = gains(self.configurations, self.price, rate, density, current, choices)
        if self._bars:
            gain[self._barred(rows, current, choices)] = -np.inf
        return gain

    def _barred(self, rows: Numbers, current: Numbers, choices: Numbers) -> npt.NDArray[np.bool_]:
        """Return which choices have a copy that the segment may not; what is there stays."""
        segments, known = self.segments, self.configurations
        barred: npt.NDArray[np.bool_] = known.kl[choices] > segments.most_kl[rows][:, None]
        if self._second_sight:
            below = known.stored[choices][:, :, 1:].any(axis=2)
            barred |= below & (segments.uses[rows] < SIGHTS)[:, None]
        stays: npt.NDArray[np.bool_] = choices == current[:, None]
        return barred & ~stays

    def _reclaim(self, now: float, tier: int) -> None:
        rest = self.used[tier] <= self.capacity[tier]
        if self.used[tier] <= self.capacity[tier] * FULL:
            self.price[tier] *= SLACK_DECAY
            return
        if rest:
            self._appraise(now, tier)
            return
        while self.used[tier] > self.capacity[tier]:
            rows = np.union1d(self._sample(tier), self._still(tier, self._near[tier]))
            if not len(rows):
                return
            steps, loss, freed = self._losses(now, tier, rows)
            # Of what loses the same, what was used longest ago.
            order = np.lexsort((self.segments.context[rows], loss))
            order = order[loss[order] < np.inf]
            if not len(order):
                continue
            need = self.used[tier] - self.capacity[tier]
            enough = int(np.searchsorted(np.cumsum(freed[order]), need)) + 1
            taken = min(enough, 1 + len(rows) // TAKEN if self._views is None else 1)
            self._near[tier] = rows[order[taken : taken + NEAR]]
            order = order[:taken]
            worth = max(float(loss[order].mean()), 0.0)
            going, steps = rows[order], steps[order]
            if enough > taken and not steps[-1]:
                behind = self._run(tier, int(going[-1]), need - float(freed[order].sum()))
                going = np.append(going, behind)
                steps = np.append(steps, np.zeros_like(behind))
            self._take(tier, going, steps)
            self.price[tier] = moved(self.price[tier], worth, len(going))

    def _appraise(self, now: float, tier: int) -> None:
        """Move the price of a full tier that gives up nothing."""
        rows = self._sample(tier)
        if len(rows):
            loss = np.sort(self._losses(now, tier, rows)[1])
            worth = float(loss[int(len(loss) * FLOOR)])
            if worth < np.inf:
                self.price[tier] += MEMORY * (max(worth, 0.0) - self.price[tier])

    def _still(self, tier: int, rows: Numbers) -> Numbers:
        stored = self.configurations.stored[self.segments.configuration[rows], tier]
        still: Numbers = rows[stored > 0]
        return still

    def _run(self, tier: int, row: int, need: float) -> Numbers:
        """Return what can go with the end of a chain: segments ahead of it with one fate."""
        segments, run = self.segments, list[int]()
        context, current = segments.context[row], segments.configuration[row]
        stored = float(self.configurations.stored[current, tier])
        while need > 0:
            row = segments.parent(row)
            if (
                row == NONE
                or segments.children[row] > 1
                or segments.context[row] != context
                or segments.configuration[row] != current
                or segments.foreign[row]
            ):
                break
            run.append(row)
            need -= stored * segments.nbytes[row]
        return np.array(run, np.int64)

    def _losses(self, now: float, tier: int, rows: Numbers) -> tuple[Numbers, Floats, Floats]:
        """Return for each segment the step that loses least per byte, that loss, bytes freed."""
        segments, known = self.segments, self.configurations
        current, inner = segments.configuration[rows], segments.children[rows] > 0
        if self._lately:
            freed = known.stored[current, tier] * segments.nbytes[rows]
            return np.zeros_like(rows), np.where(inner, np.inf, 0.0), freed
        steps = known.relief(tier, current)
        barred = (steps == 0) & inner[:, None]
        rate, density = self.rate(rows, now), segments.density[rows]
        loss, freed = losses(known, self.price, tier, rate, density, current, steps)
        if self._bars:
            barred |= self._barred(rows, current, steps)
        loss[barred] = np.inf
        least = loss.argmin(axis=1)
        every = np.arange(len(rows))
        return steps[every, least], loss[every, least], freed[every, least] * segments.nbytes[rows]

    def _sample(self, tier: int) -> Numbers:
        """Return distinct segments of a tier; half of those inside a chain stand for its end."""
        segments, stored = self.segments, self.configurations.stored
        while self._pooled[tier]:
            pool, count = self._pools[tier], self._pooled[tier]
            places = np.unique(self._random.integers(0, count, SAMPLED))
            rows = pool[places]
            here = stored[segments.configuration[rows], tier] > 0
            for place in places[~here][::-1].tolist():
                self._in_pool[pool[place], tier] = False
                count -= 1
                pool[place] = pool[count]
            self._pooled[tier] = count
            rows = rows[here]
            if len(rows):
                context = segments.context[rows]
                tails = segments.ends(context)
                instead = (segments.children[rows] > 0) & (np.arange(len(rows)) % 2 == 1)
                instead &= tails != NONE
                instead &= segments.context[tails] == context
                instead &= stored[segments.configuration[tails], tier] > 0
                return np.unique(np.where(instead, tails, rows))
        return np.zeros(0, np.int64)

    def _take(self, tier: int, rows: Numbers, steps: Numbers) -> None:
        known, current = self.configurations, self.segments.configuration[rows]
        before, after = known.stored[current], known.stored[steps]
        self.decisions += int(self.segments.blocks[rows].sum())
        lower = (after > before).any(axis=1)
        inside = (after[:, tier] > 0) & ~lower
        self.moved["demoted"] += int(np.count_nonzero(lower))
        self.moved["downgraded"] += int(np.count_nonzero(inside))
        self.moved["dropped"] += int(np.count_nonzero(~lower & ~inside))
        self._change(rows, steps)

    def _change(self, rows: Numbers, after: Numbers) -> None:
        """Give segments other configurations, with all that is counted by them."""
        if not len(rows):
            return
        segments, known = self.segments, self.configurations
        before = segments.configuration[rows]
        nbytes = segments.nbytes[rows][:, None]
        change = (known.stored[after] - known.stored[before]) * nbytes
        self.used += change.sum(axis=0)
        self.written += np.maximum(change, 0).sum(axis=0)
        segments.configuration[rows] = after
        segments.gained(rows[(before == 0) & (after != 0)])
        lost = rows[(before != 0) & (after == 0)]
        segments.lost(lost)
        if self._views is not None:
            self._views.gave_up(lost)
        for tier in range(len(self.price)):
            self._pool(tier, rows[known.stored[after, tier] > 0])

    def _pool(self, tier: int, rows: Numbers) -> None:
        top = int(rows.max(initial=0))
        while top >= len(self._in_pool):
            self._in_pool = np.concatenate([self._in_pool, np.zeros_like(self._in_pool)])
        rows = rows[~self._in_pool[rows, tier]]
        count = self._pooled[tier]
        while count + len(rows) > len(self._pools[tier]):
            self._pools[tier] = np.concatenate([self._pools[tier], self._pools[tier]])
        self._pools[tier][count : count + len(rows)] = rows
        self._in_pool[rows, tier] = True
        self._pooled[tier] = count + len(rows)
