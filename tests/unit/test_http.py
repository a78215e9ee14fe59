"""Who may ask the HTTP process for what (report R27), and what it answers them."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http_server import STAT, Serve, Served, serving
from tierkv.errors import ErrorKind, TierKVError
from tierkv.settings import HttpSettings
from tierkv.stat import to_wire
from tierkv_service import http

EVERYWHERE = "0.0.0.0"  # noqa: S104 - what must be refused
TOKEN = "correct-horse-battery"


@pytest.fixture
def serve() -> Iterator[Serve]:
    with serving() as start:
        yield start


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return str(path)


@pytest.fixture(scope="module")
def attacked() -> Iterator[Served]:
    """Serve all attacks with one server: each must leave it as it was."""
    with serving() as start:
        yield start()


# Who may ask.


def test_r27_by_default_other_machines_find_nothing() -> None:
    with http.listen(HttpSettings(port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_r27_other_machines_need_a_token() -> None:
    for address in (EVERYWHERE, "::", "10.1.2.3"):
        with pytest.raises(TierKVError, match="token_file") as caught:
            HttpSettings(address=address)
        assert caught.value.kind is ErrorKind.INVALID


@pytest.mark.parametrize("content", ["", "short", "two words of it all", "ä" * 20])
def test_r27_a_token_must_be_one(content: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(TierKVError, match="openssl rand"):
        http.read_token(HttpSettings(token_file=str(path)))
    with pytest.raises(TierKVError, match="cannot read"):
        http.read_token(HttpSettings(token_file=str(tmp_path / "none")))


def test_r27_without_the_token_nothing_but_health_answers(serve: Serve) -> None:
    served = serve(token=TOKEN)
    wrong = ("", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN)
    for given in wrong:
        headers = {"Authorization": given}
        for path in ("/metrics", "/v1/tiers", "/v1/stat", "/openapi.json", "/nowhere", "/docs"):
            answer = served.get(path, **headers)
            assert answer.status_code == 401, path
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert served.clear(**headers).status_code == 401
        assert served.get("/healthz", **headers).status_code == 200
    assert served.clear().status_code == 401
    assert not served.channel.cleared
    assert "problem" not in served.get("/readyz").text
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert served.get("/v1/tiers", **headers).status_code == 200
    assert served.clear(**headers).status_code == 200
    assert "problem" in served.get("/readyz", **headers).text


def test_r27_a_token_of_any_bytes_is_only_wrong(serve: Serve) -> None:
    served = serve(token=TOKEN)
    line = served.raw(
        b"GET /v1/stat HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
    )
    assert b"401" in line


def test_r27_other_hosts_and_origins_are_refused(serve: Serve) -> None:
    served = serve(HttpSettings(port=0, hosts=("node7.example",)))
    own = f"127.0.0.1:{served.port}"
    for host in (
        "evil.example",
        f"evil.example:{served.port}",
        "127.0.0.1.evil.example",
        "",
        "[::",
    ):
        assert served.get("/healthz", Host=host).status_code == 421, host
    for host in (own, "localhost", "LOCALHOST:1", "[::1]:80", "node7.example:9464"):
        assert served.get("/healthz", Host=host).status_code == 200, host
    for origin in ("http://evil.example", "null", "http://localhost:3000", ""):
        assert served.clear(Origin=origin).status_code == 403, origin
    assert not served.channel.cleared
    assert served.clear(Origin=f"http://{own}").status_code == 200


def test_r27_beyond_loopback_any_name_will_do(serve: Serve, token_file: str) -> None:
    served = serve(HttpSettings(port=0, address=EVERYWHERE, token_file=token_file), TOKEN)
    assert served.get("/healthz", Host="10.9.8.7:9464").status_code == 200
    assert served.get("/v1/stat", Host="10.9.8.7:9464").status_code == 401


# The attack list.


@pytest.mark.parametrize(
    "name",
    ["..%2f..%2fx", "%2e%2e%2fx", "..%5cx", "a%00", "%00", "a%0ab", "%20", "a b", "a%25", "%ff",
     "%c3%a9", "a" * 129, "a'--", "{{7*7}}", "$(id)", "*", "%2e%2e%2f%2e%2e%2fetc%2fpasswd"],
)  # fmt: skip
def test_r27_names_out_of_the_alphabet_are_refused(name: str, attacked: Served) -> None:
    request = f"POST /v1/namespaces/{name}/clear HTTP/1.1\r\nHost: localhost\r\n\r\n"
    status = attacked.raw(request.encode()).split(b" ")[1]
    assert status in {b"400", b"404"}, status
    assert not attacked.channel.cleared
    assert attacked.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /v1/namespaces/../../x/clear HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/namespaces//clear HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/namespaces/a\0b/clear HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /redoc HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /run_script HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n1 + 1",
        b"GET /v1/namespaces/a/clear HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\nx",
        b"\0\1\2\3\r\n\r\n",
    ],
)
def test_r27_odd_requests_are_refused(request_bytes: bytes, attacked: Served) -> None:
    assert attacked.raw(request_bytes).split(b" ")[1][:1] == b"4"
    assert not attacked.channel.cleared
    assert attacked.get("/healthz").status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_r27_ten_megabytes_go_nowhere(declared: bool, attacked: Served) -> None:
    text = b"a" * 10_000_000
    heads = {
        True: b"POST /v1/namespaces/a/clear HTTP/1.1\r\nContent-Length: 10000000\r\n"
        b"Host: localhost\r\n\r\n" + text,
        False: b"POST /v1/namespaces/" + text + b"/clear HTTP/1.1\r\nHost: localhost\r\n\r\n",
    }
    first = attacked.raw(heads[declared])
    assert first == b"closed" or first.split(b" ")[1] in {b"400", b"413"}
    assert not attacked.channel.cleared
    assert attacked.get("/healthz").status_code == 200


# Administration.


def test_r27_clear_is_done_and_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve()
    with caplog.at_level(logging.INFO, "tierkv.http"):
        answer = served.clear("Team_a.b-2")
    assert answer.json() == {
        "namespace": "Team_a.b-2", "generation": 3, "removed": {"host": 2}, "failed": {},
    }  # fmt: skip
    assert served.channel.cleared == ["Team_a.b-2"]
    assert "clear of namespace Team_a.b-2 for 127.0.0.1" in caplog.text
    served.channel.failed = {"redis": "timed out"}
    assert served.clear().status_code == 502
    served.channel.stat = None
    assert served.clear().status_code == 503


def test_stat_and_tiers_are_json(serve: Serve) -> None:
    served = serve()
    assert served.get("/v1/stat").json() == json.loads(json.dumps(to_wire(STAT)))
    assert [tier["name"] for tier in served.get("/v1/tiers").json()["tiers"]] == [
        "host", "nvme", "redis",
    ]  # fmt: skip
    served.channel.stat = None
    assert served.get("/v1/stat").status_code == 503
    assert "did not answer" in served.get("/v1/tiers").json()["error"]
