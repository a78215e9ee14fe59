"""The lab's texts: enough of each domain, and nothing evaluated that was calibrated on."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tierkv.errors import TierKVError
from tierkv_codecs.lab import texts
from tierkv_codecs.lab.texts import CODE, PROSE, SPANISH, calibration_texts, evaluation_texts

REPOSITORY = Path(__file__).parents[2]
RUN_WORDS = 20
CHARACTERS_OF_A_SEQUENCE = 1152 * 5


def runs(text: str) -> set[str]:
    """Return every run of RUN_WORDS words that is prose: not a table, a list of digits, or art."""
    words = text.split()
    cut = (words[at : at + RUN_WORDS] for at in range(len(words) - RUN_WORDS + 1))
    return {" ".join(run) for run in cut if len(set(run)) > RUN_WORDS // 2}


def test_nothing_is_in_both() -> None:
    calibrated, evaluated = calibration_texts(), evaluation_texts()
    assert not {one.name for one in calibrated} & {one.name for one in evaluated}
    seen = set().union(*(runs(one.text) for one in calibrated))
    shared = {one.name: len(runs(one.text) & seen) for one in evaluated}
    assert {name: count for name, count in shared.items() if count} == {}


def test_every_domain_has_its_share() -> None:
    evaluated = evaluation_texts()
    for domain in (PROSE, CODE, SPANISH):
        mine = [one for one in evaluated if one.domain == domain]
        assert len(mine) == 8
        assert all(len(one.text) >= 2 * CHARACTERS_OF_A_SEQUENCE for one in mine)
    assert SPANISH not in {one.domain for one in calibration_texts()}
    assert sum(len(one.text) for one in calibration_texts()) > 1_500_000


def test_texts_are_text() -> None:
    for one in (*calibration_texts(), *evaluation_texts()):
        assert one.name
        assert "\f" not in one.name
        assert "Gutenberg" not in one.text
        assert "\ufffd" not in one.text


def test_digest_sees_every_field_and_the_order() -> None:
    first, second = evaluation_texts()[:2]
    known = texts.digest([first, second])
    assert len(known) == 64
    assert known == texts.digest([first, second])
    assert texts.digest([second, first]) != known
    for field in first._fields:
        changed = first._replace(**{field: getattr(first, field) + "x"})
        assert texts.digest([changed, second]) != known


def test_missing_source_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "EVALUATION_MODULES", ("zlib_of_another_python",))
    with pytest.raises(TierKVError, match=r"zlib_of_another_python.*install"):
        evaluation_texts()


def test_texts_are_in_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("tierkv", "codecs", "connectors", "service"):
        shutil.copytree(REPOSITORY / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    command += ["--no-index", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=110)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {Path(name).name for name in names if "/lab/data/" in name} == {
        "README.md",
        "calibration-english.txt",
        "evaluation-english.txt",
        "evaluation-spanish.txt",
    }
