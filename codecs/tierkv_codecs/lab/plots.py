"""Plots: ratio against KL, a picture for each domain."""

import io
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tierkv_codecs.lab.results import Row

_COLOURS = {
    "exact": "#1a7f37",
    "near_lossless": "#2da44e",
    "safe": "#0969da",
    "economy": "#bf8700",
    "rejected": "#cf222e",
}
_LEAST_KL = 1e-6
"""What is drawn for a KL of 0, which has no logarithm."""


def draw(rows: Sequence[Row]) -> dict[str, bytes]:
    """Return PNG files by name, one for each domain, in the domains' order."""
    domains = dict.fromkeys(row.domain for row in rows)
    return {
        f"kl-{domain}.png": _draw(domain, [row for row in rows if row.domain == domain])
        for domain in domains
    }


def _draw(domain: str, rows: Sequence[Row]) -> bytes:
    figure = Figure(figsize=(7.5, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row in rows:
        low, middle, high = (max(kl, _LEAST_KL) for kl in (row.kl_lo, row.kl_mean, row.kl_hi))
        colour = _COLOURS[row.fidelity_class]
        axes.plot([row.ratio_payload] * 2, [low, max(high, middle)], color=colour, linewidth=2)
        axes.plot(row.ratio_payload, middle, "o", color=colour, markersize=6)
        axes.annotate(
            row.profile,
            (row.ratio_payload, middle),
            xytext=(6, 4),
            textcoords="offset points",
            fontsize=8,
        )
    for name, colour in _COLOURS.items():
        if any(row.fidelity_class == name for row in rows):
            axes.plot([], [], "o", color=colour, label=name.replace("_", " "))
    axes.set(
        title=f"{domain}: what compression costs",
        xlabel="ratio of coded tokens, against 16 bit",
        ylabel="KL in nats per token, with its 95% interval",
        xscale="log",
        yscale="log",
    )
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.xaxis.set_minor_formatter("")
    axes.set_xticks([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48])
    largest = max(row.ratio_payload for row in rows)
    axes.set_xlim(0.9, max(largest * 1.6, 2))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()
