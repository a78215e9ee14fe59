"""The demo's verdict and its cleaning up; `make demo` runs the whole of it."""

import re
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.sidecars import until
from tierkv.errors import TierKVError
from tierkv.fidelity import Fidelity
from tierkv.settings import load
from tierkv.stat import StoreStat, TierStat
from tierkv_service.demo import Demo, run
from tierkv_service.demo_engine import Answer, Durable, Order, Ready, document
from tierkv_service.demo_processes import Processes, run_engine
from tierkv_service.demo_profile import Lossy, prepare
from tierkv_service.demo_vllm import OWN

PROMPT = list(range(300))
TOKENS = [7, 8, 9]


def answer(name: str, tier: str = "", **changes: Any) -> Answer:
    fields: dict[str, Any] = {
        "name": name,
        "prompt": PROMPT,
        "tokens": TOKENS,
        "text": "",
        "ttft_s": 0.5 if tier else 5.0,
        "reused": 256 if tier else 0,
        "sources": {tier: 256} if tier else {},
    }
    return Answer(**fields | changes)


def demo(tmp_path: Path, *changed: Answer, redis: bool = True) -> Demo:
    played = Demo(Console(file=StringIO()), Processes(tmp_path), tmp_path)
    played.ready = Ready(seconds=1.0, block_tokens=128, block_bytes=1000)
    played.redis = redis
    tiers = ("host", "nvme", "redis") if redis else ("host", "nvme")
    answers = [answer("cold"), answer("turn 2", "host"), *(answer(tier, tier) for tier in tiers)]
    played.answers = {one.name: one for one in [*answers, *changed]}
    return played


def test_all_as_promised(tmp_path: Path) -> None:
    played = demo(tmp_path)
    assert played.problems() == []
    assert msgspec.to_builtins(played.report()) == {
        "model": "SmolLM2-135M-Instruct (float32)",
        "prompt_tokens": 300,
        "reused_tokens": 256,
        "ttft_s": {"cold": 5.0, "host": 0.5, "nvme": 0.5, "redis": 0.5},
        "tokens_equal": True,
        "hits_by_tier": {"host": 512, "nvme": 256, "redis": 256},
    }


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (answer("nvme", "nvme", tokens=[7, 8, 1]), "NVMe.*tokens"),
        (answer("redis", "host"), "Redis.*reused"),
        (answer("host", "host", reused=128, sources={"host": 128}), "RAM.*128"),
        (answer("cold", reused=32), "no cache: 32 tokens"),
    ],
)
def test_what_went_wrong_is_said(tmp_path: Path, changed: Answer, says: str) -> None:
    (problem,) = demo(tmp_path, changed).problems()
    assert re.search(says, problem)


def test_without_redis_the_rest_still_counts(tmp_path: Path) -> None:
    played = demo(tmp_path, redis=False)
    assert played.problems() == []
    assert played.report().ttft_s["redis"] is None
    shown = StringIO()
    Console(file=shown, width=80).print(played.table())
    assert "no redis-server" in shown.getvalue()
    assert max(map(len, shown.getvalue().splitlines())) <= 80


def test_vllms_own_cache_is_no_tier(tmp_path: Path) -> None:
    played = Demo(Console(file=StringIO()), Processes(tmp_path), tmp_path, vllm="python")
    complete = demo(tmp_path, answer("turn 2", OWN, reused=288, sources={OWN: 288}))
    played.answers, played.ready = complete.answers, complete.ready
    assert played.problems() == []
    assert played.report().hits_by_tier == {"host": 256, "nvme": 256, "redis": 256}
    shown = StringIO()
    Console(file=shown, width=80).print(played.table())
    assert "on vLLM, prompt of 300 tokens" in shown.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown.getvalue(), "all fits"
    assert re.search(r"vLLM's own cache.* 288 .* 0 MB", shown.getvalue())
    assert max(map(len, shown.getvalue().splitlines())) <= 80


LOSSY = Lossy("kvtc@8x", "a.kvtc", "gate.json", Fidelity.NEAR_LOSSLESS, 0.001, 0.0006)


