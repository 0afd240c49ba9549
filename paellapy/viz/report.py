"""One HTML page that shows a trace offline: it contains the numbers, the pictures, and plotly itself."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from paellapy.instrument.traces.trace import Trace
from paellapy.viz import data
from paellapy.viz.data import BINS, By, Part, Parts
from paellapy.viz.figures import plot
from paellapy.viz.palette import Theme, look
from paellapy.viz.static import ViewName, checked, draw, write

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 1.5rem; background: {ground}; color: {ink}; font: 15px/1.45 system-ui, sans-serif; }}
h1 {{ font-size: 1.3rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
caption {{ display: none; }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8886; }}
th:first-child, td:first-child {{ text-align: left; overflow-wrap: anywhere; }}
footer {{ opacity: .7; font-size: .85rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{facts}</p>
<div style="overflow-x: auto">{table}</div>
{figure}
<footer>occupancy: mean resident warps / maximum, while the kernel has a block on the SM · waves: blocks of a launch /
blocks that the GPU holds at once · tail: share of a launch's time after its first SM has run dry<br>{versions}</footer>
</body>
</html>
"""


def to_html(
    trace: Trace,
    path: str | os.PathLike[str],
    title: str | None = None,
    *,
    by: By | None = None,
    bins: int = BINS,
    theme: Theme = "light",
) -> Path:
    """Writes a page with the trace's summary and its linked views; it loads nothing from the network."""
    path = Path(path)
    figure = plot(trace, by=by, bins=bins, theme=theme)
    figure.update_layout(title=None)
    inner = figure.to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True})
    versions = " · ".join(f"{name} {number}" for name, number in trace.device.versions.items())
    page = _PAGE.format(
        title=html.escape(title or path.stem),
        ground=look(theme).ground,
        ink=look(theme).ink,
        facts=html.escape(repr(trace)[1:-1]),
        table=trace._repr_html_(),
        figure=inner,
        versions=html.escape(versions),
    )
    path.write_text(page, encoding="utf-8")
    return path


# `t.picture()`: a picture that is stored in a notebook's file, so that it also shows where no scripts run.
#
# Plotly's figures need a script to show; GitHub and mail programs run none.


DPI = 90


class Still:
    """A picture that Jupyter shows as PNG; `save` writes PNG, SVG or PDF. `figure` is matplotlib's."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=DPI)
        return file.getvalue()

    def save(self, path: str | os.PathLike[str], dpi: int = 160) -> Path:
        return write(self.figure, checked(path), dpi)

    def __repr__(self) -> str:
        width, height = self.figure.get_size_inches()
        return f"<picture, {width:g} x {height:g} inches>"


def picture(
    trace: Trace,
    view: ViewName | Sequence[ViewName] = "all",
    *,
    theme: Theme = "light",
    size_inches: tuple[float, float] | None = None,
    sms: tuple[int, int] | None = None,
    **part: Unpack[Part],
) -> Still:
    """One or more views of a trace as a picture for a notebook. Options as in `save_figure`."""
    prepared = data.prepare(trace, **part)
    return Still(draw([prepared], view, theme, size_inches, sms=sms))


def compare_picture(
    a: Trace,
    b: Trace,
    view: ViewName | Sequence[ViewName] = "all",
    *,
    labels: tuple[str, str] = ("a", "b"),
    theme: Theme = "light",
    size_inches: tuple[float, float] | None = None,
    **parts: Unpack[Parts],
) -> Still:
    """Two traces side by side, on axes of one scale, as a picture for a notebook. Options as in `save_comparison`."""
    data.check_labels(labels)
    prepared = data.prepare_all((a, b), **parts)
    return Still(draw(prepared, view, theme, size_inches, labels))
