"""Nothing that figures for papers say is cut off, lies over something else, or has somebody else's colour."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from viz_traces import EPOCH, MIX, TOY, engine_trace, make

import paellapy as pp
from paellapy.instrument.traces.trace import DeviceFacts, Trace
from paellapy.scheduler.engine.trace import EngineTrace
from paellapy.viz import palette

pytest.importorskip("matplotlib", reason="the extra `viz` is not installed")

LONG = "void cutlass::device_kernel<float, some::very::long::{}::Layout<{}>>"


def long_names(n: int = 25, **lost: int) -> Trace:
    few = make(MIX)
    launches, blocks = np.resize(few.launches, n), np.resize(few.blocks, n)
    launches["launch"] = launches["kernel"] = blocks["launch"] = blocks["kernel"] = np.arange(n)
    blocks["start_ns"] = EPOCH + 100 * np.arange(n)
    blocks["end_ns"] = blocks["start_ns"] + 1000
    return Trace(blocks, launches, [LONG.format("namespace", i) for i in range(n)], TOY, **lost)


def with_models(*models: str) -> EngineTrace:
    """Like `engine_trace`, with these models after its own two; they are loaded but never asked."""
    trace = engine_trace()
    trace.know(trace.jobs, trace.segments, trace.owners, (*trace.models, *models), "paella", False)
    return trace


def drawn(trace: Trace, view: Any = "all", size_inches: tuple[float, float] | None = None, **options: Any) -> Any:
    figure = trace.picture(view, size_inches=size_inches, **options).figure
    figure.draw_without_rendering()
    return figure


def legend_of(figure: Any) -> dict[str, Any]:
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    return dict(zip(texts, legend.legend_handles, strict=True))


def assert_all_is_inside(figure: Any) -> None:
    width, height = figure.bbox.width, figure.bbox.height
    said = [figure.legends[0], *([figure._suptitle] if figure._suptitle else [])]
    said += [label for ax in figure.axes for label in (ax.yaxis.label, ax.xaxis.label) if label.get_text()]
    for each in said:
        box = each.get_window_extent()
        assert box.x0 >= 0, each
        assert box.y0 >= 0, each
        assert box.x1 <= width, each
        assert box.y1 <= height, each


def assert_apart(boxes: list[Any]) -> None:
    for above, below in pairwise(boxes):
        assert above.y0 >= below.y1 - 1


@pytest.mark.parametrize("size", [None, (3.5, 2.5), (4, 3), (7, 4)])
def test_legends_with_long_names_are_inside_the_figure(size: tuple[float, float] | None) -> None:
    for view in ("gantt", "residency"):
        figure = drawn(long_names(), view, size)
        assert_all_is_inside(figure)
        entries = len(palette.OKABE_ITO) + 1 + (view == "residency")  # and the dashed line
        assert len(legend_of(figure)) == entries, "names stay different when they are shortened"


def test_legends_of_launches_are_inside_the_figure() -> None:
    assert_all_is_inside(drawn(pp.recordings.load("mix-paella"), by="launch"))
    assert_all_is_inside(drawn(pp.recordings.load("two-streams"), "gantt", by="launch"))


@pytest.mark.parametrize(("view", "size"), [("requests", (3.5, 2.5)), ("all", (4, 3)), ("all", (3.5, 5))])
def test_figures_of_a_paper_s_column_are_whole_and_their_axes_names_apart(view: Any, size: tuple[float, float]) -> None:
    figure = drawn(pp.recordings.load("mix-paella"), view, size)
    assert_all_is_inside(figure)
    axes = [ax for ax in figure.axes if ax.get_subplotspec() is not None]
    assert_apart([ax.yaxis.label.get_window_extent() for ax in axes])
    for ax in axes:
        ticks = [t for t in ax.yaxis.get_major_ticks() if t.label1.get_text() and t.label1.get_visible()]
        extents = sorted((t.label1.get_window_extent() for t in ticks), key=lambda box: -box.y0)
        assert_apart(extents)


@pytest.mark.parametrize("size", [None, (4, 3)])
def test_what_was_lost_is_said_on_a_line_of_its_own(size: tuple[float, float] | None) -> None:
    figure = drawn(long_names(dropped=2048, unfinished=1), size_inches=size)
    assert_all_is_inside(figure)
    (legend,) = figure.legends
    said = legend.get_title()
    assert said.get_text().replace("\n", " ").startswith("⚠ 2,048 block records dropped")
    entries = [text.get_window_extent() for text in legend.get_texts()]
    assert_apart([said.get_window_extent(), max(entries, key=lambda box: box.y1)])
    alone = drawn(make(MIX, dropped=3), "heatmap").legends[0]
    assert alone.get_title().get_text() == "⚠ 3 block records dropped: the rings were full"


def test_models_have_colours_that_no_launch_has() -> None:
    legend = legend_of(drawn(pp.recordings.load("mix-paella"), by="launch"))
    colour = {name: handle.get_facecolor() for name, handle in legend.items() if hasattr(handle, "get_facecolor")}
    assert len({colour[name] for name in colour}) == len(colour)
    taken = palette.colours(f"launch {i}" for i in range(7))
    models = palette.further_colours(("bert", "resnet"), taken.values())
    assert not {*models.values()} & {*taken.values(), palette.OTHERS}
    plotted = pp.recordings.load("mix-paella").plot(by="launch")
    blocks = {t.marker.color for t in plotted.data if t.type == "scatter" and t.showlegend and t.mode == "markers"}
    requests = {t.marker.color for t in plotted.data if t.type == "bar" and t.meta == "segments"}
    assert len(requests) == 2
    assert not requests & {palette.rgba(each, 1) for each in blocks if isinstance(each, str) and each[0] == "#"}


def test_a_model_without_a_request_is_not_in_the_legend() -> None:
    for by in ("model", "kernel"):
        names = list(legend_of(drawn(with_models("loaded, never asked"), by=by)))
        assert [name for name in names if name in ("bert", "resnet", "loaded, never asked")] == ["bert", "resnet"]


def test_shares_of_very_little_have_ticks_that_differ() -> None:
    whole = engine_trace()
    gpu = DeviceFacts("H200", 132, 64, (9, 0))
    little = EngineTrace(whole.blocks[:1], whole.launches, whole.kernels, gpu)
    little.know(whole.jobs, whole.segments, whole.owners, whole.models, "fifo", False)
    (ax,) = drawn(little, "residency").axes
    low, high = ax.get_ylim()
    ticks = [t.label1.get_text() for t in ax.yaxis.get_major_ticks() if low <= t.get_loc() <= high]
    assert len(ticks) == len(set(ticks)) > 2
    (full,) = drawn(make(MIX), "residency").axes
    assert {"0%", "20%", "100%"} <= {t.label1.get_text() for t in full.yaxis.get_major_ticks()}


def test_a_name_with_dollars_is_shown_as_it_is() -> None:
    names = ("f$lambda$1", "add", "softmax")
    trace = Trace(make(MIX).blocks, make(MIX).launches, names, TOY)
    assert "f$lambda$1" in legend_of(drawn(trace, "gantt"))
    assert not drawn(trace, "gantt").legends[0].get_texts()[0].get_parse_math()
