"""`t.plot_ranges()`: the ranges of kernels, with a lane for each block resident at a time, or for each warp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paellapy.instrument.errors import TraceError
from paellapy.instrument.traces.trace import Trace
from paellapy.viz import timeline
from paellapy.viz.needs import need
from paellapy.viz.palette import colours

_FEW_SMS, _FIGURE_LANES = 2, 40


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


def shown_slices(trace: Trace, sms: Sequence[int] | None) -> list[timeline.RangeSlice]:
    """The ranges on these SMs, or on the first two that have any."""
    slices = timeline.range_slices(trace)
    if not slices:
        raise TraceError('this trace has no ranges: mark some in the kernel with `with pp.range("load"):`')
    if sms is None:
        sms = sorted({s.place // timeline.LANES_PER_SM for s in slices})[:_FEW_SMS]
    shown = [s for s in slices if s.place // timeline.LANES_PER_SM in sms]
    if not shown:
        raise TraceError(f"this trace has no ranges on SMs {list(sms)}: choose others, or leave out sms")
    return shown


def depth_of(trace: Trace, number: int) -> int:
    depth = trace.ranges.records["depth"][trace.ranges.records["range"] == number]
    return int(depth.min(initial=3)) if len(depth) else 0


def lane_name(place: int, warp: int) -> str:
    sm, lane = divmod(place, timeline.LANES_PER_SM)
    return f"SM {sm}, lane {lane}" + ("" if warp < 0 else f", warp {warp}")
