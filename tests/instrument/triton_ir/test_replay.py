"""Recorded runs give what direct ones give, bit for bit where nothing is summed in another order."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numba
import numpy as np
import pytest
import triton
import triton.language as tl
from corpus_sources import compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from paellapy.instrument.triton_ir import TtirProgram, libdevice, machine, memory, native
from paellapy.instrument.triton_ir.types import ELEMENTS, decode, encode, rounder


@triton.jit
def product(
    a, b, c, M, N, K, am, ak, bk, bn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.full((BM, BN), 0.5, tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + m[:, None] * am + k[None, :] * ak, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        if TURNED:
            right = tl.load(b + n[:, None] * bn + k[None, :] * bk, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
            acc = tl.dot(left, tl.trans(right), acc)
        else:
            right = tl.load(b + k[:, None] * bk + n[None, :] * bn, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
            acc = tl.dot(left, right, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


@cache
def product_program(turned: bool, half: bool) -> TtirProgram:
    x, c = np.zeros((3, 3), np.float16 if half else np.float32), np.zeros((3, 3), np.float32)
    sizes = dict.fromkeys(("M", "N", "K", "am", "ak", "bk", "bn"), 3)
    return compiled(product, {"a": x, "b": x, "c": c, **sizes}, BM=16, BN=16, BK=16, TURNED=turned)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 70), st.integers(1, 70), st.integers(1, 50), st.booleans(), st.booleans(), st.booleans(),
    st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_products_of_any_shape_and_layout(
    m: int, n: int, k: int, turned: bool, half: bool, a_by_columns: bool, b_by_columns: bool, first: int
) -> None:
    rng = np.random.default_rng(m * n + k)
    dtype = np.float16 if half else np.float32
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
    expected = a.astype(np.float64) @ b.astype(np.float64) + 0.5
    (am, ak), (bk, bn) = (1, m) if a_by_columns else (k, 1), (1, k) if b_by_columns else (n, 1)
    a, b = np.asfortranarray(a) if a_by_columns else a, np.asfortranarray(b) if b_by_columns else b
    grid = (-(-m // 16), -(-n // 16))
    blocks = range(min(first, grid[0] * grid[1] - 1), grid[0] * grid[1])
    results = []
    for _ in range(4):  # direct, direct, recorded, replayed
        c = np.full((m, n), np.nan, np.float32)
        cost = product_program(turned, half).run([a, b, c, m, n, k, am, ak, bk, bn], grid, blocks)
        done = ~np.isnan(c)
        assert np.allclose(c[done], expected[done], rtol=1e-4, atol=1e-4)
        results.append((c, cost))
    assert np.array_equal(results[0][1], results[-1][1])
    assert np.array_equal(np.isnan(results[0][0]), np.isnan(results[-1][0]))


@triton.jit
def layers(x, w, out, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    mask = at < n
    v = tl.load(x + at, mask=mask, other=2.0)
    e = tl.exp(v)
    square = tl.reshape(e, (B // 4, 4))
    spread = tl.reshape(square - tl.max(square, axis=1)[:, None], (B,))
    e = e * v + tl.load(w + tl.program_id(0) % 2)
    e = tl.where(at % 3 == 0, e, -spread)
    tl.store(out + at, e + spread, mask=mask)
    nothing = tl.load(x + at + n, mask=at < 0, other=7.0)  # masked everywhere: it may point anywhere
    tl.store(out + n + at, nothing * e, mask=mask)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 300), st.integers(0, 5))
def test_a_replay_gives_the_bits_of_a_direct_run(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(2).astype(np.float32)
    outs = []
    for call in range(5):
        x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
        out = np.full(2 * n, np.nan, np.float32)
        layers_program().run([x, w, out, n], (-(-n // 32),), record=call > 0)
        assert np.array_equal(x, np.random.default_rng(seed).standard_normal(n).astype(np.float32))
        outs.append(out)
    for out in outs:
        assert np.array_equal(out.view(np.int32), outs[0].view(np.int32))


@cache
def layers_program() -> TtirProgram:
    x = np.zeros(8, np.float32)
    return compiled(layers, {"x": x, "w": x, "out": x, "n": 3}, B=32)


def test_a_tape_that_grows_too_large_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_ENTRIES", 5)
    x, w = np.linspace(-1, 1, 40, dtype=np.float32), np.ones(2, np.float32)
    evaluator = compiled(layers, {"x": x, "w": w, "out": x, "n": 3}, B=32)
    outs = []
    for _ in range(5):
        outs.append(np.full(80, np.nan, np.float32))
        evaluator.run([x, w, outs[-1], 40], (2,))
    assert all(np.array_equal(out, outs[0]) for out in outs)


def test_scalars_of_either_zero_are_told_apart() -> None:
    evaluator = compiled(copysign, {"y": np.zeros(4, np.float32), "s": 0.5}, B=16)
    for _ in range(4):
        for zero, expected in ((0.0, np.inf), (-0.0, -np.inf)):
            y = np.zeros(16, np.float32)
            evaluator.run([y, zero], (1,))
            assert (y == expected).all()


@triton.jit
def copysign(y, s, B: tl.constexpr):
    tl.store(y + tl.arange(0, B), 1.0 / s)


@pytest.mark.parametrize("size", [10, 1000])
@pytest.mark.parametrize("name", ["f16", "bf16", "f8E4M3FN", "f8E5M2"])
def test_narrow_floats_round_as_their_types_do(name: str, size: int) -> None:
    element = ELEMENTS[name]
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(size) * 10.0 ** rng.integers(-9, 3, size)).astype(np.float32)
    limit = element.limit or np.inf
    to = rounder(element)
    assert to is not None
    with np.errstate(all="ignore"):
        expected = np.clip(x, -limit, limit).astype(element.memory)
        assert np.array_equal(encode(x, element), expected.view(element.storage))
        assert np.array_equal(to(x), expected.astype(np.float32))


def test_every_float16_survives_the_way_through_float32() -> None:
    element, every = ELEMENTS["f16"], np.arange(65536, dtype=np.uint16).view(np.float16)
    wide = decode(every, element)
    with np.errstate(invalid="ignore"):  # some CPUs report NaNs that signal
        assert np.array_equal(wide, every.astype(np.float32), equal_nan=True)
    assert np.array_equal(encode(wide, element), every, equal_nan=True)
    halfway = (wide[:0x7BFF] + wide[1:0x7C00]) / 2  # ties go to even
    with np.errstate(all="ignore"):
        assert np.array_equal(encode(halfway, element), halfway.astype(np.float16))
        for edge in (65519.996, 65520.0, 1e30, -1e30, np.inf, np.nan, 2.0**-25, 2.0**-25 * 1.001, -0.0):
            x = np.full(100, edge, np.float32)
            assert np.array_equal(
                encode(x, element).view(np.uint16) & 0x7DFF, x.astype(np.float16).view(np.uint16) & 0x7DFF
            )


@pytest.mark.parametrize(
    ("symbol", "value", "expected"),
    [
        ("__nv_tanhf", 0.5, np.tanh(0.5)),
        ("__nv_fast_expf", 0.5, np.exp(0.5)),
        ("__nv_erf", 0.5, 0.5204998778130465),
        ("__nv_erfinvf", 0.5204998778130465, 0.5),
        ("__nv_fsqrt_rn", 4.0, 2.0),
        ("__nv_isinfd", np.inf, 1),
        ("__nv_roundf", -2.5, -3.0),
        ("__nv_lgammaf", 4.5, 2.4537365708424423),
    ],
)
def test_libdevice(symbol: str, value: float, expected: float) -> None:
    fn = libdevice.lookup(symbol)
    assert fn is not None
    for dtype in (np.float32, np.float64):
        assert np.allclose(fn(np.full(3, value, dtype)), expected, rtol=1e-6)


def test_unknown_libdevice_functions_are_unknown() -> None:
    assert libdevice.lookup("__nv_no_such_thing") is None


def test_bfloat16_arrays_may_come_as_bits() -> None:
    x = np.linspace(-3, 3, 16).astype(ml_dtypes.bfloat16)
    y = np.zeros(16, np.uint16)
    evaluator = compiled(double, {"x": x, "y": x}, B=16)
    for _ in range(3):
        evaluator.run([x.view(np.uint16), y], (1,))
        assert np.array_equal(y.view(ml_dtypes.bfloat16), x + x)


@triton.jit
def double(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(x + i) * 2)


def test_runs_are_compiled_once_for_arrays_that_may_be_written_and_those_that_may_not() -> None:
    start, length = np.array([1, 4]), np.array([2, 3])
    for writes in (True, False):
        source, target = np.arange(10, dtype=np.uint64), np.zeros(10, np.uint64)
        source.setflags(write=writes)
        memory._copy_runs(source.view(), target, start, start - 1, length)
        assert target.tolist() == [1, 2, 0, 4, 5, 6, 0, 0, 0, 0]
    own = [each for each in native.copy_runs.signatures if each[0].dtype == numba.uint64]  # type: ignore[attr-defined]
    assert len(own) == 1
