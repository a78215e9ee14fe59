"""Settings: one small TOML file, read strictly into frozen structs. Values, never objects.

A section is a struct; its keys are the struct's fields without their unit: `size_bytes` is `size`
and takes a size (`64GiB`, `500MB`, or bytes), `timeout_s` is `timeout` and takes a duration
(`30s`, `7d`, or seconds). Every key has a default, and `[nvme]` and `[redis]` are off unless they
are there. What cannot be read is an error that names file, line, key, value and an example;
nothing is ignored.

`docs/tierkv.toml` is the reference: every key, its default and its trade-off.
The environment sets one thing, for clients: `TIERKV_SOCKET`.
"""

import difflib
import os
import re
import stat
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

import msgspec

from tierkv.errors import TierKVError, invalid, unavailable
from tierkv.tiers.endpoint import RedisSettings
from tierkv.tiers.host import HostSettings
from tierkv.tiers.nvme import NvmeSettings

SOCKET_NAME = "tierkv.sock"
TEMPORARY = Path("/tmp")  # noqa: S108 - what is made there is checked
MAX_FILE_BYTES = 1 << 20
LOOPBACK = ("127.0.0.1", "::1", "localhost")

_SIZE_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


class SocketSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where engines connect, and who may."""

    path: str = ""
    """Empty: `tierkv.sock` in the user's runtime directory."""
    group: str = ""
    """Members of this group may connect too (the socket is then 0660)."""
    uids: tuple[int, ...] = ()
    """Peers of these user ids may connect too, for containers (the socket is then 0666)."""
    arena_wait_s: float = 30.0
    """Time that clients of an earlier sidecar have to let go of its memory before we give up."""


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP process: health, metrics, administration."""

    enabled: bool = True
    address: str = "127.0.0.1"
    port: int = 9464
    token_file: str = ""
    """File with the bearer token; needed to listen beyond loopback."""
    hosts: tuple[str, ...] = ()
    """Further names that a request's Host header may carry."""

    def __post_init__(self) -> None:
        """Refuse a port that is none, and an open port without a token."""
        if not 0 <= self.port < 1 << 16:
            raise invalid(f"port is {self.port}: give 0 to 65535, for example 9464 (0: any)")
        if self.address not in LOOPBACK and not self.token_file:
            raise invalid(
                f"address {self.address!r} is reachable from other machines and there is no token:"
                ' set token_file = "/etc/tierkv/token", or address = "127.0.0.1"'
            )


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the store treats blocks, whatever the tier."""

    sync: Literal["process", "power"] = "process"
    """What `flush` promises to outlive: kill -9 of the process, or a power loss."""
    verify: Literal["arrival", "always"] = "arrival"
    """When payload checksums are compared: coming back from disk or network, or on every read."""
    write_behind_bytes: int = 256 << 20
    """Bound of the queue of copies on their way to lower tiers."""
    grace_s: float = 10.0
    """Time to finish writes when the sidecar is told to stop."""
    gate: str = ""
    """File that `tierkv eval` wrote; empty: lossless profiles only."""
    artifacts: tuple[str, ...] = ()
    """Files that `tierkv calibrate` wrote, by which copies that leave RAM are encoded again."""
    policy: Literal["auto", "lru", "evicpress"] = "auto"
    """What keeps, compresses, moves and drops; auto: evicpress with a gate, else lru."""
    second_sight: bool = False
    """With evicpress: lower tiers take only what was asked for twice."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All of them; `nvme` and `redis` are None when off."""

    host: HostSettings = msgspec.field(default_factory=HostSettings)
    nvme: NvmeSettings | None = None
    redis: RedisSettings | None = None
    socket: SocketSettings = SocketSettings()
    http: HttpSettings = HttpSettings()
    store: StoreSettings = StoreSettings()


def load(path: str | Path) -> Settings:
    """Read a settings file.

    Raises: TierKVError: it cannot be read, or says something that cannot be.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise unavailable(f"cannot read the settings file {path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise invalid(f"{path} is larger than {MAX_FILE_BYTES} bytes: is it a settings file?")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise invalid(f"{path} is not UTF-8 text: {error}") from error
    return parse(text, name=str(path))


def parse(text: str, name: str = "settings") -> Settings:
    """Read the text of a settings file; `name` is what errors call it.

    Raises: TierKVError: it says something that cannot be.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise invalid(f"{name}: not TOML: {error}") from error
    source = _Source(name, text)
    sections = {field.name: _struct_of(field.type) for field in msgspec.structs.fields(Settings)}
    values = {}
    for section, table in tables.items():
        if section not in sections:
            noun = "section" if isinstance(table, dict) else "key outside of any section,"
            raise source.error(f"unknown {noun} {section!r}{_nearest(section, sections)}", section)
        if not isinstance(table, dict):
            raise source.error(f"{section!r} is a section: write [{section}]", section)
        values[section] = _read_section(source, section, table, sections[section])
    return msgspec.structs.replace(Settings(), **values)


def client_socket() -> Path:
    """Return where a client finds the sidecar: `TIERKV_SOCKET`, or the default.

    Raises: TierKVError: the default lies in a directory that is not this user's own.
    """
    named = os.environ.get("TIERKV_SOCKET")
    return Path(named) if named else default_socket()


