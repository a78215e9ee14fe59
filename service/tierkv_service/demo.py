"""The demo: what a real small model gains from RAM, NVMe and Redis, on this machine.

One conversation about a document is held four ways: without a cache, after the engine was restarted
(its prefix comes from RAM), after the sidecar was started anew (NVMe), and with a new sidecar that
shares nothing with the first but Redis. All must give the same tokens.
"""

import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from tierkv.errors import invalid, unavailable
from tierkv.stat import StoreStat
from tierkv_connectors.models import smollm2
from tierkv_service import demo_profile, demo_vllm
from tierkv_service.demo_engine import Answer, Durable, Event, Order, Ready
from tierkv_service.demo_processes import Processes, Sidecar, run_engine, start_redis
from tierkv_service.demo_profile import Lossy

MODEL = "SmolLM2-135M-Instruct (float32)"
COPY_S = 60.0
INTERRUPTED = 130

HITS = {"host": "RAM, new engine", "nvme": "NVMe, new start", "redis": "Redis, new sidecar"}
NAMES = {"host": "RAM", "nvme": "NVMe", "redis": "Redis"}
LABELS = {"turn 1": "first turn", "cold": "no cache", "turn 2": "RAM, next turn", **HITS}


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """What a lossy profile saves and costs; KL in nats per token, by tier and of the gate."""

    profile: str
    fidelity_class: str
    gate_kl: float
    kl_limit: float
    kl: dict[str, float]
    raw_bytes: int
    stored_bytes: dict[str, int]
    blocks: int
    blocks_of_other_profiles: int


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `--json` prints; `loss` only of a lossy profile."""

    model: str
    prompt_tokens: int
    reused_tokens: int
    ttft_s: dict[str, float | None]
    tokens_equal: bool
    hits_by_tier: dict[str, int]
    loss: Loss | None = None


class Demo:
    """The scenario: does it step by step, and keeps what was seen.

    Args:
        console: for people.
        processes: what it starts.
        model: directory of the model.
        vllm: Python that has vLLM, for engines on that; "": on transformers.
        lossy: the profile that blocks are stored with; none: losslessly.
    """

    def __init__(
        self,
        console: Console,
        processes: Processes,
        model: Path,
        vllm: str = "",
        lossy: Lossy | None = None,
    ) -> None:
        self.answers: dict[str, Answer] = {}
        self.ready = Ready(seconds=0.0, block_tokens=1, block_bytes=0)
        self.redis = True
        self._console = console
        self._processes = processes
        self._model = str(model)
        self._vllm = vllm
        self._labels = LABELS | ({"turn 2": demo_vllm.OWN} if vllm else {})
        self._durable = Durable(blocks=0, of=0)
        self._lossy = lossy
        self.stored = StoreStat()
        """What the sidecar said when its blocks were in every tier."""

    def play(self) -> None:
        """Run all of it. Raises: TierKVError: something does not start or does not work."""
        with self._step("starting redis-server and a sidecar"):
            url = start_redis(self._processes)
            one = self.sidecar("one", url)
            one.start()
        self.redis = bool(url)
        if not url:
            self._console.print(
                "[yellow]no redis-server here, so no Redis part[/] (apt install redis-server)"
            )
        with self._step("first engine: two turns about a document, then without the cache"):
            run_engine(self._processes, "first", self.order(one), self.seen)
        prompt = self.answers["cold"].prompt
        with self._step("second engine: the last turn again"):
            self._again("host", one, prompt)
        with self._step("copying to the lower tiers, then restarting the sidecar"):
            if not one.copied(self._durable.of, COPY_S):
                raise unavailable("the sidecar did not copy its blocks to every lower tier")
            self.stored = one.stat() or self.stored
            one.stop()
            one.start()
        with self._step("third engine: the last turn again, the sidecar's RAM is empty"):
            self._again("nvme", one, prompt)
        one.stop()
        if url:
            with self._step("fourth engine: the last turn again, with a new sidecar"):
                two = self.sidecar("two", url)
                two.start()
                self._again("redis", two, prompt)
                two.stop()

    def problems(self) -> list[str]:
        """Return what did not go as promised, for people."""
        cold = self.answers["cold"]
        block = self.ready.block_tokens
        expected = (len(cold.prompt) - 1) // block * block
        found = []
        if cold.reused:
            found.append(f"no cache: {cold.reused} tokens were reused")
        if self._durable.blocks < self._durable.of:
            found.append(f"{self._durable.blocks} of {self._durable.of} blocks were flushed")
        for tier in self._tiers():
            answer = self.answers[tier]
            if self._lossy and (answer.kl is None or answer.kl > self._lossy.limit):
                found.append(
                    f"{HITS[tier]}: KL {answer.kl} is above {self._lossy.limit}, the limit of its"
                    " class"
                )
            if not self._lossy and answer.tokens != cold.tokens:
                found.append(f"{HITS[tier]}: the tokens are not those without a cache")
            if answer.sources != {tier: expected}:
                found.append(f"{HITS[tier]}: reused {answer.sources}, not {expected} from {tier}")
        return found

    def report(self) -> Report:
        """Return the figures."""
        cold = self.answers["cold"]
        hits = Counter[str]()
        for name, answer in self.answers.items():
            hits.update(answer.sources if name != "cold" else {})
        ttft_s = {name: self._ttft(name) for name in ("cold", *HITS)}
        return Report(
            model=MODEL,
            prompt_tokens=len(cold.prompt),
            reused_tokens=self.answers["host"].reused,
            ttft_s=ttft_s,
            tokens_equal=all(self.answers[tier].tokens == cold.tokens for tier in self._tiers()),
            hits_by_tier={tier: hits[tier] for tier in HITS},
            loss=self._loss(self._lossy) if self._lossy else None,
        )

    def _loss(self, lossy: Lossy) -> Loss:
        return Loss(
            profile=lossy.profile,
            fidelity_class=lossy.fidelity.label,
            gate_kl=lossy.kl,
            kl_limit=lossy.limit,
            kl={tier: self.answers[tier].kl or 0.0 for tier in self._tiers()},
            raw_bytes=self._durable.of * self.ready.block_bytes,
            stored_bytes={tier.name: tier.used_bytes for tier in self.stored.tiers},
            blocks=self._durable.of,
            blocks_of_other_profiles=self.stored.counters.get("put_fallback", 0),
        )

    def loss_lines(self) -> list[str]:
        """Return what the lossy profile saved and cost, for people; nothing without one."""
        if self._lossy is None:
            return []
        loss = self._loss(self._lossy)
        raw = loss.raw_bytes
        tiers = ", ".join(
            f"{NAMES[tier]} {size / 1e6:.1f} MB ({raw / size:.1f}x)"
            for tier, size in loss.stored_bytes.items()
            if size
        )
        kl = ", ".join(f"{NAMES[tier]} {one:.2g}" for tier, one in loss.kl.items())
        word = loss.fidelity_class.replace("_", " ")
        stored = f"{loss.profile}: {loss.blocks} blocks of {raw / 1e6:.1f} MB (float32)"
        allowed = f"{word} allows {loss.kl_limit:g}, the gate measured up to {loss.gate_kl:.2g}"
        lines = [f"{stored} are in {tiers}", f"KL of what follows: {kl} nats per token; {allowed}"]
        if loss.blocks_of_other_profiles:
            other = f"{loss.blocks_of_other_profiles} of the blocks did not suit {loss.profile}"
            lines.append(f"{other} and were stored losslessly")
        return lines

    def table(self) -> Table:
        """Return the figures for people."""
        cold = self.answers["cold"]
        engine = "vLLM" if self._vllm else "transformers"
        title = f"{MODEL} on {engine}, prompt of {len(cold.prompt)} tokens"
        caption = "" if self.redis else "no Redis line: there is no redis-server here"
        table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD)
        table.add_column(no_wrap=True)
        for heading in ("TTFT", "faster", "reused", "computed", "KV", "tokens"):
            table.add_column(heading, justify="right")
        for name in ("cold", "turn 2", *self._tiers()):
            answer = self.answers[name]
            tokens = sum(answer.sources.get(tier, 0) for tier in HITS)
            loaded = tokens // self.ready.block_tokens * self.ready.block_bytes
            table.add_row(
                self._labels[name],
                f"{answer.ttft_s:.2f} s",
                "" if name == "cold" else f"{cold.ttft_s / answer.ttft_s:.1f} x",
                f"{answer.reused}",
                f"{len(answer.prompt) - answer.reused}",
                f"{loaded / 1e6:.0f} MB",
                "" if name == "cold" else "equal" if answer.tokens == cold.tokens else "DIFFER",
            )
        return table

    def _tiers(self) -> list[str]:
        return [tier for tier in HITS if tier != "redis" or self.redis]

    def _ttft(self, name: str) -> float | None:
        return round(self.answers[name].ttft_s, 4) if name in self.answers else None

    def _again(self, tier: str, sidecar: Sidecar, prompt: list[int]) -> None:
        order = msgspec.structs.replace(self.order(sidecar), name=tier, prompt=prompt)
        run_engine(self._processes, tier, order, self.seen)

    def sidecar(self, name: str, redis_url: str) -> Sidecar:
        """Return a sidecar whose gate allows the profile."""
        return Sidecar(self._processes, name, redis_url, self._lossy.gate if self._lossy else "")

    def order(self, sidecar: Sidecar) -> Order:
        """Return what an engine of the demo is for."""
        order = Order(model=self._model, socket=str(sidecar.socket), vllm=self._vllm)
        lossy = self._lossy
        if lossy is None:
            return order
        return msgspec.structs.replace(
            order,
            profiles=(lossy.profile,),
            artifact=lossy.artifact,
            fidelity=lossy.fidelity.label,
            scores=str(self._processes.folder / "exact.npy"),
        )

    def seen(self, event: Event) -> None:
        """Keep what an engine tells, and show it."""
        if isinstance(event, Ready):
            self.ready = event
            self._console.print(f"   the model is loaded ({event.seconds:.1f} s)", style="dim")
        elif isinstance(event, Durable):
            self._durable = event
        else:
            self.answers[event.name] = event
            computed = len(event.prompt) - event.reused
            where = ", ".join(event.sources) or "nowhere"
            self._console.print(
                f"   {self._labels[event.name]}: first token after [bold]{event.ttft_s:.2f} s[/],"
                f" {event.reused} tokens from {where}, {computed} computed"
            )
            self._console.print(f"   {event.text.strip()!r}", style="dim", markup=False)

    @contextmanager
    def _step(self, text: str) -> Iterator[None]:
        started = time.monotonic()
        with self._console.status(text):
            yield
        self._console.print(f"[green]done[/] {text} ({time.monotonic() - started:.1f} s)")


def run(*, as_json: bool = False, vllm: str = "", profile: str = "") -> int:
    """Run the demo; the exit code says whether everything went as promised.

    Args:
        as_json: print the figures for programs.
        vllm: Python that has vLLM, for engines on that; "": on transformers.
        profile: a lossy one to store blocks with; "": losslessly.

    Raises: TierKVError: the model cannot be had, there is no vLLM, the profile is not allowed, or a
        process does not start.
    """
    console = Console(stderr=True)
    if profile and vllm:
        raise invalid("--profile needs --engine transformers; docs/VLLM.md has it for vLLM")
    if vllm:
        vllm = demo_vllm.find(vllm)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="tierkv-demo-"))
    try:

        def write(line: str) -> None:
            console.print(line, style="dim", markup=False, highlight=False)

        model = smollm2(progress=write)
        lossy = demo_profile.prepare(model, profile, write) if profile else None
        with Processes(folder) as processes:
            demo = Demo(console, processes, model, vllm, lossy)
            demo.play()
    except KeyboardInterrupt:
        console.print("interrupted")
        return INTERRUPTED
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        sys.stdout.write(msgspec.json.encode(demo.report()).decode() + "\n")
    else:
        Console().print(demo.table())
        for line in demo.loss_lines():
            Console().print(line, markup=False, highlight=False)
    if vllm:
        console.print("the same by hand, with a text or token ids as the PROMPT:", style="dim")
        for line in demo_vllm.by_hand(vllm, str(model)):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    problems = demo.problems()
    for problem in problems:
        console.print(f"[red]failed[/] {problem}")
    return 1 if problems else 0
