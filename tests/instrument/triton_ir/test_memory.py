"""Masks that cut off the end of consecutive elements: they become slices, and nothing else changes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from corpus_sources import compiled
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st

from paellapy.instrument.errors import OutOfBoundsError
from paellapy.instrument.triton_ir import TtirProgram, program
from paellapy.instrument.triton_ir.memory import PrefixRead, PrefixStore, prefix

B = 32
CALLS = 4  # direct, recorded, replayed; a split run records a call later


@triton.jit
def mixed(x, y, out, count, n, scale, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + i, mask=i < n, other=3.0).to(tl.float32)
    b = tl.load(y + i, mask=i < n)
    v = tl.where(a > 0, tl.exp(a) * scale, b + i)
    tl.store(out + i, v.to(out.dtype.element_ty), mask=i < n)
    tl.store(count + i, i - (a > b).to(tl.int32), mask=i < n)


@triton.jit
def cuts(x, out, n, m, B: tl.constexpr):
    """Loads and stores that are cut at different elements, so that the load's fill value may be stored."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=7.0) + 1, mask=i < m)


@triton.jit
def largest(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n, other=9.0)
    tl.store(out + i, v - tl.max(v, axis=0), mask=i < n)


@triton.jit
def from_to(x, out, low, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    keep = (i >= low) & (i < n)
    tl.store(out + i, tl.load(x + i, mask=keep) * 2, mask=keep)


@cache
def mixed_program(half: bool) -> TtirProgram:
    x, y = np.zeros(8, np.float16 if half else np.float32), np.zeros(8, np.float32)
    args = {"x": x, "y": y, "out": x, "count": np.zeros(8, np.int32), "n": 3, "scale": 0.5}
    return compiled(mixed, args, B=B)


@cache
def program_of(name: str) -> TtirProgram:
    x = np.zeros(8, np.float32)
    kernel, more = {
        "cuts": (cuts, {"n": 3, "m": 3}), "largest": (largest, {"n": 3}), "from_to": (from_to, {"low": 3, "n": 3})
    }[name]  # fmt: skip
    return compiled(kernel, {"x": x, "out": x, **more}, B=B)


def assert_same(results: list[list[np.ndarray[Any, Any]]]) -> None:
    for each in results[1:]:
        for found, expected in zip(each, results[0], strict=True):
            assert found.tobytes() == expected.tobytes()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 5 * B), st.integers(0, 3), st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 9))
def test_results_and_costs_are_those_of_a_direct_run(
    n: int, first: int, room: int, half: bool, split: bool, seed: int
) -> None:
    evaluator, dtype = mixed_program(half), np.float16 if half else np.float32
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal(n + room).astype(dtype), rng.standard_normal(n + room).astype(np.float32)
    blocks = -(-n // B) + 1  # the last one is masked everywhere, or cut at its beginning
    ids = range(min(first, blocks - 1), blocks)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "MIN_SPLIT", 1 if split else 1 << 14)
        for call in range(CALLS + 1):
            out, count = np.full(n + room, 5, dtype), np.full(n + room, 5, np.int32)
            args = [x, y, out, count, n, 0.5]
            if call < CALLS:
                cost = evaluator.run(args, (blocks,), ids, record=call > 0)
            else:
                prepared = evaluator.prepare(args, (blocks,), ids)
                assert prepared is not None
                prepared()
            results.append([out, count, cost])
    assert_same(results)
    assert (results[0][0][n:] == 5).all()
    assert results[0][2]["bytes_stored"].sum() == (dtype().itemsize + 4) * max(0, n - ids.start * B)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["cuts", "largest", "from_to"]), st.integers(0, 100), st.integers(0, 100))
def test_what_is_cut_otherwise_is_computed_as_ever(name: str, n: int, m: int) -> None:
    x = np.random.default_rng(n + m).standard_normal(100).astype(np.float32)
    results = []
    for call in range(CALLS):
        out = np.full(100, 5, np.float32)
        numbers = [n, m] if name == "cuts" else [n] if name == "largest" else [m, n]
        cost = program_of(name).run([x, out, *numbers], (4,), record=call > 0)
        results.append([out, cost])
    assert_same(results)
    if name == "cuts":
        full = np.where(np.arange(100) < n, x, np.float32(7)) + 1
        assert np.array_equal(results[0][0], np.where(np.arange(100) < m, full, np.float32(5)))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 70), st.integers(0, 40), st.integers(0, 40))
def test_arguments_that_overlap_are_read_before_they_are_written(n: int, source: int, target: int) -> None:
    results = []
    for call in range(CALLS):
        memory = np.arange(120, dtype=np.float32)
        x, out = memory[source : source + n], memory[target : target + n]
        program_of("from_to").run([x, out, 0, n], (3,), record=call > 0)
        results.append([memory])
    assert_same(results)
    expected = np.arange(120, dtype=np.float32)
    expected[target : target + n] = np.arange(source, source + n) * 2
    assert np.array_equal(results[0][0], expected)


@pytest.mark.parametrize("n", [41, 64, 65, 200])
def test_a_mask_that_lets_too_much_through_is_named_every_time(n: int) -> None:
    x, out = np.ones(40, np.float32), np.zeros(200, np.float32)
    for _ in range(CALLS):
        with failing(OutOfBoundsError, kernel="from_to", op="tt.load", field="x", given=40):
            program_of("from_to").run([x, out, 0, n], (7,))
        with failing(OutOfBoundsError, kernel="from_to", op="tt.store", field="out", given=40):
            program_of("from_to").run([out, x, 0, n], (7,))
    assert (x == 1).all()


def test_elementwise_kernels_fill_and_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, x = program_of("from_to"), np.arange(70, dtype=np.float32)
    for _ in range(3):
        evaluator.run([x, np.zeros(70, np.float32), 0, 70], (3,))

    def never(*_: Any) -> None:
        raise AssertionError("a whole tile")

    monkeypatch.setattr(PrefixRead, "__call__", never)
    monkeypatch.setattr(PrefixStore, "__call__", never)
    out = np.zeros(70, np.float32)
    evaluator.run([x, out, 0, 70], (3,))
    assert np.array_equal(out, 2 * x)


@given(st.integers(-3, 3), st.lists(st.sampled_from([1, 1, 1, 1, 2, 0, -1]), max_size=8), st.data())
def test_a_prefix_is_all_that_is_kept_and_in_order(start: int, steps: list[int], data: st.DataObject) -> None:
    offset = start + np.cumsum([0, *steps])
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(offset), max_size=len(offset))))
    kept = offset[mask]
    expected = None
    if len(kept) and mask[: len(kept)].all() and np.array_equal(kept, kept[0] + np.arange(len(kept))):
        expected = (int(kept[0]), len(kept))
    assert prefix(offset, mask) == expected
