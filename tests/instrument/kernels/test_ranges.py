"""Ranges in kernels: their markers, the pass, events on both devices, and what a trace makes of them."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from hypothesis import given, settings

import paellapy as pp
from paellapy.instrument.device.base import EventLayout, Events
from paellapy.instrument.errors import ArgumentError, CompileError, InstrumentError
from paellapy.instrument.kernels.ranges import has_ranges
from paellapy.instrument.ptx import passes
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.ranges import Marker, Ranges, Sites
from paellapy.instrument.records import RANGE_END, RANGE_HEAD, RANGE_RECORD, WHOLE_BLOCK
from paellapy.instrument.traces.summary import pair

N = 1024


@triton.jit
def scale(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    with pp.range("load"):
        v = tl.load(x + i, mask=i < n)
    pp.range_begin("compute")
    for _ in range(3):
        with pp.range("step"):
            v = v * 2.0
    pp.range_end("compute")
    tl.store(out + i, v, mask=i < n)


@triton.jit
def scale_without(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n)
    for _ in range(3):
        v = v * 2.0
    tl.store(out + i, v, mask=i < n)


@triton.jit
def calls_scale(x, out, n, B: tl.constexpr):
    scale(x, out, n, B)


CUDA = r"""
extern "C" __global__ void twice(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    RANGES_BEGIN
    if (i < n) out[i] = 2 * x[i];
    RANGES_END
}
"""


def traced() -> pp.Trace:
    kernel = pp.kernel(scale)
    x, out = np.arange(N, dtype=np.float32), np.zeros(N, np.float32)
    with pp.Device("virtual:h200"), pp.trace() as t:
        kernel[(8,)](x, out, N, 128)
    np.testing.assert_array_equal(out, 8 * x)
    return t


@triton.jit
def many_ranges(x, out, n, ROUNDS: tl.constexpr):
    v = tl.load(x)
    for _ in range(ROUNDS):
        with pp.range("step"):
            v = v * 2.0
    tl.store(out, v)


@triton.jit
def range_without_end(x, out, n, B: tl.constexpr):
    pp.range_begin("open")
    tl.store(out, tl.load(x))


@pytest.mark.parametrize(("fn", "rounds"), [(many_ranges, 400), (range_without_end, 1)])
def test_a_table_of_ranges_says_when_it_lacks_some(fn, rounds):
    x, out = np.zeros(1, np.float32), np.zeros(1, np.float32)
    with pp.Device("virtual:h200"), pp.trace() as t:
        pp.kernel(fn)[(1,)](x, out, 1, rounds)
    lost = f"{t.ranges.lost:,} events of ranges"
    assert t.ranges.lost > 0
    assert lost in repr(t)
    assert lost in str(t.summary()).splitlines()[-1]
    assert lost in t.summary()._repr_html_()


def test_ranges_lie_inside_their_blocks_and_inside_each_other():
    t = traced()
    r = t.ranges.records
    assert t.ranges.lost == 0
    assert {t.ranges.names[i] for i in r["range"]} == {"load", "compute", "step"}
    assert len(r) == 8 * 5
    for block in t.blocks:
        mine = r[r["block"] == block["block"]]
        assert (mine["start_ns"] >= block["start_ns"]).all()
        assert (mine["end_ns"] <= block["end_ns"]).all()
        by_name = {name: mine[mine["range"] == t.ranges.names.index(name)] for name in t.ranges.names}
        assert by_name["load"]["end_ns"][0] <= by_name["compute"]["start_ns"][0]
        assert list(by_name["step"]["depth"]) == [1, 1, 1]
        assert by_name["step"]["start_ns"].min() >= by_name["compute"]["start_ns"][0]


def test_a_summary_has_a_row_for_each_range():
    summary = traced().summary()
    rows = {r.name: r for r in summary.ranges}
    assert rows["step"].count == 24
    assert 0 < rows["load"].share < 1
    assert "step" in str(summary)
    assert "step" in summary._repr_html_()


def test_ranges_survive_a_file_a_selection_and_other_tools_formats(tmp_path):
    t = traced()
    t.save(tmp_path / "t.pptrace")
    again = pp.Trace.load(tmp_path / "t.pptrace")
    np.testing.assert_array_equal(again.ranges.records, t.ranges.records)
    assert again.ranges.names == t.ranges.names
    assert len(t.select(launch=int(t.launches["launch"][0])).ranges) == len(t.ranges)
    events = json.loads(t.to_perfetto(tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(e.get("cat") == "step" for e in events) == 24
    assert any(e["name"] == "compute" for e in events)
    assert {trace.name for trace in t.plot_ranges().data} == set(t.ranges.names)


def test_outside_a_trace_ranges_compile_to_the_same_machine_code():
    args = ("*fp32", "*fp32", N, 128)
    with_, without = (pp.kernel(fn).compile(*args, target="sm_90", report=None) for fn in (scale, scale_without))
    code = [k.ptx.replace("scale_without", "scale") for k in (with_, without)]
    assert _instructions(code[0]) == _instructions(code[1])


def _instructions(ptx: str) -> list[str]:
    lines = (line.strip() for line in ptx.splitlines())
    return [line for line in lines if line and not line.startswith((".loc", ".file", "//", "$L__tmp", "$L__func"))
            and ".b8" not in line and ".b32" not in line and ".section" not in line]  # fmt: skip


def test_a_function_that_a_kernel_calls_may_have_the_ranges():
    assert has_ranges(calls_scale)
    assert not has_ranges(scale_without)


def test_names_that_cannot_be_written_down_are_refused():
    with pytest.raises(ArgumentError):
        Marker(True, False, 'a "quoted" name')
    with failing(ArgumentError, field="range"):
        pp.range("load")


def marked(per_warp: bool, target: str = "sm_90") -> str:
    word = "pp_warp_range" if per_warp else "pp_range"
    text = CUDA.replace("RANGES_BEGIN", f'{word}_begin("work");').replace("RANGES_END", f'{word}_end("work");')
    kernel = pp.kernel(source=text, name="twice")
    return kernel._source.source(target, marked=True).ptx


@pytest.mark.parametrize("per_warp", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
def test_the_pass_puts_an_event_in_place_of_every_marker(per_warp, sliced):
    kernel = pp.kernel(source=CUDA.replace("RANGES_BEGIN", "").replace("RANGES_END", ""), name="twice")
    ptx = marked(per_warp)
    assert Ranges.in_text(ptx) == Ranges(("work",), per_warp)
    out = passes.apply(ptx, PassConfig("trace", sliced=sliced))
    assert "paellapy begin" not in out
    assert Sites.in_text(out).moments == (((0,),), ((RANGE_END,),))  # a branch lies between them
    source = kernel._source.source("sm_90")
    from dataclasses import replace

    assert replace(source, ptx=ptx).build(PassConfig("trace", sliced=sliced)).cubin


def test_ranges_of_functions_that_are_called_are_refused():
    text = """
    __noinline__ __device__ float work(float x) { pp_range_begin("w"); x *= 2; pp_range_end("w"); return x; }
    extern "C" __global__ void twice(float* out) { out[threadIdx.x] = work(out[threadIdx.x]); }
    """
    ptx = pp.kernel(source=text, name="twice")._source.source("sm_90", marked=True).ptx
    with failing(InstrumentError, kernel="twice", field="range", given="_Z4workf"):
        passes.apply(ptx, PassConfig("trace"), "twice")


def test_a_name_that_is_no_text_is_an_error_of_compiling():
    @triton.jit
    def kernel(x):
        pp.range_begin(1)
        tl.store(x, 1.0)

    with pytest.raises(CompileError):
        pp.kernel(kernel).compile("*fp32", target="sm_90")


tags = st.sampled_from([0, 1, 0 | RANGE_END, 1 | RANGE_END])
moments = st.lists(st.lists(tags, min_size=1, max_size=4).map(tuple), min_size=1, max_size=3).map(tuple)


@given(st.lists(moments, min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.data())
def test_events_are_read_back_as_a_gpu_writes_them(sites, blocks, warps, per_warp, data):
    layout = EventLayout.of(Ranges(("a", "b"), per_warp), Sites(tuple(sites)), blocks, 32 * warps, records=16)
    memory = data.draw(st.sampled_from([0, 0xA5])) * np.ones(layout.nbytes, np.uint8)
    heads = memory[: layout.heads_bytes].view(RANGE_HEAD)
    rings = memory[layout.heads_bytes :].view(RANGE_RECORD).reshape(-1, 16)
    wanted, total = [], 0
    for number, (b, lane) in enumerate(np.ndindex(layout.blocks, layout.lanes)):
        passed = data.draw(st.lists(st.integers(0, len(sites) - 1), max_size=40))
        clock = 0
        for i, site in enumerate(passed):
            rings[number, i % 16]["site"] = site
            for m, at in enumerate(sites[site]):
                clock += 1
                rings[number, i % 16]["clocks"][m] = 1000 + clock
                if i >= len(passed) - 16:
                    wanted += [(b, lane if per_warp else WHOLE_BLOCK, tag, clock / 1000) for tag in at]
        events = sum(len(at) for site in passed for at in sites[site])
        total += events
        heads[-1 - number] = (16 * len(passed), events, 1000, 7, 2000, 0)
    for number in range(len(heads)):  # a block's clocks are those of its first lane
        if number % layout.lanes:
            heads[-1 - number]["clock_start"] = heads[-1 - number]["clock_end"] = 0xFFFFFFFF
    found = layout.read(5, memory)
    rows = zip(found.block, found.warp, found.tag, np.round(found.part, 6), strict=True)
    assert [(int(a), int(w), int(t), float(p)) for a, w, t, p in rows] == wanted
    assert found.overwritten == total - len(wanted)
    assert set(found.start_lo.tolist()) <= {7}


@pytest.mark.parametrize("junk", [0, 1, 0x11, 0xFF])
def test_blocks_that_did_not_run_lose_no_events(junk):
    layout = EventLayout.of(Ranges(("a",)), Sites((((0,), (RANGE_END,)),)), 8, 32)
    assert layout.read(1, np.full(layout.nbytes, junk, np.uint8)).overwritten == 0


def test_a_block_with_fewer_events_than_its_records_must_have_did_not_run():
    layout = EventLayout.of(Ranges(("a",)), Sites((((0,), (RANGE_END,)),)), 2, 32)
    memory = np.zeros(layout.nbytes, np.uint8)
    memory[: layout.heads_bytes].view(RANGE_HEAD)["used"] = [16 * 300, 16 * 1000]  # the second block is the first one
    memory[: layout.heads_bytes].view(RANGE_HEAD)["events"] = [1, 2000]
    found = layout.read(1, memory)
    assert set(found.block.tolist()) == {0}
    assert found.overwritten == 2000 - len(found.tag)


_inner = lambda inner: st.lists(st.tuples(st.integers(0, 2), inner), max_size=3)  # noqa: E731
nested = st.recursive(st.just([]), _inner, max_leaves=12)


@settings(max_examples=60)
@given(st.lists(nested, min_size=1, max_size=3))
def test_begins_and_ends_find_each_other_however_they_are_nested(lanes):
    tags, block, expected = [], [], []

    def walk(ranges, lane, depth):
        for name, inner in ranges:
            at = len(tags)
            tags.append(name)
            block.append(lane)
            walk(inner, lane, depth + 1)
            expected.append((at, len(tags), depth))
            tags.append(name | RANGE_END)
            block.append(lane)

    for lane, ranges in enumerate(lanes):
        walk(ranges, lane, 0)
    n = len(tags)
    events = Events(1, ("a", "b", "c"), np.array(block, np.uint32), np.zeros(n, np.uint16), np.array(tags, np.uint32),
                    np.linspace(0, 1, n))  # fmt: skip
    begin, end, depth = pair(events)
    assert sorted(zip(begin.tolist(), end.tolist(), depth.tolist(), strict=True)) == sorted(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("preemptible", [False, True])
@pytest.mark.parametrize("per_warp", [False, True])
def test_a_gpu_notes_ranges_within_its_blocks(per_warp, preemptible):
    word = "pp_warp_range" if per_warp else "pp_range"
    text = CUDA.replace("RANGES_BEGIN", f'{word}_begin("work");').replace("RANGES_END", f'{word}_end("work");')
    kernel = pp.kernel(source=text, name="twice")
    with pp.Device("cuda"):
        x, out = pp.array(np.arange(N, dtype=np.float32)), pp.zeros(N)
        with pp.trace() as t:
            (kernel.preemptible if preemptible else kernel)[8, 128](x, out, N)
    np.testing.assert_array_equal(out.numpy(), 2 * x.numpy())
    r = t.ranges.records
    assert len(r) == 8 * (4 if per_warp else 1)
    assert t.ranges.lost == 0
    for block in t.blocks:
        mine = r[r["block"] == block["block"]]
        assert (mine["start_ns"] >= block["start_ns"]).all()
        assert (mine["end_ns"] <= block["end_ns"]).all()


def test_an_explanation_names_what_limits_a_kernel():
    explained = traced().explain()
    (kernel,) = explained.kernels
    about = {c.about: c for c in kernel.claims}
    assert about["small grid"].figures["blocks per launch"] == 8
    assert about["widest range"].says.startswith("'")
    assert "small grid" in str(explained)
    assert {bar.name for bar in explained.plot().data} == set(about)


def test_work_is_kept_with_a_trace(tmp_path):
    t = traced()
    assert t.work["bytes"][0] == 2 * 4 * N
    assert t.work["plain_registers"][0] > 0
    t.save(tmp_path / "t.pptrace")
    np.testing.assert_array_equal(pp.Trace.load(tmp_path / "t.pptrace").work, t.work)


def test_a_file_from_before_sectors_were_counted_is_read(tmp_path):
    t = traced()
    old = ["launch", "spill_bytes", "plain_registers", "bytes", "flops", "tensor_flops"]
    t.work = t.work[old].astype([(name, t.work.dtype[name]) for name in old])
    t.save(tmp_path / "t.pptrace")
    found = pp.Trace.load(tmp_path / "t.pptrace")
    assert found.work["bytes"].tolist() == t.work["bytes"].tolist()
    assert not found.work["updates"].any()
    assert found.explain().kernels


def test_ranges_are_saved_as_a_figure(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `viz` is not installed")
    t = traced()
    figure = t.save_figure(tmp_path / "ranges.svg", ["residency", "ranges"]).read_text()
    for name in t.ranges.names:
        assert f">{name}<" in figure or f"<!-- {name} -->" in figure
    whole, part = (t.save_figure(tmp_path / name, "ranges", sms=sms) for name, sms in
                   (("a.svg", None), ("b.svg", (0, 0))))  # fmt: skip
    assert "SM 1," in whole.read_text()
    assert "SM 1," not in part.read_text()
    with failing(pp.TraceError, field="sms", given=[999]):
        t.save_figure(tmp_path / "c.svg", "ranges", sms=(999, 999))
    with failing(pp.TraceError, field="ranges"):
        t.save_figure(tmp_path / "d.svg", "ranges", start_ns=0, end_ns=1)
