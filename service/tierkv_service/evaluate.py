"""`tierkv eval`: the quality lab on a model directory, with progress, tables and files."""

import contextlib
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging

from tierkv import __version__
from tierkv.errors import invalid
from tierkv.gate import Gate
from tierkv.identity import Identity
from tierkv_codecs import CODECS, Codec, CodecRegistry, kvtc_artifact
from tierkv_codecs.kvtc import codecs_of
from tierkv_codecs.lab import fallbacks, report, results
from tierkv_codecs.lab.evaluate import SUITES, Results, Step, Suite, evaluate
from tierkv_codecs.lab.report import GATE, Report
from tierkv_codecs.lab.results import Pair, Row, Verdicts
from tierkv_codecs.lab.texts import Document, digest, evaluation_texts
from tierkv_codecs.lab.yardsticks import registry_with
from tierkv_connectors.subject import TransformersSubject

ALL = "all"
WIDE = 120
"""Columns of tables that no terminal shows."""
_COLOURS = {
    "exact": "green",
    "near_lossless": "green",
    "safe": "blue",
    "economy": "yellow",
    "rejected": "red",
}


class Order(NamedTuple):
    """What `tierkv eval` was asked for."""

    model: Path
    out: Path
    suite: str
    profiles: str = ALL
    texts: tuple[str, ...] = ()
    """NAME=FILE, each a domain beside the shipped ones; one NAME may have several files."""
    artifact: Path | None = None
    kv_dtype: str = "bf16"
    tokens_per_block: int = 128
    context: int = 1024
    tail: int = 0


def run(order: Order, *, as_json: bool) -> int:
    """Evaluate, write the files and print the outcome. Raises: TierKVError: what to change."""
    if order.suite not in SUITES:
        raise invalid(f"suite {order.suite!r} is not known; use one of {', '.join(SUITES)}")
    with _progress() as on_step:
        full = measure(order, SUITES[order.suite], on_step)
    if as_json:
        print(msgspec.json.encode(full.rows).decode())
    else:
        console = Console(markup=False)
        _show(
            full, order.out, console if console.is_terminal else Console(markup=False, width=WIDE)
        )
    return 0


def measure(order: Order, suite: Suite, on_step: Callable[[Step], None]) -> Report:
    """Evaluate what was ordered and write the files. Raises: TierKVError: what to change."""
    transformers_logging.disable_progress_bar()
    suite = suite._replace(context=order.context, tail=order.tail)
    documents = (*evaluation_texts(), *map(_read_text, order.texts))
    old = report.folder(order.out)
    subject = TransformersSubject(order.model, order.kv_dtype, order.tokens_per_block)
    registry = registry_with(CODECS)
    about = _add_artifact(registry, order.artifact, subject.identity)
    codecs = _chosen(order.profiles, registry)
    others = fallbacks.candidates(CODECS.all(), codecs, old)
    started = time.monotonic()
    found = evaluate(subject, codecs, registry, documents, suite, on_step, others)
    found = fallbacks.settle(found, subject.identity, old)
    about |= _about(suite, subject, documents, time.monotonic() - started)
    full = _report(found, subject, about, old)
    report.write(order.out, full, old)
    return full


def _read_text(named: str) -> Document:
    name, equals, path = named.partition("=")
    if not (name and equals and path):
        raise invalid(f"--text {named!r} is not NAME=FILE, for example german=faust.txt")
    try:
        return Document(name, path, Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"cannot read {path} as UTF-8 text: {error}") from error


def _add_artifact(registry: CodecRegistry, path: Path | None, identity: Identity) -> dict[str, str]:
    """Add an artifact's profiles; return what is to be said of it.

    Raises: TierKVError: it cannot be read, or was calibrated for another model.
    """
    if path is None:
        return {}
    artifact = kvtc_artifact.read(path)
    artifact.check(identity, artifact.part)
    for codec in codecs_of(artifact):
        registry.add(codec)
    return {"artifact": f"{path.name}, {path.stat().st_size} bytes, {artifact.digest.hex()}"}


