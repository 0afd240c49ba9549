"""The views of pictures for papers (matplotlib): heat map, Gantt chart, residency and requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.viz import data, gantt
from paellapy.viz import requests as rq
from paellapy.viz.data import Picture
from paellapy.viz.needs import need
from paellapy.viz.palette import SCALE, WARNING, Look, paler
from paellapy.viz.static_ranges import boxes

DPI = 160


def heatmap_view(picture: Picture, ax: Any, colour: dict[str, str], style: Look) -> None:
    seen = data.heat(picture)
    image = ax.imshow(
        seen.resident, cmap=SCALE, vmin=0, vmax=1, aspect="auto", interpolation="none", extent=_extent(picture)
    )
    if ax.get_subplotspec().is_last_col():
        ax.figure.colorbar(image, ax=ax, label="resident warps", format=_percent(), pad=0.01)
    ax.set_ylabel("SM")
    _sm_ticks(ax)


def gantt_view(picture: Picture, ax: Any, colour: dict[str, str], style: Look) -> None:
    chart = gantt.gantt(picture)
    names = picture.groups.names
    pixels = _height(ax)
    bottom, top = ax.get_ylim()  # the SMs shown
    if len(chart.blocks) <= gantt.EXACT_BLOCKS and chart.depth * (bottom - top) <= pixels / 2:
        _bars(picture, ax, colour, chart, style.ground)
        ax.set_ylabel(gantt.OF_BLOCKS)
    else:  # blocks thinner than pixels, drawn one by one, would give a moiré pattern
        cells = gantt.cells(picture, chart, min(gantt.ROWS, int(pixels / 2)))
        paint = np.zeros((*cells.group.shape, 4))
        for g, name in enumerate(names):
            paint[cells.group == g] = need("matplotlib.colors", "a Gantt chart").to_rgba(colour[name])
        paint[..., 3] *= 0.25 + 0.75 * np.clip(cells.share, 0, 1)
        # Lanes narrower than pixels blend, instead of some of them vanishing.
        ax.imshow(paint, aspect="auto", interpolation="antialiased", extent=_extent(picture))
        ax.set_ylabel(gantt.OF_SHARES)
    _sm_ticks(ax)
    ax.set_ylim(bottom, top)


def _height(ax: Any) -> float:
    """Approximate height in pixels, before the layout is computed."""
    height: float = ax.get_position().height * ax.figure.get_size_inches()[1] * DPI
    return height


def _bars(picture: Picture, ax: Any, colour: dict[str, str], chart: gantt.Gantt, ground: str) -> None:
    b = chart.blocks
    of_group = np.array([[colour[name], paler(colour[name], ground)] for name in picture.groups.names]).reshape(-1, 2)
    paint = of_group[picture.groups.of_block, chart.second().astype(int)]
    boxes(picture, ax, b["start_ns"], b["end_ns"], chart.middle(), chart.height(), paint.tolist())


def requests_view(picture: Picture, ax: Any, colour: dict[str, str], style: Look) -> None:
    seen = rq.requests(picture.whole, rq.MOST)
    if seen is None:
        return
    of_model = rq.colour_of_models(seen, colour, picture.by_model)
    paint = np.array([of_model[name] for name in seen.models])
    for each in rq.bars(seen):
        lane, height = seen.lane[each.job].astype(float), rq.HEIGHT[each.what]
        late = each.what == rq.LATE
        if late:
            lane = lane + 0.4 - height / 2
        tones = [WARNING] * len(lane) if late else [
            paler(tone, style.ground, rq.STRENGTH[each.what]) for tone in paint[seen.jobs["model"][each.job]]
        ]  # fmt: skip
        boxes(picture, ax, each.start_ns, each.end_ns, lane, height, tones)
    lost = np.flatnonzero(seen.unanswered)
    size = 30 if seen.lane.max() < rq.ROOM else 12
    spare = rq.spare(seen)
    ends, due = (picture.axis.of(seen.jobs[at][spare]) for at in ("end_ns", "deadline_ns"))
    ax.hlines(seen.lane[spare], ends, due, colors=paint[seen.jobs["model"][spare]].tolist(), linewidths=1.0)
    ax.scatter(picture.axis.of(seen.jobs["deadline_ns"][seen.due]), seen.lane[seen.due], s=size, marker="|",
               color=style.ink, linewidths=1.2, zorder=3)  # fmt: skip
    ax.scatter(picture.axis.of(seen.jobs["end_ns"][lost]), seen.lane[lost], s=size, marker="x", color=WARNING, zorder=3)
    ax.set(ylabel=rq.axis_title(seen, "\n"), yticks=[])
    below = max([seen.lane.max() + 0.5, *ax.get_ylim()])  # columns share one scale
    ax.set_ylim(below, -0.5)


def residency_view(picture: Picture, ax: Any, colour: dict[str, str], style: Look) -> None:
    seen = data.residency(picture)
    edges = picture.axis.of(seen.edges_ns)
    for g, name in enumerate(picture.groups.names):
        ax.stairs(seen.resident[g], edges, color=colour[name], linewidth=1.2)
        ax.stairs(seen.resident[g], edges, color=colour[name], alpha=0.15, fill=True)
        allowed = picture.groups.theoretical[g]
        if allowed is not None:
            ax.plot(data.ran(picture, g), [allowed, allowed], "--", color=colour[name], linewidth=1.2)
    # Without theoretical limits, the scale ends a little above the data; columns share one scale.
    needed = 1.05 if any(each is not None for each in picture.groups.theoretical) else 1.2 * _most(seen.resident)
    before = ax.get_ylim()[1] if not ax.get_subplotspec().is_first_col() else 0.0
    ax.set(ylabel=data.residency_title(picture, "\n"), ylim=(0, min(1.05, max(needed, before))))
    ax.yaxis.set_major_formatter(_percent())


def _most(values: NDArray[np.float64]) -> float:
    return float(values.max()) if values.size else 1.0


def _extent(picture: Picture) -> tuple[float, float, float, float]:
    return 0, picture.axis.length, picture.trace.device.n_sm - 0.5, -0.5


def _percent() -> Any:
    return need("matplotlib.ticker", "a picture").FuncFormatter(lambda share, _: f"{100 * share:.3g}%")


def _sm_ticks(ax: Any) -> None:
    ax.yaxis.set_major_locator(need("matplotlib.ticker", "a picture").MaxNLocator("auto", integer=True))


VIEWS: dict[str, Callable[[Picture, Any, dict[str, str], Look], None]] = {
    "heatmap": heatmap_view,
    "gantt": gantt_view,
    "residency": residency_view,
    "requests": requests_view,
}
