"""Traces inside traces, kernels that a trace cannot see, and live counts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from hypothesis import given
from hypothesis import strategies as st
from stand_in_device import StandInDevice
from triton import knobs

import paellapy as pp
from paellapy.instrument.device import array, empty_like, zeros
from paellapy.instrument.errors import TraceError
from paellapy.instrument.records import SM_LINE, WARP_SHIFT
from paellapy.instrument.traces.session import counts


@triton.jit
def copy(x, out, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i))


traced = pp.kernel(copy)


@pytest.fixture(autouse=True)
def device() -> Any:
    with pp.Device("virtual:h200") as opened:
        yield opened


def launch(blocks: int) -> None:
    x = np.zeros(64 * blocks, np.float32)
    traced[blocks,](x, np.zeros_like(x), B=64)


def test_a_trace_inside_a_trace_holds_its_own_launches():
    with pp.trace() as outer:
        launch(1)
        with pp.trace() as inner:
            launch(2)
            launch(3)
        with pp.trace() as empty:
            pass
        launch(4)
    assert len(outer.blocks) == 10
    assert len(inner.blocks) == 5
    assert len(empty.blocks) == 0
    assert np.isin(inner.blocks["start_ns"], outer.blocks["start_ns"]).all()


def test_a_trace_that_is_being_recorded_says_so():
    with pp.trace() as t:
        launch(2)
        assert "recording" in repr(t)
        for read in (t.summary, t.explain, t.occupancy, t.residency, t.select):
            with failing(TraceError, field="recording"):
                read()
    assert len(t.select().blocks) == 2
    with pytest.raises(ZeroDivisionError), pp.trace() as t:
        launch(1 // 0)
    assert t.occupancy().shape[0] > 0


def test_an_error_inside_an_inner_trace_leaves_the_outer_one_whole():
    with pp.trace() as outer:
        with pytest.raises(ZeroDivisionError), pp.trace():
            launch(1 // 0)
        launch(3)
    assert len(outer.blocks) == 3


def test_kernels_that_do_not_report_are_named(tmp_path: Path):
    with pp.trace() as t:
        launch(1)
        knobs.runtime.launch_enter_hook(SimpleNamespace(get=lambda: {"name": "somebody_elses"}))  # as Triton calls it
    assert t.unseen == ("somebody_elses",)
    assert "somebody_elses" in repr(t)
    t.save(tmp_path / "t")
    assert pp.Trace.load(tmp_path / "t").unseen == t.unseen
    with pp.trace() as t:
        launch(1)
    assert t.unseen == ()
    assert "not traced" not in repr(t)


def test_occupancy_is_an_array_where_one_is_wanted():
    with pp.trace() as t:
        launch(8)
    occupancy = t.occupancy(bins=7)
    assert occupancy.shape == np.asarray(occupancy).shape == (132, 7)
    assert np.asarray(occupancy, np.float32).dtype == np.float32


def test_arrays_of_zeros_and_arrays_like_others():
    assert (zeros((2, 3), np.int32).numpy() == 0).all()
    like = empty_like(zeros((2, 3), np.float16))
    assert like.shape == (2, 3)
    assert like.dtype == np.float16
    assert empty_like(like, np.int8).dtype == np.int8


def test_arrays_of_tensors_and_like_tensors():
    torch = pytest.importorskip("torch")
    for kind in (torch.bfloat16, torch.float8_e5m2, torch.int16):
        tensor = torch.arange(6).reshape(2, 3).to(kind)
        made = array(tensor.T)
        assert (made.shape, made.dtype.name) == ((3, 2), str(kind).removeprefix("torch."))
        assert made.astype(np.float64).tolist() == tensor.T.tolist()
        alike = empty_like(tensor)
        assert (alike.shape, alike.dtype) == ((2, 3), made.dtype)
    assert array(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_kernels_of_a_first_compilation_inside_the_trace_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    late = tmp_path / "late_inductor.py"
    text = "class CachingAutotuner:\n    fn = triton_poi_fused_mul_0\n    def run(self):\n        return 3\n"
    late.write_text(f"def triton_poi_fused_mul_0():\n    ...\n\n\n{text}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("paellapy.instrument.traces.session._INDUCTOR", "late_inductor")
    finders = list(sys.meta_path)
    with pp.trace() as t:
        imported = importlib.import_module("late_inductor")
        assert imported.CachingAutotuner().run() == 3
    assert t.unseen == ("triton_poi_fused_mul_0",)
    assert imported.CachingAutotuner.run.__name__ == "run"
    assert not hasattr(imported.CachingAutotuner.run, "__wrapped__")
    with pp.trace() as later:
        pass
    assert later.unseen == ()
    assert sys.meta_path == finders


def test_kernels_that_inductor_launches_without_a_hook_are_named(monkeypatch: pytest.MonkeyPatch):
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    ran: list[Any] = []
    monkeypatch.setattr(heuristics.CachingAutotuner, "run", lambda self, *args, stream: ran.append((args, stream)))
    plain = heuristics.CachingAutotuner.run
    tuner = object.__new__(heuristics.CachingAutotuner)
    tuner.fn = SimpleNamespace(__name__="triton_poi_fused_add_0")
    with pp.trace() as outer:
        with pp.trace() as inner:
            tuner.run(1, 2, stream=0)
        with pp.trace() as later:
            pass
    tuner.run(3, stream=0)
    assert ran == [((1, 2), 0), ((3,), 0)]
    assert outer.unseen == inner.unseen == ("triton_poi_fused_add_0",)
    assert later.unseen == ()
    assert "triton_poi_fused_add_0" in repr(outer)
    assert heuristics.CachingAutotuner.run is plain


# Anywhere, and where a count of blocks is about to carry into the count of warps above it.
words = st.one_of(
    st.integers(0, 2**64 - 1), st.integers(0, 2**32).map(lambda warps: ((warps << WARP_SHIFT) - 3) % 2**64)
)


def on_an_sm(started: int, ended: int) -> tuple[int, int]:
    lines = np.zeros(1, SM_LINE)
    lines["started"], lines["ended"] = started, ended
    now = counts(StandInDevice.make(lines=lines))
    return int(now.resident_blocks[0]), int(now.resident_warps[0])


def packed(blocks: int, warps: int) -> int:
    return (blocks + (warps << WARP_SHIFT)) % 2**64


@given(words, st.integers(0, 32), st.integers(0, 64))
def test_resident_is_what_started_and_did_not_end_wherever_counters_stand(ended: int, blocks: int, warps: int) -> None:
    assert on_an_sm((ended + packed(blocks, warps)) % 2**64, ended) == (blocks, warps)


@given(words, st.integers(0, 32), st.integers(0, 64))
def test_an_end_seen_before_its_start_is_nothing_resident(started: int, blocks: int, warps: int) -> None:
    assert on_an_sm(started, (started + packed(blocks, warps)) % 2**64) == (0, 0)


def test_counts_tell_blocks_warps_and_occupancy_of_every_sm() -> None:
    lines = np.zeros(3, SM_LINE)
    lines["started"] = [packed(5, 20), packed(1, 64), 0]
    lines["ended"] = [packed(3, 12), 0, 0]
    now = counts(StandInDevice.make(lines=lines))
    assert now.started.tolist() == [5, 1, 0]
    assert now.ended.tolist() == [3, 0, 0]
    assert now.resident_blocks.tolist() == [2, 1, 0]
    assert now.resident_warps.tolist() == [8, 64, 0]
    assert now.occupancy.tolist() == [8 / 64, 1.0, 0.0]
    assert all(a.dtype == np.int64 for a in (now.started, now.ended, now.resident_blocks, now.resident_warps))


def test_without_a_device_the_current_one_is_asked() -> None:
    with StandInDevice.make() as device:
        device.lines["started"] = packed(1, 2)
        assert counts().resident_warps.tolist() == [2, 2]
