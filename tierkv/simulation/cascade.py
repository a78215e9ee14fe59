"""Cascade: a policy that knows no forms, over the tiers of a scenario and the service's Catalog.

Each block has one copy. What is used comes to the first tier; what a tier gives up goes to the next
one, and behind the last is gone. All copies are of one profile. Blocks of the prompt that is served
make no room for one another; what has no room in the first tier is left out, tail first.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tierkv.catalog import NONE, Catalog, Unit
from tierkv.fidelity import Fidelity
from tierkv.key import KEY_BYTES
from tierkv.policies.configurations import Form
from tierkv.policy import Policy
from tierkv.simulation.contests import Account, Pieces, Prompt
from tierkv.simulation.policies.arc import Arc
from tierkv.simulation.policies.gdsf import Gdsf, Saved
from tierkv.simulation.policies.s3fifo import S3Fifo
from tierkv.simulation.scenario import Scenario

Make = Callable[[Scenario, Form], Policy]
"""Returns a policy for the tiers of a scenario."""


class _Block(NamedTuple):
    """A block by number, its stored bytes and the position of its first token."""

    number: int
    size: int
    position: int

    @property
    def key(self) -> bytes:
        return self.number.to_bytes(KEY_BYTES, "little")

    @property
    def unit(self) -> Unit:
        size = self.size
        return Unit(self.key, 0, 1, Fidelity.EXACT, 0, size, size, 0, 0, 0, self.position)


class Cascade:
    """See `Contest`."""

    def __init__(self, scenario: Scenario, distinct: int, form: Form, make: Make) -> None:
        self.forms = [form]
        self._capacity = scenario.capacity
        self._bytes_per_token = scenario.model.bytes_per_token
        self._catalog = Catalog([tier.name for tier in scenario.tier])
        self._policy = make(scenario, form)
        self._row_of = np.full(distinct, NONE, np.int32)
        self._id_of: dict[int, int] = {}
        self._written = [0.0] * len(scenario.tier)
        self._encoded = 0.0
        self._moved = {"stored": 0, "demoted": 0, "promoted": 0, "dropped": 0}

    def find(self, prompt: Prompt) -> Pieces:
        """Return the blocks up to the first that no tier has."""
        rows = self._row_of[prompt.ids]
        gone = rows == NONE
        head = int(gone.argmax()) if gone.any() else len(rows)
        tiers = self._catalog.column("tier")[rows[:head]].astype(np.int64)
        return Pieces(
            np.ones(head, np.int64), prompt.nbytes[:head], tiers, np.zeros(head, np.int64)
        )

    def use(self, prompt: Prompt, loaded: int) -> None:
        """Touch what is there, and bring the rest to the first tier."""
        catalog, row_of = self._catalog, self._row_of
        form = self.forms[0]
        if form.progressive:
            self._encoded += float(prompt.nbytes[loaded:].sum())
        sizes = (prompt.nbytes / form.ratio).astype(np.int64).tolist()
        ids, rows = prompt.ids.tolist(), row_of[prompt.ids]
        before = np.cumsum(prompt.nbytes) - prompt.nbytes
        positions = (before / self._bytes_per_token).astype(np.int64).tolist()
        present = rows[rows != NONE].tolist()
        self._policy.touched(catalog, present)
        here = [row for row in present if catalog.tier[row] == 0]
        catalog.hold(here)
        missing = [at for at, row in enumerate(rows.tolist()) if row == NONE or catalog.tier[row]]
        self._bring([_Block(ids[at], sizes[at], positions[at]) for at in missing])
        catalog.unhold(here)

    def account(self) -> Account:
        """See `Contest`."""
        decisions = sum(self._moved.values())
        return Account(self._written, self._encoded, decisions, dict(self._moved))

    def _bring(self, blocks: list[_Block]) -> None:
        """Write blocks of a prompt, head first, to the first tier."""
        worth = self._policy.offered(self._catalog, 0, [block.key for block in blocks])
        blocks = self._fit(0, blocks[:worth])
        for block in blocks:
            before = int(self._row_of[block.number])
            self._moved["promoted" if before != NONE else "stored"] += 1
            if before != NONE:
                self._forget([before])
        self._enter(0, blocks)

    def _fit(self, tier: int, blocks: list[_Block]) -> list[_Block]:
        """Make room, moving what a tier gives up to the next one; returns the blocks that fit."""
        catalog = self._catalog
        short = sum(block.size for block in blocks) - self._free(tier)
        if short > 0:
            # Told head first: what leaves first comes last.
            rows = self._policy.victims(catalog, tier, short)[::-1]
            leaving = [
                _Block(self._id_of[row], catalog.allocated[row], catalog.position[row])
                for row in rows
            ]
            self._forget(rows)
            staying = self._fit(tier + 1, leaving) if tier + 1 < len(self._capacity) else []
            self._enter(tier + 1, staying)
            self._moved["demoted"] += len(staying)
            self._moved["dropped"] += len(leaving) - len(staying)
        free = self._free(tier)
        ends = accumulate(block.size for block in blocks)
        return [block for block, end in zip(blocks, ends, strict=True) if end <= free]

    def _free(self, tier: int) -> int:
        return self._capacity[tier] - sum(self._catalog.bytes[tier])

    def _enter(self, tier: int, blocks: list[_Block]) -> None:
        """Make ready copies of blocks, head first."""
        if not blocks:
            return
        rows = self._catalog.begin(tier, [block.unit for block in blocks])
        self._catalog.commit(rows)
        self._policy.touched(self._catalog, rows)
        for row, block in zip(rows, blocks, strict=True):
            self._row_of[block.number] = row
            self._id_of[row] = block.number
        self._written[tier] += sum(block.size for block in blocks)

    def _forget(self, rows: list[int]) -> None:
        self._catalog.leave(rows)
        self._catalog.gone(rows)
        self._policy.forgot(rows)
        for row in rows:
            self._row_of[self._id_of.pop(row)] = NONE


def seconds_saved(scenario: Scenario, form: Form) -> Saved:
    """Return what a hit of a placement saves: seconds of prefill less those of the load."""
    per_token = scenario.model.bytes_per_token / form.ratio
    load = [1 / rates.read_bps + form.ratio / form.decode_bps for rates in scenario.rates]

    def saved(view: Catalog, row: int) -> float:
        size = view.allocated[row]
        prefill = scenario.recompute.seconds(round(size / per_token), view.position[row])
        return max(prefill - size * load[view.tier[row]], 0.0)

    return saved


MAKES: dict[str, Make] = {
    "arc-tail-first": lambda scenario, _: Arc(scenario.capacity),
    "s3fifo-tail-first": lambda scenario, _: S3Fifo(scenario.capacity),
    "gdsf": lambda scenario, form: Gdsf(len(scenario.tier), seconds_saved(scenario, form)),
}
"""Policies by name."""
