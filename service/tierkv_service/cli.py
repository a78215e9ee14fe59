"""Command line: `tierkv serve`, `stat`, `policy`, `explain`, `eval`, `calibrate`, `replay`...

For people by default, `--json` for programs. What the caller must change is one line on standard
error and exit 2. Imports wait until a command needs them, so that `tierkv --help` is quick.
"""

import enum
import logging
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tierkv import __version__
from tierkv.errors import TierKVError, invalid, unavailable
from tierkv_service import replay_options as options

SAMPLE_S = 1.0

app = typer.Typer(
    name="tierkv",
    help="Keep the KV cache of LLM engines in host RAM, NVMe and Redis.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Socket = Annotated[
    Path | None,
    typer.Option("--socket", "-s", help="The sidecar's socket; else TIERKV_SOCKET, else yours."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def _version(asked: bool) -> None:  # noqa: FBT001 - the signature of an option's callback
    if asked:
        print(f"tierkv {__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    """Keep the KV cache of LLM engines in host RAM, NVMe and Redis."""


@app.command()
def serve(
    *,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Settings file; without one: 4 GiB of RAM only."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="File for what the policy is told, asked and answers."),
    ] = None,
) -> None:
    """Run the sidecar until SIGTERM or Ctrl-C."""
    from tierkv.settings import Settings, load

    settings = load(config) if config else Settings()

    from tierkv_service import sidecar

    raise typer.Exit(sidecar.run(settings, record=record))


@app.command()
def stat(
    *,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Show tiers, traffic, rates over a second, queues and refusals of a running sidecar."""
    import msgspec

    from tierkv.client import Client
    from tierkv.settings import client_socket
    from tierkv.stat import StoreStat, from_wire
    from tierkv_connectors.sidecar import SidecarChannel
    from tierkv_service import show

    path = socket or client_socket()
    logging.getLogger("tierkv.client").setLevel(logging.ERROR)  # what it warns of is told below
    channel = SidecarChannel(path, client="stat", arena=False)
    client = Client(channel)

    def ask(*, probe: bool) -> StoreStat:
        found = client.stat(probe=probe)
        if found is None:
            why = f" ({channel.last_error})" if channel.last_error else ""
            raise unavailable(
                f"no sidecar answers on {path}{why}: run `tierkv serve`, or give --socket"
            )
        return from_wire(found)

    try:
        before = ask(probe=False)
        time.sleep(SAMPLE_S)
        after = ask(probe=True)  # what does not answer is no tier that is "ok"
    finally:
        client.close()
    rates = show.rates(before, after)
    if as_json:
        print(msgspec.json.encode({"stat": after, "per_second": rates}).decode())
    else:
        from rich.console import Console

        show.show(after, rates, Console())


@app.command()
def policy(
    name: Annotated[
        str, typer.Argument(help="auto, lru or evicpress; without one: show what decides now.")
    ] = "",
    *,
    socket: Socket = None,
) -> None:
    """Change what keeps, compresses, moves and drops in a running sidecar, until it ends."""
    from tierkv_service import ask

    raise typer.Exit(ask.policy(name, socket))


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="Of a block, 64 hex digits.")] = "",
    *,
    last_drop: Annotated[
        bool, typer.Option("--last-drop", help="Why the last block was given up for room.")
    ] = False,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Say why a block is where it is, in numbers."""
    from tierkv_service import ask

    raise typer.Exit(ask.tell(key, socket, last_drop=last_drop, as_json=as_json))


@app.command(name="eval")
def evaluate(  # noqa: PLR0913 -- one for each option
    *,
    model: Annotated[Path, typer.Option("--model", help="Directory of a transformers model.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for tables, plots and gate.json.")],
    suite: Annotated[
        str, typer.Option("--suite", help="quick: 8 sequences a domain; full: 32.")
    ] = "quick",
    profiles: Annotated[
        str, typer.Option("--profiles", help="Names with commas between them, or all.")
    ] = "all",
    text: Annotated[
        list[str] | None,
        typer.Option("--text", help="NAME=FILE: a domain of your own; may be given again."),
    ] = None,
    artifact: Annotated[
        Path | None, typer.Option("--artifact", help="Of `tierkv calibrate`: kvtc profiles.")
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="Of the engine to gate: bf16, fp16 or fp32.")
    ] = "bf16",
    tokens_per_block: Annotated[
        int, typer.Option("--tokens-per-block", help="Of the engine's blocks.")
    ] = 128,
    context: Annotated[
        int, typer.Option("--context", help="Tokens of prefix; the gate allows twice as many.")
    ] = 1024,
    tail: Annotated[
        int,
        typer.Option("--tail", help="Last tokens of the prefix to keep exact, as papers do: 128."),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Measure what lossy profiles do to a model's answers, and write the gate that allows them."""
    from tierkv_service.evaluate import Order, run

    order = Order(
        model=model,
        out=out,
        suite=suite,
        profiles=profiles,
        texts=tuple(text or ()),
        artifact=artifact,
        kv_dtype=kv_dtype,
        tokens_per_block=tokens_per_block,
        context=context,
        tail=tail,
    )
    raise typer.Exit(run(order, as_json=as_json))


class ServedClass(enum.StrEnum):
    """Fidelity that readers accept; a better one is always accepted too."""

    EXACT = "exact"
    NEAR_LOSSLESS = "near_lossless"
    SAFE = "safe"
    ECONOMY = "economy"


@app.command()
def replay(  # noqa: PLR0913 -- one for each option
    trace: Annotated[
        Path,
        typer.Argument(
            help="JSON lines as Mooncake publishes them; or what `serve --record` wrote."
        ),
    ],
    *,
    policy: options.Policy = None,
    config: options.Config = None,
    fidelity: Annotated[
        ServedClass, typer.Option("--class", help="What readers accept, with --config.")
    ] = ServedClass.SAFE,
    engines: options.Engines = 0,
    seed: options.Seed = 0,
    hints: options.ToldHints = None,
    sensitivity: options.SensitivityCv = 0.0,
    kl_floor: options.KlFloor = None,
    blocks: options.Blocks = None,
    plot: options.Plot = None,
    file_tokens: options.FileTokens = None,
    block_tokens: options.BlockTokens = None,
    as_json: Json = False,
) -> None:
    """Replay a trace of requests through a policy and count what it would have hit."""
    from tierkv_service.replay import Order, run
    from tierkv_service.replay_record import run_record
    from tierkv_service.replay_serving import Setting

    run_record(trace, as_json=as_json)

    setting = None
    if config is None and (hints or sensitivity or kl_floor is not None):
        raise invalid("--hints, --sensitivity-cv and --kl-floor go with --config")
    if config is not None:
        name, told = policy or "evicpress", hints and hints.value
        setting = Setting(config, name, fidelity.value, engines, seed, told, sensitivity, kl_floor)
    order = Order(trace, policy or "lru", setting, blocks, plot, file_tokens, block_tokens)
    raise typer.Exit(run(order, as_json=as_json))


@app.command()
def advise(
    *,
    scenario: Annotated[
        str, typer.Option("--scenario", help="h100-8b, small, or one's own TOML file.")
    ] = "h100-8b",
    fidelity: Annotated[
        ServedClass, typer.Option("--class", help="What readers accept.")
    ] = ServedClass.SAFE,
    position: Annotated[
        int, typer.Option("--position", min=0, help="Token at which the loaded run starts.")
    ] = 0,
) -> None:
    """Say from which bandwidth on loading pays, and what each profile earns in each tier."""
    from tierkv_service.advise import run

    raise typer.Exit(run(scenario, fidelity.value, position))


@app.command()
def calibrate(
    *,
    model: Annotated[Path, typer.Option("--model", help="Directory of a transformers model.")],
    out: Annotated[Path, typer.Option("--out", help="The artifact to write.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text", help="A text of the kind that is served; may be given again. Else the lab's."
        ),
    ] = None,
    ratios: Annotated[
        str, typer.Option("--ratios", help="Levels of the progressive stream.")
    ] = "4,8,16,32",
    tokens: Annotated[int, typer.Option("--tokens", help="The most tokens to read.")] = 65536,
) -> None:
    """Make the artifact that kvtc profiles need: a basis and bit plans for one model.

    Without --text the calibration texts of the quality lab are read: chapters of public domain
    books, of Python's language reference, and modules of its standard library. Give text of every
    kind and language that will be served; blocks of other kinds are stored by another codec.
    """
    from tierkv_service.calibrate import Order, run

    raise typer.Exit(run(Order(model, out, tuple(text or ()), ratios, tokens)))


class Engine(enum.StrEnum):
    """What the demo's model runs on."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"


@app.command()
def demo(
    *,
    as_json: Json = False,
    engine: Annotated[
        Engine, typer.Option("--engine", help="vllm: its real HTTP server.")
    ] = Engine.TRANSFORMERS,
    engine_python: Annotated[
        str,
        typer.Option(
            "--engine-python", help="The Python that has vLLM; else this one.", show_default=False
        ),
    ] = sys.executable,
    profile: Annotated[
        str,
        typer.Option(
            "--profile",
            help="Store with a lossy profile, such as kvtc@8x or int8; the first time it is"
            " calibrated and measured, which takes minutes.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Show on this machine what a real small model gains from tierkv."""
    from tierkv_service.demo import run

    vllm = engine_python if engine == Engine.VLLM else ""
    raise typer.Exit(run(as_json=as_json, vllm=vllm, profile=profile))


def main() -> None:
    """Run a command; an error of tierkv is one line and exit 2."""
    try:
        app()
    except TierKVError as error:
        _end(str(error))
    except ModuleNotFoundError as error:
        if str(error.name).startswith("tierkv"):
            raise
        _end(
            f"{error.name} is not installed: pip install 'tierkv-sidecar[demo,lab]' has everything"
        )


def _end(message: str) -> NoReturn:
    print(f"tierkv: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