def lossy(tmp_path: Path, **kl: float) -> Demo:
    """Return a demo whose answers differ in tokens, as they may with loss, and whose KL is this."""
    changed = (
        answer(tier, tier, tokens=[7, 8, 1], kl=kl.get(tier, 0.0004))
        for tier in ("host", "nvme", "redis")
    )
    complete = demo(tmp_path, *changed)
    played = Demo(Console(file=StringIO()), Processes(tmp_path), tmp_path, lossy=LOSSY)
    played.answers, played.ready = complete.answers, complete.ready
    played.seen(Durable(blocks=3, of=3))
    tiers = {"host": 400, "nvme": 320, "redis": 300}
    stored = tuple(TierStat(name=name, used_bytes=size) for name, size in tiers.items())
    played.stored = StoreStat(tiers=stored, counters={"put_fallback": 1})
    return played


def test_a_lossy_profile_is_judged_by_its_class(tmp_path: Path) -> None:
    played = lossy(tmp_path)
    assert played.problems() == []
    assert msgspec.to_builtins(played.report())["loss"] == {
        "profile": "kvtc@8x",
        "fidelity_class": "near_lossless",
        "gate_kl": 0.0006,
        "kl_limit": 0.001,
        "kl": {"host": 0.0004, "nvme": 0.0004, "redis": 0.0004},
        "raw_bytes": 3000,
        "stored_bytes": {"host": 400, "nvme": 320, "redis": 300},
        "blocks": 3,
        "blocks_of_other_profiles": 1,
    }
    said = " ".join(played.loss_lines())
    for part in ("RAM 0.0 MB (7.5x)", "Redis 0.0 MB (10.0x)", "near lossless allows 0.001"):
        assert part in said
    assert "1 of the blocks did not suit kvtc@8x" in said
    (problem,) = lossy(tmp_path, nvme=0.002).problems()
    assert re.search("NVMe.*KL 0.002 is above 0.001", problem)
    assert demo(tmp_path).loss_lines() == []


def test_its_sidecar_has_the_gate_and_its_engines_the_profile(tmp_path: Path) -> None:
    played = lossy(tmp_path)
    one = played.sidecar("one", "redis://here")
    settings = load(tmp_path / "one.toml")
    assert settings.redis is not None
    assert (settings.store.gate, settings.redis.url) == ("gate.json", "redis://here")
    order = played.order(one)
    assert (order.profiles, order.artifact) == (("kvtc@8x",), "a.kvtc")
    assert (order.fidelity, Path(order.scores).parent) == ("near_lossless", tmp_path)
    plain = demo(tmp_path).order(one)
    assert (plain.profiles, plain.fidelity, plain.scores) == (("raw", "lossless"), "exact", "")


def test_what_the_demo_cannot_show_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(TierKVError, match=r"docs/VLLM\.md"):
        run(profile="kvtc@8x", vllm="python")
    with pytest.raises(TierKVError, match="loses nothing"):
        prepare(tmp_path, "lossless", print)
    with pytest.raises(TierKVError, match="'kvtc@9x' is not known; use one of"):
        prepare(tmp_path, "kvtc@9x", print)


def test_every_process_ends_with_the_demo(tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted() -> None:
        with Processes(tmp_path) as processes:
            started.extend(processes.start("sleeper", ["sleep", "60"]) for _ in range(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(process.returncode == -15 for process in started)


def test_processes_end_when_the_demo_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib; from tierkv_service.demo_processes import Processes;"
        "p = Processes(pathlib.Path(sys.argv[1])).start('s', ['sleep', '60']);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    child = int(killed.stdout.readline())
    comm = Path(f"/proc/{child}/comm")
    assert until(lambda: comm.read_text() == "sleep\n"), "setpriv becomes sleep"
    killed.kill()
    killed.communicate()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            break  # ended; whoever adopted it has not looked yet
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize("vllm", ["", sys.executable])
def test_an_engine_that_fails_says_why(tmp_path: Path, vllm: str) -> None:
    order = Order(model=str(tmp_path / "none"), socket=str(tmp_path / "none.sock"), vllm=vllm)
    with Processes(tmp_path) as processes:  # noqa: SIM117 -- the error is caught inside
        with pytest.raises(TierKVError, match="engine failed"):
            run_engine(processes, "first", order, lambda _event: None)
    assert [path.name for path in tmp_path.iterdir()] == ["first.log"]


def test_the_document_is_long_enough() -> None:
    assert len(document().split()) > 2000
