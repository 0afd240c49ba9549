"""`t.picture()`: a picture that is stored in a notebook's file, so that it also shows where no scripts run.

Plotly's figures need a script to show; GitHub and mail programs run none.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from paellapy.instrument.traces.trace import Trace
from paellapy.viz import data
from paellapy.viz.data import Part, Parts
from paellapy.viz.palette import Theme
from paellapy.viz.static import ViewName, checked, draw, write

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
