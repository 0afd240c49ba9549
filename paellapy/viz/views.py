"""The views of an interactive figure (plotly), each drawn into its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paellapy.instrument.traces.summary import readable_time
from paellapy.viz import data
from paellapy.viz.data import Picture
from paellapy.viz.palette import SCALE, WARNING, Look, need, paler, rgba

TALL_PIXELS = 600  # height of a Gantt chart of many SMs


class Place:
    """The place of a view, and the state it shares with the other views of its figure."""

    def __init__(self, figure: Any, row: int, column: int, colour: Mapping[str, str], style: Look, first: bool) -> None:
        self.figure, self.row, self.column = figure, row, column
        self.colour, self.look = colour, style
        self.first = first  # the first column names the axes and has the colour bar
        self.legend: set[str] = set()

    def add(self, trace: Any) -> None:
        self.figure.add_trace(trace, row=self.row, col=self.column)

    def axes(self, title: str, **y: Any) -> None:
        self.figure.update_yaxes(title_text=title if self.first else None, row=self.row, col=self.column, **y)

    def y_span(self) -> tuple[float, float]:
        low, high = self.figure.get_subplot(self.row, self.column).yaxis.domain
        return low, high


View = Callable[[Picture, Place], None]


def heatmap_view(picture: Picture, place: Place) -> None:
    go = need("plotly.graph_objects", "a heat map")
    seen = data.heat(picture)
    low, high = place.y_span()
    unit, most = picture.axis.unit, picture.trace.device.max_warps_per_sm
    place.add(
        go.Heatmap(
            z=seen.resident.astype(np.float32),
            x=picture.axis.of(seen.edges_ns),
            y0=0,
            dy=1,
            zmin=0,
            zmax=1,
            colorscale=SCALE,
            showscale=place.first,
            colorbar={
                "title": {"text": "resident warps", "side": "right"},
                "tickformat": ".0%",
                "y": (low + high) / 2,
                "len": high - low,
                "thickness": 14,
            },
            hovertemplate=f"SM %{{y}}<br>%{{x:.6~g}} {unit}<br>%{{z:.1%}} of {most} warps<extra></extra>",
            name="occupancy",
        )
    )
    place.axes("SM", range=[picture.trace.device.n_sm - 0.5, -0.5])


def gantt_view(picture: Picture, place: Place) -> None:
    chart = data.gantt(picture)
    # Bars of less than half a pixel would hide each other at random, so a full GPU is drawn as shares of its lanes.
    thin = picture.trace.device.n_sm * chart.depth > 2 * TALL_PIXELS
    if len(chart.blocks) <= data.EXACT_BLOCKS and not thin:
        title = data.OF_BLOCKS
        _bars(picture, place, chart)
    else:
        title = data.OF_SHARES
        _binned_gantt(picture, place, data.cells(picture, chart))
    place.axes(title, range=[picture.trace.device.n_sm - 0.5, -0.5])


def _bars(picture: Picture, place: Place, chart: data.Gantt) -> None:
    go = need("plotly.graph_objects", "a Gantt chart")
    b, middle = chart.blocks, chart.middle()
    second = chart.second()
    # A gap between lanes if there is room; where lanes are a pixel or two high, browsers leave one anyway.
    height = chart.height() * (0.9 if picture.trace.device.n_sm * chart.depth <= 80 else 1.3)
    for g, name in enumerate(picture.groups.names):
        mine = picture.groups.of_block == g
        of = b[mine]
        tones = np.array([place.colour[name], paler(place.colour[name], place.look.ground)])
        kernels = [picture.trace.kernels[k] for k in of["kernel"]]
        lasted = [readable_time(ns) for ns in (of["end_ns"] - of["start_ns"]).tolist()]
        place.add(
            go.Bar(
                orientation="h",
                base=picture.axis.of(of["start_ns"]),
                x=(of["end_ns"] - of["start_ns"]) / picture.axis.ns_per_unit,
                y=middle[mine],
                width=height,
                marker={"color": tones[second[mine].astype(int)], "line": {"width": 0}},
                customdata=list(zip(kernels, of["block"], of["launch"], of["sm"], lasted, strict=True)),
                hovertemplate="%{customdata[0]}<br>block %{customdata[1]} of launch %{customdata[2]} on SM "
                f"%{{customdata[3]}}<br>from %{{base:.6~g}} {picture.axis.unit}, for %{{customdata[4]}}<extra></extra>",
                **_legend(place, name),
            )
        )


def _binned_gantt(picture: Picture, place: Place, cells: data.Cells) -> None:
    go = need("plotly.graph_objects", "a Gantt chart")
    edges = picture.axis.of(cells.edges_ns)
    step = 1 / cells.rows_per_sm
    for g, name in enumerate(picture.groups.names):
        mine = cells.group == g
        columns = np.flatnonzero(mine.any(axis=0))
        if not len(columns):
            continue
        # Only the time in which the group ran, since a page holds the cells of all groups.
        part = slice(int(columns[0]), int(columns[-1]) + 1)
        share = np.where(mine, cells.share, np.nan)[:, part].astype(np.float32)
        colour = place.colour[name]
        place.add(
            go.Heatmap(
                z=share,
                x=edges[part.start : part.stop + 1],
                y0=-0.5 + step / 2,
                dy=step,
                zmin=0,
                zmax=1,
                colorscale=[[0, rgba(colour, 0.25)], [1, colour]],
                showscale=False,
                hoverongaps=False,
                hovertemplate=f"{_short(name)}<br>SM %{{y:.0f}}<br>%{{x:.6~g}} {picture.axis.unit}<br>"
                "%{z:.0%} of these lanes<extra></extra>",
                name=_short(name),
                legendgroup=name,
            )
        )
        # Heat maps have no legend entry in their own colour, so an empty line provides it.
        mark = {"color": colour, "size": 12, "symbol": "square"}
        place.add(go.Scatter(x=[None], y=[None], mode="markers", marker=mark, **_legend(place, name)))


def residency_view(picture: Picture, place: Place) -> None:
    go = need("plotly.graph_objects", "residency")
    seen = data.residency(picture)
    time = picture.axis.of(seen.edges_ns)
    for g, name in enumerate(picture.groups.names):
        allowed = picture.groups.theoretical[g]
        of_most = "" if allowed is None else f"<br>theoretical occupancy {allowed:.1%}"
        place.add(
            go.Scatter(
                x=time,
                y=np.append(seen.resident[g], seen.resident[g, -1:]),
                mode="lines",
                line={"shape": "hv", "width": 1.5, "color": place.colour[name]},
                fill="tozeroy",
                fillcolor=rgba(place.colour[name], 0.15),
                hovertemplate=f"{_short(name)}<br>%{{x:.6~g}} {picture.axis.unit}<br>%{{y:.1%}} of all warps"
                f"{of_most}<extra></extra>",
                **_legend(place, name),
            )
        )
        if allowed is not None:
            place.add(
                go.Scatter(
                    x=data.ran(picture, g),
                    y=[allowed, allowed],
                    mode="lines",
                    line={"dash": "dash", "width": 1.5, "color": place.colour[name]},
                    hovertemplate=f"{_short(name)}: theoretical occupancy {allowed:.1%}<extra></extra>",
                    name=f"{_short(name)}, theoretical",
                    legendgroup=name,
                    showlegend=False,
                )
            )
    place.axes(data.residency_title(picture, "<br>"), range=[0, 1.05], tickformat=".2~%")


def say_empty(place: Place) -> None:
    go = need("plotly.graph_objects", "a picture")
    place.add(go.Scatter(x=[], y=[], showlegend=False))  # without data there would be no axes
    left, right = place.figure.get_subplot(place.row, place.column).xaxis.domain
    low, high = place.y_span()
    place.figure.add_annotation(
        text="no blocks were recorded",
        showarrow=False,
        xref="paper",
        yref="paper",
        x=(left + right) / 2,
        y=(low + high) / 2,
        font={"size": 14, "color": WARNING},
    )


def _legend(place: Place, name: str) -> dict[str, Any]:
    """One entry for everything of this colour; a click on it hides all of it."""
    shown = name not in place.legend
    place.legend.add(name)
    return {"name": _short(name), "legendgroup": name, "showlegend": shown}


def _short(name: str) -> str:
    return data.short(name).replace("<", "&lt;")
