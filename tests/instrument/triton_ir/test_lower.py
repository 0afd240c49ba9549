"""Whether data decide which ops of a kernel run, and on which elements."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl

import paellapy as pp
from paellapy.instrument.triton_ir.lower import follows_data, reaches_by_data
from paellapy.instrument.triton_ir.parse import parse


@triton.jit
def loop_by_number(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for start in range(0, n, B):
        total += tl.load(x + start + i, mask=start + i < n)
    tl.store(out + i, total)


@triton.jit
def loop_by_data(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for start in range(0, tl.load(x).to(tl.int32), B):
        total += tl.load(x + start + i, mask=start + i < n)
    tl.store(out + i, total)


@triton.jit
def branch_by_block(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    if tl.program_id(0) < n:
        tl.store(out + i, tl.load(x + i))


@triton.jit
def branch_by_data(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    if tl.sum(tl.load(x + i)) > n:
        tl.store(out + i, i.to(tl.float32))


@triton.jit
def while_by_data(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    left = tl.load(x).to(tl.int32)
    while left > 0:
        tl.store(out + left + i, i.to(tl.float32))
        left -= B


@triton.jit(noinline=True)
def first_of(x):
    return tl.load(x)


@triton.jit
def branch_by_a_function(x, out, n, B: tl.constexpr):
    if first_of(x) > n:
        tl.store(out, 1.0)


@triton.jit
def return_by_data(x, out, n, B: tl.constexpr):
    if tl.load(x) > n:
        return
    tl.store(out, 1.0)


@triton.jit
def loop_by_an_earlier_round(x, out, n, B: tl.constexpr):
    most = n
    for _ in range(3):
        for j in range(most):
            tl.store(out + j, 1.0)
        most = tl.load(x).to(tl.int32)


@triton.jit
def load_masked_by_data(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=tl.load(out + i) > n))


@triton.jit
def store_masked_by_data(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i, value, mask=value > 0)


@triton.jit
def update_masked_by_data(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.atomic_add(out + i, 1.0, mask=value > 0)


@triton.jit
def update_by_data(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.atomic_add(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@pytest.mark.parametrize(
    ("kernel", "depends"),
    [
        (loop_by_number, False), (branch_by_block, False), (loop_by_data, True), (branch_by_data, True),
        (while_by_data, True), (branch_by_a_function, True), (return_by_data, True), (loop_by_an_earlier_round, True),
        (load_masked_by_data, True), (store_masked_by_data, True), (update_masked_by_data, True),
        (update_by_data, False),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)  # fmt: skip
def test_loops_branches_and_masks_that_depend_on_memory_are_found(kernel: Any, depends: bool) -> None:
    made = pp.kernel(kernel).compile("*fp32", "*fp32", "i32", B=32, target="sm_90", report=None)
    assert follows_data(parse(made.source.ttir, made.name)) is depends


@triton.jit
def load_by_data(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + tl.load(out + i).to(tl.int32)))


@triton.jit
def store_by_data(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + tl.load(x + i).to(tl.int32), 1.0)


@triton.jit
def tile_by_number(x, out, n, B: tl.constexpr):
    tiles = tl.make_tensor_descriptor(x, [n, B], [B, 1], [B, B])
    tiles.store([n, 0], tiles.load([0, 0]))


@triton.jit
def tile_by_data(x, out, n, B: tl.constexpr):
    tiles = tl.make_tensor_descriptor(x, [n, B], [B, 1], [B, B])
    tiles.store([tl.load(out).to(tl.int32), 0], tl.zeros((B, B), tl.float32))


@pytest.mark.parametrize(
    ("kernel", "depends"),
    [
        (load_by_data, True), (store_by_data, True), (tile_by_number, False), (tile_by_data, True),
        (update_by_data, False), (load_masked_by_data, True),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)  # fmt: skip
def test_addresses_that_depend_on_memory_are_found(kernel: Any, depends: bool) -> None:
    made = pp.kernel(kernel).compile("*fp32", "*fp32", "i32", B=32, target="sm_90", report=None)
    assert reaches_by_data(parse(made.source.ttir, made.name)) is depends
