"""Pictures as PNG, SVG or PDF, for papers and notebooks (matplotlib); no browser or display is needed."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import TraceError
from paellapy.instrument.traces.trace import Trace
from paellapy.scheduler.core.codes import OK
from paellapy.scheduler.sim.results import Comparison, Results
from paellapy.viz import data
from paellapy.viz.data import Part, Parts, Picture, short
from paellapy.viz.palette import OKABE_ITO, SCALE, WARNING, Look, Theme, colours, further_colours, look, need, paler

ViewName = Literal["all", "heatmap", "gantt", "residency", "requests", "ranges"]

DPI, _NOTEBOOK_DPI = 160, 90
POINTS = 72  # per inch
SMALLEST = 6.0  # points: the smallest size that journals accept
# Lengths in a legend as multiples of its font size: matplotlib's own, with a narrower handle.
HANDLE, AFTER_HANDLE, BETWEEN, LINE = 1.6, 0.6, 1.6, 1.5

_DATE = {".svg": "Date", ".pdf": "CreationDate"}
_RANGE_HEIGHTS = (0.8, 0.55, 0.3)  # of a range, of one inside it, and of all further inside
_MOST_LABELS = 48  # of lanes of ranges
_DASHES = ("-", "--", ":", "-.")  # beyond the palette, colours repeat with the next line style


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
    path = _checked(path)
    return picture(trace, view, theme=theme, size_inches=size_inches, sms=sms, **part).save(path, dpi)


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
    path = _checked(path)
    return compare_picture(a, b, view, labels=labels, theme=theme, size_inches=size_inches, **parts).save(path, dpi)


class Still:
    """A picture that Jupyter shows as PNG; `save` writes PNG, SVG or PDF. `figure` is matplotlib's."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=_NOTEBOOK_DPI)
        return file.getvalue()

    def save(self, path: str | os.PathLike[str], dpi: int = DPI) -> Path:
        path = _checked(path)
        # Text stays editable, and the same trace gives the same bytes.
        settings = {"svg.fonttype": "none", "svg.hashsalt": "paellapy"}
        with need("matplotlib", "save_figure()").rc_context(settings):
            self.figure.savefig(path, dpi=dpi, metadata={_DATE[path.suffix]: None} if path.suffix in _DATE else None)
        return path

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


def _checked(path: str | os.PathLike[str]) -> Path:
    """The path, if its extension is supported."""
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise TraceError(f"{path}: give a file name that ends in .png, .svg or .pdf", field="path", given=path)
    return path


# -- the figure around the views


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
    font = font_size(size, len(chosen))
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
        _legend(figure, pictures, _handles(pictures, chosen, colour, look(theme)), max(SMALLEST, 0.8 * font))
        if size_inches is not None:
            fit_labels(figure)
    return figure


def _chosen(pictures: Sequence[Picture], view: ViewName | Sequence[ViewName]) -> list[str]:
    wanted: list[str] = [view] if isinstance(view, str) else list(view)
    if unknown := [name for name in wanted if name not in ("all", "ranges", *VIEWS)]:
        said = f"there is no view {unknown[0]!r}: choose from all, {', '.join(VIEWS)}, ranges"
        raise TraceError(said, field="view", given=unknown[0])
    if "ranges" in wanted:
        if len(pictures) > 1:
            raise TraceError("the view 'ranges' shows one trace: save a figure of each", field="view", given="ranges")
        data.shown_ranges(pictures[0].trace, None)  # there must be some
    if "requests" in wanted:
        data.check_requests(*(p.whole for p in pictures))
    if "all" in wanted:
        every = [name for name in VIEWS if name != "requests" or any(data.has_requests(p.whole) for p in pictures)]
        return [*every, *(name for name in wanted if name == "ranges")]
    return wanted


def _title(figure: Any, axes: Any, pictures: Sequence[Picture], labels: Sequence[str], font: float) -> None:
    width = figure.get_figwidth() * POINTS
    if len(pictures) == 1:
        title = wrapped(pictures[0].title, font, 0.97 * width)
        figure.suptitle(title, fontsize=font, x=0.01, ha="left")
        return
    small = max(SMALLEST, 0.8 * font)
    for ax, picture, label in zip(axes[0], pictures, labels, strict=True):
        device, _, rest = picture.title.rpartition(": ")
        about = wrapped(f"{device}\n{rest}", small, 0.4 * width)
        below = "\n" * (about.count("\n") + 1)
        ax.set_title(f"{label}{below}", fontsize=1.1 * font, fontweight="bold", loc="left")
        ax.text(0, 1.01, about, transform=ax.transAxes, fontsize=small, va="bottom", in_layout=False)


