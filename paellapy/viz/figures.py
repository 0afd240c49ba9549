"""Interactive pictures of a trace (plotly), and the HTML page that shows a trace offline.

All views of a figure share one time axis: zooming one zooms the others.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from paellapy.instrument.traces.explain import Explanation
from paellapy.instrument.traces.summary import readable_time
from paellapy.instrument.traces.trace import Trace
from paellapy.scheduler.core.codes import STATUS
from paellapy.viz import data
from paellapy.viz.data import BINS, By, Parts, Picture, TimeAxis
from paellapy.viz.palette import LOOKS, OTHERS, SCALE, WARNING, Look, Theme, colours, look, need, paler, rgba

TALL_PIXELS = 600  # height of a Gantt chart of many SMs
_FEW_SMS = 40
_MOST_LANES = 40  # of ranges that add to the height of a figure


def plot(trace: Trace, **options: Any) -> Any:
    """Heat map, Gantt chart and residency on one time axis, as a plotly figure. Options as in `plot_heatmap`.

    The trace of an engine also shows its requests.

        with pp.trace() as t: ...
        t.plot(theme="dark")
    """
    return build([trace], all_views(trace), **options)


def plot_heatmap(trace: Trace, **options: Any) -> Any:
    """SM x time: resident warps / maximum.

    Options of every plot: `by` = "kernel", "launch", "stream", "model" or a mapping of kernel names chooses the
    coloured groups, by default models in the trace of an engine, else kernels; `kernel`, `start_ns`, `end_ns` choose a
    part of the trace; `bins` is the number of bins on the time axis; `theme` = "light" or "dark".
    """
    return build([trace], (heatmap_view,), **options)


def plot_gantt(trace: Trace, **options: Any) -> Any:
    """Per SM, one lane for each block resident at a time. Options as in `plot_heatmap`."""
    return build([trace], (gantt_view,), **options)


def plot_residency(trace: Trace, **options: Any) -> Any:
    """Each kernel's share of the GPU's warps over time, with its theoretical occupancy. Options as in
    `plot_heatmap`.
    """
    return build([trace], (residency_view,), **options)


def compare(a: Trace, b: Trace, labels: tuple[str, str] | None = None, **options: Any) -> Any:
    """Two traces side by side, on axes of one scale: two policies, or virtual against real.

    Options as in `plot_heatmap`. Clocks differ, so `start_ns` and `end_ns` may be pairs, one time for each trace.
    """
    labels = ("a", "b") if labels is None else labels
    data.check_labels(labels)
    return build([a, b], all_views(a, b), labels, **options)


def plot_requests(trace: Trace, **options: Any) -> Any:
    """Requests of an engine's trace: queued (pale), launched (medium), their segments (full), deadlines and lateness.

    Options as in `plot_heatmap`.
    """
    data.check_requests(trace)
    return build([trace], (requests_view,), **options)


def all_views(*traces: Trace) -> tuple[View, ...]:
    views: tuple[View, ...] = (heatmap_view, gantt_view, residency_view)
    return (*views, requests_view) if any(map(data.has_requests, traces)) else views


# -- the figure around the views


def build(
    traces: Sequence[Trace],
    views: Sequence[View],
    labels: Sequence[str] = (),
    *,
    theme: Theme = "light",
    height: int | None = None,
    axis: TimeAxis | None = None,
    colour: Mapping[str, str] | None = None,
    **parts: Unpack[Parts],
) -> Any:
    subplots, go = need("plotly.subplots", "plot()"), need("plotly.graph_objects", "plot()")
    style = look(theme)
    pictures = data.prepare_all(traces, axis=axis, **parts)
    tall = any(p.trace.device.n_sm > _FEW_SMS for p in pictures) and gantt_view in views
    colour = colour or colours(name for p in pictures for name in p.names)
    titles = [f"<b>{label}</b>: {_two_lines(p)}" for p, label in zip(pictures, labels, strict=True)] if labels else None
    figure = subplots.make_subplots(
        rows=len(views), cols=len(pictures), shared_xaxes="all", row_heights=[_share(view, tall) for view in views],
        vertical_spacing=0.04, horizontal_spacing=0.05, column_titles=titles,
    )  # fmt: skip
    legend: set[str] = set()
    for column, picture in enumerate(pictures, 1):
        for row, view in enumerate(views, 1):
            place = Place(figure, row, column, colour, style, legend, go)
            view(picture, place)
            if not len(picture.trace.blocks) and view is not requests_view:
                say_empty(place)
        figure.update_xaxes(title_text=f"time ({picture.axis.unit})", row=len(views), col=column)
    figure.update_xaxes(range=[0, pictures[0].axis.length], showgrid=False)
    figure.update_xaxes(showspikes=True, spikemode="across", spikethickness=1)
    if heatmap_view in views and gantt_view in views:
        for column in range(1, len(pictures) + 1):
            above = figure.get_subplot(1, column).yaxis.plotly_name.replace("axis", "")
            figure.update_yaxes(matches=above, row=2, col=column)
    if height is None:
        height = 120 + TALL_PIXELS // 4 * sum(_share(view, tall) for view in views)
    _frame(figure, pictures, views, style, height)
    return figure


def _share(view: View, tall: bool) -> int:
    """A view's share of the figure's height: lanes of many SMs need more."""
    if view in (residency_view, requests_view):
        return 1 if view is residency_view else 2
    return 4 if tall and view is gantt_view else 2


def _frame(figure: Any, pictures: Sequence[Picture], views: Sequence[View], style: Look, height: int) -> None:
    heat = heatmap_view in views
    warning = "<br>".join(p.warning for p in pictures if p.warning)
    below = figure.get_subplot(2, 1).yaxis.domain[1] if heat and len(views) > 1 else 1
    figure.update_layout(
        template=style.plotly,
        # In two lines, since a phone would cut a single one.
        title={"text": _two_lines(pictures[0]) if len(pictures) == 1 else None, "x": 0.01, "font": {"size": 15}},
        barmode="overlay",
        height=height,
        margin={"l": 70, "r": 30, "t": 60 + 25 * bool(warning) + 20 * (len(pictures) > 1), "b": 50},
        # Beside the Gantt chart, below the colour bar of the heat map.
        legend={"x": 1.02, "y": below, "xanchor": "left", "yanchor": "top", "itemsizing": "constant"},
        hovermode="closest",
        hoverlabel={"align": "left"},
    )
    if requests_view in views:  # with the models' colours, beside the requests
        beside = figure.get_subplot(len(views), 1).yaxis.domain[1]
        figure.update_layout(legend2={"x": 1.02, "y": beside, "xanchor": "left", "yanchor": "top", "title": "requests"})
    if warning:
        figure.add_annotation(
            text=f"⚠ {warning}", xref="paper", yref="paper", x=0, y=1, yshift=42 if len(pictures) > 1 else 6,
            xanchor="left", yanchor="bottom", showarrow=False, align="left", font={"color": WARNING, "size": 13},
        )  # fmt: skip


def _two_lines(picture: Picture) -> str:
    return picture.title.replace(": ", "<br>", 1)


# -- the views, each drawn into its place


@dataclass(slots=True)
class Place:
    """The place of a view, and the state it shares with the other views of its figure."""

    figure: Any
    row: int
    column: int
    colour: Mapping[str, str]
    look: Look
    legend: set[str]  # names that it has already
    go: Any  # plotly's graph_objects

    @property
    def first(self) -> bool:
        """Whether it is in the first column, which names the axes and has the colour bar."""
        return self.column == 1

    def add(self, trace: Any) -> None:
        self.figure.add_trace(trace, row=self.row, col=self.column)

    def axes(self, title: str, **y: Any) -> None:
        self.figure.update_yaxes(title_text=title if self.first else None, row=self.row, col=self.column, **y)

    def y_span(self) -> tuple[float, float]:
        low, high = self.figure.get_subplot(self.row, self.column).yaxis.domain
        return low, high


View = Callable[[Picture, Place], None]


def heatmap_view(picture: Picture, place: Place) -> None:
    seen = data.heat(picture)
    low, high = place.y_span()
    unit, most = picture.axis.unit, picture.trace.device.max_warps_per_sm
    place.add(
        place.go.Heatmap(
            z=seen.resident.astype(np.float32), x=picture.axis.of(seen.edges_ns), y0=0, dy=1, zmin=0,
            zmax=data.heat_ends(seen, picture.least_heat), colorscale=SCALE, showscale=place.first, name="occupancy",
            colorbar={"title": {"text": "resident warps", "side": "right"}, "tickformat": ".0%",
                      "y": (low + high) / 2, "len": high - low, "thickness": 14},
            hovertemplate=f"SM %{{y}}<br>%{{x:.6~g}} {unit}<br>%{{z:.1%}} of {most} warps<extra></extra>",
        )
    )  # fmt: skip
    place.axes("SM", range=[picture.trace.device.n_sm - 0.5, -0.5])


def gantt_view(picture: Picture, place: Place) -> None:
    chart = data.gantt(picture)
    # Bars of less than half a pixel would hide each other at random, so a full GPU is drawn as shares of its lanes.
    thin = picture.trace.device.n_sm * chart.depth > 2 * TALL_PIXELS
    if len(chart.blocks) <= data.EXACT_BLOCKS and not thin:
        title = data.OF_BLOCKS
        _block_bars(picture, place, chart)
    else:
        title = data.OF_SHARES
        _binned_gantt(picture, place, data.cells(picture, chart))
    place.axes(title, range=[picture.trace.device.n_sm - 0.5, -0.5])


def _block_bars(picture: Picture, place: Place, chart: data.Gantt) -> None:
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
            place.go.Bar(
                orientation="h", y=middle[mine], width=height,
                base=picture.axis.of(of["start_ns"]), x=(of["end_ns"] - of["start_ns"]) / picture.axis.ns_per_unit,
                marker={"color": tones[second[mine].astype(int)], "line": {"width": 0}},
                customdata=list(zip(kernels, of["block"], of["launch"], of["sm"], lasted, strict=True)),
                hovertemplate="%{customdata[0]}<br>block %{customdata[1]} of launch %{customdata[2]} on SM "
                f"%{{customdata[3]}}<br>from %{{base:.6~g}} {picture.axis.unit}, for %{{customdata[4]}}<extra></extra>",
                **_legend(place, name),
            )
        )  # fmt: skip


def _binned_gantt(picture: Picture, place: Place, cells: data.Cells) -> None:
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
            place.go.Heatmap(
                z=share, x=edges[part.start : part.stop + 1], y0=-0.5 + step / 2, dy=step, zmin=0, zmax=1,
                colorscale=[[0, rgba(colour, 0.25)], [1, colour]], showscale=False, hoverongaps=False,
                hovertemplate=f"{_short(name)}<br>SM %{{y:.0f}}<br>%{{x:.6~g}} {picture.axis.unit}<br>"
                "%{z:.0%} of these lanes<extra></extra>",
                name=_short(name), legendgroup=name,
            )
        )  # fmt: skip
        # Heat maps have no legend entry in their own colour, so an empty line provides it.
        mark = {"color": colour, "size": 12, "symbol": "square"}
        place.add(place.go.Scatter(x=[None], y=[None], mode="markers", marker=mark, **_legend(place, name)))


def residency_view(picture: Picture, place: Place) -> None:
    seen = data.residency(picture)
    time = picture.axis.of(seen.edges_ns)
    for g, name in enumerate(picture.groups.names):
        allowed = picture.groups.theoretical[g]
        of_most = "" if allowed is None else f"<br>theoretical occupancy {allowed:.1%}"
        place.add(
            place.go.Scatter(
                x=time, y=np.append(seen.resident[g], seen.resident[g, -1:]), mode="lines",
                line={"shape": "hv", "width": 1.5, "color": place.colour[name]},
                fill="tozeroy", fillcolor=rgba(place.colour[name], 0.15),
                hovertemplate=f"{_short(name)}<br>%{{x:.6~g}} {picture.axis.unit}<br>%{{y:.1%}} of all warps"
                f"{of_most}<extra></extra>",
                **_legend(place, name),
            )
        )  # fmt: skip
        if allowed is not None:
            place.add(
                place.go.Scatter(
                    x=data.ran(picture, g), y=[allowed, allowed], mode="lines",
                    line={"dash": "dash", "width": 1.5, "color": place.colour[name]},
                    hovertemplate=f"{_short(name)}: theoretical occupancy {allowed:.1%}<extra></extra>",
                    name=f"{_short(name)}, theoretical", legendgroup=name, showlegend=False,
                )
            )  # fmt: skip
    place.axes(data.residency_title(picture, "<br>"), range=[0, 1.05], tickformat=".2~%")


def say_empty(place: Place) -> None:
    place.add(place.go.Scatter(x=[], y=[], showlegend=False))  # without data there would be no axes
    left, right = place.figure.get_subplot(place.row, place.column).xaxis.domain
    low, high = place.y_span()
    place.figure.add_annotation(
        text="no blocks were recorded", showarrow=False, xref="paper", yref="paper", x=(left + right) / 2,
        y=(low + high) / 2, font={"size": 14, "color": WARNING},
    )  # fmt: skip


def _legend(place: Place, name: str) -> dict[str, Any]:
    """One entry for everything of this colour; a click on it hides all of it."""
    shown = name not in place.legend
    place.legend.add(name)
    return {"name": _short(name), "legendgroup": name, "showlegend": shown}


def _short(name: str) -> str:
    return data.short(name).replace("<", "&lt;")


# -- the view of requests


def requests_view(picture: Picture, place: Place) -> None:
    """Pale: queued; medium: launched; full: segments. Colours stand for models; a stripe at the bottom means late."""
    seen = data.requests_of(picture.whole, data.MOST_REQUESTS)
    if seen is None:
        return
    colour = data.colour_of_models(seen, place.colour, picture.by_model)
    *shown, late = data.request_bars(seen)
    for m, name in enumerate(seen.models):
        if (seen.jobs["model"] == m).any():
            # Plotly omits entries without data from the legend, so a model that never ran is listed by its queue.
            known_by = data.SEGMENTS if (seen.jobs["model"][seen.job_of] == m).any() else data.QUEUED
            for bars in shown:
                legend = _request_legend(picture, place, name, bars.what == known_by)
                _request_bars(picture, place, seen, bars.of(seen.jobs["model"][bars.job] == m), colour[name], legend)
    if len(late.job):
        _request_bars(picture, place, seen, late, WARNING, _request_legend(picture, place, data.LATE, True))
    _request_marks(picture, place, seen)
    place.axes(data.requests_title(seen, "<br>"), range=[int(seen.lane.max()) + 0.5, -0.5], showticklabels=False)


def _request_bars(
    picture: Picture, place: Place, seen: data.Requests, bars: data.RequestBars, colour: str, legend: dict[str, Any]
) -> None:
    if bars.segment is None:
        facts = [_job_facts(seen, j) for j in bars.job.tolist()]
    else:
        facts = [_segment_facts(seen, j, s) for j, s in zip(bars.job.tolist(), bars.segment.tolist(), strict=True)]
    place.add(
        place.go.Bar(
            orientation="h", base=picture.axis.of(bars.start_ns), y=bars.middle(seen), width=data.HEIGHT[bars.what],
            x=(bars.end_ns - bars.start_ns) / picture.axis.ns_per_unit,
            marker={"color": rgba(colour, data.STRENGTH.get(bars.what, 1.0)), "line": {"width": 0}},
            text=facts, textposition="none", meta=bars.what,
            hovertemplate=f"%{{text}}<br>{bars.what} from %{{base:.6~g}} {picture.axis.unit}<extra></extra>",
            **legend,
        )
    )  # fmt: skip


def _request_marks(picture: Picture, place: Place, seen: data.Requests) -> None:
    """Deadlines, and a cross where a request ended without an answer."""
    early = data.ends_early(seen)
    if len(early):
        gap = np.full(len(early), np.nan)
        until = np.stack([picture.axis.of(seen.jobs[at][early]) for at in ("end_ns", "deadline_ns")] + [gap], axis=1)
        line = {"width": 1, "color": OTHERS}
        lane = np.repeat(seen.lane[early], 3)
        place.add(place.go.Scatter(mode="lines", x=until.ravel(), y=lane, line=line, hoverinfo="skip", showlegend=False,
                             meta="to spare"))  # fmt: skip
    lost = np.flatnonzero(seen.unanswered)
    kinds = (
        ("deadline", seen.due, seen.jobs["deadline_ns"], "line-ns-open", place.look.ink),
        ("not answered", lost, seen.jobs["end_ns"], "x-thin-open", WARNING),
    )
    for name, job, at_ns, symbol, colour in kinds:
        if len(job):
            mark = {"symbol": symbol, "size": 9, "color": colour, "line": {"width": 2, "color": colour}}
            place.add(
                place.go.Scatter(
                    mode="markers", x=picture.axis.of(at_ns[job]), y=seen.lane[job], marker=mark, meta=name,
                    text=[_job_facts(seen, j) for j in job.tolist()],
                    hovertemplate=f"%{{text}}<br>{name} at %{{x:.6~g}} {picture.axis.unit}<extra></extra>",
                    **_request_legend(picture, place, name, True),
                )
            )  # fmt: skip


def _request_legend(picture: Picture, place: Place, name: str, wanted: bool) -> dict[str, Any]:
    """Legend beside the requests, unless the blocks above have the same names and colours."""
    group = name if picture.by_model else f"model {name}"
    shown = wanted and group not in place.legend
    if shown:
        place.legend.add(group)
    legend = "legend" if picture.by_model and len(picture.groups.names) else "legend2"
    return {"name": _short(name), "legendgroup": group, "showlegend": shown, "legend": legend}


def _job_facts(seen: data.Requests, j: int) -> str:
    job = seen.jobs[j]
    waited, lasted = int(seen.launch_ns[j] - job["arrival_ns"]), int(job["end_ns"] - job["arrival_ns"])
    due = ""
    if job["deadline_ns"] >= 0:
        left = int(job["deadline_ns"] - job["end_ns"])
        due = f"<br>{readable_time(abs(left))} {'after its deadline' if left < 0 else 'before its deadline'}"
    return (
        f"{seen.models[job['model']]}, request {job['request']}: {STATUS[job['status']]}<br>{readable_time(lasted)} in "
        f"all, {readable_time(waited)} queued, batch of {job['batch']}<br>client {job['client']}, priority "
        f"{job['priority']}{due}"
    )


def _segment_facts(seen: data.Requests, j: int, s: int) -> str:
    job, segment = seen.jobs[j], seen.segments[s]
    which = "the whole program" if segment["segment"] < 0 else f"segment {segment['segment']}"
    lasted = readable_time(int(segment["end_ns"] - segment["start_ns"]))
    return f"{seen.models[job['model']]}, request {job['request']}<br>{which}: {segment['blocks']} blocks, {lasted}"


# -- other figures, and the page


def plot_explanation(found: Explanation) -> Any:
    """Bars by kernel (plotly): the costs in time, and how near the kernel is to its roof. Hovering shows the words."""
    go = need("plotly.graph_objects", "explain().plot()")
    abouts = list(dict.fromkeys(c.about for k in found.kernels for c in k.claims))
    colour = colours(abouts)
    figure = go.Figure()
    for about in abouts:
        rows = [(k.kernel, c) for k in found.kernels for c in k.claims if c.about == about]
        figure.add_trace(
            go.Bar(
                orientation="h", name=about, y=[kernel for kernel, _ in rows], x=[c.share for _, c in rows],
                text=[f"{about} {c.share:.0%}" for _, c in rows], hovertext=[c.says for _, c in rows],
                marker_color=colour[about],
            )
        )  # fmt: skip
    figure.update_xaxes(title_text="share of the kernel's time", tickformat=".0%", range=[0, 1])
    figure.update_yaxes(autorange="reversed")
    bars = sum(len(k.claims) for k in found.kernels)
    figure.update_layout(barmode="group", height=140 + 34 * max(bars, 1))
    return figure


def plot_ranges(trace: Trace, sms: Sequence[int] | None = None) -> Any:
    """Ranges over time (plotly). `sms` are the SMs to show, by default the first two that have ranges.

    Ranges inside others are drawn thinner. Times count from the first range shown.
    """
    go = need("plotly.graph_objects", "plot_ranges()")
    records, row, names = data.shown_ranges(trace, sms)
    start_us, end_us = ((records[at] - records["start_ns"].min()) / 1000 for at in ("start_ns", "end_ns"))
    between = np.full(len(records), np.nan)  # the line ends there
    x = np.stack((start_us, end_us, between), axis=1)
    figure = go.Figure()
    colour = colours(trace.ranges.names)
    for i, name in enumerate(trace.ranges.names):
        mine = records["range"] == i
        said = [f"block {r['block']}, {r['end_ns'] - r['start_ns']} ns" for r in records[mine]]
        line = {"color": colour[name], "width": max(4, 16 - 5 * data.depth_of(trace, i))}
        figure.add_trace(
            go.Scatter(
                x=x[mine].ravel(), y=np.repeat(row[mine], 3), text=np.repeat(said, 3), name=name, mode="lines",
                line=line, hoverinfo="text+name+x",
            )
        )  # fmt: skip
    figure.update_xaxes(title_text="µs")
    figure.update_yaxes(tickvals=list(range(len(names))), ticktext=names, autorange="reversed")
    figure.update_layout(height=120 + 24 * min(len(names), _MOST_LANES), title_text=trace.device.name)
    return figure


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{themes}
body {{ margin: 1.5rem; background: var(--ground); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }}
h1 {{ font-size: 1.3rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
caption {{ display: none; }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8886; }}
th:first-child, td:first-child {{ text-align: left; overflow-wrap: anywhere; min-width: 7rem; }}
footer {{ opacity: .7; font-size: .85rem; }}
@media (max-width: 40rem) {{
  body {{ margin: .8rem; }}
  table {{ font-size: .8rem; }}
  th, td {{ padding: .2rem .4rem; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{facts}</p>
<div style="overflow-x: auto">{table}</div>
<div id="views" class="plotly-graph-div"></div>
<script>{plotly}</script>
<script>
const figures = {figures}, dark = matchMedia("(prefers-color-scheme: dark)"), narrow = matchMedia("(max-width: 40rem)");
function draw() {{
  const {{ data, layout }} = structuredClone((dark.matches && figures.dark) || figures.light || figures.dark);
  if (narrow.matches) {{ // what is beside the views goes above and below them
    Object.assign(layout.margin, {{ l: 48, r: 8, t: layout.margin.t + 40 }});
    const below = {{ orientation: "h", x: 0, xanchor: "left", yanchor: "top", yref: "container" }};
    layout.margin.b += layout.legend2 ? 110 : 60;
    layout.legend = {{ ...layout.legend, ...below, y: layout.legend2 ? 0.06 : 0.03 }};
    if (layout.legend2) layout.legend2 = {{ ...layout.legend2, ...below, y: 0.03 }};
    for (const each of data)
      if (each.colorbar) Object.assign(each.colorbar, {{ orientation: "h", x: 0.5, y: 1, yanchor: "bottom", len: 1 }});
  }}
  Plotly.newPlot("views", data, layout, {{ displaylogo: false, responsive: true, displayModeBar: !narrow.matches }});
}}
draw();
for (const each of [dark, narrow]) each.addEventListener("change", draw);
</script>
<footer>occupancy: mean resident warps / maximum, while the kernel has a block on the SM · waves: blocks of a launch /
blocks that the GPU holds at once · tail: share of a launch's time after its first SM has run dry<br>{versions}</footer>
</body>
</html>
"""


