"""`t.explore()`: the figure of `t.plot()` in Jupyter, binned again for every part that is zoomed into."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from paellapy.instrument.traces.trace import Trace
from paellapy.viz import data
from paellapy.viz.data import BINS, By
from paellapy.viz.figures import all_views, build
from paellapy.viz.needs import need
from paellapy.viz.palette import OTHERS, Theme, colours


def explore(trace: Trace, *, by: By | None = None, bins: int = BINS, theme: Theme = "light") -> Any:
    """A live figure for Jupyter. Zoomed in far enough, it shows single blocks with their numbers instead of bins.

        with pp.trace() as t: ...
        t.explore()
    """
    need("anywidget", "explore()")
    go = need("plotly.graph_objects", "explore()")
    whole = data.prepare(trace, by, bins=bins)
    axis = whole.axis
    # A kernel keeps its colour in parts where others do not run.
    colour: dict[str, str] = defaultdict(lambda: OTHERS, colours(whole.names))
    options: dict[str, Any] = {"by": by, "bins": bins, "theme": theme, "axis": axis, "colour": colour}
    figure = go.FigureWidget(_without_nan(build([trace], all_views(trace), **options)))

    def redraw(_: Any, time_range: tuple[float, float]) -> None:
        start, end = (axis.origin_ns + round(t * axis.ns_per_unit) for t in time_range)
        drawn = build([trace], all_views(trace), start_ns=start, end_ns=max(end, start + 1), **options)
        with figure.batch_update():
            figure.data = ()
            figure.add_traces(_without_nan(drawn).data)

    figure.layout.on_change(redraw, "xaxis.range")
    return figure


def _without_nan(figure: Any) -> Any:
    """Replaces NaN by None: a widget sends heat maps as JSON, which has no NaN. Pages store them as bytes."""
    for trace in figure.data:
        if trace.type == "heatmap" and np.isnan(trace.z).any():
            trace.z = np.where(np.isnan(trace.z), None, trace.z)
    return figure
