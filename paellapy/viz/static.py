"""The same pictures as PNG, SVG or PDF, for papers (matplotlib); no browser or display is needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from paellapy.instrument.errors import TraceError
from paellapy.instrument.traces.trace import Trace
from paellapy.viz import data, fit
from paellapy.viz import requests as rq
from paellapy.viz.data import Part, Parts, Picture
from paellapy.viz.needs import need
from paellapy.viz.palette import WARNING, Look, Theme, colours, look, paler
from paellapy.viz.static_ranges import check_ranges, range_colours, ranges_view
from paellapy.viz.static_views import DPI, VIEWS

ViewName = Literal["all", "heatmap", "gantt", "residency", "requests", "ranges"]


def save_figure(
    trace: Trace,
    path: str | os.PathLike[str],
    view: ViewName | Sequence[ViewName] = "all",
    *,
    theme: Theme = "light",
    size_inches: tuple[float, float] | None = None,
    sms: tuple[int, int] | None = None,
    dpi: int = DPI,
    **part: Unpack[Part],
) -> Path:
    """Draws the trace into a file; its extension (.png, .svg, .pdf) chooses the format. `sms` = (first, last) shows
    only these SMs. The view "ranges" is not part of "all"; without `sms` it shows the first two SMs with ranges.

    >>> from paellapy import recordings
    >>> save_figure(recordings.load(recordings.names()[0]), "/dev/null.txt")
    Traceback (most recent call last):
    paellapy.instrument.errors.TraceError: /dev/null.txt: give a file name that ends in .png, .svg or .pdf
    """
    path = checked(path)
    picture = data.prepare(trace, **part)
    return write(draw([picture], view, theme, size_inches, sms=sms), path, dpi)


def save_comparison(
    a: Trace,
    b: Trace,
    path: str | os.PathLike[str],
    view: ViewName | Sequence[ViewName] = "all",
    *,
    labels: tuple[str, str] = ("a", "b"),
    theme: Theme = "light",
    size_inches: tuple[float, float] | None = None,
    dpi: int = DPI,
    **parts: Unpack[Parts],
) -> Path:
    """Draws two traces side by side, on axes of one scale: two policies, or virtual against real.

    Clocks differ, so `start_ns` and `end_ns` may be pairs, one time for each trace.
    """
    path = checked(path)
    data.check_labels(labels)
    pictures = data.prepare_all((a, b), **parts)
    return write(draw(pictures, view, theme, size_inches, labels), path, dpi)


def checked(path: str | os.PathLike[str]) -> Path:
    """The path, if its extension is supported."""
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise TraceError(f"{path}: give a file name that ends in .png, .svg or .pdf")
    return path


def write(figure: Any, path: Path, dpi: int) -> Path:
    # Text stays editable, and the same trace gives the same bytes.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "paellapy"}
    with need("matplotlib", "save_figure()").rc_context(settings):
        figure.savefig(path, dpi=dpi, metadata=None if path.suffix == ".png" else {_DATE[path.suffix]: None})
    return path


_DATE = {".svg": "Date", ".pdf": "CreationDate"}


def draw(
    pictures: Sequence[Picture],
    view: ViewName | Sequence[ViewName],
    theme: Theme,
    size_inches: tuple[float, float] | None = None,
    labels: Sequence[str] = (),
    sms: tuple[int, int] | None = None,
) -> Any:
    """The matplotlib figure, with a column for each picture and a row for each view."""
    style = need("matplotlib.style", "save_figure()")
    figures = need("matplotlib.figure", "save_figure()")
    chosen = _chosen(pictures, view)
    size = size_inches or (8 if len(pictures) == 1 else 11, 2.9 * len(chosen))
    font = fit.font_size(size, len(chosen))
    with style.context([look(theme).matplotlib, {"font.size": font}]):
        figure = figures.Figure(figsize=size, layout="constrained")
        heights = [1 if name == "residency" else 2 for name in chosen]
        axes = figure.subplots(
            len(chosen), len(pictures), sharex=True, sharey="row", squeeze=False, height_ratios=heights
        )
        colour = colours(name for p in pictures for name in p.names)
        for column, picture in enumerate(pictures):
            for ax, name in zip(axes[:, column], chosen, strict=True):
                first, last = sms or (0, picture.trace.device.n_sm - 1)
                if name in ("heatmap", "gantt"):
                    ax.set_ylim(last + 0.5, first - 0.5)
                if name == "ranges":
                    ranges_view(picture, ax, sms)
                else:
                    VIEWS[name](picture, ax, colour, look(theme))
                if column:
                    ax.set_ylabel("")
                if name == "heatmap":
                    ax.set_ylim(last + 0.5, first - 0.5)
                if not len(picture.trace.blocks) and name != "requests":
                    ax.text(0.5, 0.5, "no blocks were recorded", transform=ax.transAxes, ha="center", color=WARNING)
            axes[-1, column].set(xlabel=f"time ({picture.axis.unit})", xlim=(0, picture.axis.length))
        _title(figure, axes, pictures, labels, font)
        _legend(figure, pictures, _handles(pictures, chosen, colour, look(theme)), max(fit.SMALLEST, 0.8 * font))
        if size_inches is not None:
            fit.fit_labels(figure)
    return figure


def _chosen(pictures: Sequence[Picture], view: ViewName | Sequence[ViewName]) -> list[str]:
    wanted: list[str] = [view] if isinstance(view, str) else list(view)
    if unknown := [name for name in wanted if name not in ("all", "ranges", *VIEWS)]:
        raise TraceError(f"there is no view {unknown[0]!r}: choose from all, {', '.join(VIEWS)}, ranges")
    if "ranges" in wanted:
        check_ranges(pictures)
    there = [rq.has_requests(p.whole) for p in pictures]
    if "requests" in wanted and not all(there):
        raise TraceError("this trace has no requests: record them with `with engine.trace() as t:`")
    if "all" in wanted:
        every = [name for name in VIEWS if name != "requests" or any(there)]
        return [*every, *(name for name in wanted if name == "ranges")]
    return wanted


def _title(figure: Any, axes: Any, pictures: Sequence[Picture], labels: Sequence[str], font: float) -> None:
    width = figure.get_figwidth() * fit.POINTS
    if len(pictures) == 1:
        title = fit.wrapped(pictures[0].title, font, 0.97 * width)
        figure.suptitle(title, fontsize=font, x=0.01, ha="left")
        return
    small = max(fit.SMALLEST, 0.8 * font)
    for ax, picture, label in zip(axes[0], pictures, labels, strict=True):
        device, _, rest = picture.title.rpartition(": ")
        about = fit.wrapped(f"{device}\n{rest}", small, 0.4 * width)
        below = "\n" * (about.count("\n") + 1)
        ax.set_title(f"{label}{below}", fontsize=1.1 * font, fontweight="bold", loc="left")
        ax.text(0, 1.01, about, transform=ax.transAxes, fontsize=small, va="bottom", in_layout=False)


def _legend(figure: Any, pictures: Sequence[Picture], handles: Sequence[Any], font: float) -> None:
    """One legend below the figure, preceded by lines that say which records were lost."""
    warning = "; ".join(p.warning for p in pictures if p.warning)
    if not handles and not warning:
        return
    width, height = (inches * fit.POINTS for inches in figure.get_size_inches())
    most = 0.97 * width - font
    names, columns = fit.legend_names([h.get_label() for h in handles], font, most, height / 4)
    legend = figure.legend(
        handles, names, fontsize=font, frameon=False, loc="outside lower center", ncols=max(columns, 1),
        handlelength=fit.HANDLE, handletextpad=fit.AFTER_HANDLE, columnspacing=fit.BETWEEN, alignment="left",
        title=fit.wrapped(f"⚠ {warning}", font, most) if warning else None, title_fontsize=font,
    )  # fmt: skip
    legend.get_title().set_color(WARNING)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a kernel's name may contain dollar signs


def _handles(pictures: Sequence[Picture], chosen: Sequence[str], colour: dict[str, str], style: Look) -> list[Any]:
    """The entries for colours and for the marks in request lanes."""
    patches, lines = need("matplotlib.patches", "a legend"), need("matplotlib.lines", "a legend")
    shown: dict[str, str] = {}
    if set(chosen) - {"heatmap", "requests", "ranges"}:
        there = {name for p in pictures for name in p.groups.names}
        shown = {name: tone for name, tone in colour.items() if name in there}
    marks: list[Any] = []
    if "ranges" in chosen:
        marks = [patches.Patch(color=tone, label=name) for name, tone in range_colours(pictures).items()]
    if "requests" in chosen:
        found = []
        for p in pictures:
            if (seen := rq.requests(p.whole, rq.MOST)) is not None:
                found.append(seen)
                of_model = rq.colour_of_models(seen, colour, p.by_model)
                shown |= {name: tone for name, tone in of_model.items() if name in seen.asked}
        grey = "#808080"
        marks += [patches.Patch(color=paler(grey, style.ground, rq.STRENGTH[what]), label=label) for what, label in
                 ((rq.QUEUED, "queued"), (rq.LAUNCHED, "launched"), (rq.SEGMENTS, "on the GPU"))]  # fmt: skip
        dot: dict[str, Any] = {"linestyle": "none", "markersize": 8}
        if any(len(each.due) for each in found):
            marks.append(lines.Line2D([], [], marker="|", color=style.ink, label="deadline", **dot))
        if any(each.late.any() for each in found):
            marks.append(patches.Patch(color=WARNING, label="late"))
        if any(each.unanswered.any() for each in found):
            marks.append(lines.Line2D([], [], marker="x", color=WARNING, label="not answered", **dot))
    if "residency" in chosen and any(limit is not None for p in pictures for limit in p.groups.theoretical):
        marks.append(lines.Line2D([], [], linestyle="--", color=style.ink, label="theoretical occupancy"))
    return [*(patches.Patch(color=tone, label=name) for name, tone in shown.items()), *marks]
