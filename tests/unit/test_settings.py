"""Settings are read strictly, and docs/tierkv.toml says what the code says."""

import re
import stat
from pathlib import Path

import msgspec
import pytest

from tierkv import settings
from tierkv.errors import ErrorKind, TierKVError
from tierkv.settings import Settings, load, parse, read_duration, read_size

SAMPLE = Path(__file__).resolve().parents[2] / "docs" / "tierkv.toml"
OFF = {"nvme", "redis"}


def refused(text: str) -> str:
    with pytest.raises(TierKVError) as caught:
        parse(text, "t.toml")
    assert caught.value.kind is ErrorKind.INVALID
    return str(caught.value)


def keys(kind: type[msgspec.Struct]) -> dict[str, object]:
    return {settings.toml_key(field.name): field for field in msgspec.structs.fields(kind)}


def switched_on(text: str) -> str:
    """Return the sample with the sections that are off switched on."""
    return re.sub(r"^#(?=\[|[a-z_]+ = )", "", text, flags=re.MULTILINE)


def test_nothing_is_needed() -> None:
    found = parse("")
    assert found == Settings()
    assert found.host.size_bytes == 4 << 30
    assert found.nvme is None
    assert found.redis is None
    assert (found.http.address, found.http.port) == ("127.0.0.1", 9464)


def test_sample_says_the_defaults() -> None:
    assert load(SAMPLE) == Settings()
    on = parse(switched_on(SAMPLE.read_text()), "sample")
    assert on.nvme is not None
    assert on.redis is not None
    for section in OFF:
        found = getattr(on, section)
        for field in msgspec.structs.fields(type(found)):
            if not field.required:
                default = getattr(found, field.name)
                expected = (
                    field.default
                    if field.default is not msgspec.NODEFAULT
                    else field.default_factory()
                )
                assert default == expected, f"[{section}] {field.name}"


def test_sample_has_every_key_with_its_trade_off() -> None:
    text = switched_on(SAMPLE.read_text())
    for field in msgspec.structs.fields(Settings):
        kind = settings._struct_of(field.type)
        _, _, body = text.partition(f"[{field.name}]\n")
        body = re.split(r"^\[", body, flags=re.MULTILINE)[0]
        lines = body.splitlines()
        for key in keys(kind):
            at = [n for n, line in enumerate(lines) if re.match(rf"{key} = ", line)]
            assert len(at) == 1, f"[{field.name}] {key} stands {len(at)} times"
            assert lines[at[0] - 1].startswith("# "), f"[{field.name}] {key} has no trade-off"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    message = refused('[host]\n\nszie = "1GiB"\n')
    assert message == "t.toml:3: unknown key 'szie' in [host]; did you mean 'size'?"
    assert "t.toml:2: unknown section 'hots'; did you mean 'host'?" in refused("\n[hots]\n")
    assert "known: host, nvme, redis" in refused("[qqqqqq]\n")
    assert "t.toml:1:" in refused('size = "1GiB"\n')
    assert "write [host]" in refused("host = 3\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[host]\nsize = "64 Gigs"\n', "t.toml:2: [host] size = '64 Gigs': give a size, for exam"),
        ("[host]\nsize = -1\n", "size = -1: give a size"),
        ("[host]\nsize = true\n", "size = true: give a size"),
        ("[http]\nport = '9464'\n", "port = '9464': give a whole number, for example 8"),
        ("[http]\nport = true\n", "port = true: give a whole number"),
        ("[http]\nport = 70000\n", "[http] port is 70000"),
        ("[http]\nenabled = 1\n", "give true or false, for example true"),
        ("[http]\nhosts = 'a'\n", 'give a list, for example ["text"]'),
        ("[http]\nhosts = [1]\n", "give text in quotes"),
        ("[http]\naddress = '0.0.0.0'\n", "token_file"),
        ("[store]\nsync = 'ever'\n", "give one of 'process', 'power'"),
        ("[store]\ngrace = '3 weeks'\n", 'give a duration, for example "30s" or "7d"'),
        ("[store]\ngrace = inf\n", "give a duration"),
        ("[redis]\nurl = 'redis://h'\nttl = '1500ms'\n", "give whole seconds"),
        ("[nvme]\n", "t.toml:1: [nvme] needs path"),
        ("[host\n", "not TOML"),
        ("[host]\nsize = 1\nsize = 2\n", "not TOML"),
    ],
)
def test_a_wrong_value_names_key_value_and_example(text: str, expected: str) -> None:
    assert expected in refused(text)


def test_long_values_are_cut() -> None:
    assert len(refused(f"[host]\nsize = '{'x' * 10_000}'\n")) < 200


@pytest.mark.parametrize(
    ("value", "expected"),
    [("64GiB", 64 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("7", 7), (7, 7), ("0B", 0)],
)
def test_sizes(value: object, expected: int) -> None:
    assert read_size(value) == expected


@pytest.mark.parametrize("value", ["", "GiB", "1gib", "1 EB", "-1MB", "1e3", -1, 1.5, None, True])
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(ValueError, match="64GiB"):
        read_size(value)


@pytest.mark.parametrize(
    ("value", "expected"), [("30s", 30.0), ("7d", 604800.0), ("250ms", 0.25), (2, 2.0), (0.5, 0.5)]
)
def test_durations(value: object, expected: float) -> None:
    assert read_duration(value) == expected


@pytest.mark.parametrize("value", ["", "s", "30", "-1s", -1, True, float("nan"), float("inf")])
def test_what_is_no_duration(value: object) -> None:
    with pytest.raises(ValueError, match="30s"):
        read_duration(value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, kind in ((tmp_path / "none", ErrorKind.UNAVAILABLE), (tmp_path, None)):
        with pytest.raises(TierKVError, match=re.escape(str(path))) as caught:
            load(path)
        assert kind in {None, caught.value.kind}
    large = tmp_path / "large"
    large.write_bytes(b"#" * (2 << 20))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\0")
    for path in (large, binary):
        with pytest.raises(TierKVError, match=re.escape(str(path))):
            load(path)


def test_clients_find_the_socket_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_SOCKET", "/run/x.sock")
    assert settings.client_socket() == Path("/run/x.sock")


def test_the_default_socket_is_in_the_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIERKV_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert settings.client_socket() == tmp_path / "tierkv.sock"
    assert settings.socket_path(Settings()) == tmp_path / "tierkv.sock"
    given = parse("[socket]\npath = '/run/tierkv/a.sock'\n")
    assert settings.socket_path(given) == Path("/run/tierkv/a.sock")


def test_a_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(settings, "TEMPORARY", tmp_path)
    path = settings.default_socket()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.parent.chmod(0o777)
    with pytest.raises(TierKVError, match="not a directory of uid"):
        settings.default_socket()
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path)
    with pytest.raises(TierKVError, match="not a directory of uid"):
        settings.default_socket()
