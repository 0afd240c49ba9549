"""`t.explain().plot()`: a bar for every claim about a kernel, as long as the share of time that it concerns."""

from __future__ import annotations

from typing import Any

from paellapy.instrument.traces.explain import Explanation
from paellapy.viz.needs import need
from paellapy.viz.palette import colours


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
