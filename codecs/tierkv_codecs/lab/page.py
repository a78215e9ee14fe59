"""Page: an evaluation as one HTML file that loads nothing."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tierkv_codecs.lab.results import Fallback, Pair, Row, Verdicts

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  color: #1f2328; background: #fff; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #d1d9e0; text-align: right; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
img { max-width: 49%; } dt { font-weight: 600; float: left; clear: left; width: 12rem; }
dd { margin-left: 12.5rem; overflow-wrap: anywhere; }
.rejected { color: #cf222e; } .economy { color: #9a6700; } .safe { color: #0969da; }
.near_lossless, .exact { color: #1a7f37; }
"""

_CLASSES = "By the worst domain and the end of each 95% interval that speaks against the profile."
_PAIRS = (
    "Mean KL of the profile over that of the one in the column, on the same sequences: value and"
    " upper end of its paired 95% interval."
)
_ROW_HEADS = (
    "profile", "domain", "ratio, coded", "ratio, all", "KL mean", "95% interval", "KL p99", "top-1",
    "dNLL", "needles", "encode GB/s", "decode GB/s", "class",
)  # fmt: skip


def render(
    about: Mapping[str, str],
    rows: Sequence[Row],
    verdicts: Mapping[str, Verdicts],
    pairs: Sequence[Pair],
    fallbacks: Sequence[Fallback],
    images: Mapping[str, bytes],
) -> str:
    """Return the page's text."""
    facts = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in about.items())
    classes = _table(
        ("profile", "class", "what stands against a better one"),
        (
            (escape(name), _class(one.fidelity_class), escape(one.why))
            for name, one in verdicts.items()
        ),
    )
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>tierkv quality report</title>",
        f"<style>{_STYLE}</style><h1>tierkv quality report</h1><dl>{facts}</dl>",
        f"<h2>Classes</h2><p>{_CLASSES}</p>{classes}",
        *_fallbacks(fallbacks),
        *(_image(name, image) for name, image in images.items()),
        f"<h2>Rows</h2>{_table(_ROW_HEADS, map(_row, rows))}",
        f"<h2>KL against KL</h2><p>{_PAIRS}</p>",
        *_pairs(pairs),
    ]
    return "\n".join(parts) + "</html>\n"


def _row(row: Row) -> tuple[str, ...]:
    needles = f"{row.needle_ok}/{row.needle_n}" if row.needle_n else ""
    return (
        escape(row.profile),
        escape(row.domain),
        f"{row.ratio_payload:.2f}",
        f"{row.ratio_total:.2f}",
        f"{row.kl_mean:.2g}",
        f"{row.kl_lo:.2g} to {row.kl_hi:.2g}",
        f"{row.kl_p99:.2g}",
        f"{row.top1:.1%}",
        f"{row.dnll:+.4f}",
        needles,
        f"{row.encode_gbps:.2f}",
        f"{row.decode_gbps:.2f}",
        _class(row.fidelity_class),
    )


def _fallbacks(fallbacks: Sequence[Fallback]) -> Iterable[str]:
    if fallbacks:
        yield "<h2>Blocks that another profile took</h2>"
        yield _table(
            ("profile", "domain", "taken by", "blocks", "share", "reason"),
            (
                (escape(one.profile), escape(one.domain), escape(one.fallback), str(one.blocks),
                 f"{one.share:.1%}", escape(one.reason))
                for one in fallbacks
            ),
        )  # fmt: skip


def _pairs(pairs: Sequence[Pair]) -> Iterable[str]:
    names = list(dict.fromkeys(pair.profile for pair in pairs))
    for domain in dict.fromkeys(pair.domain for pair in pairs):
        cells = {(one.profile, one.reference): one for one in pairs if one.domain == domain}
        yield f"<h3>{escape(domain)}</h3>"
        yield _table(
            ("profile", *map(escape, names)),
            ((escape(one), *(_cell(cells.get((one, other))) for other in names)) for one in names),
        )


def _cell(pair: Pair | None) -> str:
    return f"{pair.kl_ratio:.2f} &le; {pair.kl_ratio_hi:.2f}" if pair else ""


def _class(name: str) -> str:
    return f'<span class="{escape(name)}">{escape(name.replace("_", " "))}</span>'


def _image(name: str, image: bytes) -> str:
    data = base64.b64encode(image).decode()
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
