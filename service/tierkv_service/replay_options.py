"""The options of `tierkv replay`, as typer reads them."""

import enum
from pathlib import Path
from typing import Annotated

import typer


class Hints(enum.StrEnum):
    """What the clients of a replay tell of the future."""

    CLOSED = "closed"


Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="lru, evicpress, arc, s3fifo, gdsf or belady; lru-prompt-order, arc-tail-first or"
        " s3fifo-tail-first for the other order of a prompt's blocks. With --config: evicpress"
        " (else it is lru), evicpress-second-sight, clairvoyant, or lru@PROFILE.",
    ),
]
Config = Annotated[
    str | None,
    typer.Option("--config", help="A scenario: h100-8b, small, or one's own TOML file."),
]
Engines = Annotated[
    int, typer.Option("--engines", min=0, help="Serve from a queue with so many engines.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of what is sampled and drawn.")]
ToldHints = Annotated[
    Hints | None,
    typer.Option("--hints", help="Clients say with a request that none goes on with it."),
]
SensitivityCv = Annotated[
    float,
    typer.Option(
        "--sensitivity-cv",
        min=0.0,
        max=4.0,
        help="How much sessions differ in what losses do to them: lognormal around 1.",
    ),
]
KlFloor = Annotated[
    float | None,
    typer.Option(
        "--kl-floor",
        min=0.0,
        help="No copy may lose more KL than this (nats), times its session's sensitivity.",
    ),
]
Blocks = Annotated[
    int | None, typer.Option("--blocks", help="One tier of so many equal blocks, and no codec.")
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw hits over capacities for all policies to this PNG file."),
]
FileTokens = Annotated[
    int | None,
    typer.Option("--file-tokens", min=1, help="Per block in the file; else it is worked out."),
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        "--block-tokens", min=1, help="Per block of the replay, a multiple of the file's."
    ),
]