def to_html(
    trace: Trace, path: str | os.PathLike[str], title: str | None = None,
    *, by: By | None = None, bins: int = BINS, theme: Theme | None = None,
) -> Path:  # fmt: skip
    """Writes a page with the trace's summary and its linked views; it loads nothing from the network.

    Without `theme` the page is light or dark as the reader's browser asks for.
    """
    path = Path(path)
    figures = {each: plot(trace, by=by, bins=bins, theme=each) for each in ([theme] if theme else LOOKS)}
    for figure in figures.values():
        figure.update_layout(title=None)
    colour = ":root {{ --ground: {0.ground}; --ink: {0.ink}; color-scheme: {1}; }}"
    rules = [colour.format(look(each), each) for each in figures]
    rules[1:] = [f"@media (prefers-color-scheme: dark) {{ {each} }}" for each in rules[1:]]
    versions = " · ".join(f"{name} {number}" for name, number in trace.device.versions.items())
    page = _PAGE.format(
        title=html.escape(title or path.stem),
        themes="\n".join(rules),
        facts=html.escape(repr(trace)[1:-1]),
        table=trace._repr_html_(),
        plotly=need("plotly.offline", "a report").get_plotlyjs(),
        figures=_safe(json.dumps({name: json.loads(each.to_json()) for name, each in figures.items()})),
        versions=html.escape(versions),
    )
    path.write_text(page, encoding="utf-8")
    return path


def _safe(text: str) -> str:
    """JSON inside a script element, which `</` would end."""
    return text.replace("<", "\\u003c")
