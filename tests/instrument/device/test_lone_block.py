"""A block's time by its machine code: what it waits for counts, and how often it goes through its loops."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl

import paellapy as pp
from paellapy.instrument.gpu_model.costs import LoneBlock
from paellapy.instrument.ptx.sass import instructions
from paellapy.instrument.triton_ir import COST_DTYPE, TtirProgram


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
