"""`tierkv calibrate`: an artifact of `kvtc` from a model directory and text, with progress."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

from tierkv.codec import ARTIFACT_FORMAT
from tierkv.errors import invalid
from tierkv_codecs.kvtc_artifact import (
    ANCHOR,
    MOST_LEVELS,
    USUAL,
    Artifact,
    ArtifactHeader,
    unpack,
)
from tierkv_codecs.kvtc_calibrate import calibrate
from tierkv_codecs.lab.texts import Document, calibration_texts, digest
from tierkv_connectors.calibration import CalibrationSubject, capture, part_of, sequences_of

LINE_S = 5.0
"""Seconds between two lines of progress of one stage, where no terminal shows a bar."""
LEAST_RATIO, MOST_RATIO = 2.0, 128.0


class Order(NamedTuple):
    """What `tierkv calibrate` was asked for. No texts: those of the lab."""

    model: Path
    out: Path
    texts: tuple[Path, ...] = ()
    ratios: str = "4,8,16,32"
    tokens: int = 65536


def run(order: Order) -> int:
    """Calibrate, write the artifact and say what it is. Raises: TierKVError: what to change."""
    with _progress() as on_step:
        made = make(order, on_step)
    _show(made, order.out, Console())
    return 0


class Made(NamedTuple):
    """An artifact that was written, its bytes and the seconds that it took."""

    artifact: Artifact
    size: int
    seconds: float


def make(order: Order, on_step: Callable[[str, float], None]) -> Made:
    """Calibrate and write the artifact; `on_step` is told each stage and its share.

    Raises: TierKVError: what to change.
    """
    ratios = _ratios(order.ratios)
    documents = [_read(path) for path in order.texts] or calibration_texts()
    if not order.out.parent.is_dir():
        raise invalid(f"{order.out.parent} is no folder: make it, or give another --out")
    try:  # now, not after minutes of work
        tempfile.TemporaryFile(dir=order.out.parent).close()
    except OSError as error:
        raise invalid(f"cannot write {order.out}: {error.strerror}; give another --out") from error
    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    subject = CalibrationSubject(order.model)
    identity = subject.identity
    part = part_of(identity)
    sequences = sequences_of([subject.tokens(one.text) for one in documents], order.tokens)
    rows = capture(subject, sequences, on_step)
    del subject  # the model's memory is wanted for the basis
    header = ArtifactHeader(
        format=ARTIFACT_FORMAT,
        model=identity.model,
        weights=identity.weights,
        part=tuple(part),
        layers=identity.layers,
        ratios=ratios,
        realised=(0.0,) * len(ratios),
        errors=((0.0, 0.0),) * (len(ratios) + 1),
        step=0.0,
        drift_steps=(1.0,) * len(ratios),
        grades=(0,) * ANCHOR,
        cuts=(0.0,) * ANCHOR,
        tokens=len(rows.keys),
        text=digest(documents),
    )
    data = calibrate(rows, header, on_step)
    _write(order.out, data)
    return Made(unpack(data), len(data), time.monotonic() - started)


def _ratios(text: str) -> tuple[float, ...]:
    """Return ratios from the coarsest. Raises: TierKVError (invalid)."""
    try:
        found = sorted({float(part) for part in text.split(",")}, reverse=True)
    except ValueError:
        found = []
    sound = found and found[-1] >= LEAST_RATIO and found[0] <= MOST_RATIO
    if not sound or len(found) > MOST_LEVELS:
        raise invalid(
            f"--ratios {text!r} is not a list of 1 to {MOST_LEVELS} ratios from {LEAST_RATIO:g} to"
            f" {MOST_RATIO:g}, for example 4,8,16,32"
        )
    return tuple(found)


def _read(path: Path) -> Document:
    try:
        return Document("given", path.name, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"cannot read {path} as UTF-8 text: {error}") from error


def _write(path: Path, data: bytes) -> None:
    """Replace the file as a whole: an artifact that is cut off would be refused everywhere."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Show progress on standard error: a bar for each stage, or lines where nobody looks."""
    if not sys.stderr.isatty():
        yield in_lines(lambda line: Console(stderr=True).print(line, highlight=False))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as shown:
        tasks = {
            name: shown.add_task(name, total=1.0, start=False)
            for name in ("reading", "basis", "errors", "plan")
        }

        def on_step(name: str, share: float) -> None:
            shown.start_task(tasks[name])
            shown.update(tasks[name], completed=share)

        yield on_step


def in_lines(write: Callable[[str], None]) -> Callable[[str, float], None]:
    """Return what tells of progress in lines: each stage's start and end, and every few seconds."""
    told: dict[str, float] = {}

    def on_step(name: str, share: float) -> None:
        now = time.monotonic()
        if name in told and share < 1 and now - told[name] < LINE_S:
            return
        told[name] = now
        write(f"{name} {share:4.0%}")

    return on_step


def _show(made: Made, path: Path, console: Console) -> None:
    artifact, header = made.artifact, made.artifact.header
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("profile", no_wrap=True)
    for head in ("expected ratio", "components K", "components V"):
        table.add_column(head, justify="right")
    for level, (ratio, realised) in enumerate(zip(header.ratios, header.realised, strict=True)):
        plan = artifact.plan(level, USUAL)
        ranks = [str(artifact.ready(side, plan).rank) for side in (0, 1)]
        table.add_row(f"kvtc@{ratio:g}x", f"{realised:.1f}", *ranks)
    console.print(table)
    console.print(
        f"{path}: {made.size / 1e6:.1f} MB from {header.tokens} tokens in {made.seconds:.0f} s,"
        f" digest {artifact.digest.hex()[:16]}",
        highlight=False,
    )