def default_socket() -> Path:
    """Return the user's own socket path; its directory exists and only this user can write there.

    `XDG_RUNTIME_DIR`, else `/tmp/tierkv-UID`. Somebody else could have made the latter, to hand out
    KV of their own: so it is checked.

    Raises: TierKVError: the directory is not this user's own.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / SOCKET_NAME
    folder = TEMPORARY / f"tierkv-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise unavailable(f"cannot use {folder} for the socket: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise unavailable(
            f"{folder} is not a directory of uid {os.getuid()} alone: remove it,"
            " or set TIERKV_SOCKET and [socket] path"
        )
    return folder / SOCKET_NAME


def socket_path(settings: Settings) -> Path:
    """Return where the sidecar listens."""
    return Path(settings.socket.path) if settings.socket.path else default_socket()


def toml_key(field: str) -> str:
    """Return the key of a struct's field: its name without the unit."""
    return re.sub(r"_bytes(?=_|$)|_s$", "", field)


class _Source:
    """Where a text came from, to name the line of what is wrong in it."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._lines = text.splitlines()

    def error(self, message: str, section: str, key: str = "") -> TierKVError:
        line = self._find(section, key)
        return invalid(f"{self._name}{f':{line}' if line else ''}: {message}")

    def _find(self, section: str, key: str) -> int:
        wanted = re.compile(rf"[\"']?{re.escape(key or section)}\b")
        here = ""
        for number, line in enumerate(self._lines, 1):
            text = line.strip()
            if header := re.match(r"\[+\s*[\"']?([^\"'\].]+)", text):
                here = header[1].strip()
                if here == section and not key:
                    return number
            elif wanted.match(text) and here == (section if key else ""):
                return number
        return 0


def _read_section(
    source: _Source, section: str, table: dict[str, Any], struct: type[msgspec.Struct]
) -> msgspec.Struct:
    fields = {toml_key(field.name): field for field in msgspec.structs.fields(struct)}
    values = {}
    for key, value in table.items():
        if key not in fields:
            raise source.error(
                f"unknown key {key!r} in [{section}]{_nearest(key, fields)}", section, key
            )
        try:
            values[fields[key].name] = _read_value(fields[key].name, fields[key].type, value)
        except ValueError as error:
            raise source.error(
                f"[{section}] {key} = {_shown(value)}: {error}", section, key
            ) from None
    missing = [key for key, field in fields.items() if field.required and field.name not in values]
    if missing:
        raise source.error(f"[{section}] needs {missing[0]}; see docs/tierkv.toml", section)
    try:
        return struct(**values)
    except (ValueError, TierKVError) as error:
        raise source.error(f"[{section}] {error}", section) from error


def _read_value(field: str, kind: object, value: object) -> object:
    """Return a TOML value as a field's type. Raises: ValueError: with what was expected."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        kind = next(option for option in options if option is not types.NoneType)
        return _read_value(field, kind, value)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"give a list, for example [{_EXAMPLES[options[0]]}]")
        return tuple(_read_value(field, options[0], item) for item in value)
    if origin is Literal:
        if value not in options:
            raise ValueError(f"give one of {', '.join(repr(option) for option in options)}")
    elif re.search(r"_bytes(_|$)", field):
        value = read_size(value)
    elif field.endswith("_s"):
        value = read_duration(value) if kind is float else _read_seconds(value)
    elif type(value) is not kind and (kind is not float or type(value) is not int):
        raise ValueError(f"give {_NOUNS[kind]}, for example {_EXAMPLES[kind]}")
    return float(value) if kind is float and isinstance(value, int) else value


def read_size(value: object) -> int:
    """Return bytes from `64GiB`, `500MB` or a count of bytes. Raises: ValueError."""
    found = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    if found and found[2] in _SIZE_UNITS:
        return int(float(found[1]) * _SIZE_UNITS[found[2]])
    if type(value) is int and value >= 0:
        return value
    raise ValueError('give a size, for example "64GiB" or "500MB"')


def read_duration(value: object) -> float:
    """Return seconds from `30s`, `7d` or a count of seconds. Raises: ValueError."""
    found = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    if found and found[2] in _SECONDS:
        return float(found[1]) * _SECONDS[found[2]]
    if isinstance(value, int | float) and type(value) is not bool and 0 <= value < float("inf"):
        return float(value)
    raise ValueError('give a duration, for example "30s" or "7d"')


def _read_seconds(value: object) -> int:
    seconds = read_duration(value)
    if not seconds.is_integer():
        raise ValueError('give whole seconds, for example "30s"')
    return int(seconds)


_NOUNS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
}
_EXAMPLES: dict[object, str] = {bool: "true", int: "8", float: "0.5", str: '"text"'}


def _shown(value: object) -> str:
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004


def _nearest(name: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def _struct_of(kind: object) -> type[msgspec.Struct]:
    """Return the struct of `Struct` or `Struct | None`."""
    options = typing.get_args(kind) or (kind,)
    return next(option for option in options if isinstance(option, type(msgspec.Struct)))
