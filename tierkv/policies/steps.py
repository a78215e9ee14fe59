"""Steps: which sets of copies a store can come to have, as numbers and bits over `Configurations`.

The table of `Configurations` is that of the replay, which can do more than a store: a store cuts a
progressive copy where it lies, encodes an exact one again on its way down, has one copy of a unit
in each tier but RAM (`pairs`), and makes nothing that the gate does not allow for the block
(`lineage`).
"""

from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt

from tierkv.catalog import LEAVING, Catalog
from tierkv.codec import BY_NUMBER, PROFILES, Profile
from tierkv.cost import Rates
from tierkv.lineage import encodable
from tierkv.pairs import PROGRESSIVE as PROGRESSIVES
from tierkv.plan import Kind
from tierkv.policies.configurations import PLAIN, PROGRESSIVE, Configurations, Form
from tierkv.tier import RAM

Numbers = npt.NDArray[np.int64]


class Steps:
    """The sets of copies over tiers, all profiles being forms.

    Attributes:
        known: the configurations. Only the gate says which of the lossy forms may be made.
        alone: by tier and profile number, the configuration of one copy: sets of copies are sums.
    """

    def __init__(self, rates: Sequence[Rates]) -> None:
        forms = [
            Form(one.name, one.ratio, one.decode_bps, float(one.lossy), one.levels > 0)
            for one in PROFILES.values()
        ]
        self.known = known = Configurations(forms, rates, encodes_down=True)
        self._tiers = len(rates)
        names = [form.name for form in known.forms]
        self._bit = {one.number: 1 << names.index(one.name) for one in PROFILES.values()}
        self._profile = [PROFILES[name].number for name in names]
        self._masks: dict[tuple[int, int, bool, frozenset[bytes]], int] = {}
        self.alone = [
            {one.number: known.named(tier, one.name) for one in PROFILES.values()}
            for tier in range(self._tiers)
        ]
        count = len(known.seconds)
        self._forms = np.zeros(count, np.int64)
        self._digit = np.zeros((self._tiers, 2, count), np.int64)
        rest = np.arange(count)
        for slot in range(2 * self._tiers):
            tier, family = divmod(slot, 2)
            rest, digit = np.divmod(rest, len(known.families[family]) + 1)
            self._digit[tier, family] = digit
            self._forms |= np.where(digit > 0, 1 << (self._first(family) + digit - 1), 0)
        self._smallest = self._digit[:, PROGRESSIVE].max(axis=0)
        self._double = np.logical_and.reduce(self._digit[RAM + 1 :] > 0, axis=1).any(axis=0)

    def _first(self, family: int) -> int:
        return len(self.known.families[PLAIN]) if family == PROGRESSIVE else 0

    def there(self, view: Catalog, row: int, going: Container[int] = ()) -> int:
        """Return the set of copies that a placement's unit has, those being written included.

        But for others that are `going`.
        """
        number = 0
        for copy in view.copies(view.head(view.key(row), view.part[row])):
            gone = view.state[copy] == LEAVING or (copy != row and copy in going)
            if view.profile[copy] and not gone:
                number += self.alone[view.tier[copy]].get(view.profile[copy], 0)
        return number

    def made(self, choice: Profile, allowed: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the profiles that a block's copies may come to have when it is put with one.

        In RAM, where a copy can only be cut, and below, where an exact one is encoded on its way.
        """
        near, far = [choice.number], [choice.number]
        for one in PROFILES.values():
            if one.lossy and one.number not in allowed:
                continue
            if one.codec_id == choice.codec_id and 0 < one.levels < choice.levels:
                near.append(one.number)
                far.append(one.number)
            elif not choice.lossy and one.segments == 1 and one.ratio > choice.ratio:
                far.append(one.number)
        return near, far

    def barred(
        self, tier: int, allowed: Numbers, current: Numbers, steps: Numbers, kinds: set[Kind]
    ) -> npt.NDArray[np.bool_]:
        """Return which steps (n, steps) of placements in a tier cannot be taken.

        `allowed` (n,): forms that may be made, as bits, see there.
        """
        allowed = allowed[:, None]
        now = current[:, None]
        barred: npt.NDArray[np.bool_] = (self._forms[steps] & ~self._forms[now] & ~allowed) != 0
        barred |= self._double[steps]
        plain, here = self._digit[tier, PLAIN], self._digit[tier].sum(axis=0)
        barred |= (plain[steps] != plain[now]) & (plain[steps] > 0)
        # Of a pair the progressive copy loses nothing now: it is what remains of both later.
        small = self._digit[tier, PROGRESSIVE]
        barred |= (plain[now] > 0) & (small[now] > 0) & (self._smallest[steps] == 0)
        lower = np.zeros(steps.shape, np.bool_)
        for other in range(tier + 1, self._tiers):
            for digit in self._digit[other]:
                lower |= digit[steps] != digit[now]
            # What a pair's progressive copy can become is not encoded again from the plain one.
            progressive = self._digit[other, PROGRESSIVE]
            paired = (small[now] > 0) & (plain[steps] != plain[now])
            barred |= paired & (progressive[steps] != progressive[now])
        if Kind.DEMOTE not in kinds:
            barred |= lower
        if Kind.DOWNGRADE not in kinds:
            barred |= ~lower & (here[steps] > 0)
        return barred

    def of_another(
        self, view: Catalog, rows: Sequence[int], current: Numbers, steps: Numbers
    ) -> npt.NDArray[np.bool_]:
        """Return which steps of placements of a tier are not theirs but the other copy's there."""
        tier = view.tier[rows[0]]
        small = np.array([view.profile[row] in PROGRESSIVES for row in rows])[:, None]
        plain = self._digit[tier, PLAIN]
        theirs: npt.NDArray[np.bool_] = (plain[steps] == plain[current[:, None]]) == small
        return ~theirs

    def allowed(self, view: Catalog, row: int) -> int:
        """Return the forms that may be made of a placement, as bits: by cuts, or by encoding."""
        profile = BY_NUMBER.get(view.profile[row])
        cuts = profile is not None and profile.levels > 0
        kind = view.allowance[row], view.fixed[row], cuts, view.encodes
        mask = self._masks.get(kind)
        if mask is None:
            mask = self._masks[kind] = sum(
                self._bit[one.number]
                for one in PROFILES.values()
                if (one.levels and cuts and one.number in view.allowed(row))
                or encodable(view, row, one)
            )
        return mask

    def read(self, tier: int, current: int, step: int) -> tuple[Kind, int, int]:
        """Return what a step does: kind, tier of the result, number of its profile."""
        for other in range(tier, self._tiers):
            for family in (PLAIN, PROGRESSIVE):
                digit = int(self._digit[other, family, step])
                if digit and digit != self._digit[other, family, current]:
                    profile = self._profile[self._first(family) + digit - 1]
                    return (Kind.DOWNGRADE if other == tier else Kind.DEMOTE), other, profile
        return Kind.DROP, tier, 0

    def say(self, tiers: Sequence[str], number: int) -> str:
        """Return a set of copies for people."""
        found = []
        for tier, name in enumerate(tiers):
            for forms, digits in zip(self.known.families, self._digit[tier], strict=True):
                if digits[number]:
                    found.append(f"{forms[digits[number] - 1].name} in {name}")
        return " + ".join(found) or "no copy"
