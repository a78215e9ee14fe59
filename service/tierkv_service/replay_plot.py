"""The plot of a sweep: what each policy makes of a capacity, under a bound."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from tierkv_service.sweep import Curve, Panel

_GIB = 1 << 30
_COLORS = ("#888888", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#d55e00")
"""Told apart by the colour-blind too."""
_MARKERS = "os^vDP"


def draw(title: str, panels: Sequence[Panel]) -> bytes:
    """Return a PNG file with one panel beside the other, over one legend."""
    figure = Figure(figsize=(5.8 * len(panels), 4.9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    named: dict[str, Artist] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, curve in enumerate(panel.curves):
            gib = [nbytes / _GIB for nbytes in curve.capacity_bytes]
            (line,) = axes.plot(gib, curve.values, label=curve.name, **_look(number, curve))
            named.setdefault(curve.name, line)
        axes.set(xlabel=panel.of, title=panel.what, xscale="log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks([nbytes / _GIB for nbytes in panel.curves[0].capacity_bytes])
        axes.xaxis.set_major_formatter("{x:.3g}")
        axes.margins(y=0.07)
        axes.grid(visible=True, alpha=0.3)
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=4, fontsize=9, frameon=False
    )
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _look(number: int, curve: Curve) -> dict[str, Any]:
    """Return how a curve is drawn: bounds dashed, of curves that lie on one another all seen."""
    if curve.bound:
        return {"color": "black", "linestyle": "--", "linewidth": 1.2}
    at = number % len(_COLORS)
    return {
        "color": _COLORS[at],
        "marker": _MARKERS[at],
        "markersize": 8 - at,
        "linewidth": 1.4,
    }
