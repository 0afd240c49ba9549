"""The pictures show the trace's numbers: checked on the data of the figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import failing
from hypothesis import given
from hypothesis import strategies as st
from viz_traces import EPOCH, MIX, NAMES, TOY, engine_trace, make, many, schedules

import paellapy as pp
from paellapy.instrument.errors import TraceError
from paellapy.instrument.traces.trace import DeviceFacts, Trace
from paellapy.scheduler.engine.trace import EngineTrace
from paellapy.viz import data, palette
from paellapy.viz.data import requests_of

pytest.importorskip("plotly", reason="the extra `viz` is not installed")


def of_type(figure: Any, kind: str) -> list[Any]:
    return [trace for trace in figure.data if trace.type == kind]


def lines(figure: Any, dashed: bool) -> dict[str, Any]:
    found = [t for t in of_type(figure, "scatter") if t.mode == "lines"]
    return {t.legendgroup: t for t in found if (t.line.dash == "dash") == dashed}


# -- what is drawn


@given(schedules)
def test_lanes_never_overlap_and_are_as_few_as_blocks_were_resident(trace: Trace) -> None:
    chart = data.gantt(data.prepare(trace))
    for sm in range(TOY.n_sm):
        on = chart.blocks["sm"] == sm
        used = chart.lane[on]
        assert len(set(used.tolist())) == trace.residency().max_blocks[sm]
        for lane in set(used.tolist()):
            mine = chart.blocks[on][used == lane]
            assert (mine["start_ns"][1:] >= mine["end_ns"][:-1]).all()


@given(schedules)
def test_residency_of_all_groups_adds_up_to_the_occupancy(trace: Trace) -> None:
    picture = data.prepare(trace, bins=7)
    total = data.residency(picture).resident.sum(axis=0)
    np.testing.assert_allclose(total, data.heat(picture).resident.mean(axis=0), atol=1e-9)


@given(schedules, st.booleans())
def test_binned_lanes_show_all_the_time_of_a_single_kernel(trace: Trace, pooled: bool) -> None:
    picture = data.prepare(trace, by=dict.fromkeys(NAMES, "any"), bins=9)
    chart = data.gantt(picture)
    with pytest.MonkeyPatch.context() as patch:
        if pooled:
            patch.setattr(data, "ROWS", TOY.n_sm)
        cells = data.cells(picture, chart)
    assert cells.rows_per_sm == (1 if pooled else chart.depth)
    lanes_per_row = chart.depth if pooled else 1
    shown = (np.where(cells.group == 0, cells.share, 0) * np.diff(cells.edges_ns)).sum() * lanes_per_row
    assert shown == pytest.approx((trace.blocks["end_ns"] - trace.blocks["start_ns"]).sum(), rel=1e-6, abs=0.1)


def test_theoretical_occupancy_comes_from_the_launch_s_resources() -> None:
    groups = data.prepare(make(MIX)).groups
    assert groups.names == ("gemm", "add<int>")
    # 4 warps x 32 registers fill an SM; 8 warps x 64 registers x 32 threads = 16384 registers a block: 4 of 65536.
    assert groups.theoretical == (1.0, 0.5)
    elsewhere = DeviceFacts("unknown", 3, 64, (99, 9))
    assert data.prepare(make(MIX, elsewhere)).groups.theoretical == (None, None)


def test_colours_may_stand_for_launches_streams_or_models() -> None:
    trace = make([*MIX, (3, 0, 2, 6000, 10)])
    assert data.prepare(trace, by="launch").groups.names == ("gemm #1", "add<int> #2", "softmax #3")
    assert data.prepare(trace, by="stream").groups.names == ("stream 0", "stream 1")
    picture = data.prepare(trace, by={"gemm": "bert", "add<int>": "bert"})
    assert picture.groups.names == ("bert", "softmax")


def test_of_many_kernels_the_largest_have_colours_and_the_rest_share_grey() -> None:
    launches, blocks = np.resize(make(MIX).launches, 12), np.resize(make(MIX).blocks, 12)
    for each in (launches, blocks):
        each["launch"] = each["kernel"] = np.arange(12)
    launches["warps"] = 4
    blocks["start_ns"], blocks["end_ns"] = 0, 10 + np.arange(12)
    groups = data.group(Trace(blocks, launches, [f"k{i}" for i in range(12)], TOY))
    assert groups.names == ("k5", "k6", "k7", "k8", "k9", "k10", "k11", "5 others")
    assert list(palette.colours(groups.names).values()) == [*palette.OKABE_ITO, palette.OTHERS]
    assert np.bincount(groups.of_block).tolist() == [1] * 7 + [5]


# -- figures


def test_heat_map_shows_the_occupancy_of_each_sm() -> None:
    trace = make(MIX)
    (heat,) = of_type(trace.plot_heatmap(bins=16), "heatmap")
    seen = trace.occupancy(16)
    np.testing.assert_array_equal(heat.z, seen.resident.astype(np.float32))
    np.testing.assert_allclose(heat.x, (seen.edges_ns - EPOCH) / 1000)
    assert (heat.zmin, heat.y0, heat.dy) == (0, 0, 1)
    assert 0 <= heat.zmax - seen.resident.max() < 0.1
    assert "64 warps" in heat.hovertemplate


def test_gantt_draws_every_block_where_and_when_it_ran() -> None:
    trace = make(MIX)
    bars = of_type(trace.plot_gantt(), "bar")
    assert [bar.name for bar in bars] == ["gemm", "add&lt;int>"]
    drawn = set()
    for bar in bars:
        for base, length, y, facts in zip(bar.base, bar.x, bar.y, bar.customdata, strict=True):
            kernel, block, launch, sm, _ = facts
            assert sm - 0.5 < y < sm + 0.5
            drawn.add((kernel, int(launch), int(block), int(sm), round(base * 1000), round(length * 1000)))
    expected = {(NAMES[launch - 1], launch, block, sm, start, ns) for launch, block, sm, start, ns in MIX}
    assert drawn == expected


def test_gantt_of_many_blocks_is_binned_and_keeps_kernels_and_times() -> None:
    trace = many(12_000)
    figure = trace.plot_gantt()
    assert not of_type(figure, "bar")
    cells = of_type(figure, "heatmap")
    assert [c.name for c in cells] == ["gemm", "add&lt;int>", "softmax"]
    for k, each in enumerate(cells):
        mine = trace.blocks[trace.blocks["kernel"] == k]
        # It dominates a first cell at the latest one block (3 µs) after its own first one.
        assert -(each.x[1] - each.x[0]) <= each.x[0] - (mine["start_ns"].min() - EPOCH) / 1000 < 3
        assert each.z.shape[0] == 132 * 2
        # Four lanes to a row, never more than full; the kernel's cells hold its time, less what others dominate.
        assert np.nanmax(each.z) <= 1 + 1e-6
        area_ns = np.nansum(each.z * np.diff(each.x)) * 4 * 1000
        assert 0.5 < area_ns / (mine["end_ns"] - mine["start_ns"]).sum() < 1 + 1e-6


def test_residency_lines_and_their_theoretical_limits() -> None:
    trace = make(MIX)
    figure = trace.plot_residency(bins=8)
    for k, name in enumerate(("gemm", "add<int>")):
        line = lines(figure, dashed=False)[name]
        seen = trace.occupancy(8, kernel=name).resident.mean(axis=0)
        np.testing.assert_allclose(line.y[:-1], seen, atol=1e-12)
        assert line.line.shape == "hv"
        limit = lines(figure, dashed=True)[name]
        assert set(limit.y) == {(1.0, 0.5)[k]}
        ran = trace.select(kernel=name).span_ns
        assert list(limit.x) == [(ns - EPOCH) / 1000 for ns in ran]


def test_all_views_share_the_time_axis_and_one_legend() -> None:
    figure = make(MIX).plot()
    assert {t.type for t in figure.data} == {"heatmap", "bar", "scatter"}
    x_axes = [figure.layout[name] for name in ("xaxis", "xaxis2", "xaxis3")]
    assert len({axis.matches or "x" for axis in x_axes} - {"x3"}) <= 1
    assert [axis.range for axis in x_axes] == [(0, 8)] * 3
    assert figure.layout.yaxis2.matches == "y"
    assert [t.name for t in figure.data if t.showlegend] == ["gemm", "add&lt;int>"]
    assert figure.layout.title.text == "toy<br>7 blocks of 2 launches in 8.00 µs"


def test_gantt_of_a_full_gpu_is_binned_where_lanes_are_thinner_than_half_a_pixel() -> None:
    full, half_empty = pp.recordings.load("add-two-waves"), pp.recordings.load("tail-effect")
    assert max(len(full.blocks), len(half_empty.blocks)) <= data.EXACT_BLOCKS
    assert not of_type(full.plot_gantt(), "bar")
    assert of_type(half_empty.plot_gantt(), "bar")


def test_a_window_is_binned_anew() -> None:
    trace = make(MIX)
    (heat,) = of_type(trace.plot_heatmap(bins=10, start_ns=EPOCH + 4000, end_ns=EPOCH + 6000), "heatmap")
    np.testing.assert_array_equal(heat.z, trace.occupancy(10, EPOCH + 4000, EPOCH + 6000).resident.astype(np.float32))
    assert (heat.x[0], heat.x[-1]) == (0, 2)


def test_compare_puts_two_traces_on_one_scale() -> None:
    short = make(MIX[:3])
    figure = pp.compare(make(MIX), short, labels=("mixed", "alone"))
    first, second = of_type(figure, "heatmap")
    assert first.x[-1] == second.x[-1] == 8
    assert first.zmax == second.zmax >= max(first.z.max(), second.z.max())
    np.testing.assert_allclose(
        second.z, short.occupancy(second.z.shape[1], EPOCH, EPOCH + 8000).resident.astype(np.float32)
    )
    titles = [a.text for a in figure.layout.annotations]
    assert titles == ["<b>mixed</b>: toy<br>7 blocks of 2 launches in 8.00 µs",
                      "<b>alone</b>: toy<br>3 blocks of 1 launch in 5.00 µs"]  # fmt: skip
    assert [t.name for t in figure.data if t.showlegend] == ["gemm", "add&lt;int>"]


def test_parts_of_two_traces_may_be_compared_in_pictures_and_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first = make(MIX)
    later = make([(launch, block, sm, start + 10**6, ns) for launch, block, sm, start, ns in MIX])
    window = {"start_ns": (EPOCH + 4000, EPOCH + 10**6 + 4000), "end_ns": (EPOCH + 6000, EPOCH + 10**6 + 6000)}
    still = pp.viz.compare_picture(first, later, "heatmap", kernel="gemm", bins=10, **window)
    expected = first.occupancy(10, EPOCH + 4000, EPOCH + 6000, kernel="gemm").resident
    for ax in still.figure.axes[:2]:
        np.testing.assert_array_equal(np.asarray(ax.get_images()[0].get_array()), expected)
        assert ax.get_xlim() == (0, 2)
    one_clock = {"start_ns": EPOCH + 4000, "end_ns": EPOCH + 6000}
    assert pp.viz.save_comparison(first, first, tmp_path / "x.png", "gantt", kernel="gemm", **one_clock).exists()
    for heat in of_type(pp.compare(first, later, kernel="gemm", bins=10, **window), "heatmap"):
        np.testing.assert_array_equal(heat.z, expected.astype(np.float32))


REPLAYS = [(1, block, block, start, 100) for start in (0, 1000, 2000) for block in range(3)]


@pytest.mark.parametrize(
    ("rows", "part", "title"),
    [
        (MIX, {"by": "launch"}, "7 blocks of 2 launches in 8.00 µs"),
        (MIX, {"start_ns": EPOCH + 4500, "end_ns": EPOCH + 6000}, "5 blocks of 2 launches in 1.50 µs"),
        (MIX, {"end_ns": EPOCH + 10**6}, "7 blocks of 2 launches in 8.00 µs"),  # no more time than there was
        (REPLAYS, {}, "9 blocks of 3 launches in 2.10 µs"),
        (REPLAYS, {"by": "launch"}, "9 blocks of 3 launches (1 and its replays) in 2.10 µs"),
    ],
)
def test_a_title_counts_blocks_launches_and_the_time_that_is_shown(rows: Any, part: Any, title: str) -> None:
    assert data.prepare(make(rows), **part).title == f"toy: {title}"


def test_light_and_dark() -> None:
    trace = make(MIX)
    assert trace.plot(theme="dark").layout.template.layout.paper_bgcolor == "rgb(17,17,17)"
    assert trace.plot().layout.template.layout.paper_bgcolor == "white"


def test_lost_records_are_shown() -> None:
    (note,) = make(MIX, dropped=1234, unfinished=1).plot().layout.annotations
    assert note.text == "⚠ 1,234 block records dropped: the rings were full; 1 block record without an end"


def test_exploring_bins_every_window_anew_and_shows_blocks_when_close() -> None:
    pytest.importorskip("anywidget", reason="the extra `viz` is not installed")
    trace = many(12_000)
    figure = trace.explore(bins=50)
    everything = [t.name for t in figure.data]
    assert not of_type(figure, "bar")
    colour = next(t for t in figure.data if t.showlegend and t.name == "softmax").marker.color
    span_us = (trace.span_ns[1] - EPOCH) / 1000
    figure.layout.xaxis.range = (span_us - 4, span_us)
    heat = of_type(figure, "heatmap")[0]
    seen = trace.occupancy(50, EPOCH + round((span_us - 4) * 1000), trace.span_ns[1]).resident
    np.testing.assert_array_equal(heat.z, seen.astype(np.float32))
    assert heat.x[0] == pytest.approx(span_us - 4)  # the axis still counts from the trace's start
    bars = of_type(figure, "bar")
    assert [bar.name for bar in bars] == ["softmax"]
    assert bars[0].marker.color[0] == colour
    figure.layout.xaxis.range = (0, 30)
    drawn = [each.z for each in of_type(figure, "heatmap")]
    assert any(z.dtype == object for z in drawn), "lanes are binned, and nowhere full of one kernel"
    for z in drawn:
        json.dumps(z.tolist(), allow_nan=False)  # a widget's numbers are sent as JSON, which has no NaN
    figure.layout.xaxis.range = (0, span_us)
    assert [t.name for t in figure.data] == everything


# -- requests of an engine


def test_requests_show_their_wait_their_run_and_each_segment() -> None:
    figure = engine_trace().plot_requests()
    drawn = {
        (bar.name, bar.meta): [
            (round(b * 1000), round(x * 1000), round(y)) for b, x, y in zip(bar.base, bar.x, bar.y, strict=True)
        ]
        for bar in of_type(figure, "bar")
    }
    assert drawn == {
        ("bert", "queued"): [(0, 1500, 0), (1000, 500, 1)],
        ("bert", "launched"): [(1500, 9000, 0), (1500, 9000, 1)],
        ("bert", "segments"): [(2000, 4900, 0), (7000, 3000, 0), (2000, 4900, 1), (7000, 3000, 1)],
        ("resnet", "queued"): [(3000, 2000, 2)],
        ("resnet", "launched"): [],
        ("resnet", "segments"): [],
        ("late", "late"): [(8000, 2500, 0)],
    }
    hover = next(bar for bar in figure.data if (bar.name, bar.meta) == ("resnet", "queued")).text[0]
    assert "request 3: expired" in hover
    assert "2.00 µs queued" in hover


def test_deadlines_are_marked_and_requests_without_an_answer_crossed_out() -> None:
    figure = engine_trace().plot_requests()
    marks = {t.name: [(round(x * 1000), y) for x, y in zip(t.x, t.y, strict=True)]
             for t in of_type(figure, "scatter") if t.mode == "markers"}  # fmt: skip
    assert marks == {"deadline": [(8000, 0), (11000, 1), (5000, 2)], "not answered": [(5000, 2)]}
    late, in_time, _ = next(t for t in figure.data if t.name == "deadline").text
    assert late.endswith("2.50 µs after its deadline")
    assert in_time.endswith("500 ns before its deadline")


def test_a_deadline_has_no_mark_where_another_request_is_in_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paellapy.viz.data.REQUEST_LANES", 1)
    jobs = np.repeat(engine_trace().jobs[:1], 2)
    jobs["request"], jobs["arrival_ns"], jobs["end_ns"] = [1, 2], [EPOCH, EPOCH + 10], [EPOCH + 5, EPOCH + 20]
    jobs["start_ns"], jobs["deadline_ns"] = jobs["arrival_ns"], EPOCH + 15
    trace = engine_trace()
    trace.know(jobs, trace.segments, trace.owners, trace.models, "fifo", False)
    seen = requests_of(trace)
    assert seen is not None
    assert seen.lane.tolist() == [0, 0]
    assert seen.due.tolist() == [1]


def test_segments_are_their_request_s_whichever_clock_is_ahead() -> None:
    """The jobs' times are the host's, and the segments' are the GPU's."""
    trace = engine_trace()
    jobs = np.repeat(trace.jobs[:1], 2)
    jobs["request"] = [1, 2]
    jobs["arrival_ns"] = jobs["start_ns"] = EPOCH + np.array([0, 50_000])
    jobs["end_ns"] = EPOCH + np.array([40_000, 90_000])
    segments = np.repeat(trace.segments, 2)
    strange = 10_000_000  # of somebody the trace does not know
    for apart, last, expected in (
        (-4000, 88_000, [(0, 0), (0, 1), (1, 2), (1, 3)]),
        (0, 88_000, [(0, 0), (0, 1), (1, 2), (1, 3)]),
        (4000, 88_000, [(0, 0), (0, 1), (1, 2), (1, 3)]),
        (0, strange, [(0, 0), (0, 1), (1, 2)]),
    ):
        segments["start_ns"] = EPOCH + np.array([0, 20_000, 50_000, last]) + apart
        segments["end_ns"] = segments["start_ns"] + 10
        trace.know(jobs, segments, trace.owners, trace.models, "fifo", False)
        seen = requests_of(trace)
        assert seen is not None
        assert list(zip(seen.job_of.tolist(), seen.segment_of.tolist(), strict=True)) == expected


def test_an_engine_s_trace_shows_requests_below_on_the_same_axis() -> None:
    figure = engine_trace().plot()
    assert {bar.meta for bar in of_type(figure, "bar")} == {None, "queued", "launched", "segments", "late"}
    assert figure.layout.xaxis4.range == (0, 10.5)
    (heat,) = of_type(figure, "heatmap")
    assert heat.x[0] == 0  # the first arrival, not the first block


def test_blocks_and_requests_of_a_model_have_one_colour_and_one_entry_in_the_legend() -> None:
    figure = engine_trace().plot()
    assert [t.name for t in figure.data if t.showlegend] == ["bert", "resnet", "late", "deadline", "not answered"]
    gantt = next(bar for bar in of_type(figure, "bar") if bar.meta is None)
    segments = next(bar for bar in of_type(figure, "bar") if (bar.name, bar.meta) == ("bert", "segments"))
    assert gantt.name == "bert"
    assert len(gantt.base) == len(MIX)
    assert palette.rgba(gantt.marker.color[0], 1) == segments.marker.color
    assert not lines(figure, dashed=True), "a model has no theoretical occupancy"
    assert {t.legend for t in figure.data if t.showlegend} == {"legend", None}
    assert all(len(t.x) for t in figure.data if t.showlegend), "plotly leaves empty ones out of the legend"


def test_blocks_of_an_engine_may_still_be_told_apart_by_kernel() -> None:
    figure = engine_trace().plot(by="kernel")
    assert [t.name for t in figure.data if t.showlegend][:4] == ["gemm", "add&lt;int>", "bert", "resnet"]
    assert {t.legend for t in figure.data if t.name in ("bert", "resnet", "late")} == {"legend2"}


def test_colours_of_models_do_not_depend_on_who_was_launched_first() -> None:
    trace = engine_trace()
    swapped = engine_trace()
    owners = trace.owners.copy()
    owners["model"] = [1, 0, 0]
    swapped.know(trace.jobs, trace.segments, owners, trace.models, "streams", False)
    assert palette.colours(data.prepare(trace).names) == palette.colours(data.prepare(swapped).names)


def test_blocks_of_no_model_are_called_so() -> None:
    trace = engine_trace()
    trace.know(trace.jobs, trace.segments, trace.owners[1:], trace.models, "fifo", False)
    assert data.prepare(trace).groups.names == ("no model's", "bert")


def test_requests_without_blocks_and_an_engine_s_empty_trace(tmp_path: Path) -> None:
    whole = engine_trace()
    only = EngineTrace(whole.blocks[:0], whole.launches, whole.kernels, TOY)
    only.know(whole.jobs, whole.segments[:0], whole.owners, whole.models, "fifo", False)
    figure = only.plot()
    assert "no blocks were recorded" in {a.text for a in figure.layout.annotations}
    assert figure.layout.xaxis4.range == (0, 10.5)
    empty = EngineTrace(whole.blocks[:0], whole.launches[:0], (), TOY)
    assert "no blocks were recorded" in {a.text for a in empty.plot().layout.annotations}
    for trace in (only, empty):
        trace.to_perfetto(tmp_path / "x")
        assert trace.save_figure(tmp_path / "x.png").stat().st_size > 1000


def test_of_very_many_requests_the_slowest_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paellapy.viz.data.MOST_REQUESTS", 2)
    figure = engine_trace().plot_requests()
    assert "slowest 2 of 3" in figure.layout.yaxis.title.text
    assert "resnet" not in {bar.name for bar in figure.data}


# -- edges


@pytest.mark.parametrize("name", ["plot", "plot_heatmap", "plot_gantt", "plot_residency"])
def test_an_empty_trace_says_so(name: str) -> None:
    for trace in (make([]), Trace(make([]).blocks, make([]).launches[:0], (), TOY)):
        figure = getattr(trace, name)()
        assert "no blocks were recorded" in {a.text for a in figure.layout.annotations}
        assert figure.layout.xaxis.range == (0, 1)


@pytest.mark.parametrize("duration", [0, 1, 3_000_000_000])
def test_one_block(duration: int, tmp_path: Path) -> None:
    trace = make([(1, 0, 1, 0, duration)])
    figure = trace.plot()
    (bar,) = of_type(figure, "bar")
    assert list(bar.y) == [1]
    assert figure.layout.xaxis3.title.text == ("time (s)" if duration > 1 else "time (ns)")
    assert trace.save_figure(tmp_path / "one.png").stat().st_size > 1000


def test_without_plotly_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] in ("plotly", "matplotlib")]:
        monkeypatch.delitem(sys.modules, module)
    for library in ("plotly", "matplotlib"):
        monkeypatch.setitem(sys.modules, library, None)
    trace = make(MIX)
    with pytest.raises(pp.MissingExtraError, check=lambda e: (e.library, e.extra) == ("plotly", "viz")):
        trace.plot()
    with pytest.raises(ImportError, check=lambda e: e.library == "matplotlib"):
        trace.save_figure(tmp_path / "x.png")


# -- files


def test_figures_for_papers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = make(MIX, dropped=3)
    assert trace.save_figure(tmp_path / "all.png", theme="dark").read_bytes().startswith(b"\x89PNG")
    for view in ("heatmap", "gantt", "residency"):
        text = trace.save_figure(tmp_path / "one.svg", view).read_text()
        assert text.startswith("<?xml")
        assert "3 block records dropped" in text


def test_static_views_show_the_same_numbers() -> None:
    pytest.importorskip("matplotlib")
    from paellapy.viz import static

    trace = make(MIX)
    figure = static.draw([data.prepare(trace, bins=16)], "all", "light")
    heat, gantt, residency = figure.axes[:3]
    np.testing.assert_array_equal(np.asarray(heat.get_images()[0].get_array()), trace.occupancy(16).resident)
    (shapes,) = gantt.collections
    boxes = sorted((p.get_extents().x0, p.get_extents().x1) for p in shapes.get_paths())
    assert boxes == sorted((start / 1000, (start + ns) / 1000) for *_, start, ns in MIX)
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["gemm", "add<int>", "theoretical occupancy"]
    assert {tuple(line.get_ydata()) for line in residency.get_lines()} == {(1.0, 1.0), (0.5, 0.5)}


def test_static_requests_show_the_same_numbers() -> None:
    pytest.importorskip("matplotlib")
    from paellapy.viz import static

    figure = static.draw([data.prepare(engine_trace())], "requests", "light")
    (ax,) = figure.axes
    boxes = [
        [(round(p.get_extents().x0 * 1000), round(p.get_extents().x1 * 1000)) for p in each.get_paths()]
        for each in ax.collections[:4]
    ]
    queued, launched, segments, late = boxes
    assert queued == [(0, 1500), (1000, 1500), (3000, 5000)]
    assert launched == [(1500, 10500), (1500, 10500)]
    assert segments == [(2000, 6900), (7000, 10000), (2000, 6900), (7000, 10000)]
    assert late == [(8000, 10500)]
    deadlines, lost = (np.round(each.get_offsets()[:, 0] * 1000).tolist() for each in ax.collections[5:])
    ((joined,),) = (each.get_segments() for each in ax.collections[4:5])
    assert np.round(joined[:, 0] * 1000).tolist() == [10500, 11000], "a request and the deadline that it meets"
    assert (deadlines, lost) == ([8000, 11000, 5000], [5000])
    words = [t.get_text() for t in figure.legends[0].get_texts()]
    assert words == ["bert", "resnet", "queued", "launched", "on the GPU", "deadline", "late", "not answered"]


def test_two_traces_side_by_side_in_one_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    both = engine_trace("streams"), engine_trace("paella")
    for ending in ("png", "svg"):
        path = pp.viz.save_comparison(*both, tmp_path / f"both.{ending}", ["requests", "gantt"],
                                      labels=("streams", "paella"))  # fmt: skip
        assert path.stat().st_size > 1000
        again = pp.viz.save_comparison(*both, tmp_path / f"again.{ending}", ["requests", "gantt"],
                                       labels=("streams", "paella"))  # fmt: skip
        assert again.read_bytes() == path.read_bytes(), "the same traces make the same file"


def test_a_picture_shows_itself_in_a_notebook_and_can_be_saved(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    still = engine_trace().picture(["requests", "heatmap"], size_inches=(6, 4), sms=(1, 2))
    assert still.figure.axes[1].get_ylim() == (2.5, 0.5)
    assert still._repr_png_().startswith(b"\x89PNG")
    assert repr(still) == "<picture, 6 x 4 inches>"
    assert still.save(tmp_path / "x.svg").read_text().startswith("<?xml")
    both = pp.viz.compare_picture(make(MIX), make(MIX[:3]), "heatmap", labels=("one", "other"))
    assert [ax.get_title("left").strip() for ax in both.figure.axes[:2]] == ["one", "other"]


REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    ("by", lambda t, _: t.plot(by="sm"), {"given": "sm"}),
    ("by", lambda t, _: t.plot(by="model"), {"given": "model"}),
    ("end_ns", lambda t, _: t.plot(start_ns=EPOCH + 9, end_ns=EPOCH), {"given": EPOCH, "limit": EPOCH + 9}),
    ("start_ns", lambda t, _: pp.compare(t, t, start_ns=(1, 2, 3)), {"given": 3, "limit": 2}),
    ("bins", lambda t, _: t.plot(bins=0), {"given": 0}),
    ("theme", lambda t, _: t.plot(theme="pink"), {"given": "pink"}),
    ("view", lambda t, _: t.picture("pie"), {"given": "pie"}),
    ("path", lambda t, folder: t.save_figure(folder / "x.gif"), {}),
    ("requests", lambda t, _: t.plot_requests(), {}),
    ("requests", lambda t, _: t.picture("requests"), {}),
    ("requests", lambda t, _: pp.viz.compare_picture(engine_trace(), t, "requests"), {}),
    *(("labels", lambda t, _, labels=labels: pp.compare(t, t, labels=labels), {"given": labels})
      for labels in (("a",), ("a", "b", "c"), (), "ab", 2)),
    ("labels", lambda t, _: pp.viz.compare_picture(t, t, labels="ab"), {"given": "ab"}),
    ("labels", lambda t, folder: pp.viz.save_comparison(t, t, folder / "x.png", labels="ab"), {"given": "ab"}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "draw", "facts"), REFUSED)
def test_what_cannot_be_drawn_is_named(field: str, draw: Any, facts: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with failing(TraceError, field=field, **facts):
        draw(make(MIX), tmp_path)


def test_the_report_is_one_page_that_loads_nothing(tmp_path: Path) -> None:
    page = make(MIX, dropped=3).to_html(tmp_path / "report.html", "gemm & add").read_text()
    assert "<title>gemm &amp; add</title>" in page
    assert "<td>add&lt;int&gt;</td>" in page
    assert "3 dropped" in page
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", page)
    assert len(page) > 3_000_000, "plotly itself is not inside"
    (figures,) = re.findall(r"const figures = ({.*}), dark", page)
    templates = {name: each["layout"]["template"]["layout"] for name, each in json.loads(figures).items()}
    assert set(templates) == {"light", "dark"}
    assert templates["light"]["paper_bgcolor"] != templates["dark"]["paper_bgcolor"]
