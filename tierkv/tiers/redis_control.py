"""The rare commands of the Redis tier, through redis-py: removing frames, and what is cleared.

Minimum generations lie in one hash: field namespace (16 bytes), value 20 digits, and a field
"changed" with a token that each rise replaces. Readers ask for the token with every batch and read
the hash again when it differs. A server that lost the hash gets it back from whoever remembers it.
"""

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from tierkv.errors import unavailable
from tierkv.tiers.endpoint import Endpoint, RedisSettings
from tierkv.tiers.redis_hash import Meta
from tierkv.tiers.resp import LostError, Refused, Reply, request

if TYPE_CHECKING:
    import redis

NAMESPACE_BYTES = 16
DIGITS = 20
"""Enough for 64 bits, and always as many, so that generations compare as text."""
CHANGED = b"changed"
RAISE = """
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old and old >= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2], 'changed', ARGV[3])
return 1
"""
"""Compares text, because Lua's numbers are exact only up to 2**53."""


class ServerError(OSError):
    """A command failed. `reached`: the server answered, with an error."""

    def __init__(self, message: str, *, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached


class Control:
    """Rare commands and the known minimum generations. Methods raise ServerError.

    Args:
        settings: of the tier.
        prefix: of its keys.
    """

    def __init__(self, settings: RedisSettings, prefix: bytes) -> None:
        self._client = _client(settings)
        self._key = prefix + b"generations"
        self.opening = request(b"HGET", self._key, CHANGED)
        """What a batch asks first; `check` takes the reply."""
        self._lock = threading.Lock()
        self._minimum: dict[bytes, int] = {}
        self._token: object = self  # nothing that a server can answer: not read yet

    def known(self) -> dict[bytes, int]:
        """Return the minimum generations as they were read last."""
        with self._lock:
            return dict(self._minimum)

    def live(self, meta: Meta) -> bool:
        """Whether a stored frame has not been cleared."""
        return meta.generation >= self._minimum.get(meta.namespace, 0)

    def check(self, token: Reply) -> None:
        """Take the reply to `opening`: a server that answers an error is as good as gone.

        Raises: LostError.
        """
        if isinstance(token, Refused):
            raise LostError(token.text)
        if token != self._token:
            try:
                self.pull()
            except ServerError as error:
                raise LostError(f"cannot read the generations: {error}") from None

    def pull(self) -> None:
        """Read the generations; write back those that the server has lost."""
        stored = self._ask("HGETALL", self._key)
        if not isinstance(stored, dict):
            raise ServerError("not the reply to HGETALL", reached=True)
        there = {
            name: int(value)
            for name, value in stored.items()
            if len(name) == NAMESPACE_BYTES and len(value) == DIGITS and value.isdigit()
        }
        with self._lock:
            for name, value in there.items():
                self._minimum[name] = max(self._minimum.get(name, 0), value)
            lost = {n: v for n, v in self._minimum.items() if there.get(n, -1) < v}
        try:
            for name, value in lost.items():
                self.push(name, value)
        except ServerError as error:
            if not error.reached:
                raise
            # No memory, or a replica: what is known here holds, and the next batch tries again.
            self._token = self
        else:
            self._token = stored.get(CHANGED)

    def remember(self, namespace: bytes, generation: int) -> None:
        """Raise a minimum here; whichever batch comes next sees to it that the server has it."""
        with self._lock:
            known = self._minimum.get(namespace, 0)
            self._minimum[namespace] = max(known, generation)
        self._token = self

    def push(self, namespace: bytes, generation: int) -> None:
        """Raise a minimum on the server; of several raised at once the highest stays."""
        digits = b"%0*d" % (DIGITS, generation)
        self._ask("EVAL", RAISE, 1, self._key, namespace, digits, secrets.token_bytes(8))

    def unlink(self, keys: Sequence[bytes]) -> None:
        """Remove keys; the server frees their memory later."""
        self._ask("UNLINK", *keys)

    def close(self) -> None:
        """Close redis-py's connections. Idempotent."""
        self._client.close()

    def _ask(self, *words: str | bytes | int) -> object:
        import redis

        try:
            execute = cast("Callable[..., object]", self._client.execute_command)
            return execute(*words)
        except redis.ResponseError as error:
            raise ServerError(_kind(error), reached=True) from None
        except (redis.RedisError, OSError, TypeError, ValueError) as error:
            raise ServerError(_kind(error), reached=False) from None


def _kind(error: Exception) -> str:
    """Name an error of redis-py without its text, which may quote the password."""
    return f"Redis: {type(error).__name__}"


def _client(settings: RedisSettings) -> "redis.Redis":
    """Return redis-py's client. Raises: TierKVError (unavailable) when it is not installed."""
    try:
        import hiredis  # noqa: F401, redis-py uses it by itself
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise unavailable(
            f"the Redis tier needs {error.name}: pip install 'tierkv-sidecar[redis]'"
        ) from None
    endpoint = Endpoint.parse(settings.url)
    return redis.Redis(
        host=endpoint.host,
        port=endpoint.port,
        unix_socket_path=endpoint.path or None,
        db=endpoint.database,
        username=endpoint.user or None,
        password=endpoint.password or None,
        socket_timeout=settings.timeout_s,
        socket_connect_timeout=settings.connect_timeout_s,
        protocol=2,
        # Once more on a connection that died of old age, never after a timeout.
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        ssl=endpoint.tls,
        ssl_ca_certs=settings.tls_ca or None,
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
    )