def _legend(figure: Any, pictures: Sequence[Picture], handles: Sequence[Any], font: float) -> None:
    """One legend below the figure, preceded by lines that say which records were lost."""
    warning = "; ".join(p.warning for p in pictures if p.warning)
    if not handles and not warning:
        return
    width, height = (inches * POINTS for inches in figure.get_size_inches())
    most = 0.97 * width - font
    names, columns = legend_names([h.get_label() for h in handles], font, most, height / 4)
    legend = figure.legend(
        handles, names, fontsize=font, frameon=False, loc="outside lower center", ncols=max(columns, 1),
        handlelength=HANDLE, handletextpad=AFTER_HANDLE, columnspacing=BETWEEN, alignment="left",
        title=wrapped(f"⚠ {warning}", font, most) if warning else None, title_fontsize=font,
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
            if (seen := data.requests_of(p.whole, data.MOST_REQUESTS)) is not None:
                found.append(seen)
                of_model = data.colour_of_models(seen, colour, p.by_model)
                shown |= {name: tone for name, tone in of_model.items() if name in seen.asked}
        grey = "#808080"
        marks += [patches.Patch(color=paler(grey, style.ground, data.STRENGTH[what]), label=label) for what, label in
                 ((data.QUEUED, "queued"), (data.LAUNCHED, "launched"), (data.SEGMENTS, "on the GPU"))]  # fmt: skip
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


# -- the views


def boxes(
    picture: Picture,
    ax: Any,
    start_ns: NDArray[np.int64],
    end_ns: NDArray[np.int64],
    middle: NDArray[np.float64],
    height: float,
    paint: list[str],
) -> None:
    """Bars over time, each in its own colour."""
    collections = need("matplotlib.collections", "a picture")
    left, right = picture.axis.of(start_ns), picture.axis.of(end_ns)
    low, high = middle - height / 2, middle + height / 2
    corners = np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
    shapes = collections.PolyCollection(corners, facecolors=paint, linewidths=0)
    shapes.set_snap(False)  # lanes thinner than a pixel become paler, instead of a whole pixel or none
    ax.add_collection(shapes)


def heatmap_view(picture: Picture, ax: Any, colour: dict[str, str], style: Look) -> None:
    seen = data.heat(picture)
    image = ax.imshow(
        seen.resident, cmap=SCALE, vmin=0, vmax=data.heat_ends(seen, picture.least_heat), aspect="auto",
        interpolation="none", extent=_extent(picture),
    )  # fmt: skip
    if ax.get_subplotspec().is_last_col():
        ax.figure.colorbar(image, ax=ax, label="resident warps", format=_percent(), pad=0.01)
    ax.set_ylabel("SM")
    _sm_ticks(ax)


def gantt_view(picture: Picture, ax: Any, colour: dict[str, str], style: Look) -> None:
    chart = data.gantt(picture)
    names = picture.groups.names
    pixels = _height(ax)
    bottom, top = ax.get_ylim()  # the SMs shown
    if len(chart.blocks) <= data.EXACT_BLOCKS and chart.depth * (bottom - top) <= pixels / 2:
        _bars(picture, ax, colour, chart, style.ground)
        ax.set_ylabel(data.OF_BLOCKS)
    else:  # blocks thinner than pixels, drawn one by one, would give a moiré pattern
        cells = data.cells(picture, chart, min(data.ROWS, int(pixels / 2)))
        paint = np.zeros((*cells.group.shape, 4))
        for g, name in enumerate(names):
            paint[cells.group == g] = need("matplotlib.colors", "a Gantt chart").to_rgba(colour[name])
        paint[..., 3] *= 0.25 + 0.75 * np.clip(cells.share, 0, 1)
        # Lanes narrower than pixels blend, instead of some of them vanishing.
        ax.imshow(paint, aspect="auto", interpolation="antialiased", extent=_extent(picture))
        ax.set_ylabel(data.OF_SHARES)
    _sm_ticks(ax)
    ax.set_ylim(bottom, top)


def _height(ax: Any) -> float:
    """Approximate height in pixels, before the layout is computed."""
    height: float = ax.get_position().height * ax.figure.get_size_inches()[1] * DPI
    return height


def _bars(picture: Picture, ax: Any, colour: dict[str, str], chart: data.Gantt, ground: str) -> None:
    b = chart.blocks
    of_group = np.array([[colour[name], paler(colour[name], ground)] for name in picture.groups.names]).reshape(-1, 2)
    paint = of_group[picture.groups.of_block, chart.second().astype(int)]
    boxes(picture, ax, b["start_ns"], b["end_ns"], chart.middle(), chart.height(), paint.tolist())


def requests_view(picture: Picture, ax: Any, colour: dict[str, str], style: Look) -> None:
    seen = data.requests_of(picture.whole, data.MOST_REQUESTS)
    if seen is None:
        return
    of_model = data.colour_of_models(seen, colour, picture.by_model)
    paint = np.array([of_model[name] for name in seen.models])
    for each in data.request_bars(seen):
        tones = [WARNING] * len(each.job) if each.what == data.LATE else [
            paler(tone, style.ground, data.STRENGTH[each.what]) for tone in paint[seen.jobs["model"][each.job]]
        ]  # fmt: skip
        boxes(picture, ax, each.start_ns, each.end_ns, each.middle(seen), data.HEIGHT[each.what], tones)
    lost = np.flatnonzero(seen.unanswered)
    size = 30 if seen.lane.max() < data.REQUEST_LANES else 12
    spare = data.ends_early(seen)
    ends, due = (picture.axis.of(seen.jobs[at][spare]) for at in ("end_ns", "deadline_ns"))
    ax.hlines(seen.lane[spare], ends, due, colors=paint[seen.jobs["model"][spare]].tolist(), linewidths=1.0)
    ax.scatter(picture.axis.of(seen.jobs["deadline_ns"][seen.due]), seen.lane[seen.due], s=size, marker="|",
               color=style.ink, linewidths=1.2, zorder=3)  # fmt: skip
    ax.scatter(picture.axis.of(seen.jobs["end_ns"][lost]), seen.lane[lost], s=size, marker="x", color=WARNING, zorder=3)
    ax.set(ylabel=data.requests_title(seen, "\n"), yticks=[])
    below = max([seen.lane.max() + 0.5, *ax.get_ylim()])  # columns share one scale
    ax.set_ylim(below, -0.5)


def residency_view(picture: Picture, ax: Any, colour: dict[str, str], style: Look) -> None:
    seen = data.residency(picture)
    edges = picture.axis.of(seen.edges_ns)
    for g, name in enumerate(picture.groups.names):
        ax.stairs(seen.resident[g], edges, color=colour[name], linewidth=1.2)
        ax.stairs(seen.resident[g], edges, color=colour[name], alpha=0.15, fill=True)
        allowed = picture.groups.theoretical[g]
        if allowed is not None:
            ax.plot(data.ran(picture, g), [allowed, allowed], "--", color=colour[name], linewidth=1.2)
    # Without theoretical limits, the scale ends a little above the data; columns share one scale.
    needed = 1.05 if any(each is not None for each in picture.groups.theoretical) else 1.2 * _most(seen.resident)
    before = ax.get_ylim()[1] if not ax.get_subplotspec().is_first_col() else 0.0
    ax.set(ylabel=data.residency_title(picture, "\n"), ylim=(0, min(1.05, max(needed, before))))
    ax.yaxis.set_major_formatter(_percent())


def _most(values: NDArray[np.float64]) -> float:
    return float(values.max()) if values.size else 1.0


def _extent(picture: Picture) -> tuple[float, float, float, float]:
    return 0, picture.axis.length, picture.trace.device.n_sm - 0.5, -0.5


def _percent() -> Any:
    return need("matplotlib.ticker", "a picture").FuncFormatter(lambda share, _: f"{100 * share:.3g}%")


def _sm_ticks(ax: Any) -> None:
    ax.yaxis.set_major_locator(need("matplotlib.ticker", "a picture").MaxNLocator("auto", integer=True))


VIEWS: dict[str, Callable[[Picture, Any, dict[str, str], Look], None]] = {
    "heatmap": heatmap_view,
    "gantt": gantt_view,
    "residency": residency_view,
    "requests": requests_view,
}


def ranges_view(picture: Picture, ax: Any, sms: tuple[int, int] | None) -> None:
    """A lane for each block resident at a time, or for each warp, on the first SMs that have ranges, or on `sms`."""
    trace = picture.trace
    records, row, names = data.shown_ranges(trace, None if sms is None else range(sms[0], sms[1] + 1))
    tone = range_colours([picture])
    for i, name in enumerate(trace.ranges.names):
        mine = records["range"] == i
        start, end = (records[at][mine] for at in ("start_ns", "end_ns"))
        height = _RANGE_HEIGHTS[min(data.depth_of(trace, i), 2)]
        boxes(picture, ax, start, end, row[mine].astype(np.float64), height, [tone[name]] * len(start))
    step = -(-len(names) // _MOST_LABELS)
    ax.set_yticks(range(0, len(names), step), names[::step])
    ax.set(ylabel="ranges", ylim=(len(names) - 0.5, -0.5))


def range_colours(pictures: Sequence[Picture]) -> dict[str, str]:
    """Other colours than those of the kernels in other views."""
    named = [name for p in pictures for name in p.trace.ranges.names]
    return further_colours(named, colours(name for p in pictures for name in p.groups.names).values())


# -- text in a figure: it is measured, broken into lines, shortened


def font_size(size_inches: tuple[float, float], views: int) -> float:
    """10 points if there is room, less in a paper's column."""
    width, height = size_inches
    return max(SMALLEST, min(10.0, 10 * width / 6, 10 * height / (1.9 * views)))


def width_of(text: str, size: float, weight: str = "normal") -> float:
    """Width in points of the longest line."""
    fonts, paths = need("matplotlib.font_manager", "a picture"), need("matplotlib.textpath", "a picture")
    font = fonts.FontProperties(size=size, weight=weight)
    measure = paths.text_to_path.get_text_width_height_descent
    return max(float(measure(line, font, ismath=False)[0]) for line in text.split("\n"))


def wrapped(text: str, size: float, most: float) -> str:
    """The text in lines of at most `most` points, broken between words."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append("")
        for word in line.split(" "):
            longer = f"{lines[-1]} {word}" if lines[-1] else word
            if lines[-1] and width_of(longer, size) > most:
                lines.append(word)
            else:
                lines[-1] = longer
    return "\n".join(lines)


def legend_columns(names: Sequence[str], size: float, most: float) -> int:
    """The largest number of columns, filled one after another, that fit into `most` points; at least 1."""
    widths = [width_of(name, size) + (HANDLE + AFTER_HANDLE) * size for name in names]
    for n in range(len(names), 1, -1):
        rows, longer = divmod(len(names), n)
        starts = [c * rows + min(c, longer) for c in range(n + 1)]
        columns = (max(widths[a:b]) for a, b in pairwise(starts))
        if sum(columns) + (n - 1) * BETWEEN * size <= most:
            return n
    return 1


def legend_names(names: Sequence[str], size: float, most: float, high: float) -> tuple[list[str], int]:
    """The names, shortened until they fit into `most` points of width and `high` points of height but stay distinct;
    and the number of columns.
    """
    shown = [short(name) for name in names]
    columns = legend_columns(shown, size, most)
    for letters in (24, 16, 12):
        shorter = [short(name, letters) for name in names]
        fits = all(width_of(name, size) + (HANDLE + AFTER_HANDLE) * size <= most for name in shown)
        fits = fits and -(-len(names) // columns) * LINE * size <= high
        if fits or len({*shorter}) < len({*shown}):
            break
        shown, columns = shorter, legend_columns(shorter, size, most)
    return shown, columns


def fit_labels(figure: Any) -> None:
    """Breaks or cuts labels of vertical axes that are longer than their axis."""
    figure.draw_without_rendering()  # computes the layout
    for ax in figure.axes:
        label = ax.yaxis.label
        text, size = label.get_text(), label.get_size()
        room = ax.get_window_extent().height / figure.dpi * POINTS * 1.1
        lines = text.count("\n") + 1
        choices = (text, wrapped(text, size, room), text.split("\n")[0], text.split()[0].rstrip(",") if text else "")
        for choice in choices:
            if width_of(choice, size) <= room and choice.count("\n") < max(lines, 2):
                break
        label.set_text(choice)


# -- latencies of simulated requests, by policy and by model, and the use of the GPU over time

_PANEL = 3.2, 2.5  # inches
_TAIL_POINTS = 400  # of a curve
_USES = {"block_slots": "block slots", "memory_bandwidth": "memory bandwidth", "kernel_issue": "kernel issue"}


def plot_run(results: Results) -> Still:
    """The latencies of one run, a line for each model with its target, and its use of the GPU."""
    figure = need("matplotlib.figure", "plot()").Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, each in enumerate(results.per_model):
        style = _style(number)
        if _tail(left, results, each.name, style | {"label": each.name}) and results.models[number].target_ms:
            left.axvline(results.models[number].target_ms, linestyle=":", color=style["color"], linewidth=1.2)
    _latency_axes(left)
    left.set_title(f"{results.policy}, {results.device}", fontsize="medium", loc="left")
    used = results.occupancy_columns()
    for number, (name, label) in enumerate(_USES.items()):
        if np.any(used[name]):  # a resource that no profile knows has no line
            right.plot(used["time_ms"], used[name], label=label, linewidth=1, **_style(number))
    right.set(xlabel="time, ms", ylim=(0, 1.02), xlim=(0, results.seconds * 1e3 or None))
    right.yaxis.set_major_formatter(_percent())
    right.set_title("use of the GPU", fontsize="medium", loc="left")
    handles = _keyed(left)
    if any(each.target_ms for each in results.models):
        lines = need("matplotlib.lines", "a legend")
        handles.append(lines.Line2D([], [], linestyle=":", color="#808080", label="target of the model"))
    _beneath(left, handles)
    _beneath(right, _keyed(right))
    return Still(figure)


def plot_comparison(comparison: Comparison) -> Still:
    """A panel for all requests and one for each model, or client if there are several; in each a line for every run,
    and the model's target.
    """
    runs = comparison.runs
    clients = any(len(run.clients) > 1 for run in runs)
    parts = [each.name for run in runs for each in (run.per_tenant if clients else run.per_model) if each.completed]
    names: list[str | None] = list(dict.fromkeys(parts))
    panels = [None, *names] if len(names) != 1 else names
    n = max(len(panels), 1)
    across = n if n <= 3 else min((2, 3, 4) if n == 4 else (4, 3), key=lambda a: -n % a)  # with few empty places
    down = -(-n // across)
    size = max(_PANEL[0] * across, 5.5), _PANEL[1] * down + 0.7
    figure = need("matplotlib.figure", "plot()").Figure(figsize=size, layout="constrained")
    axes = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
    targets = {each.name: each.target_ms for run in runs for each in run.models if not clients}
    for at, (ax, name) in enumerate(zip(axes, panels, strict=False)):
        for number, run in enumerate(runs):
            _tail(ax, run, name, _style(number))
        if name is not None and targets.get(name):
            ax.axvline(targets[name], linestyle=":", color="#808080", linewidth=1.4)
        ax.set_title("all requests" if name is None else short(name), fontsize="medium", loc="left")
        _latency_axes(ax)
        if at + across < len(panels):  # a panel below it names the axis
            ax.set_xlabel("")
        ax.set_ylabel("")
    for ax in axes[len(panels) :]:
        ax.remove()
    figure.supylabel(_AT_LEAST, fontsize="medium")
    lines = need("matplotlib.lines", "a legend")
    handles = [lines.Line2D([], [], label=run.policy, **_style(number)) for number, run in enumerate(runs)]
    if any(targets.get(str(name)) for name in panels):
        handles.append(lines.Line2D([], [], linestyle=":", color="#808080", label="target of the model"))
    most = (size[0] - 0.4) * POINTS
    columns = legend_columns([each.get_label() for each in handles], SMALLEST + 3, most)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=SMALLEST + 3)
    return Still(figure)


_AT_LEAST = "share of requests that take longer"


def _tail(ax: Any, run: Results, name: str | None, style: dict[str, Any]) -> bool:
    """Draws the share of a part's requests that were not answered within a time; False without any answer."""
    jobs = run.jobs_of(name)
    done = jobs[jobs["status"] == OK]
    if not len(done):
        return False
    ms = np.sort((done["finish_ns"] - done["arrival_ns"]) / 1e6)
    # Requests without an answer count: they took longer than all others. Points are dense towards the slowest.
    behind = np.unique(np.geomspace(1, len(ms), _TAIL_POINTS).astype(int))
    slower = (len(jobs) - np.arange(len(ms))) / len(jobs)
    ax.plot(ms[-behind[::-1]], slower[-behind[::-1]], linewidth=1.4, **style)
    return True


def _latency_axes(ax: Any) -> None:
    ax.set(xscale="log", yscale="log", xlabel="latency, ms", ylabel=_AT_LEAST)
    ax.grid(visible=True, which="major", linewidth=0.4, alpha=0.5)
    ticker = need("matplotlib.ticker", "a picture")
    left, right = ax.get_xlim()
    ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if right < 30 * left else (1,)))
    ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(ticker.NullFormatter())
    ax.yaxis.set_major_formatter(_percent())
    ax.set_ylim(top=1.2)


def _keyed(ax: Any) -> list[Any]:
    return [line for line in ax.get_lines() if not line.get_label().startswith("_")]


def _beneath(ax: Any, handles: list[Any]) -> None:
    """A legend below the axes, with every line."""
    if handles:
        columns = legend_columns([each.get_label() for each in handles], SMALLEST + 2, 5 * POINTS)
        ax.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns, frameon=False,
            fontsize=SMALLEST + 2,
        )  # fmt: skip


def _style(number: int) -> dict[str, str]:
    again, at = divmod(number, len(OKABE_ITO))
    return {"color": OKABE_ITO[at], "linestyle": _DASHES[again % len(_DASHES)]}
