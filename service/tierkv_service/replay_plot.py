"""The plot of a sweep: what each policy makes of a capacity, under a bound."""

import io
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tierkv_service.sweep import Panel

_GIB = 1 << 30


def draw(title: str, panels: Sequence[Panel]) -> bytes:
    """Return a PNG file with one panel beside the other."""
    figure = Figure(figsize=(6.5 * len(panels), 4.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for curve in panel.curves:
            gib = [nbytes / _GIB for nbytes in curve.capacity_bytes]
            look = {"color": "black", "linestyle": "--"} if curve.bound else {"marker": "o"}
            axes.plot(gib, curve.values, label=curve.name, markersize=4, **look)
        axes.set(xlabel=panel.of, ylabel=panel.what, xscale="log")
        axes.set_xticks([nbytes / _GIB for nbytes in panel.curves[0].capacity_bytes])
        axes.xaxis.set_major_formatter("{x:.3g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(loc="best", fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()
