"""Operations that only some kernels have: inline PTX, scaled products, tables of pointers, maps, polls, libdevice."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing, warning
from hypothesis import example, given
from hypothesis import strategies as st
from triton.language.extra.cuda import libdevice as triton_libdevice

import paellapy as pp
from paellapy.instrument.errors import OutOfBoundsError, UnsupportedOpError, ViewWarning
from paellapy.instrument.triton_ir import elementwise as rnd
from paellapy.instrument.triton_ir import libdevice, memory_ops, ptx_asm

pytestmark = pytest.mark.versions


@pytest.fixture(autouse=True)
def device() -> Any:
    with pp.Device("virtual:h200") as opened, np.errstate(all="ignore"):
        yield opened


def some(n: int = 64, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


# ---- division --------------------------------------------------------------------------------------------------------


@triton.jit
def quotients(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.fdiv(tl.load(x + i), tl.load(y + i), approx=True))


@pytest.mark.skipif("approx" not in inspect.signature(tl.fdiv).parameters, reason="this Triton has no such option")
def test_approximate_division():
    x, y, out = some(64, 1), some(64, 2), np.zeros(64, np.float32)
    x[:5], y[:5] = (1.0, -1.0, np.inf, 1.0, 0.0), (2.0**127, 2.0**127, 2.0**127, 0.0, 0.0)
    pp.kernel(quotients)[1,](x, y, out, N=64)
    np.testing.assert_allclose(out[5:], x[5:] / y[5:], rtol=3e-7)
    np.testing.assert_array_equal(out[:5], [0.0, -0.0, np.nan, np.inf, np.nan])


# ---- choices ---------------------------------------------------------------------------------------------------------


@triton.jit
def powers(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    first = tl.program_id(0) * 4
    total = tl.zeros((N,), tl.float32)
    if (n >= first) & (n < first + 8):  # Triton makes this a choice between tensors by one condition
        total += 1.0
    for _ in range(first, n, 4):
        total *= tl.load(x + i)
    tl.store(out + tl.program_id(0) * N + i, total)


@given(n=st.integers(0, 24))
@example(n=6)
def test_a_scalar_condition_chooses_between_tensors(n: int):
    x, out = some(16), np.zeros((5, 16), np.float32)
    pp.kernel(powers)[5,](x, out, n, N=16)
    for block, row in enumerate(out):
        trips = max(0, -(-(n - 4 * block) // 4))
        np.testing.assert_allclose(row, x**trips if 4 * block <= n < 4 * block + 8 else 0 * x, rtol=1e-6)


# ---- inline PTX ------------------------------------------------------------------------------------------------------


@triton.jit
def tanh_ptx(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [tl.load(x + i)], tl.float32, True, 1)
    tl.store(out + i, v)


@triton.jit
def halves_ptx(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    # Four bytes become four halves: packed registers on both sides, as dequantisation has it.
    text: tl.constexpr = "{ .reg .b32 lo, hi; prmt.b32 lo, $2, 0, 0x4140; prmt.b32 hi, $2, 0, 0x4342; mov.b32 $0, lo; mov.b32 $1, hi; }"  # noqa: E501
    v = tl.inline_asm_elementwise(text, "=r,=r,r", [tl.load(x + i)], tl.int16, True, 4)
    tl.store(out + i, v)


@triton.jit
def two_results(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    text: tl.constexpr = "{ .reg .pred p; setp.gt.s32 p, $2, 5; selp.b32 $0, $2, 5, p; @p add.s32 $1, $2, 1; @!p mov.b32 $1, 0; }"  # noqa: E501
    a, b = tl.inline_asm_elementwise(text, "=r,=r,r", [tl.load(x + i)], (tl.int32, tl.int32), True, 1)
    tl.store(out + i, a + 100 * b)


@triton.jit
def clock_ptx(out):
    tl.store(out, tl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r", [], tl.int32, False, 1))


def test_inline_ptx_computes():
    x, out = some(), np.zeros(64, np.float32)
    pp.kernel(tanh_ptx)[1,](x, out, 64)
    assert out == pytest.approx(np.tanh(x), rel=1e-6)


def test_packed_registers_hold_neighbouring_elements():
    x, out = np.arange(64, dtype=np.uint8), np.zeros(64, np.int16)
    pp.kernel(halves_ptx)[1,](x, out, 64)
    assert out.tolist() == list(range(64))


def test_predicates_and_several_results():
    x, out = np.arange(16, dtype=np.int32), np.zeros(16, np.int32)
    pp.kernel(two_results)[1,](x, out, 16)
    assert out.tolist() == [max(v, 5) + (100 * (v + 1) if v > 5 else 0) for v in range(16)]


def test_ptx_that_is_not_evaluated_is_refused_by_name():
    with failing(UnsupportedOpError, kernel="clock_ptx", op="tt.elementwise_inline_asm"):
        pp.kernel(clock_ptx)[1,](np.zeros(1, np.int32))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3), st.integers(0, 255))
def test_lop3_is_its_truth_table(words: list[int], table: int):
    made = ptx_asm.Assembly.of(f"lop3.b32 $0, $1, $2, $3, {table};", "=r,r,r,r")
    (found,) = made.run(*(np.array([w], np.uint32) for w in words))
    bits = sum((table >> ((a << 2) | (b << 1) | c) & 1) << k
               for k in range(32) for a, b, c in [[w >> k & 1 for w in words]])  # fmt: skip
    assert int(found[0]) == bits


@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.booleans())
def test_shifts_beyond_the_width_saturate(word: int, by: int, sign: bool):
    made = ptx_asm.Assembly.of(f"shr.{'s' if sign else 'u'}32 $0, $1, $2;", "=r,r,r")
    (found,) = made.run(np.array([word], np.uint32), np.array([by], np.uint32))
    value = word - (1 << 32) if sign and word >> 31 else word
    assert int(found[0]) == (value >> by) & 0xFFFFFFFF


def test_packed_conversions_put_the_first_source_into_the_upper_half():
    made = ptx_asm.Assembly.of("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f")
    (found,) = made.run(*(np.array([v], np.float32).view(np.uint32) for v in (1.5, -2.0)))
    assert found.view(np.float16).tolist() == [-2.0, 1.5]


# ---- products with scales ------------------------------------------------------------------------------------------


@triton.jit
def scaled_product(a, sa, b, sb, out, M: tl.constexpr, K: tl.constexpr, FA: tl.constexpr, PA: tl.constexpr):
    i, k, ka, s = tl.arange(0, M), tl.arange(0, K), tl.arange(0, K // PA), tl.arange(0, K // 32)
    x = tl.load(a + i[:, None] * (K // PA) + ka[None, :])
    y = tl.load(b + k[:, None] * M + i[None, :])
    scale_x = tl.load(sa + i[:, None] * (K // 32) + s[None, :])
    scale_y = tl.load(sb + i[:, None] * (K // 32) + s[None, :])
    tl.store(out + i[:, None] * M + i[None, :], tl.dot_scaled(x, scale_x, FA, y, scale_y, "e5m2"))


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("kind", ["e5m2", "e2m1"])
def test_scaled_products(kind: str):
    rng = np.random.default_rng(1)
    scales = [rng.integers(120, 134, (64, 2)).astype(np.uint8) for _ in range(2)]
    b = rng.standard_normal((64, 64)).astype(ml_dtypes.float8_e5m2)
    if kind == "e2m1":
        a = rng.integers(0, 256, (64, 32)).astype(np.uint8)
        exact = np.stack([FP4[a & 15], FP4[a >> 4]], -1).reshape(64, 64)
    else:
        a = rng.standard_normal((64, 64)).astype(ml_dtypes.float8_e5m2)
        exact = a.astype(np.float64)
    out = np.zeros((64, 64), np.float32)
    pp.kernel(scaled_product)[1,](a, scales[0], b, scales[1], out, 64, 64, kind, 2 if kind == "e2m1" else 1)
    wide = [np.repeat(np.exp2(s.astype(np.float64) - 127), 32, 1) for s in scales]
    expected = (exact * wide[0]) @ (b.astype(np.float64) * wide[1].T)
    assert np.abs(out - expected).max() <= 1e-5 * np.abs(expected).max()


# ---- addresses -----------------------------------------------------------------------------------------------------


@triton.jit
def through_table(table, out, N: tl.constexpr):
    p = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, N)
    tl.store(out + tl.program_id(0) * N + i, tl.load(p + i))


@triton.jit
def there_and_back(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    address = x.to(tl.int64) + 4 * i
    tl.store(out + i, tl.load(address.to(tl.pointer_type(tl.float32), bitcast=True)))


def test_a_table_of_addresses_reaches_the_arrays():
    arrays = [pp.array(some(seed=k)) for k in range(3)]
    table, out = np.array([a.ctypes.data for a in arrays]), np.zeros((3, 64), np.float32)
    for _ in range(3):  # and is read anew every time
        pp.kernel(through_table)[3,](table, out, 64)
        assert (out == np.stack(arrays)).all()
        arrays = arrays[::-1]
        table = table[::-1].copy()


def test_tensors_are_reached_by_their_addresses_too():
    torch = pytest.importorskip("torch")
    tensors = [torch.randn(64) for _ in range(2)]
    table, out = torch.tensor([t.data_ptr() for t in tensors]), torch.zeros(2, 64)
    pp.kernel(through_table)[2,](table, out, 64)
    assert torch.equal(out, torch.stack(tensors))


def test_all_objects_are_searched_only_for_tensors_whose_address_nobody_asked_for(monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    searches: list[int] = []
    found = memory_ops.live_instances
    monkeypatch.setattr(memory_ops, "live_instances", lambda kind: searches.append(1) or found(kind))

    def reached(tensors: Any, ask: Any) -> int:
        searches.clear()
        table, out = torch.tensor([ask(t) for t in tensors]), torch.zeros(len(tensors), 64)
        pp.kernel(through_table)[len(tensors),](table, out, 64)
        assert torch.equal(out, torch.stack(tensors))
        return len(searches)

    def nobody(tensor: Any) -> int:
        return int(memory_ops.storage_bytes(tensor.untyped_storage()).ctypes.data)

    tensors = [torch.randn(64) for _ in range(3)]
    assert reached(tensors, nobody) == 1
    assert reached(tensors, nobody) == 0
    del tensors[1]
    tensors.append(torch.randn(64))
    assert reached(tensors, nobody) <= 1
    for ask in (
        lambda t: t.data_ptr(), lambda t: t.untyped_storage().data_ptr(), lambda t: t.numpy().ctypes.data,
        lambda t: np.asarray(t).ctypes.data,
    ):  # fmt: skip
        fresh = [torch.randn(64) for _ in range(3)]
        assert reached(fresh, ask) == 0
        assert reached(fresh, ask) == 0
    assert reached([torch.randn(2, 64)[1] for _ in range(3)], lambda t: t.data_ptr()) == 0


@triton.jit
def adds_twice(table, view, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(table).to(tl.pointer_type(tl.float32), bitcast=True)
    total = tl.load(table + 1).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.atomic_add(total + i, 1.0)
    tl.atomic_add(total + i, tl.load(x + i))


def test_an_address_reaches_all_of_a_tensor_of_which_a_view_is_an_argument():
    torch = pytest.importorskip("torch")
    for _ in range(2):  # with tensors seen before, and new ones
        x, total = torch.ones(1024), torch.zeros(128)
        pp.kernel(adds_twice)[1,](torch.tensor([x.data_ptr(), total.data_ptr()]), x[:64], 128)
        assert (total == 2).all()


def test_an_address_of_nothing_is_an_error():
    with failing(OutOfBoundsError, kernel="through_table", op="tt.load", field="(no array at address 0x10)", given=-1):
        pp.kernel(through_table)[1,](np.array([16]), np.zeros(64, np.float32), 64)


def test_a_pointer_is_a_number_and_back():
    x, out = some(), np.zeros(64, np.float32)
    pp.kernel(there_and_back)[1,](x, out, 64)
    assert (out == x).all()


@triton.jit
def before_the_view(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i - 4))


def test_an_access_outside_of_all_memory_says_where_a_view_lies():
    x = np.arange(64, dtype=np.float32)
    with failing(OutOfBoundsError, kernel="before_the_view", op="tt.load", field="x", given=-4):
        pp.kernel(before_the_view)[1,](x[2:], np.zeros(16, np.float32), 16)


def test_memory_behind_a_view_is_reached_with_a_warning():
    x, out = np.arange(64, dtype=np.float32), np.zeros(16, np.float32)
    with warning(ViewWarning, kernel="before_the_view"):
        pp.kernel(before_the_view)[1,](x[8:24], out, 16)
    assert out.tolist() == list(range(4, 20))
    with pytest.raises(OutOfBoundsError):
        pp.kernel(before_the_view)[1,](x[2:24], out, 16)


def test_each_place_that_reaches_beyond_a_view_warns_once():
    x, out, kernel = np.arange(64, dtype=np.float32), np.zeros(64, np.float32), pp.kernel(double_next)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            kernel[1,](x[8:12], out, 16)
            kernel[1,](x[:16], out[8:12], 16)
    found = [(w.message.field, w.message.given, w.message.limit) for w in caught]
    assert sorted(found) == [("out", 4, 4), ("x", 4, 4)]
    i = np.arange(24)
    assert (out[:24] == np.where(i < 16, 6 * (i + 8), 0) + np.where(i >= 8, 6 * (i - 8), 0)).all()


@triton.jit
def double_taken(x, index, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    at = tl.load(index + i)
    tl.store(out + i, tl.load(out + i) + 2 * tl.load(x + at))


@triton.jit
def double_next(x, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + i, tl.load(out + i) + 2 * tl.load(x + i))


def test_memory_behind_a_view_is_reached_after_runs_within_it():
    x = np.arange(64, dtype=np.float32)
    by_data, by_grid = pp.kernel(double_taken), pp.kernel(double_next)
    inside, outside = np.arange(16, dtype=np.int32), np.arange(30, 46, dtype=np.int32)
    for _ in range(3):  # plain, recorded, replayed
        out = np.ones(16, np.float32)
        by_data[1,](x[:32], inside, out, 16)
        by_grid[1,](x[:16], out, 16)
        assert (out == 1 + 4 * inside).all()
    out = np.ones(48, np.float32)
    with warning(ViewWarning, kernel="double_taken"):
        by_data[1,](x[:32], outside, out, 16)
    with warning(ViewWarning, kernel="double_next"):
        by_grid[3,](x[:16], out, 16)
    assert (out == 1 + 2 * x[:48] + np.pad(2 * outside, (0, 32))).all()


def test_memory_behind_a_broadcast_row_is_reached_with_a_warning():
    x, out = np.arange(64, dtype=np.float32), np.zeros(16, np.float32)
    rows = np.broadcast_to(x[:16], (4, 16))  # as many elements as the whole array
    with warning(ViewWarning, kernel="double_taken"):
        pp.kernel(double_taken)[1,](rows, np.arange(20, 36, dtype=np.int32), out, 16)
    assert (out == 2 * x[20:36]).all()


# ---- the rest --------------------------------------------------------------------------------------------------------


@triton.jit
def ordered(a, b):
    if a < b:
        return a, b
    return b, a


@triton.jit
def map_pairs(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.map_elementwise(ordered, tl.load(x + i), tl.load(y + i))
    tl.store(x + i, a)
    tl.store(y + i, b)


@pytest.mark.skipif(not hasattr(tl, "map_elementwise"), reason="this Triton has none")
def test_a_function_of_scalars_maps_over_tensors():
    x, y = some(), some(seed=1)
    a, b = x.copy(), y.copy()
    pp.kernel(map_pairs)[1,](a, b, 64)
    assert (a == np.minimum(x, y)).all()
    assert (b == np.maximum(x, y)).all()


@triton.jit
def compare(a, b):
    if a < b:
        return -1
    if a == b:
        return 0
    return 1


@triton.jit
def map_compare(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    signs = tl.map_elementwise(compare, tl.load(x + i)[:, None], tl.load(y + i)[None, :])
    tl.store(out + i[:, None] * N + i[None, :], signs)


@pytest.mark.skipif(not hasattr(tl, "map_elementwise"), reason="this Triton has none")
def test_a_mapped_function_may_branch_more_than_once():
    x, y, out = np.arange(16, dtype=np.int32), np.arange(16, dtype=np.int32)[::-1].copy(), np.zeros((16, 16), np.int32)
    pp.kernel(map_compare)[1,](x, y, out, 16)
    assert (out == np.sign(x[:, None] - y[None, :])).all()


@triton.jit
def split_pair(x, out):
    a, b = tl.split(tl.load(x + tl.arange(0, 2)))
    tl.store(out, a - 2 * b)


def test_a_pair_splits_into_scalars():
    out = np.zeros(1, np.float32)
    pp.kernel(split_pair)[1,](np.array([7, 2], np.float32), out)
    assert out[0] == 3


@triton.jit
def wait_for_flag(flag, out):
    if tl.program_id(0) == 0:
        tl.atomic_poll(flag, 1)
        tl.store(out, tl.atomic_load(flag) + 1)
    else:
        tl.atomic_store(flag, 1)


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="this Triton has none")
def test_a_block_polls_until_another_stores():
    out = np.zeros(1, np.int32)
    pp.kernel(wait_for_flag)[2,](np.zeros(1, np.int32), out)
    assert out[0] == 2


@triton.jit
def dependent(x):
    tl.extra.cuda.gdc_wait()
    tl.store(x, 1.0)
    tl.extra.cuda.gdc_launch_dependents()


@pytest.mark.parametrize("on", [True, False])
def test_programmatic_dependent_launch(on: bool):
    x = np.zeros(1, np.float32)
    pp.kernel(dependent)[1,](x, launch_pdl=on)
    assert x[0] == 1
    assert pp.kernel(dependent).compile("*fp32", target="sm_90", launch_pdl=on).source.dependent is on


def test_every_function_of_libdevice_is_known():
    with open(triton_libdevice.__file__) as f:
        symbols = set(re.findall(r'"(__nv_\w+)"', f.read()))
    assert len(symbols) > 300
    assert [s for s in sorted(symbols) if libdevice.lookup(s) is None] == []


@pytest.mark.parametrize(("name", "args", "expected"), [
    ("j0f", [1.5], 0.5118276717),
    ("j1", [1.5], 0.5579365079), ("y0", [1.5], 0.3824489237), ("y1f", [1.5], -0.412308627),
    ("cyl_bessel_i0f", [1.5], 1.6467231898), ("cyl_bessel_i1", [1.5], 0.9816664286), ("erfcx", [30.0], 0.018795888861),
    ("normcdfinvf", [0.25], -0.6744897502), ("erfcinvf", [0.5], 0.4769362762), ("sinpif", [0.25], math.sqrt(0.5)),
    ("cospi", [1e6 + 0.25], math.sqrt(0.5)), ("rcbrtf", [8.0], 0.5), ("rhypotf", [3.0, 4.0], 0.2),
    ("norm3df", [2.0, 3.0, 6.0], 7.0), ("logbf", [10.0], 3.0), ("nextafterf", [1.0, 2.0], 1 + 2.0**-23),
    ("remainderf", [5.0, 3.0], -1.0), ("remainderf", [3.0, 2.0], -1.0), ("remainder", [-7.5, 1.0], 0.5),
    ("remainderf", [5.0, math.inf], 5.0), ("roundf", [0.49999997], 0.0), ("roundf", [-2.5], -3.0),
    ("roundf", [8388609.0], 8388609.0), ("round", [0.49999999999999994], 0.0), ("fdimf", [math.inf, math.inf], 0.0),
    ("fdim", [3.0, 1.0], 2.0), ("logb", [0.0], -math.inf), ("logbf", [-math.inf], math.inf), ("sinpif", [3.0], 0.0),
    ("sinpi", [-1e10 - 0.5], -1.0), ("cospif", [2.5], 0.0), ("cospi", [1.0], -1.0),
])  # fmt: skip
def test_functions_of_libdevice(name: str, args: list[float], expected: float):
    fn = libdevice.lookup(f"__nv_{name}")
    dtype = np.float32 if name.endswith("f") else np.float64
    assert fn is not None
    rel = 2e-7 if dtype is np.float32 else 1e-9
    assert float(fn(*(dtype(a) for a in args))) == pytest.approx(expected, rel=rel, abs=0.0)  # 0 is exact


@pytest.mark.parametrize(("name", "args", "expected"), [
    ("brev", [1], -(2**31)), ("ffs", [8], 4), ("ffs", [0], 0),
    ("byte_perm", [0x33221100, 0x77665544, 0x7530], 0x77553300),
    ("mul24", [0x1000001, 5], 5), ("hadd", [-3, 2], -1), ("urhadd", [-1, -1], -1), ("sad", [5, -3, 10], 18),
    ("float2int_rn", [2.5], 2), ("float2int_ru", [2.1], 3), ("float2uint_rz", [-1.0], 0), ("ilogbf", [10.0], 3),
    ("float_as_int", [1.0], 0x3F800000), ("llrintf", [2.5], 2), ("llroundf", [2.5], 3),
    ("llroundf", [0.49999997], 0),
])  # fmt: skip
def test_integer_functions_of_libdevice(name: str, args: list[Any], expected: int):
    fn = libdevice.lookup(f"__nv_{name}")
    assert fn is not None
    given_ = [np.float32(a) if isinstance(a, float) else np.array(a, np.int64).astype(np.int32)[()] for a in args]
    assert int(fn(*given_)) == expected


halves = st.integers(-20, 20).map(lambda n: n / 2)


@given(st.floats() | halves, st.floats() | halves)
@example(0.5, 1.0)
@example(1.5, 1.0)
@example(-7.5, 3.0)
@example(5e-324, 1.5e-323)
@example(1.7e308, 1.2e308)
def test_a_remainder_is_that_of_ieee(x: float, y: float):
    fn = libdevice.lookup("__nv_remainder")
    assert fn is not None
    with np.errstate(all="ignore"):
        found = float(fn(np.float64(x), np.float64(y)))
    try:
        expected = math.remainder(x, y)
    except ValueError:
        expected = math.nan
    assert found == expected or math.isnan(found) == math.isnan(expected) is True
    assert math.isnan(found) or math.copysign(1, found) == math.copysign(1, expected)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


_EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b, _: a + b, "mul": lambda a, b, _: a * b, "div": lambda a, b, _: a / b,
    "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


@given(st.sampled_from(list(_EXACT)), floats, floats.filter(bool), floats)
@example("mul", float(np.float32(1e-30)), float(np.float32(1e-30)), 0.0)
@example("div", float(np.float32(3.4601335e-38)), float(np.float32(6.5621353e-09)), 0.0)
@example("fma", 1.0, float(np.float32(1e-30)), 1.0)
@example("fma", -0.5, float(np.float32(1e-45)), 0.5)
@example("fma", 1.0, float(np.float32(-3e38)), 1.0)
@example("fma", float(np.float32(1e-30)), float(np.float32(1e-30)), float(np.float32(1e-45)))
def test_directed_rounding_encloses_the_exact_result(name: str, a: float, b: float, c: float):
    given_ = [np.float32(each) for each in (a, b, c)[: 3 if name == "fma" else 2]]
    with np.errstate(all="ignore"):
        low, near, high = (rnd.directed(name, mode)(*given_) for mode in ("rd", "rn", "ru"))
        zero = rnd.directed(name, "rz")(*given_)
    exact = _EXACT[name](Fraction(a), Fraction(b), Fraction(c))
    assert low <= near <= high
    assert np.isinf(low) or Fraction(float(low)) <= exact
    assert np.isinf(high) or exact <= Fraction(float(high))
    assert high == low or high == np.nextafter(low, np.float32(np.inf))
    assert abs(zero) == min(abs(low), abs(high))


@pytest.mark.parametrize(("name", "args"), [
    ("mul", [1e-300, 7e-211]), ("mul", [5e-324, 3600677070411.76]), ("div", [-1e-310, -1e-10]),
    ("div", [5e-324, 1e300]), ("div", [5e-324, -0.0276]), ("fma", [-3e-245, 5e-324, -1e-30]),
    ("fma", [3e-6, 5e-324, -7e9]), ("fma", [1 / 3, 1 / 3, -(1 / 3) * (1 / 3)]), ("fma", [1 / 3, 1 / 3, 1e-40]),
])  # fmt: skip
def test_directed_rounding_of_doubles_encloses_the_exact_result(name: str, args: list[float]):
    low, high = (rnd.directed(name, mode)(*map(np.float64, args)) for mode in ("rd", "ru"))
    exact = _EXACT[name](*map(Fraction, [*args, 0][:3]))
    assert Fraction(float(low)) <= exact <= Fraction(float(high))
    if low != high:
        assert high == np.nextafter(low, np.inf)
        assert exact not in (Fraction(float(low)), Fraction(float(high)))


@pytest.mark.parametrize(("name", "args"), [("mul", [3e38, 2.0]), ("add", [3e38, 3e38]), ("fma", [3e38, 3e38, 1.0]),
                                            ("div", [3e38, 0.1])])  # fmt: skip
def test_directed_rounding_of_numbers_too_large(name: str, args: list[float]):
    most = np.finfo(np.float32).max
    for sign in (1, -1):
        xs = [np.float32(a) for a in args]
        xs[0], xs[-1] = xs[0] * sign, xs[-1] * sign if name == "add" else xs[-1]
        found = {mode: rnd.directed(name, mode)(*xs) for mode in ("rn", "rz", "ru", "rd")}
        inwards, outwards = ("rd", "ru") if sign > 0 else ("ru", "rd")
        assert found["rz"] == found[inwards] == sign * most
        assert found["rn"] == found[outwards] == sign * np.inf
    assert rnd.directed("div", "rz")(np.float32(1), np.float32(0)) == np.inf
    assert rnd.to_float(np.float64(1e300), "rz", "f4") == most


@pytest.mark.parametrize(("name", "args", "signs"), [
    ("add", [1.5, -1.5], "+-"), ("add", [0.0, 0.0], "++"), ("add", [-0.0, -0.0], "--"), ("add", [0.0, -0.0], "+-"),
    ("sub", [2.0, 2.0], "+-"), ("sub", [0.0, -0.0], "++"), ("mul", [0.0, -1.0], "--"),
    ("fma", [0.0, -2.0, 0.0], "+-"), ("fma", [0.0, 2.0, 0.0], "++"), ("fma", [2.0, 3.0, -6.0], "+-"),
])  # fmt: skip
def test_zeros_rounded_up_and_down_have_the_sign_that_ieee_gives_them(name: str, args: list[float], signs: str):
    for mode, sign in zip(("ru", "rd"), signs, strict=True):
        found = rnd.directed(name, mode)(*map(np.float32, args))
        assert found == 0
        assert bool(np.signbit(found)) == (sign == "-")


@triton.jit
def swap_in_either(a, b, out):
    block = tl.program_id(0)
    at = a
    if block == 1:
        at = b
    tl.store(out + block, tl.atomic_cas(at, 0, 1))


def test_a_swap_in_one_of_several_arguments_is_refused_by_name() -> None:
    with failing(UnsupportedOpError, kernel="swap_in_either", op="tt.atomic_cas"):
        pp.kernel(swap_in_either)[2,](np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(2, np.int32))


@triton.jit
def reduce_tile(out, x, N, KIND: tl.constexpr, B: tl.constexpr):
    tile = tl.make_tensor_descriptor(out, [N, N], [N, 1], [B, B])
    i = tl.arange(0, B)
    value = tl.load(x + i[:, None] * N + i[None, :])
    if KIND == "min":
        tile.atomic_min([0, 0], value)
    else:
        tile.atomic_max([0, 0], value)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.uint64, np.int64])
@pytest.mark.parametrize("kind", ["min", "max"])
def test_reductions_into_a_descriptor_know_unsigned_numbers(kind: str, dtype: Any) -> None:
    rng, facts = np.random.default_rng(0), np.iinfo(dtype)
    x, out = (rng.integers(facts.min, facts.max, (16, 16), dtype, endpoint=True) for _ in range(2))
    expected = (np.minimum if kind == "min" else np.maximum)(x, out)
    pp.kernel(reduce_tile)[1,](out, x, 16, KIND=kind, B=16)
    np.testing.assert_array_equal(out, expected)
