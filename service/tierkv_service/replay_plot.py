"""The plot of a sweep: what a policy makes of a capacity, under the bound of one that knows all."""

import io
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tierkv_service.replay import Curve

BOUND = "belady"
_GIB = 1 << 30


def draw(trace: str, curves: Sequence[Curve]) -> bytes:
    """Return a PNG file."""
    figure = Figure(figsize=(7.5, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve in curves:
        gib = [nbytes / _GIB for nbytes in curve.capacity_bytes]
        percent = [100 * share for share in curve.prefix_hit]
        if curve.policy == BOUND:
            axes.plot(gib, percent, "k--", linewidth=1.2, label="Belady, which knows the future")
        else:
            axes.plot(gib, percent, "o-", markersize=4, label=curve.policy)
    axes.set(
        title=trace,
        xlabel="GiB of KV of an 8B model (128 KiB a token)",
        ylabel="usable prefix, % of prompt blocks",
        xscale="log",
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()
