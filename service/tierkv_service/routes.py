"""Routes: what the HTTP process serves, and to whom.

Liveness and readiness are apart. `/healthz`: the data loop answers within a second. `/readyz`:
every tier was tried; host RAM lost is 503, an optional tier lost is "degraded" and still 200.

With a token set, everything but the two health routes needs it. A page in a browser on the same
machine can reach loopback, so the Host header must be a name of this server, and requests from
another origin are refused. No route takes a body and none evaluates anything.
"""

import hmac
import logging
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierkv.calls import Call, ClearCall, ClearReply, StatCall
from tierkv.client import Channel
from tierkv.errors import ErrorKind, TierKVError, unavailable
from tierkv.namespace import digest_of
from tierkv.settings import LOOPBACK, HttpSettings
from tierkv.stat import StoreStat, from_wire
from tierkv_service.metrics import exposition

PING_S = 1.0
ANSWER_S = 5.0
CLEAR_S = 60.0
OPEN = ("/healthz", "/readyz")
"""Routes without a token: an orchestrator's probes. They tell states, and details with a token."""

_STATUS = {ErrorKind.INVALID: 400, ErrorKind.UNAVAILABLE: 503, ErrorKind.INCOMPATIBLE: 502}
_log = logging.getLogger("tierkv.http")


def build(settings: HttpSettings, token: bytes, channel: Channel) -> FastAPI:
    """Return the application. `channel` takes calls from any number of threads at once."""
    app = FastAPI(title="tierkv", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Guard, settings=settings, token=token)
    app.add_exception_handler(TierKVError, _refused)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        reply = await _ask(channel, StatCall(), ANSWER_S)
        found = from_wire(reply) if isinstance(reply, dict) else None
        text, content_type = exposition(found, request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    @app.get("/v1/stat")
    async def stat() -> JSONResponse:
        return JSONResponse(msgspec.to_builtins(await _stat(channel)))

    @app.get("/v1/tiers")
    async def tiers() -> JSONResponse:
        return JSONResponse({"tiers": msgspec.to_builtins((await _stat(channel)).tiers)})

    _add_health(app, token, channel)
    _add_clear(app, channel)
    return app


async def _stat(channel: Channel) -> StoreStat:
    reply = await _ask(channel, StatCall(), ANSWER_S)
    if not isinstance(reply, dict):
        raise unavailable(f"the sidecar did not answer within {ANSWER_S:g} s")
    return from_wire(reply)


async def _ask(channel: Channel, call: Call, timeout_s: float) -> Any | None:  # noqa: ANN401
    """Return the reply, None when there is none in time, however the sidecar hangs."""
    with anyio.move_on_after(timeout_s):
        return await anyio.to_thread.run_sync(channel.call, call, timeout_s, abandon_on_cancel=True)
    return None


def readiness(stat: StoreStat | None, *, details: bool) -> tuple[int, dict[str, Any]]:
    """Return status and body of `/readyz`; `stat` is what a probe found, None: no answer."""
    if stat is None:
        problem = "the sidecar does not answer"
        return 503, {"status": "unavailable", "failing": ["sidecar"], "problem": problem}
    tiers = [tier for tier in stat.tiers if tier.state != "off"]
    lost = {tier.name for tier in tiers if tier.state == "lost"}
    failing = [tier.name for tier in tiers if tier.state != "ok"]
    down = "host" in lost or len(lost) == len(tiers)
    return 503 if down else 200, {
        "status": "unavailable" if down else "degraded" if failing else "ok",
        "failing": failing,
        "tiers": {
            tier.name: {"state": tier.state, **({"problem": tier.problem} if details else {})}
            for tier in tiers
        },
    }


def _add_health(app: FastAPI, token: bytes, channel: Channel) -> None:
    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        alive = isinstance(await _ask(channel, StatCall(), PING_S), dict)
        if alive:
            return JSONResponse({"status": "ok"})
        problem = f"the data loop did not answer within {PING_S:g} s"
        return JSONResponse({"status": "unavailable", "problem": problem}, 503)

    @app.get("/readyz")
    async def readyz(request: Request) -> JSONResponse:
        reply = await _ask(channel, StatCall(probe=True), ANSWER_S)
        found = from_wire(reply) if isinstance(reply, dict) else None
        status, body = readiness(found, details=_knows(token, request.headers))
        return JSONResponse(body, status)


def _add_clear(app: FastAPI, channel: Channel) -> None:
    @app.post("/v1/namespaces/{name}/clear")
    async def clear(name: str, request: Request) -> JSONResponse:
        digest_of(name)
        peer = request.client.host if request.client else "unknown"
        reply = await _ask(channel, ClearCall(namespace=name), CLEAR_S)
        if not isinstance(reply, ClearReply):
            _log.error("clear of namespace %s for %s: no answer", name, peer)
            raise unavailable(f"the sidecar did not answer within {CLEAR_S:g} s: ask again")
        _log.warning(
            "clear of namespace %s for %s: generation %d, removed %s, failed %s",
            name,
            peer,
            reply.generation,
            reply.removed,
            reply.failed,
        )
        body = {
            "namespace": name,
            "generation": reply.generation,
            "removed": reply.removed,
            "failed": reply.failed,
        }
        return JSONResponse(body, 502 if reply.failed else 200)


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TierKVError)
    return JSONResponse({"error": str(error)}, _STATUS[error.kind])


class Guard:
    """Refuses what must not reach a route: a foreign host or origin, no token, a body."""

    def __init__(self, app: ASGIApp, settings: HttpSettings, token: bytes) -> None:
        self._app = app
        self._token = token
        self._hosts = {name.lower() for name in (*LOOPBACK, settings.address, *settings.hosts)}
        self._any_host = settings.address not in LOOPBACK and not settings.hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a refusal, or pass on."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Cache-Control"] = "no-store"
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        refusal = self._refusal(scope["path"], Headers(scope=scope))
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, path: str, headers: Headers) -> JSONResponse | None:
        host = headers.get("host", "")
        if not self._any_host and _host_name(host) not in self._hosts:
            return _error(421, "this server has another name: add it to [http] hosts")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return _error(403, "requests from pages of another origin are refused")
        if path not in OPEN and not _knows(self._token, headers):
            refusal = _error(401, "send the token of [http] token_file: Authorization: Bearer ...")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            return _error(413, "no route takes a body")
        return None


def _error(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status)


def _knows(token: bytes, headers: Headers) -> bool:
    """Return whether a request carries the token; true when there is none to carry."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("latin-1"), token)
    return not token or (same and scheme.lower() == "bearer")


def _host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
