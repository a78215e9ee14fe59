"""Units: whatever is entered and taken away, each unit leads to its first row, as in a dict."""

import random
from array import array

import numpy as np
import pytest

from tests.frames import key_of
from tierkv import units
from tierkv.units import FEW, NONE, Units


def small_key(number: int) -> bytes:
    """Return a key of small words, most of which are 0."""
    return bytes(number % 4 * 8) + (number // 4 + 1).to_bytes(32 - number % 4 * 8, "little")


class Model:
    """Units beside a dict that says the same."""

    def __init__(self) -> None:
        self.part = array("h")
        self.units = Units(self.part)
        self.first: dict[tuple[bytes, int], int] = {}

    def enter(self, names: list[tuple[bytes, int]]) -> list[int]:
        start = len(self.part)
        self.units.extend(b"".join(key for key, _ in names))
        self.part.extend(part for _, part in names)
        rows = list(range(start, len(self.part)))
        before = self.units.lead(np.array(rows, np.int32)).tolist()
        assert before == [self.first.get(name, NONE) for name in names]
        self.first.update(zip(names, rows, strict=True))
        return rows

    def take(self, name: tuple[bytes, int], after: int) -> None:
        row = self.first[name]
        self.units.follow(row, after, *self.units.homes([row]))
        if after == NONE:
            del self.first[name]
        else:
            self.first[name] = after

    def check(self, keys: list[bytes], part: int) -> None:
        expected = [self.first.get((key, part), NONE) for key in keys]
        assert self.units.find(b"".join(keys), part).tolist() == expected
        assert [self.units.first(key, part) for key in keys] == expected
        for row in range(len(self.part)):
            leads = self.first.get((self.units.key(row), self.part[row])) == row
            assert self.units.leads(row) == leads


@pytest.mark.parametrize("few", [1, FEW, 1 << 30], ids=["numpy", "both", "loops"])
@pytest.mark.parametrize("meet", [False, True], ids=["spread", "in one place"])
@pytest.mark.parametrize("seed", range(4))
def test_units_are_found_as_in_a_dict(
    monkeypatch: pytest.MonkeyPatch, few: int, seed: int, *, meet: bool
) -> None:
    monkeypatch.setattr(units, "FEW", few)
    make = key_of
    if meet:  # every slot is the first one or the last, so that all stand in one another's way
        make = small_key
        monkeypatch.setattr("secrets.randbits", lambda _bits: 0 if seed % 2 else (1 << 64) - 1)
    rng = random.Random(seed)
    model = Model()
    keys = [make(number) for number in range(40)]
    for _ in range(20):
        names = [(key, part) for key in rng.sample(keys, rng.randrange(1, 25)) for part in (0, 1)]
        fresh = [name for name in names if name not in model.first]
        model.enter(fresh if rng.random() < 0.7 else names)
        for name in rng.sample(list(model.first), rng.randrange(len(model.first))):
            row = model.first[name]
            rest = [
                other
                for other in range(len(model.part))
                if (model.units.key(other), model.part[other]) == name and other != row
            ]
            model.take(name, rng.choice([*rest, NONE]))
        model.check(rng.sample(keys, len(keys)), rng.randrange(2))


def test_a_table_grows_and_a_run_ends_where_another_row_stands() -> None:
    model = Model()
    keys = [key_of(number) for number in range(5000)]
    model.enter([(key, 0) for key in keys])
    model.enter([(key, 0) for key in keys[100:200]])
    asked = keys[:300] + keys[4000:] + [key_of(9999)] + keys[300:320]
    assert model.units.find(b"".join(asked), 0).tolist() == [
        model.first.get((key, 0), NONE) for key in asked
    ]
    assert model.units.find(b"".join(asked), 1).tolist() == [NONE] * len(asked)
    assert model.units.find(b"".join(keys[-40:]) + bytes(32), 0).tolist()[-1] == NONE
    assert Units(array("h")).find(b"".join(keys[:40]), 0).tolist() == [NONE] * 40


def test_a_key_of_another_length_is_refused() -> None:
    model = Model()
    (row,) = model.enter([(key_of(1), 0)])
    with pytest.raises(ValueError, match="different"):
        model.units.name([row], b"short")
    assert model.units.key(row) == key_of(1)
