"""Report: what an evaluation leaves in its folder.

rows.json            a row for each profile and domain, as `tierkv eval --json` prints them
pairs.json           KL of each profile over that of each other, paired
rows.parquet         the same as rows.json; beside it sequences, layers, pairs, and fallbacks if any
kl-DOMAIN.png        ratio against KL
report.html          all of it on one page that needs nothing else
gate.json            what the sidecar's `[store] gate` names; entries of earlier evaluations stay
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
from pyarrow import parquet

from tierkv import gate
from tierkv.errors import unavailable
from tierkv.gate import Entry, Gate
from tierkv_codecs.lab import page, plots
from tierkv_codecs.lab.results import Fallback, LayerRow, Pair, Row, SequenceRow, Verdicts

GATE = "gate.json"


class Report(NamedTuple):
    """Everything there is to tell. `about` says what was measured and how, for people."""

    about: dict[str, str]
    rows: Sequence[Row]
    verdicts: dict[str, Verdicts]
    sequences: Sequence[SequenceRow]
    layers: Sequence[LayerRow]
    pairs: Sequence[Pair]
    fallbacks: Sequence[Fallback]
    entries: Sequence[Entry]
    """Of the profiles that can be stored."""


def folder(out: Path) -> Gate:
    """Make a folder ready and return the gate that is in it, an empty one where there is none.

    Its thresholds hold for this evaluation too.

    Raises: TierKVError: it cannot be written to, or holds a gate file that cannot be read.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unavailable(f"cannot write to {out}: {error.strerror}") from error
    return gate.load(out / GATE) if (out / GATE).exists() else Gate()


def write(out: Path, report: Report, old: Gate) -> None:
    """Write all files; the gate keeps what was measured before and not again."""
    for name, rows in {"rows": report.rows, "pairs": report.pairs}.items():
        text = msgspec.json.format(msgspec.json.encode(rows)) + b"\n"
        (out / f"{name}.json").write_bytes(text)
    for name, found in {
        "rows": report.rows,
        "sequences": report.sequences,
        "layers": report.layers,
        "pairs": report.pairs,
        "fallbacks": report.fallbacks,
    }.items():
        if found:
            _write_table(out / f"{name}.parquet", found, report.about)
    images = plots.draw(report.rows)
    for name, image in images.items():
        (out / name).write_bytes(image)
    html = page.render(
        report.about, report.rows, report.verdicts, report.pairs, report.fallbacks, images
    )
    (out / "report.html").write_text(html, encoding="utf-8")
    (out / GATE).write_bytes(gate.dump(gate.merge(old, report.entries)))


def _write_table(path: Path, rows: Sequence[msgspec.Struct], about: dict[str, str]) -> None:
    table = pa.Table.from_pylist([msgspec.structs.asdict(row) for row in rows])
    table = table.replace_schema_metadata({f"tierkv.{key}": value for key, value in about.items()})
    parquet.write_table(table, path)