def _chosen(profiles: str, registry: CodecRegistry) -> Sequence[Codec]:
    """Return the codecs to measure. Raises: TierKVError (invalid) naming the known ones."""
    if profiles == ALL:
        return registry.all()
    return [registry.named(name.strip()) for name in dict.fromkeys(profiles.split(","))]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Step], None]]:
    """Show progress on standard error: a bar where a person looks, a line for each step else."""
    if not sys.stderr.isatty():
        yield lambda step: print(f"{step.share:4.0%} {step.text}", file=sys.stderr, flush=True)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("starting", total=1.0)
        yield lambda step: shown.update(task, description=step.text, completed=step.share)


def _about(
    suite: Suite, subject: TransformersSubject, documents: Sequence[Document], seconds: float
) -> dict[str, str]:
    identity = subject.identity
    return {
        "model": f"{identity.model} ({identity.weights})",
        "family": identity.family.hex(),
        "KV dtype": f"{identity.kv_dtype}, ratios against 16 bit",
        "suite": f"{suite.name}: {suite.sequences} sequences a domain, {suite.context} tokens of"
        f" prefix (the last {suite.tail} exact), {suite.continuation} of continuation,"
        f" {identity.tokens_per_block} a block",
        "texts": digest(documents),
        "took": f"{seconds:.0f} s, {torch.get_num_threads()} threads, {platform.machine()}",
        "versions": f"tierkv {__version__}, torch {torch.__version__},"
        f" Python {platform.python_version()}",
    }


def _report(
    found: Results, subject: TransformersSubject, about: dict[str, str], old: Gate
) -> Report:
    entries = results.entries(found, subject.identity)
    verdicts = results.verdicts(found, entries, old.thresholds)
    return Report(
        about=about,
        rows=results.rows(found, verdicts),
        verdicts=verdicts,
        sequences=results.sequences(found),
        layers=results.layers(found),
        pairs=results.pairs(found),
        fallbacks=results.fallbacks(found),
        entries=results.storable(entries),
    )


def _show(full: Report, out: Path, console: Console) -> None:
    console.print(_rows(full.rows))
    console.print(_classes(full.verdicts))
    found = results.matches(full.pairs)
    if found:
        console.print(_pairs(found))
    for one in full.fallbacks:
        share = f"{one.share:.1%} of its blocks went to {one.fallback}: {one.reason}"
        console.print(f"{one.profile}, {one.domain}: {share}")
    console.print(f"files: {out}; the sidecar's settings take {out / GATE} as [store] gate")


def _rows(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("profile", "domain"):
        table.add_column(head, no_wrap=True)
    heads = ("ratio", "all", "KL", "95% interval", "p99", "top-1", "dNLL", "needles", "enc", "dec")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    before = ""
    for row in rows:
        needles = f"{row.needle_ok}/{row.needle_n}" if row.needle_n else ""
        table.add_row(
            row.profile if row.profile != before else "",
            row.domain,
            f"{row.ratio_payload:.2f}",
            f"{row.ratio_total:.2f}",
            f"{row.kl_mean:.2g}",
            f"{row.kl_lo:.2g}-{row.kl_hi:.2g}",
            f"{row.kl_p99:.2g}",
            f"{row.top1:.1%}",
            f"{row.dnll:+.3f}",
            needles,
            f"{row.encode_gbps:.2f}",
            f"{row.decode_gbps:.2f}",
        )
        before = row.profile
    return table


def _pairs(pairs: Sequence[Pair]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("profile", "against", "domain"):
        table.add_column(head, no_wrap=True)
    for head in ("ratio", "KL of its KL", "95% interval, paired"):
        table.add_column(head, justify="right", no_wrap=True)
    for pair in pairs:
        interval = f"{pair.kl_ratio_lo:.2f}-{pair.kl_ratio_hi:.2f}"
        cells = (f"{pair.ratio_payload:.2f}", f"{pair.kl_ratio:.2f}", interval)
        table.add_row(pair.profile, pair.reference, pair.domain, *cells)
    return table


def _classes(verdicts: dict[str, Verdicts]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("profile", "class", "what stands against a better one"):
        table.add_column(head)
    for name, one in verdicts.items():
        shown = Text(one.fidelity_class.replace("_", " "), style=_COLOURS[one.fidelity_class])
        table.add_row(name, shown, one.why)
    return table
