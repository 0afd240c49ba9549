"""Traces inside traces, and what a trace says of kernels it cannot see."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton import knobs

import paellapy as pp
from paellapy.arrays import empty_like, zeros


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
