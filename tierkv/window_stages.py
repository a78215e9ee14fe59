"""Stages of matches with windows: which units of a longer hit lie below RAM.

Beside `stages`, whose reads they use: there a chain is brought up from its head on; here the units
of one end are, all of them or none, because a window with a gap is no hit at that end.
"""

from typing import TYPE_CHECKING

import numpy as np

from tierkv import planner, windows
from tierkv.catalog import NONE
from tierkv.lower import Lower
from tierkv.match import Match
from tierkv.store import Numbers
from tierkv.tier import RAM, FrameId

if TYPE_CHECKING:
    from tierkv.stages import Found, Stages


class WindowStages:
    """Plans stages of matches with windows. Called under the store's lock, but for the probe."""

    def __init__(self, stages: "Stages") -> None:
        self._stages = stages
        self._store = stages.store

    def consider(self, match: Match, heads: list[int]) -> None:
        """Stage what lies below for a match, or ask a shared tier first."""
        sources = self._sources(match, heads)
        if not self._stages.ask(
            match, windows.longest(sources != NONE, match.windows), self._probe
        ):
            self._stage(match, sources)

    def _sources(self, match: Match, heads: list[int]) -> Numbers:
        """Return the placement that each unit would come from, as (blocks, parts)."""
        rows = match.rows
        sources = match.grid([
            row if row != NONE else self._stages.source(match, head)
            for row, head in zip(rows, heads, strict=True)
        ])  # fmt: skip
        match.reach = max(match.reach, windows.reach(sources != NONE, match.windows))
        return sources

    def _probe(self, match: Match, lower: Lower, start: int) -> None:
        """Ask a shared tier for what a longer hit lacks; a job of its read lane.

        First for the parts without a window from their gap on, then for the windows before where
        they reach, and only if one of these has a gap for all windows before it.
        """
        del start
        generation = self._stages.generation(match, lower)
        wide = [part for part, size in zip(match.parts, match.windows, strict=True) if not size]
        found: list[Found] = []
        reach = match.asked
        if wide:
            found, reach = self._stages.gallop(match, lower, wide, match.reach, generation)
        shape = (match.asked, len(match.parts))
        last = windows.needed(shape, reach, match.windows) & (np.array(match.windows) > 0)
        more = self._find(match, lower, last, generation)
        found += more
        if len(more) < int(last.sum()):
            before = np.zeros(shape, np.bool_)
            before[:reach] = np.array(match.windows) > 0
            found += self._find(match, lower, before & ~last, generation)
        self._stages.answered(match, lower, found, self._stage_found)

    def _find(
        self, match: Match, lower: Lower, mask: windows.Bools, generation: int
    ) -> "list[Found]":
        assert lower.shared is not None
        keys, catalog = match.keys(0, match.asked), self._store.catalog
        ids = [
            FrameId(keys[block], catalog.part_at(match.parts[part]), generation)
            for block, part in np.argwhere(mask).tolist()
        ]
        sizes = lower.shared.find(ids) if ids else []
        return [(name, size) for name, size in zip(ids, sizes, strict=True) if size > 0]

    def _stage_found(self, match: Match, heads: list[int]) -> None:
        sources = self._sources(match, heads)
        self._stages.remember_absent(match, windows.longest(sources != NONE, match.windows))
        self._stage(match, sources)

    def _stage(self, match: Match, sources: Numbers) -> None:
        """Choose the end, reserve RAM for all that it needs, and start the reads."""
        store, catalog = self._store, self._store.catalog
        have = windows.longest(match.grid(match.rows) != NONE, match.windows)
        fits = windows.ends(sources != NONE, match.windows)
        fits[: have + 1] = False
        if not fits.any():
            return
        known = sources.reshape(-1).tolist()
        tier = [catalog.tier[row] if row != NONE else RAM for row in known]
        size = [catalog.nbytes[row] if at else 0 for row, at in zip(known, tier, strict=True)]
        plan = planner.plan_window_stage(
            match.grid(size),
            match.grid(tier),
            np.flatnonzero(fits),
            have,
            match.windows,
            store.rates(),
            store.decode_bps([row for row in known if row != NONE]),
            match.call,
        )
        needed = windows.needed(sources.shape, plan.blocks, match.windows).reshape(-1)
        wanted = [
            (unit, known[unit])
            for unit in np.flatnonzero(needed).tolist()
            if match.rows[unit] == NONE
        ]
        if wanted and len(self._stages.fit([row for _, row in wanted], 1)) == len(wanted):
            self._stages.want(match, wanted, plan.load_s)
