"""What the evaluator counts and how the cost model turns it into time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from corpus import TRITON_CASES

import paellapy as pp
from paellapy.instrument.gpu_model.costs import CostModel
from paellapy.instrument.gpu_model.parts import Timing, part


@triton.jit
def chase(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    at = i
    for _ in range(n):
        at = tl.load(x + at)
    tl.store(out + i, at)


@triton.jit
def apart(x, y, out, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


def _cost(device: Any, fn: Any, *args: Any, grid: int = 1, **keywords: Any) -> tuple[Any, Any]:
    kernel = pp.kernel(fn, report=None)
    values, key, options = kernel._bind(device, args, keywords)
    launcher = kernel._prepare(device, values, key, options, False)
    return launcher, launcher.evaluate(values, (grid, 1, 1), 0, grid)


@pytest.fixture
def device() -> Any:
    with pp.Device("virtual:h200") as opened:
        yield opened


def test_dependent_loads_are_a_chain_and_independent_ones_are_not(device: Any) -> None:
    links = np.random.default_rng(0).permutation(256).astype(np.int32)
    out = np.zeros(256, np.int32)
    for n in (3, 7):
        _, cost = _cost(device, chase, links, out, n, B=256)
        assert cost["loads"].tolist() == [n]
    _, cost = _cost(device, apart, links, links, out, B=256)
    assert cost["loads"].tolist() == [1]


def test_products_in_a_loop_hide_their_loads(device: Any) -> None:
    case = next(c for c in TRITON_CASES if c.name == "gemm_fp16")
    call = case.make(np.random.default_rng(0), 1.0)
    kernel = pp.kernel(case.kernel, report=None)
    values, key, options = kernel._bind(device, (), {**call.args, **call.constexprs, **call.options})
    launcher = kernel._prepare(device, values, (*key, *sorted(options.items())), options, False)
    cost = launcher.evaluate(values, (*call.grid, 1, 1)[:3], 0, 1)
    assert cost["dots"][0] > 1
    assert cost["loads"][0] <= 1


def test_updates_of_few_addresses_press_more_than_updates_of_many(device: Any) -> None:
    histogram = next(c for c in TRITON_CASES if c.name == "histogram_atomics")
    split = next(c for c in TRITON_CASES if c.name == "split_k_gemm")
    pressure = []
    for case in (histogram, split):
        call = case.make(np.random.default_rng(0), 1.0)
        kernel = pp.kernel(case.kernel, report=None)
        values, key, options = kernel._bind(device, (), {**call.args, **call.constexprs, **call.options})
        launcher = kernel._prepare(device, values, (*key, *sorted(options.items())), options, False)
        cost = launcher.evaluate(values, (*call.grid, 1, 1)[:3], 0, 1)
        pressure.append(int(cost["pressure"][0]))
    assert pressure[0] > pressure[1] > 0


def test_many_waves_of_blocks_queue_once_and_not_once_each(device: Any) -> None:
    @triton.jit
    def add_one(counts, B: tl.constexpr):
        tl.atomic_add(counts + tl.arange(0, B) * 0, 1)

    def took(blocks: int) -> int:
        with device, pp.trace(1 << 12) as t:
            pp.kernel(add_one)[blocks,](pp.zeros(1, np.int32), B=128)
        return int(t.summary().kernels[0].span_ns)

    few, many = took(5_000), took(40_000)
    assert 6 < many / few < 10


def test_a_measured_kernels_factor_scales_its_wait(device: Any) -> None:
    links = np.arange(256, dtype=np.int32)
    launcher, cost = _cost(device, chase, links, links.copy(), 5, B=256)
    label = launcher.compiled.source.metadata["label"]
    plain = CostModel(part("h200"), Timing())
    waits = [
        model.block_cost(launcher.compiled, cost, (links,), launcher.threads, launcher.program.facts).wait_ns
        for model in (plain, replace(plain, factors={label: 3.0}))
    ]
    assert waits[1] == pytest.approx(3 * waits[0])
    other = label.replace("256", "512")  # the same kernel with another constant
    assert replace(plain, factors={other: 4.0}).factor(label) == pytest.approx(4.0)
    assert plain.factor(label) == 1.0


def test_what_fits_in_l2_costs_less_traffic(device: Any) -> None:
    small, large = np.zeros(1 << 12, np.int32), np.zeros(1 << 25, np.int32)
    launcher, cost = _cost(device, apart, small, small, small.copy(), grid=16, B=256)
    model = CostModel(part("h200"), Timing())
    inside = model.block_cost(launcher.compiled, cost, (small,), launcher.threads, launcher.program.facts).bytes
    many = np.repeat(cost, 1 << 13)
    outside = model.block_cost(
        launcher.compiled, many, (large, large, large), launcher.threads, launcher.program.facts
    ).bytes
    assert inside == pytest.approx(outside / Timing().l2_speedup)


def test_the_h200_profile_is_recorded_and_used() -> None:
    model = CostModel.for_part(part("h200"))
    assert len(model.factors) > 50
    assert model.timing != Timing()
    assert pp.Device("virtual:h200").costs.timing == model.timing
