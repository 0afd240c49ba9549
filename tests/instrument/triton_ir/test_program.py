"""Kernels give the right answers without a GPU, whole or in slices, and never touch memory that is not theirs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from corpus import TRITON_CASES, Case, assert_right
from corpus.case import Argument, Call, options
from corpus_sources import compiled, ttir
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st

from paellapy.instrument.errors import ArgumentError, LaunchError, OutOfBoundsError, UnsupportedOpError
from paellapy.instrument.triton_ir import TtirProgram, program

pytestmark = pytest.mark.quick

EVALUABLE = [case for case in TRITON_CASES if case.evaluable]


def flat(args: dict[str, Argument]) -> list[Any]:
    """Arguments in the order of the TTIR function: tuples spread out, absent ones left out."""
    spread = [v if isinstance(v, tuple) else (v,) for v in args.values()]
    return [v for group in spread for v in group if v is not None]


@cache
def corpus_program(case: Case, scale: float) -> TtirProgram:
    return TtirProgram.parse(ttir(case.kernel, case.make(np.random.default_rng(0), scale), case.min_sm), case.name)


# ---- the corpus ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVALUABLE, ids=str)
def test_corpus_is_right_directly_and_recorded(case: Case) -> None:
    evaluator = corpus_program(case, 0.3)
    costs = []
    for record in (False, True, True, True):  # directly, seen first, recorded, replayed
        call = case.make(np.random.default_rng(7), 0.3)
        costs.append(evaluator.run(flat(call.args), call.grid, record=record))
        assert_right(call)
    for cost in costs:
        assert np.array_equal(cost, costs[0])
    fresh = case.make(np.random.default_rng(8), 0.3)  # other data through the same tape
    evaluator.run(flat(fresh.args), fresh.grid)
    assert_right(fresh)


@pytest.mark.parametrize("case", [case for case in EVALUABLE if case.sliceable], ids=str)
def test_corpus_in_random_slices_equals_the_whole(case: Case) -> None:
    evaluator = corpus_program(case, 0.3)
    order = np.random.default_rng(3)
    for _ in range(2):
        call = case.make(np.random.default_rng(9), 0.3)
        blocks = order.permutation(int(np.prod(call.grid)))
        for part in np.array_split(blocks, min(4, len(blocks))):
            cost = evaluator.run(flat(call.args), call.grid, part)
            assert len(cost) == len(part)
        assert_right(call)


# ---- shapes, masks, grids --------------------------------------------------------------------------------------------


@triton.jit
def scale_tile(x, y, rows, cols, sx, sy, factor, R: tl.constexpr, C: tl.constexpr):
    r = tl.program_id(1) * R + tl.arange(0, R)
    c = tl.program_id(0) * C + tl.arange(0, C)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    value = tl.load(x + r[:, None] * sx + c[None, :], mask=mask, other=1.0)
    tl.store(y + r[:, None] * sy + c[None, :], value * factor, mask=mask)


@cache
def scale_program() -> TtirProgram:
    x = np.zeros((9, 9), np.float32)
    args = {"x": x, "y": x, "rows": 9, "cols": 9, "sx": 9, "sy": 9, "factor": 2.5}
    return compiled(scale_tile, args, R=8, C=16)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_shape_stride_and_slice(data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    pad_x, pad_y = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = rng.standard_normal((rows, cols + pad_x)).astype(np.float32)
    y = np.full((rows, cols + pad_y), np.nan, np.float32)
    grid = (-(-cols // 16), -(-rows // 8))
    blocks = np.array(data.draw(st.permutations(range(grid[0] * grid[1]))))
    cut = data.draw(st.integers(0, len(blocks)))
    args = [x, y, rows, cols, cols + pad_x, cols + pad_y, 2.5]
    for _ in range(3):
        y[:] = np.nan
        for part in (blocks[:cut], blocks[cut:]):
            scale_program().run(args, grid, part)
        assert np.array_equal(y[:, :cols], x[:, :cols] * np.float32(2.5))
        assert np.isnan(y[:, cols:]).all()


def test_large_grids_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "CHUNK_ELEMENTS", 3 * 128)
    x = np.random.default_rng(0).standard_normal((77, 91)).astype(np.float32)
    grid = (-(-91 // 16), -(-77 // 8))
    for _ in range(3):
        y = np.full_like(x, np.nan)
        cost = scale_program().run([x, y, 77, 91, 91, 91, 2.5], grid)
        assert np.array_equal(y, x * np.float32(2.5))
        assert cost["bytes_loaded"].sum() == cost["bytes_stored"].sum() == x.nbytes


def test_a_range_with_a_step_and_an_empty_slice() -> None:
    x = np.ones((8, 64), np.float32)
    y = np.zeros_like(x)
    assert len(scale_program().run([x, y, 8, 64, 64, 64, 2.5], (4, 1), range(0))) == 0
    scale_program().run([x, y, 8, 64, 64, 64, 2.5], (4, 1), range(3, -1, -2))
    assert y.any(0).reshape(4, 16).any(1).tolist() == [False, True, False, True]


# ---- memory ----------------------------------------------------------------------------------------------------------


@triton.jit
def shift(x, y, by, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at + by, mask=at < n, other=0.0), mask=at < n)  # <- the load


def shift_program() -> TtirProgram:
    x = np.zeros(4, np.float32)
    return compiled(shift, {"x": x, "y": x, "by": 3, "n": 5}, B=16)


@triton.jit
def pick(x, at, out, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.gather(tl.load(x + i), tl.load(at + i), 0))  # <- the gather


def test_an_index_outside_what_is_gathered_from_is_named() -> None:
    x, at = np.arange(16, dtype=np.float32), np.arange(16, dtype=np.int32)
    evaluator = compiled(pick, {"x": x, "at": at, "out": x}, B=16)
    source = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if "# <- the gather" in text)
    at[3] = 16
    with failing(OutOfBoundsError, field="index", given=16, limit=16) as raised:
        evaluator.run([x, at, x.copy()], (1,))
    assert f"kernel pick, {__file__}:{line}" in str(raised.value)


@pytest.mark.parametrize("calls", [1, 3])
def test_out_of_bounds_names_kernel_line_block_index_and_size(calls: int) -> None:
    x, y, evaluator = np.zeros(100, np.float32), np.zeros(100, np.float32), shift_program()
    source = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if "# <- the load" in text)
    for _ in range(calls):
        with failing(OutOfBoundsError, kernel="shift", op="tt.load", field="x", given=100) as error:
            evaluator.run([x, y, 5, 100], (7,))
        message = str(error.value)
        for part in ("kernel shift", f"test_program.py:{line}", "block 5 (x=5, y=0, z=0)", "100 elements", "tt.load"):
            assert part in message
    with failing(OutOfBoundsError, kernel="shift", op="tt.load", field="x", given=-2):
        evaluator.run([x, y, -2, 100], (7,))
    with failing(OutOfBoundsError, kernel="shift", op="tt.store", field="y", given=100):
        evaluator.run([np.zeros(200, np.float32), y, 0, 101], (7,))
    evaluator.run([x, y, 0, 100], (7,))  # nothing was broken by it


@triton.jit
def look_up(table, at, y, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(table + tl.load(at + i)))


@triton.jit
def add_at(table, at, B: tl.constexpr):
    tl.atomic_add(table + tl.load(at + tl.arange(0, B)), 1.0)


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1])
def test_addresses_read_from_memory_are_checked_on_every_run(bad: int) -> None:
    table, at, y = np.arange(50, dtype=np.float32), np.arange(8, dtype=np.int32), np.zeros(8, np.float32)
    readers = compiled(look_up, {"table": table, "at": at, "y": y}, B=8)
    adders = compiled(add_at, {"table": table, "at": at}, B=8)
    wrong = at.copy()
    wrong[3] = bad
    for _ in range(3):
        readers.run([table, at, y], (1,))
        with failing(OutOfBoundsError, kernel="look_up", field="table", given=bad):
            readers.run([table, wrong, y], (1,))
        adders.run([table, at], (1,))
        with failing(OutOfBoundsError, kernel="add_at", field="table", given=bad):
            adders.run([table, wrong], (1,))
    assert table[:9].tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 8]


@triton.jit
def out_and_back(x, y, n, B: tl.constexpr):
    p = x + tl.arange(0, B) + n * 1000
    tl.store(y + tl.arange(0, B), tl.load(p - n * 1000))


def test_a_pointer_may_leave_its_array_and_come_back() -> None:
    x, y = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    for n in (1, -1, 2**20):
        compiled(out_and_back, {"x": x, "y": y, "n": 3}, B=16).run([x, y, n], (1,))
        assert np.array_equal(x, y)


def test_overlapping_arguments() -> None:
    for _ in range(2):
        memory, evaluator = np.arange(20, dtype=np.float32), shift_program()
        for start in (
            3,
            6,
            9,
            12,
        ):  # the recorded and replayed runs too: one block loads all of its tile before it stores
            evaluator.run([memory[1:], memory[:-1], 0, 16], (1,))
            assert memory[:3].tolist() == [start // 3 * 1.0 + i for i in range(3)]


@triton.jit
def add_in_place(x, y, z, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + at, mask=at < n)
    tl.store(y + at, v + 1, mask=at < n)
    tl.store(z + at, v, mask=at < n)


def test_a_loaded_value_does_not_change_when_its_array_does() -> None:
    x, z = np.arange(40, dtype=np.float32), np.zeros(40, np.float32)
    evaluator = compiled(add_in_place, {"x": x, "y": x, "z": z, "n": 40}, B=16)
    for i in range(4):
        evaluator.run([x, x, z, 40], (3,))
        assert np.array_equal(x, np.arange(40) + i + 1)
        assert np.array_equal(z, np.arange(40) + i)


def test_strided_and_reversed_arrays_are_their_memory() -> None:
    base = np.arange(40, dtype=np.float32).reshape(8, 5)
    y = np.zeros(8, np.float32)
    args = [base[:, 2], y, 0, 8]
    shift_program().run(args, (1,))
    assert y.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    shift_program().run([base.T, y, 0, 8], (1,))
    assert y.tolist() == list(range(8))
    shift_program().run([base.ravel()[::-1], y, -10, 8], (1,))
    assert y.tolist() == list(range(29, 37))
    with failing(OutOfBoundsError, kernel="shift", op="tt.load", field="x", given=1):
        shift_program().run([base.ravel()[::-1], y, -6, 8], (1,))


@triton.jit
def choose_array(x, y, z, flags, B: tl.constexpr):
    i = tl.arange(0, B)
    p = x if tl.program_id(0) % 2 == 0 else y
    if tl.load(flags + tl.program_id(0)) > 0:
        q = x + 1
    else:
        q = y + 2
    picked = tl.load(tl.where(i > 3, x + i, y + i), mask=i != 5, other=100.0)
    tl.store(z + tl.program_id(0) * B + i, tl.load(p + i) + tl.load(q + i) + picked)


def test_pointers_into_several_arguments() -> None:
    x, y, z = np.arange(20, dtype=np.float32), 50 + np.arange(20, dtype=np.float32), np.zeros((4, 8), np.float32)
    flags = np.array([1, 0, 0, 1], np.int32)
    evaluator = compiled(choose_array, {"x": x, "y": y, "z": z, "flags": flags}, B=8)
    i = np.arange(8)
    for _ in range(3):
        z[:] = np.nan
        cost = evaluator.run([x, y, z, flags], (4,))
        for b in range(4):
            p, q = (x if b % 2 == 0 else y)[:8], x[1:9] if flags[b] else y[2:10]
            assert np.array_equal(z[b], p + q + np.where(i == 5, 100, np.where(i > 3, x[:8], y[:8])))
        assert cost["bytes_loaded"].tolist() == [4 + 3 * 32 - 4] * 4


@triton.jit
def reinterpret(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    halves = x.to(tl.pointer_type(tl.int16))
    tl.store(y + i, tl.load(halves + i))


def test_a_pointer_cast_sees_the_same_bytes() -> None:
    x, y = np.arange(8, dtype=np.int32) * 70000, np.zeros(16, np.int16)
    evaluator = compiled(reinterpret, {"x": x, "y": y}, B=16)
    for _ in range(3):
        y[:] = 0
        evaluator.run([x, y], (1,))
        assert np.array_equal(y, x.view(np.int16))
    with failing(OutOfBoundsError, kernel="reinterpret", op="tt.load", field="x", given=14):
        evaluator.run([x[:7].copy(), y], (1,))


# ---- control flow ----------------------------------------------------------------------------------------------------


@triton.jit
def disagree(x, y, n):
    p = tl.program_id(0)
    if p >= n:
        return
    v = tl.load(x + p)
    total = 0
    if v % 3 == 0:
        total += 100
        if v % 2 == 0:
            total += 1000
    else:
        for i in range(p % 3, v):
            if i % 2 == 1:
                total += i
    while v > 1:
        v = tl.where(v % 2 == 0, v // 2, 3 * v + 1)
        total += 1
    tl.store(y + p, total)


def disagree_reference(p: int, v: int) -> int:
    total = 0
    if v % 3 == 0:
        total += 100 + (1000 if v % 2 == 0 else 0)
    else:
        total += sum(i for i in range(p % 3, v) if i % 2 == 1)
    while v > 1:
        v = v // 2 if v % 2 == 0 else 3 * v + 1
        total += 1
    return total


@cache
def disagree_program() -> TtirProgram:
    x = np.zeros(4, np.int32)
    return compiled(disagree, {"x": x, "y": x, "n": 7})


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(1, 4))
def test_blocks_may_disagree_about_everything(values: list[int], extra: int) -> None:
    x, y = np.array(values, np.int32), np.full(len(values) + extra, -7, np.int32)
    cost = disagree_program().run([x, y, len(x)], (len(y),))
    assert y.tolist() == [disagree_reference(p, v) for p, v in enumerate(values)] + [-7] * extra
    assert cost["bytes_loaded"].tolist() == [4] * len(x) + [0] * extra


@triton.jit(noinline=True)
def both(a, b):
    if a > b:
        return a, b
    return b, a


@triton.jit
def sorted_pairs(x, y):
    p = tl.program_id(0)
    high, low = both(tl.load(x + 2 * p), tl.load(x + 2 * p + 1))
    tl.store(y + 2 * p, low)
    tl.store(y + 2 * p + 1, high)


def test_functions_that_are_not_inlined() -> None:
    x = np.random.default_rng(0).standard_normal(24).astype(np.float32)
    y = np.zeros_like(x)
    compiled(sorted_pairs, {"x": x, "y": y}).run([x, y], (12,))
    assert np.array_equal(y.reshape(12, 2), np.sort(x.reshape(12, 2), 1))


def test_a_barrier_over_the_grid_needs_the_whole_grid() -> None:
    (case,) = (case for case in TRITON_CASES if case.name == "grid_barrier")
    call = case.make(np.random.default_rng(0), 0.3)
    with failing(LaunchError, kernel="grid_barrier", field="wait"):
        corpus_program(case, 0.3).run(flat(call.args), call.grid, range(int(np.prod(call.grid)) - 1))


@triton.jit
def checked(x, y, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + at)
    tl.device_assert(v >= 0, "v must not be negative")
    tl.device_print("v", v)
    tl.store(y + at, v)


def test_device_assert_names_kernel_line_and_block(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    call = Call({"x": x, "y": y}, {"B": 8}, (4,), (), dict, 0.0, {**options(), "debug": True})
    evaluator = TtirProgram.parse(ttir(checked, call), "checked")
    for _ in range(3):
        evaluator.run([x, y], (4,))
        assert "block 3 (x=3, y=0, z=0)" in capsys.readouterr().out
    bad = x.copy()
    bad[17] = -1
    with failing(LaunchError, kernel="checked", given="v must not be negative"):
        evaluator.run([bad, y], (4,))


# ---- what cannot be evaluated ----------------------------------------------------------------------------------------


def test_an_unknown_op_is_refused_when_parsing() -> None:
    x = np.zeros(4, np.float32)
    text = ttir(shift, Call({"x": x, "y": x, "by": 3, "n": 5}, {"B": 16}, (1,), (), dict, 0.0, options()))
    strange = re.sub(r"arith\.cmpi slt,", "arith.mystery slt,", text)
    with failing(UnsupportedOpError, kernel="shift", op="arith.mystery"):
        TtirProgram.parse(strange, "shift")


@pytest.mark.parametrize("case", [case for case in TRITON_CASES if not case.evaluable], ids=str)
def test_common_ptx_inside_a_kernel_is_translated(case: Case) -> None:
    assert corpus_program(case, 0.3)


FOUR = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("args", "field", "given_"),
    [
        ([FOUR], "arguments", 1),
        ([np.zeros(4, np.float64), FOUR, 0, 4], "x", np.float64),
        ([[1.0], FOUR, 0, 4], "x", list),
        ([FOUR, FOUR, 2**40, 4], "by", 2**40),
        ([FOUR, FOUR, "0", 4], "by", str),
        ([FOUR, np.frombuffer(bytes(16), np.float32), 0, 4], "y", None),  # read-only
    ],
)
def test_wrong_arguments_are_refused(args: list[Any], field: str, given_: Any) -> None:
    with failing(ArgumentError, kernel="shift", field=field, given=given_):
        shift_program().run(args, (1,))


def test_blocks_outside_the_grid_are_refused() -> None:
    x = np.zeros(16, np.float32)
    for blocks in (range(2), np.array([-1]), range(-1, 1)):
        with failing(LaunchError, kernel="shift", field="ids"):
            shift_program().run([x, x, 0, 16], (1,), blocks)


# ---- block pointers (Triton rewrites them on the way to TTIR, where it has them, so the text is written here) --------

BLOCK_POINTERS = """
module {
  tt.func public @tiles(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %m: i64, %n: i64, %s: i64) {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i64
    %c4 = arith.constant 4 : i32
    %cm4 = arith.constant -4 : i32
    %p = tt.get_program_id x : i32
    %r = arith.muli %p, %c4 : i32
    %a = tt.make_tensor_ptr %x, [%m, %n], [%s, %c1], [%r, %c4] {order = array<i32: 1, 0>} : <tensor<4x8xf32>>
    %b = tt.advance %a, [%c0, %cm4] : <tensor<4x8xf32>>
    %v = tt.load %b {boundaryCheck = array<i32: 0, 1>, padding = 2 : i32} : !tt.ptr<tensor<4x8xf32>>
    %o = tt.make_tensor_ptr %y, [%m, %n], [%n, %c1], [%r, %c0] {order = array<i32: 1, 0>} : <tensor<4x8xf32>>
    tt.store %o, %v {boundaryCheck = array<i32: 0, 1>} : !tt.ptr<tensor<4x8xf32>>
    tt.return
  }
}
"""


def test_block_pointers() -> None:
    evaluator = TtirProgram.parse(BLOCK_POINTERS, "tiles")
    x, y = np.arange(60, dtype=np.float32).reshape(6, 10), np.zeros((6, 5), np.float32)
    for _ in range(3):
        y[:] = 0
        cost = evaluator.run([x, y, 6, 5, 10], (2,))
        assert np.array_equal(y, x[:, :5])
        assert cost["bytes_loaded"].tolist() == [80, 40]


# ---- cost ------------------------------------------------------------------------------------------------------------


def test_cost_of_an_elementwise_kernel() -> None:
    x, y = np.zeros((8, 40), np.float32), np.zeros((8, 40), np.float32)
    for record in (False, True, True, True):
        cost = scale_program().run([x, y, 8, 40, 40, 40, 2.5], (3, 1), record=record)
        assert cost["bytes_loaded"].tolist() == cost["bytes_stored"].tolist() == [512, 512, 256]
        assert cost["flops"].tolist() == [128] * 3
        assert not cost["dot_flops"].any()


def test_cost_of_a_product() -> None:
    (case,) = (case for case in TRITON_CASES if case.name == "gemm_fp16")
    call, evaluator = case.make(np.random.default_rng(0), 1.0), corpus_program(case, 1.0)
    cost = evaluator.run(flat(call.args), call.grid)
    m, n, k = (call.args[name] for name in ("m", "n", "k")) if "m" in call.args else (None, None, None)
    assert evaluator.dot_dtype == "f16"
    assert (cost["dot_flops"] > 0).all()
    if m is not None:
        assert cost["dot_flops"].sum() >= 2 * m * n * k


@triton.jit
def keep_positive(x, y, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + at)
    tl.store(y + at, v, mask=v > 0)


def test_cost_follows_masks_made_of_data() -> None:
    x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
    evaluator = compiled(keep_positive, {"x": x, "y": y}, B=8)
    for negative in (0, 3, 8, 13):
        x[:] = 1
        x[:negative] = -1
        cost = evaluator.run([x, y], (4,))
        assert cost["bytes_stored"].tolist() == ((x > 0).reshape(4, 8).sum(1) * 4).tolist()


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_one_program_runs_in_several_threads() -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((33, 50)).astype(np.float32) for _ in range(4)]
    outputs = [np.zeros_like(x) for x in inputs]

    def work(i: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(20):
                scale_program().run([inputs[i], outputs[i], 33, 50, 50, 50, 1.5 + i], (4, 5))

        return run

    threads = [Thread(target=work(i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
        assert np.array_equal(y, x * np.float32(1.5 + i))
