"""Scenarios: the built-in ones say what they should, and a wrong file gets a message."""

from pathlib import Path

import pytest

from tierkv.errors import TierKVError
from tierkv.simulation.scenario import GIB, built_in, read_scenario


def test_built_in_scenarios() -> None:
    assert built_in() == ["h100-8b", "small"]
    large, small = read_scenario("h100-8b"), read_scenario("small")
    assert large.capacity == [64 * GIB, 1024 * GIB, 4096 * GIB]
    assert small.capacity == [16 * GIB, 128 * GIB]
    assert small.profile == large.profile
    assert large.recompute.seconds(1000, 2000) == pytest.approx(0.032 + 1.05e-9 * 2.5e6)


def test_classes_allow_profiles() -> None:
    scenario = read_scenario("h100-8b")
    names = {name: [spec.name for spec in scenario.allowed(name)] for name in ("exact", "economy")}
    assert names["exact"] == ["raw", "lossless"]
    assert [spec.name for spec in scenario.allowed("safe")] == [*names["exact"], "int8", "kvtc9"]
    assert names["economy"][-2:] == ["kvtc18", "kvtc36"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gib = 64", "gib = -1", "gib"),
        ("gib = 64", "gigs = 64", "gigs"),
        ("[model]", "[modell]", "modell"),
        ('name = "nvme"', 'name = "host"', "one name"),
        ('fidelity = "safe"', 'fidelity = "exact"', "is exact just when its kl is 0"),
        ('name = "raw"', "name = ", "line"),
        ("ratio = 9", "ratio = 0.5", "ratio"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    folder = Path(__file__).resolve().parents[2] / "tierkv/simulation/scenarios"
    text = (folder / "h100-8b.toml").read_text("utf-8")
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(TierKVError, match=message):
        read_scenario(str(path))


def test_a_file_that_is_not_there_names_the_built_in() -> None:
    with pytest.raises(TierKVError, match="h100-8b, small"):
        read_scenario("nowhere")
