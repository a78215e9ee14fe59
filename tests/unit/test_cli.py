"""The command line: quick, plain errors, a table for people and JSON for programs."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tierkv import __version__
from tierkv.calls import Call, StatCall
from tierkv.stat import (
    HoldStat,
    ProfileStat,
    StoreStat,
    TierStat,
    WriteBehindStat,
    from_wire,
    to_wire,
)
from tierkv_connectors import sidecar
from tierkv_service import cli, show

TIERKV = [sys.executable, "-c", "from tierkv_service.cli import main; main()"]


def stat_at(second: int) -> StoreStat:
    return StoreStat(
        version="0.1.0",
        epoch=5,
        uptime_s=float(second),
        tiers=(
            TierStat(name="host", capacity_bytes=4 << 30, used_bytes=1 << 30, latency_s=2e-5),
            TierStat(name="nvme", state="lost", problem="read-only file system", read_bps=2e9),
            TierStat(name="redis", state="off"),
        ),
        enabled={"policy": "evicpress"},
        asked_blocks=100 * second,
        hits_by_tier_blocks={"host": 60 * second, "nvme": 10 * second},
        miss_blocks=30 * second,
        served_bytes=second << 20,
        holds=HoldStat(clients=3),
        write_behind=WriteBehindStat(queued_bytes=1 << 20, limit_bytes=256 << 20),
        profiles=(
            ProfileStat(
                profile="kvtc@8x",
                model="llama",
                kv_dtype="bf16",
                artifact="ab" * 32,
                context=1024,
                kl=0.06,
                why="spanish: mean KL up to 0.06 > 0.05",
            ),
        ),
        profile_refusals={"int4: no gate file": 7},
        counters={"put_refused_full": 4},
    )


class FakeChannel:
    """A sidecar that is one second older at every call."""

    def __init__(self, path: Path, **_settings: object) -> None:
        self.path = path
        self.last_error = ""
        self.second = 0

    def call(self, call: Call, timeout_s: float | None = None) -> Any | None:
        assert isinstance(call, StatCall)
        assert call.probe == (self.second == 1), "what is shown was tried"
        self.second += 1
        return to_wire(stat_at(self.second))

    def close(self) -> None:
        pass


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TIERKV, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_help_is_complete() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("serve", "stat", "eval", "demo"):
        assert command in done.stdout
        assert run(command, "--help").returncode == 0


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom tierkv_service import cli\n"
        "heavy = {'numpy', 'torch', 'fastapi', 'uvicorn', 'redis', 'tierkv.settings'}\n"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    assert run("--version").stdout == f"tierkv {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serve", "--config", "{}/none.toml"), "cannot read the settings file"),
        (("serve", "--config", "{}/bad.toml"), "did you mean 'size'?"),
        (("stat", "--socket", "{}/none.sock"), "no sidecar answers on"),
        (("policy", "lru", "--socket", "{}/none.sock"), "is `tierkv serve` running?"),
    ],
)
def test_an_error_is_one_line(arguments: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('[host]\nsiz = "1GiB"\n')
    done = run(*(argument.format(tmp_path) for argument in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("tierkv: ")
    assert expected in line


@pytest.mark.parametrize("text", [None, "{", '{"format": "tierkv.gate", "version": 9}'])
def test_a_broken_gate_ends_serve_before_anything_starts(text: str | None, tmp_path: Path) -> None:
    path, folder = tmp_path / "tierkv.toml", tmp_path / "run"
    folder.mkdir()
    if text is not None:
        (tmp_path / "gate.json").write_text(text)
    path.write_text(
        f'[socket]\npath = "{folder}/s.sock"\n[nvme]\npath = "{folder}/nvme"\nsize = "256MiB"\n'
        f'[store]\ngate = "{tmp_path}/gate.json"\n'
    )
    command = [*TIERKV, "serve", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("tierkv: ")
    for part in (f"{tmp_path}/gate.json", "tierkv eval --out", "without [store] gate"):
        assert part in line
    assert list(folder.iterdir()) == [], "neither socket nor lock nor disk"


def test_a_missing_extra_is_one_line() -> None:
    program = (
        "import sys; sys.modules['msgspec'] = None; sys.argv = ['tierkv', 'stat']\n"
        "from tierkv_service.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tierkv: msgspec is not installed: pip install 'tierkv-sidecar[")


def test_an_unknown_command_is_no_traceback() -> None:
    done = run("evaluate")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_stat_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "SidecarChannel", FakeChannel)
    monkeypatch.setattr(cli, "SAMPLE_S", 0.0)
    done = CliRunner().invoke(cli.app, ["stat", "--json", "--socket", "/run/x.sock"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert from_wire(found["stat"]) == stat_at(2)
    assert found["per_second"]["hit_blocks"] == 70
    assert found["per_second"]["served_bytes"] == 1 << 20


def test_stat_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "SidecarChannel", FakeChannel)
    monkeypatch.setattr(cli, "SAMPLE_S", 0.0)
    done = CliRunner().invoke(cli.app, ["stat", "--socket", "/run/x.sock"])
    assert done.exit_code == 0, done.output
    assert "up 2.0 s" in done.output


def test_a_sidecar_from_start_to_end(tmp_path: Path) -> None:
    settings, sock = tmp_path / "t.toml", tmp_path / "t.sock"
    settings.write_text(
        f"""
        [host]
        size = "64MiB"
        [nvme]
        path = "{tmp_path}/nvme"
        size = "128MiB"
        region = "16MiB"
        free_floor = "1MiB"
        [socket]
        path = "{sock}"
        [http]
        port = 0
        [store]
        grace = "1s"
        """
    )
    command = [*TIERKV, "serve", "--config", str(settings)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as sidecar:
        assert sidecar.stderr is not None
        url = listening = ""
        while not (url and listening):
            line = sidecar.stderr.readline()
            assert line, "it ended before it listened"
            if "http://" in line:
                url = line[line.index("http://") :].strip()
            if str(sock) in line:
                listening = line
        ready = wait_for(f"{url}/readyz")
        assert ready.status_code == 200, ready.text
        assert set(ready.json()["tiers"]) == {"host", "nvme"}
        found = json.loads(run("stat", "--json", "--socket", str(sock)).stdout)
        assert [tier["state"] for tier in found["stat"]["tiers"]] == ["ok", "ok"]
        assert "another sidecar" in run("serve", "--config", str(settings)).stderr
        wrong = run("policy", "best", "--socket", str(sock)).stderr
        assert wrong.startswith("tierkv: policy 'best' is not known; use one of auto"), wrong
        assert httpx.get(f"{url}/metrics", timeout=60).text.count("tierkv_up 1.0") == 1
        sidecar.terminate()
        assert sidecar.wait(60) == 0
        assert not sock.exists()
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/healthz")


def wait_for(url: str) -> httpx.Response:
    end = time.monotonic() + 60
    while True:
        try:
            answer = httpx.get(url, timeout=60)
        except httpx.TransportError:
            assert time.monotonic() < end
        else:
            if answer.status_code == 200 or time.monotonic() > end:
                return answer
        time.sleep(0.1)


def shown(stat: StoreStat) -> str:
    console = Console(file=io.StringIO(), width=200)
    show.show(stat, show.rates(stat, stat), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_people_see_everything() -> None:
    text = shown(stat_at(100))
    for expected in (
        "4.0G", "1.0G", "1.9G/s", "0.02 ms", "read-only file system", "off",
        "host 6,000, nvme 1,000", "100.0 MiB", "of 256.0 MiB", "3 clients", "policy evicpress",
        "put_refused_full", "RAM had no room", "kvtc@8x abababab", "rejected", "1,024",
        "spanish: mean KL up to 0.06 > 0.05", "not used by 7 puts: int4: no gate file",
    ):  # fmt: skip
        assert expected in text, expected


def test_an_empty_store_can_be_shown() -> None:
    assert "blocks asked for" in shown(StoreStat())


def test_rates_need_the_same_arena() -> None:
    assert show.rates(stat_at(1), StoreStat(epoch=6, uptime_s=9.0)) == {}
    assert show.rates(stat_at(1), stat_at(1)) == {}
    assert show.rates(stat_at(1), stat_at(3))["asked_blocks"] == 100
