"""Pictures of a trace: in Jupyter and HTML (plotly), for papers (matplotlib), for other tools (Perfetto, Chrome).

The libraries of the extra `viz` are imported when the first picture is drawn.
"""

from __future__ import annotations

from paellapy.viz.figures import compare, plot, plot_gantt, plot_heatmap, plot_requests, plot_residency, to_html
from paellapy.viz.palette import MissingExtraError
from paellapy.viz.perfetto import to_perfetto
from paellapy.viz.static import Still, compare_picture, picture, save_comparison, save_figure
from paellapy.viz.widgets import explore, live

__all__ = [
    "MissingExtraError",
    "Still",
    "compare",
    "compare_picture",
    "explore",
    "live",
    "picture",
    "plot",
    "plot_gantt",
    "plot_heatmap",
    "plot_requests",
    "plot_residency",
    "save_comparison",
    "save_figure",
    "to_html",
    "to_perfetto",
]
