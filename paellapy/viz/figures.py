"""Interactive pictures of a trace (plotly). All views of a figure share one time axis: zooming one zooms the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from paellapy.instrument.errors import TraceError
from paellapy.instrument.traces.explain import Explanation
from paellapy.instrument.traces.trace import Trace
from paellapy.viz import data, perfetto
from paellapy.viz.data import Parts, Picture, TimeAxis
from paellapy.viz.palette import WARNING, Look, Theme, colours, look, need
from paellapy.viz.requests import has_requests, requests_view
from paellapy.viz.views import TALL_PIXELS, Place, View, gantt_view, heatmap_view, residency_view, say_empty

_FEW_SMS = 40


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
    if not has_requests(trace):
        raise TraceError("this trace has no requests: record them with `with engine.trace() as t:`")
    return build([trace], (requests_view,), **options)


def all_views(*traces: Trace) -> tuple[View, ...]:
    views: tuple[View, ...] = (heatmap_view, gantt_view, residency_view)
    return (*views, requests_view) if any(map(has_requests, traces)) else views


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
    subplots = need("plotly.subplots", "plot()")
    style = look(theme)
    pictures = data.prepare_all(traces, axis=axis, **parts)
    tall = any(p.trace.device.n_sm > _FEW_SMS for p in pictures) and gantt_view in views
    colour = colour or colours(name for p in pictures for name in p.names)
    figure = subplots.make_subplots(
        rows=len(views),
        cols=len(pictures),
        shared_xaxes="all",
        row_heights=[_share(view, tall) for view in views],
        vertical_spacing=0.04,
        horizontal_spacing=0.05,
        column_titles=[_wrapped(p, label) for p, label in zip(pictures, labels, strict=True)]
        if len(pictures) > 1
        else None,
    )
    legend: set[str] = set()
    for column, picture in enumerate(pictures, 1):
        for row, view in enumerate(views, 1):
            place = Place(figure, row, column, colour, style, column == 1)
            place.legend = legend
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
            text=f"⚠ {warning}",
            xref="paper",
            yref="paper",
            x=0,
            y=1,
            yshift=42 if len(pictures) > 1 else 6,
            xanchor="left",
            yanchor="bottom",
            showarrow=False,
            align="left",
            font={"color": WARNING, "size": 13},
        )


def _two_lines(picture: Picture) -> str:
    return picture.title.replace(": ", "<br>", 1)


def _wrapped(picture: Picture, label: str) -> str:
    return f"<b>{label}</b>: {_two_lines(picture)}"


# `t.explain().plot()`: a bar for every claim about a kernel, as long as the share of time that it concerns.


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
                orientation="h",
                name=about,
                y=[kernel for kernel, _ in rows],
                x=[c.share for _, c in rows],
                text=[f"{about} {c.share:.0%}" for _, c in rows],
                hovertext=[c.says for _, c in rows],
                marker_color=colour[about],
            )
        )
    figure.update_xaxes(title_text="share of the kernel's time", tickformat=".0%", range=[0, 1])
    figure.update_yaxes(autorange="reversed")
    bars = sum(len(k.claims) for k in found.kernels)
    figure.update_layout(barmode="group", height=140 + 34 * max(bars, 1))
    return figure


# `t.plot_ranges()`: the ranges of kernels, with a lane for each block resident at a time, or for each warp.


_FEW_RANGE_SMS, _FIGURE_LANES = 2, 40


def plot_ranges(trace: Trace, sms: Sequence[int] | None = None) -> Any:
    """Ranges over time (plotly). `sms` are the SMs to show, by default the first two that have ranges.

    Ranges inside others are drawn thinner. Times count from the first range shown.
    """
    go = need("plotly.graph_objects", "plot_ranges()")
    shown = shown_slices(trace, sms)
    lanes = {lane: i for i, lane in enumerate(sorted({s.lane for s in shown}))}
    origin = min(s.start_ns for s in shown)
    figure = go.Figure()
    colour = colours(trace.ranges.names)
    for i, name in enumerate(trace.ranges.names):
        mine = [s for s in shown if s.name == name]
        x = [t for s in mine for t in ((s.start_ns - origin) / 1000, (s.end_ns - origin) / 1000, None)]
        y = [v for s in mine for v in (lanes[s.lane],) * 2 + (None,)]
        text = [v for s in mine for v in (f"block {s.block}, {s.end_ns - s.start_ns} ns",) * 2 + (None,)]
        width = max(4, 16 - 5 * depth_of(trace, i))
        line = {"color": colour[name], "width": width}
        figure.add_trace(go.Scatter(x=x, y=y, text=text, name=name, mode="lines", line=line, hoverinfo="text+name+x"))
    figure.update_xaxes(title_text="µs")
    names = [lane_name(*lane) for lane in lanes]
    figure.update_yaxes(tickvals=list(range(len(lanes))), ticktext=names, autorange="reversed")
    figure.update_layout(height=120 + 24 * min(len(lanes), _FIGURE_LANES), title_text=trace.device.name)
    return figure


def shown_slices(trace: Trace, sms: Sequence[int] | None) -> list[perfetto.RangeSlice]:
    """The ranges on these SMs, or on the first two that have any."""
    slices = perfetto.range_slices(trace)
    if not slices:
        raise TraceError('this trace has no ranges: mark some in the kernel with `with pp.range("load"):`')
    if sms is None:
        sms = sorted({s.place // perfetto.LANES_PER_SM for s in slices})[:_FEW_RANGE_SMS]
    shown = [s for s in slices if s.place // perfetto.LANES_PER_SM in sms]
    if not shown:
        raise TraceError(f"this trace has no ranges on SMs {list(sms)}: choose others, or leave out sms")
    return shown


def depth_of(trace: Trace, number: int) -> int:
    depth = trace.ranges.records["depth"][trace.ranges.records["range"] == number]
    return int(depth.min(initial=3)) if len(depth) else 0


def lane_name(place: int, warp: int) -> str:
    sm, lane = divmod(place, perfetto.LANES_PER_SM)
    return f"SM {sm}, lane {lane}" + ("" if warp < 0 else f", warp {warp}")
