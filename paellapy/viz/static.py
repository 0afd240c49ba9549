"""The same pictures as PNG, SVG or PDF, for papers (matplotlib): no browser, no display."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from instrument.errors import TraceError
from instrument.trace import Trace
from paellapy.viz import data
from paellapy.viz.data import BINS, By, Picture
from paellapy.viz.needs import need
from paellapy.viz.palette import SCALE, WARNING, Theme, colours, look, paler

ViewName = Literal["all", "heatmap", "gantt", "residency"]


def save_figure(
    trace: Trace,
    path: str | os.PathLike[str],
    view: ViewName = "all",
    *,
    by: By = "kernel",
    kernel: str | int | None = None,
    start_ns: int | None = None,
    end_ns: int | None = None,
    bins: int = BINS,
    theme: Theme = "light",
    size_inches: tuple[float, float] | None = None,
    dpi: int = 160,
) -> Path:
    """Draws the trace into a file; its ending (.png, .svg, .pdf) says in which format.

    >>> from paellapy import examples
    >>> save_figure(examples.load("virtual-h200-gemm-tail"), "/dev/null.txt")
    Traceback (most recent call last):
    instrument.errors.TraceError: /dev/null.txt: a figure is saved as .png, .svg or .pdf
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise TraceError(f"{path}: a figure is saved as .png, .svg or .pdf")
    picture = data.prepare(trace, by, kernel, start_ns, end_ns, bins)
    figure = draw(picture, view, theme, size_inches)
    with need("matplotlib", "save_figure()").rc_context({"svg.fonttype": "none"}):  # text stays text, to be edited
        figure.savefig(path, dpi=dpi)
    return path


def draw(picture: Picture, view: ViewName, theme: Theme, size_inches: tuple[float, float] | None = None) -> Any:
    """The matplotlib figure."""
    style = need("matplotlib.style", "save_figure()")
    figures = need("matplotlib.figure", "save_figure()")
    if view != "all" and view not in _VIEWS:
        raise TraceError(f"there is no view {view!r}, only all, {', '.join(_VIEWS)}")
    chosen = [_VIEWS[name] for name in (_VIEWS if view == "all" else [view])]
    with style.context(look(theme).matplotlib):
        figure = figures.Figure(figsize=size_inches or (8, 2.9 * len(chosen)), layout="constrained")
        heights = [1 if add is residency_view else 2 for add in chosen]
        axes = figure.subplots(len(chosen), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        colour = colours(picture.groups.names)
        for ax, add in zip(axes, chosen, strict=True):
            add(picture, ax, colour, look(theme).ground)
            if not len(picture.trace.blocks):
                ax.text(0.5, 0.5, "no blocks were recorded", transform=ax.transAxes, ha="center", color=WARNING)
        axes[-1].set(xlabel=f"time ({picture.axis.unit})", xlim=(0, picture.axis.length))
        figure.suptitle(picture.title, fontsize=10, x=0.01, ha="left")
        if picture.warning:
            figure.supxlabel(f"⚠ {picture.warning}", fontsize=8, color=WARNING, x=0.01, ha="left")
    return figure


def heatmap_view(picture: Picture, ax: Any, colour: dict[str, str], ground: str) -> None:
    seen = data.heat(picture)
    image = ax.imshow(
        seen.resident, cmap=SCALE, vmin=0, vmax=1, aspect="auto", interpolation="none", extent=_extent(picture)
    )
    ax.figure.colorbar(image, ax=ax, label="resident warps", format=_percent(), pad=0.01)
    ax.set_ylabel("SM")
    ax.yaxis.set_major_locator(need("matplotlib.ticker", "a picture").MaxNLocator(integer=True))


def gantt_view(picture: Picture, ax: Any, colour: dict[str, str], ground: str) -> None:
    chart = data.gantt(picture)
    names = picture.groups.names
    if len(chart.blocks) <= data.EXACT_BLOCKS:
        _bars(picture, ax, colour, chart, ground)
    else:
        cells = data.cells(picture, chart)
        paint = np.zeros((*cells.group.shape, 4))
        for g, name in enumerate(names):
            paint[cells.group == g] = need("matplotlib.colors", "a Gantt chart").to_rgba(colour[name])
        paint[..., 3] *= 0.25 + 0.75 * np.clip(cells.share, 0, 1)
        ax.imshow(paint, aspect="auto", interpolation="none", extent=_extent(picture))
    _legend(ax, colour, names)
    ax.set_ylabel("SM, one lane per block")
    ax.yaxis.set_major_locator(need("matplotlib.ticker", "a picture").MaxNLocator(integer=True))
    ax.set_ylim(picture.trace.device.n_sm - 0.5, -0.5)


def _bars(picture: Picture, ax: Any, colour: dict[str, str], chart: data.Gantt, ground: str) -> None:
    collections = need("matplotlib.collections", "a Gantt chart")
    b, middle, half = chart.blocks, chart.middle(), chart.height() / 2
    left, right = picture.axis.of(b["start_ns"]), picture.axis.of(b["end_ns"])
    corners = np.stack([left, middle - half, right, middle - half, right, middle + half, left, middle + half], axis=1)
    of_group = np.array([[colour[name], paler(colour[name], ground)] for name in picture.groups.names]).reshape(-1, 2)
    paint = of_group[picture.groups.of_block, chart.second().astype(int)]
    shapes = collections.PolyCollection(corners.reshape(-1, 4, 2), facecolors=paint.tolist(), linewidths=0)
    shapes.set_snap(False)  # lanes thinner than a pixel become paler instead of a whole pixel or none
    ax.add_collection(shapes)


def residency_view(picture: Picture, ax: Any, colour: dict[str, str], ground: str) -> None:
    seen = data.residency(picture)
    edges = picture.axis.of(seen.edges_ns)
    for g, name in enumerate(picture.groups.names):
        ax.stairs(seen.resident[g], edges, color=colour[name], linewidth=1.2)
        ax.stairs(seen.resident[g], edges, color=colour[name], alpha=0.15, fill=True)
        allowed = picture.groups.theoretical[g]
        if allowed is not None:
            ax.plot(data.ran(picture, g), [allowed, allowed], "--", color=colour[name], linewidth=1.2)
    ax.set(ylabel="warps of the GPU\n(dashed: theoretical)", ylim=(0, 1.05))
    ax.yaxis.set_major_formatter(_percent())
    if ax.get_subplotspec().is_first_row():
        _legend(ax, colour, picture.groups.names)


def _legend(ax: Any, colour: dict[str, str], names: Sequence[str]) -> None:
    patches = need("matplotlib.patches", "a legend")
    if names:
        marks = [patches.Patch(color=colour[name], label=data.short(name)) for name in names]
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "ncols": 4}  # above the axes
        ax.legend(handles=marks, fontsize=7, frameon=False, **place)


def _extent(picture: Picture) -> tuple[float, float, float, float]:
    return 0, picture.axis.length, picture.trace.device.n_sm - 0.5, -0.5


def _percent() -> Any:
    return need("matplotlib.ticker", "a picture").PercentFormatter(1, decimals=0)


_VIEWS: dict[str, Callable[[Picture, Any, dict[str, str], str], None]] = {
    "heatmap": heatmap_view,
    "gantt": gantt_view,
    "residency": residency_view,
}
