"""A block's time by its machine code: what it waits for counts, and how often it goes through its loops."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl

import paellapy as pp
from paellapy.instrument.device.lone_block import LoneBlock
from paellapy.instrument.ptx.sass import instructions
from paellapy.instrument.ttir import COST_DTYPE, TtirProgram


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
    lone = LoneBlock.of(compiled(chase, "*i32:16", "*i32:16", "i32"), 1)
    assert lone is not None
    one, two, ten = cycles(lone, 1, 2, 10)
    assert ten - one == pytest.approx(9 * (two - one))
    assert 270 < two - one < 2 * 270, "each load waits for the one before; what ptxas unrolled counts as often"


def test_slow_paths_are_not_taken() -> None:
    lone = LoneBlock.of(compiled(sine, "*fp32:16", "*fp32:16"), 0)
    assert lone is not None
    assert lone.again == ()
    assert lone.fetched < len(instructions(compiled(sine, "*fp32:16", "*fp32:16").cubin, "sine")) / 2


def test_other_machine_code_is_left_alone() -> None:
    assert LoneBlock.of(compiled(chase, "*i32:16", "*i32:16", "i32", target="sm_80"), 1) is None


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
    assert program.facts.loops == 3
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
