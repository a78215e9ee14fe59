"""Where a Redis server is and how to use it: settings and URL, which never show credentials."""

import dataclasses
import ssl
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from tierkv.errors import TierKVError, invalid, unavailable

DEFAULT_PORT = 6379
SCHEMES = ("redis", "rediss", "unix")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Endpoint:
    """Where a server is and who we are to it. Shows no credentials."""

    path: str = ""
    """Of a Unix socket; empty: TCP."""
    host: str = ""
    port: int = DEFAULT_PORT
    tls: bool = False
    user: str = ""
    password: str = ""
    database: int = 0

    def __repr__(self) -> str:
        scheme = "unix" if self.path else "rediss" if self.tls else "redis"
        return f"{scheme}://{self.path or f'{self.host}:{self.port}'}/{self.database}"

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read a URL; user, password and path are percent-decoded once.

        Raises: TierKVError (invalid), which never quotes the URL.
        """
        try:
            return cls._parse(url)
        except (ValueError, TierKVError) as error:
            detail = str(error) if isinstance(error, TierKVError) else "percent-encode the password"
            raise invalid(
                "a Redis URL is redis://[user[:password]@]host[:port][/db], rediss://... or "
                f"unix://[user[:password]@]/path[?db=n]: {detail}"
            ) from None

    @classmethod
    def _parse(cls, url: str) -> Self:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise invalid("its scheme is none of these")
        query = parse_qs(parts.query, strict_parsing=bool(parts.query))
        unix = parts.scheme == "unix"
        path = unquote(parts.path)
        database = query.pop("db", ["0"])[-1] if unix else path.strip("/") or "0"
        if not database.isdecimal():
            raise invalid("the database is a number")
        if query or parts.fragment:
            raise invalid(
                "it has options that tierkv does not know; the password may hold a ? or #"
            )
        if unix != (parts.hostname is None) or (unix and path in {"", "/"}):
            raise invalid("a Unix socket has an absolute path and no host, the others have a host")
        return cls(
            path=path if unix else "",
            host=parts.hostname or "",
            port=parts.port or DEFAULT_PORT,
            tls=parts.scheme == "rediss",
            user=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            database=int(database),
        )


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the Redis tier.

    `url` is redis://, rediss:// (TLS) or unix://; user and password in it are percent-encoded.
    Resolving a host name is not bounded by any timeout here: where DNS may hang, use an address.
    """

    url: str
    prefix: str = "tierkv"
    """Starts every key; sidecars that share frames share it."""
    max_bytes: int = 64 << 30
    """Cap on what this process holds there; Redis has its own `maxmemory` and evicts by itself."""
    ttl_s: int = 7 * 24 * 3600
    timeout_s: float = 1.0
    connect_timeout_s: float = 1.0
    connections: int = 1
    """For reads; the server, one thread, is what limits them where it is near."""
    tls_ca: str = ""
    """File of the certificates to trust; empty: the system's."""
    tls_cert: str = ""
    tls_key: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot work. Raises: TierKVError (invalid)."""
        Endpoint.parse(self.url)
        for name in "max_bytes", "ttl_s", "timeout_s", "connect_timeout_s", "connections":
            if getattr(self, name) <= 0:
                raise invalid(
                    f"{name} of the Redis tier is {getattr(self, name)}: make it positive"
                )

    def __repr__(self) -> str:
        return f"RedisSettings(url={Endpoint.parse(self.url)!r}, prefix={self.prefix!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """As `__repr__`, for rich, which would show the fields."""
        return [("url", Endpoint.parse(self.url)), ("prefix", self.prefix)]


def tls_context(settings: RedisSettings) -> ssl.SSLContext:
    """Return what TLS connections use. Raises: TierKVError (unavailable) for unusable files."""
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca or None)
        if settings.tls_cert:
            context.load_cert_chain(settings.tls_cert, settings.tls_key or None)
    except OSError as error:
        raise unavailable(f"cannot use tls_ca, tls_cert or tls_key of Redis: {error}") from None
    return context
