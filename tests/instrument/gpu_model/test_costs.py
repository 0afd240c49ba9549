"""Costs of blocks: counted by the evaluator or read from machine code, and turned into time."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from corpus import TRITON_CASES

import paellapy as pp
from paellapy.instrument.gpu_model.costs import CostModel, LoneBlock
from paellapy.instrument.gpu_model.parts import Timing, part
from paellapy.instrument.ptx.sass import instructions
from paellapy.instrument.triton_ir import COST_DTYPE, TtirProgram


@triton.jit
def follow(x, out, n, B: tl.constexpr):
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
    launcher = kernel._prepare(device, values, (*key, *sorted(options.items())), options, False)
    return launcher, launcher.evaluate(values, (grid, 1, 1), 0, grid)


def _first_block(device: Any, name: str) -> Any:
    """The cost of the first block of a kernel of the corpus."""
    case = next(c for c in TRITON_CASES if c.name == name)
    call = case.make(np.random.default_rng(0), 1.0)
    kernel = pp.kernel(case.kernel, report=None)
    values, key, options = kernel._bind(device, (), {**call.args, **call.constexprs, **call.options})
    launcher = kernel._prepare(device, values, (*key, *sorted(options.items())), options, False)
    return launcher.evaluate(values, (*call.grid, 1, 1)[:3], 0, 1)[0]


@pytest.fixture
def device() -> Any:
    with pp.Device("virtual:h200") as opened:
        yield opened


def test_dependent_loads_are_a_chain_and_independent_ones_are_not(device: Any) -> None:
    links = np.random.default_rng(0).permutation(256).astype(np.int32)
    out = np.zeros(256, np.int32)
    for n in (3, 7):
        _, cost = _cost(device, follow, links, out, n, B=256)
        assert cost["loads"].tolist() == [n]
    _, cost = _cost(device, apart, links, links, out, B=256)
    assert cost["loads"].tolist() == [1]


def test_products_in_a_loop_hide_their_loads(device: Any) -> None:
    cost = _first_block(device, "gemm_fp16")
    assert cost["dots"] > 1
    assert cost["loads"] <= 1


def test_updates_of_few_addresses_press_more_than_updates_of_many(device: Any) -> None:
    few, many = (_first_block(device, name)["pressure"] for name in ("histogram_atomics", "split_k_gemm"))
    assert few > many > 0


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
    launcher, cost = _cost(device, follow, links, links.copy(), 5, B=256)
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


@triton.jit
def chase(x, out, n):
    i = 0
    for _ in range(n):
        i = tl.load(x + i)
    tl.store(out, i)


@triton.jit
def sine(x, out):
    i = tl.arange(0, 128)
    tl.store(out + i, tl.sin(tl.load(x + i)))


@triton.jit
def product(a, b, c, K: tl.constexpr, T: tl.constexpr):
    i, k = tl.arange(0, T), tl.arange(0, T)
    total = tl.zeros((T, T), tl.float32)
    for start in range(0, K, T):
        left = tl.load(a + i[:, None] * K + start + k[None, :])
        total += tl.dot(left, tl.load(b + (start + k)[:, None] * T + i[None, :]))
    tl.store(c + i[:, None] * T + i[None, :], total)


@triton.jit
def running_sum(x, out, N: tl.constexpr):
    i = tl.arange(0, 512)
    total = tl.zeros((512,), tl.float32)
    for start in range(0, N, 512):
        total += tl.load(x + start + i)
    tl.store(out + i, total)


@triton.jit
def repeated_sine(x, out, N: tl.constexpr):
    i = tl.arange(0, 512)
    value = tl.load(x + i)
    for k in range(N):
        value = tl.sin(value) * value + k
    tl.store(out + i, value)


@triton.jit
def short_loop_first(x, out, n, FEW: tl.constexpr):
    i = tl.arange(0, 512)
    total = tl.zeros((512,), tl.float32)
    for k in range(FEW):
        total += tl.load(x + k * 512 + i)
    for k in range(n):
        total = tl.maximum(total, tl.load(x + k * 512 + i))
    tl.store(out + i, total)


def compiled(fn: Any, *types: str, target: str = "sm_90") -> Any:
    return pp.kernel(fn, report=None).compile(*types, target=target)


def cycles(lone: LoneBlock, *loop0: int) -> Any:
    cost = np.zeros(len(loop0), COST_DTYPE)
    cost["loop0"] = loop0
    return lone.cycles_of(cost)


def test_machine_code_is_read() -> None:
    made = compiled(chase, "*i32:16", "*i32:16", "i32")
    code = instructions(made.cubin, "chase")
    kinds = [each.kind for each in code]
    assert "load" in kinds
    assert "store" in kinds
    assert kinds.count("exit") >= 1
    backwards = [each.target for i, each in enumerate(code) if each.kind == "jump" and 0 <= each.target < i - 3]
    assert backwards, "perhaps one for four times round, and one for the rest"
    assert instructions(made.cubin, "another") == []
    assert instructions(b"no ELF file", "chase") == []


def test_a_loop_takes_time_each_time_round() -> None:
    lone = LoneBlock.of(compiled(chase, "*i32:16", "*i32:16", "i32"), ["chase.py:1"])
    assert lone is not None
    one, two, ten = cycles(lone, 1, 2, 10)
    assert ten - one == pytest.approx(9 * (two - one))
    assert 270 < two - one < 2 * 270, "each load waits for the one before; what ptxas unrolled counts as often"


def span_ns(kernel: Any, *args: Any, **constants: int) -> int:
    with pp.Device("virtual:h200"), pp.trace(16) as t:
        pp.kernel(kernel)[1,](*args, **constants)
    return int(t.summary().kernels[0].span_ns)


@pytest.mark.parametrize("tile", [16, 32])
def test_time_grows_evenly_with_a_constant_number_of_products(tile: int) -> None:
    # ptxas unrolls the loop wholly up to about 100 turns, and in part above: by 6, by 8, by 9 with one turn left over.
    def time(k: int) -> int:
        a, b = pp.zeros((tile, k), np.float16), pp.zeros((k, tile), np.float16)
        return span_ns(product, a, b, pp.zeros((tile, tile), np.float32), K=k, T=tile)

    per_k = {k: time(k) / k for k in (1024, 2048, 2560, 2624, 3072, 3328, 4096, 8192)}
    assert max(per_k.values()) < 1.6 * min(per_k.values()), per_k


def test_time_grows_evenly_with_a_constant_number_of_loads() -> None:
    x = pp.zeros(1 << 18, np.float32)
    per_n = {
        n: span_ns(running_sum, x, pp.zeros(512, np.float32), N=n) / n for n in (1 << 14, 1 << 15, 1 << 17, 1 << 18)
    }
    assert max(per_n.values()) < 2 * min(per_n.values()), per_n


def test_a_loop_around_a_slow_path_takes_time() -> None:
    x, out = pp.zeros(512, np.float32), pp.zeros(512, np.float32)
    few, many = (span_ns(repeated_sine, x, out, N=n) for n in (100, 1000))
    assert 5 < many / few < 10


def test_an_unrolled_loop_is_not_taken_for_the_next_one() -> None:
    x, out = pp.zeros(512 * 512, np.float32), pp.zeros(512, np.float32)
    few, many = (span_ns(short_loop_first, x, out, n, FEW=4) for n in (64, 512))
    assert 4 < many / few < 8


def test_slow_paths_are_not_taken() -> None:
    lone = LoneBlock.of(compiled(sine, "*fp32:16", "*fp32:16"), [])
    assert lone is not None
    assert lone.again == ()
    assert lone.fetched < len(instructions(compiled(sine, "*fp32:16", "*fp32:16").cubin, "sine")) / 2


def test_other_machine_code_is_left_alone() -> None:
    assert LoneBlock.of(compiled(chase, "*i32:16", "*i32:16", "i32", target="sm_80"), ["chase.py:1"]) is None


def test_the_evaluator_counts_loops_in_the_order_of_the_text() -> None:
    @triton.jit
    def nested(out, n, m):
        total = 0
        for i in range(n):
            for j in range(m):
                total += i * j
        while total > 100:
            total -= 100
        tl.store(out, total)

    source = pp.kernel(nested).compile("*i32:16", "i32", "i32", target="sm_90").source
    program = TtirProgram.parse(source.ttir, "nested")
    cost = program.run([np.zeros(1, np.int32), np.int32(4), np.int32(5)], (1, 1, 1), range(1))
    assert len(program.facts.loops) == 3
    assert [int(cost[f"loop{k}"][0]) for k in range(4)] == [4, 20, 1, 0]


def test_a_traced_launch_takes_as_long_as_a_plain_one() -> None:
    def took(traced: bool) -> float:
        device: Any = pp.Device("virtual:h200")
        out = pp.zeros(1, np.int32)
        kernel = pp.kernel(chase, report=None)
        with pp.trace(16) if traced else contextlib.nullcontext():
            start = device.record()
            kernel[1,](pp.zeros(1, np.int32), out, 20)
            end = device.record()
            end.synchronize()
        return float(end.elapsed_ns(start))

    with pp.Device("virtual:h200"):
        assert took(True) == pytest.approx(took(False))
