"""Configurations: every set of copies that a segment may have, and the steps between them.

A segment may have, in each tier, a *plain* copy (raw, lossless, int8: nothing smaller is made from
a lossy one) and a *progressive* copy (KVTC: any prefix of it is a coarser copy). A configuration is
that set, as one number: the digits, in base forms + 1, say which form of its family each tier has,
0 for none, so that 0 is "no copy". What a segment costs and saves, and what can be done to it,
follows from its configuration alone: both are worked out once, when it is first met.

Source: the candidate (device, method, ratio) of EvicPress (arXiv 2512.14946), with several copies.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.cost import Rates

Numbers = npt.NDArray[np.int64]
PLAIN, PROGRESSIVE = 0, 1
ABSENT = -1


class Form(NamedTuple):
    """A profile as a policy sees it: raw bytes over stored, raw bytes per second, loss in nats."""

    name: str
    ratio: float
    decode_bps: float
    kl: float = 0.0
    progressive: bool = False

    @property
    def exact(self) -> bool:
        """Whether what is read is what was computed."""
        return self.kl == 0.0


class _Rows:
    """A table with a row for each number that was asked for, worked out the first time."""

    def __init__(self, count: int, width: int) -> None:
        self._place = np.full(count, ABSENT, np.int32)
        self._table = np.empty((0, max(1, width)), np.int64)

    def of(self, numbers: Numbers, work_out: Callable[[int], Iterator[int]]) -> Numbers:
        """Return the rows of numbers: what is worked out for each, ABSENT behind it."""
        places = self._place[numbers]
        if (places == ABSENT).any():
            for number in np.unique(numbers[places == ABSENT]).tolist():
                row = np.full((1, self._table.shape[1]), ABSENT, np.int64)
                found = list(work_out(number))
                row[0, : len(found)] = found
                self._place[number] = len(self._table)
                self._table = np.concatenate([self._table, row])
            places = self._place[numbers]
        rows: Numbers = self._table[places]
        return rows


class Configurations:
    """Sets of copies over tiers, nearest first, in forms of two families, each from fine to coarse.

    Args:
        forms: of both families.
        rates: of each tier.
        encodes_down: whether an exact plain copy may become a progressive one on its way down.

    Attributes:
        seconds: float64 by number: seconds to load a raw byte from the best copy; infinity for 0.
        stored: float64 (numbers, tiers): stored bytes in each tier for a raw byte.
        source: int64 (numbers, 2): tier of the best copy and its place in `forms`.
        progressive: bool by number: whether there is a progressive copy.
        kl: float64 by number: loss of the coarsest copy, in nats.
    """

    def __init__(
        self, forms: Sequence[Form], rates: Sequence[Rates], *, encodes_down: bool = False
    ) -> None:
        self._encodes_down = encodes_down
        self.families = [
            sorted((f for f in forms if f.progressive == family), key=lambda form: form.ratio)
            for family in (False, True)
        ]
        self.forms = [*self.families[PLAIN], *self.families[PROGRESSIVE]]
        self.tiers = len(rates)
        self._radix = [len(self.families[slot % 2]) + 1 for slot in range(2 * self.tiers)]
        self._weights = [int(np.prod(self._radix[:slot])) for slot in range(len(self._radix))]
        count = int(np.prod(self._radix))
        self._count = count
        self.measured(rates)
        self._relief = [_Rows(count, self._most_relief()) for _ in rates]

    def measured(self, rates: Sequence[Rates]) -> None:
        """Work out anew what loads cost, with other rates of the same tiers."""
        copy_s = np.array(
            [
                [1 / (form.ratio * rate.read_bps) + 1 / form.decode_bps for form in self.forms]
                for rate in rates
            ]
        ).reshape(self.tiers, -1)
        self._describe(self._count, copy_s)
        self._stores = [_Rows(self._count, self._most_stores()) for _ in range(2)]

    def _describe(self, count: int, copy_s: npt.NDArray[np.float64]) -> None:
        self.seconds = np.full(count, np.inf)
        self.stored = np.zeros((count, self.tiers))
        self.source = np.full((count, 2), ABSENT, np.int64)
        self.progressive = np.zeros(count, np.bool_)
        self.kl = np.zeros(count)
        numbers = np.arange(count)
        for slot, (radix, weight) in enumerate(zip(self._radix, self._weights, strict=True)):
            tier, family = divmod(slot, 2)
            digit = numbers // weight % radix
            self.progressive |= (digit > 0) & (family == PROGRESSIVE)
            for place, form in enumerate(self.families[family]):
                index = place + family * len(self.families[PLAIN])
                here = digit == place + 1
                self.stored[here, tier] += 1 / form.ratio
                self.kl[here] = np.maximum(self.kl[here], form.kl)
                better = here & (copy_s[tier, index] < self.seconds)
                self.seconds[better] = copy_s[tier, index]
                self.source[better] = tier, index

    def digits(self, number: int) -> list[int]:
        """Return the digits, by tier and in it plain before progressive."""
        return [
            number // weight % radix
            for radix, weight in zip(self._radix, self._weights, strict=True)
        ]

    def number(self, digits: Sequence[int]) -> int:
        """Return the configuration of digits; the other way round from `digits`."""
        return sum(digit * weight for digit, weight in zip(digits, self._weights, strict=True))

    def named(self, tier: int, name: str) -> int:
        """Return the configuration with one copy, of a form by its name."""
        for family, forms in enumerate(self.families):
            for place, form in enumerate(forms):
                if form.name == name:
                    return (place + 1) * self._weights[2 * tier + family]
        raise KeyError(name)

    def relief(self, tier: int, numbers: Numbers) -> Numbers:
        """Return what takes fewer bytes in a tier: (len(numbers), steps), ABSENT where no more.

        A copy there is moved to a lower tier as it is, dropped, made coarser in place, or moved
        coarser. Coarser is made by truncation, or of an exact copy, which becomes progressive where
        somebody encodes on the way down.
        """
        return self._relief[tier].of(numbers, lambda number: self._relieved(tier, number))

    def stores(self, numbers: Numbers, *, at_hand: bool) -> Numbers:
        """Return what adds copies: (len(numbers), choices); the first is what is there already.

        `at_hand`: the engine has the values as computed. Else a copy is made of one as fine, or of
        an exact one, which an engine that read it can encode. A segment gets a plain copy only
        beside a progressive one where that can be made: it is what remains when the plain one goes.
        """
        return self._stores[at_hand].of(numbers, lambda one: self._stored_more(int(at_hand), one))

    def _most_relief(self) -> int:
        more = (self.tiers - 1) * len(self.families[PROGRESSIVE]) * self._encodes_down
        return more + sum(
            1 + max(0, len(forms) - 1) + (self.tiers - 1) * len(forms) for forms in self.families
        )

    def _most_stores(self) -> int:
        plain, progressive = (len(forms) * self.tiers + 1 for forms in self.families)
        return plain * progressive

    def _relieved(self, tier: int, number: int) -> Iterator[int]:
        digits = self.digits(number)
        for family, forms in enumerate(self.families):
            slot = 2 * tier + family
            digit = digits[slot]
            if not digit:
                continue
            free = family == PROGRESSIVE or forms[digit - 1].exact
            without = number - digit * self._weights[slot]
            yield from self._lowered(digits, slot + 2, digit, without)
            yield without
            for new in range(digit + 1, len(forms) + 1) if free else ():
                yield without + new * self._weights[slot]
                yield from self._lowered(digits, slot + 2, new, without)
            if self._encodes_down and family == PLAIN and free:
                for new in range(1, len(self.families[PROGRESSIVE]) + 1):
                    yield from self._lowered(digits, slot + 3, new, without)

    def _lowered(self, digits: Sequence[int], first: int, new: int, without: int) -> Iterator[int]:
        """Yield what a copy leaves that moves to each slot from `first` on with none as fine."""
        for lower in range(first, len(digits), 2):
            if not digits[lower] or digits[lower] > new:
                yield without + (new - digits[lower]) * self._weights[lower]

    def _stored_more(self, at_hand: int, number: int) -> Iterator[int]:
        digits = self.digits(number)
        plain = list(self._additions(digits, PLAIN, at_hand, number))
        progressive = list(self._additions(digits, PROGRESSIVE, at_hand, number))
        has_plain, has_progressive = any(digits[0::2]), any(digits[1::2])
        for one in (0, *plain):
            for other in (0, *progressive):
                bare = (one or has_plain) and not (other or has_progressive)
                if not (one and bare and progressive):
                    yield number + one + other

    def _additions(
        self, digits: Sequence[int], family: int, at_hand: int, number: int
    ) -> Iterator[int]:
        """Yield what to add to a number for each copy of a family that can be made finer."""
        forms, mine = self.families[family], [digit for digit in digits[family::2] if digit]
        if family == PLAIN:
            exact = any(forms[digit - 1].exact for digit in mine)
        else:
            best = self.source[number, 1]
            exact = best != ABSENT and self.forms[best].exact
        for tier in range(self.tiers):
            slot = 2 * tier + family
            for digit in range(1, len(forms) + 1):
                has = digits[slot]
                finest = min(mine, default=len(forms) + 1)
                copied = digit in mine or (family == PROGRESSIVE and finest <= digit)
                if (not has or digit < has) and (at_hand or exact or copied):
                    yield (digit - has) * self._weights[slot]
