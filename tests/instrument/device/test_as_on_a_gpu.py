"""Where the virtual GPU once silently gave other answers than a GPU does."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs
from triton.language.extra import libdevice

import paellapy as pp
from paellapy.instrument.device.virtual_launch import VirtualLauncher
from paellapy.instrument.errors import HintWarning, LaunchError
from paellapy.instrument.triton_ir import elementwise
from paellapy.instrument.triton_ir import libdevice as ours
from paellapy.instrument.triton_ir.types import ELEMENTS


@pytest.fixture(autouse=True)
def device() -> Any:
    with pp.Device("virtual:h200") as opened:
        yield opened


# ---- assertions ----------------------------------------------------------------------------------------------------


@triton.jit(debug=True)
def checked(x):
    tl.device_assert(tl.load(x) == 0, "not zero")


@triton.jit
def unchecked(x):
    tl.device_assert(tl.load(x) == 0, "not zero")


def test_a_kernel_made_for_debugging_checks_its_assertions():
    with failing(LaunchError, kernel="checked", given="not zero"):
        pp.kernel(checked)[1,](np.ones(1, np.float32))


def test_debug_false_at_the_launch_turns_the_checks_off():
    pp.kernel(checked)[1,](np.ones(1, np.float32), debug=False)


def test_triton_debug_checks_all_kernels(monkeypatch: pytest.MonkeyPatch):
    kernel = pp.kernel(unchecked)
    kernel[1,](np.ones(1, np.float32))
    monkeypatch.setattr(knobs.runtime, "debug", True)  # what TRITON_DEBUG=1 sets as Triton is imported
    with failing(LaunchError, kernel="unchecked", given="not zero"):
        pp.kernel(unchecked)[1,](np.ones(1, np.float32))


# ---- promises --------------------------------------------------------------------------------------------------------


@triton.jit
def promises(x, out, n, step, N: tl.constexpr):
    tl.assume(n >= N)
    i = tl.max_contiguous(tl.multiple_of(tl.arange(0, N) * step, 4), 4)
    tl.store(out + tl.arange(0, N), tl.load(x + i, mask=i < n, other=0.0))


@pytest.mark.parametrize(("n", "step", "broken"), [(64, 1, []), (5, 1, ["assume"]), (64, 3, ["max_contiguous"])])
def test_a_promise_that_does_not_hold_is_a_warning_once(n: int, step: int, broken: list[str]):
    kernel = pp.kernel(promises)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            kernel[1,](np.zeros(64, np.float32), np.zeros(8, np.float32), n, step, 8)
    assert [w.message.field for w in caught if isinstance(w.message, HintWarning)] == broken


@triton.jit
def promised_last_tile(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    i = tl.max_contiguous(tl.multiple_of(tl.where(i < n, i, 0), N), N)
    tl.store(out + tl.arange(0, N), tl.load(x + i))


def test_a_promise_may_fail_where_no_access_needs_it():
    pp.kernel(promised_last_tile)[1,](np.zeros(64, np.float32), np.zeros(16, np.float32), 12, 16)


@triton.jit
def through_descriptor(x, out, rows, columns, stride, B: tl.constexpr):
    tiles = tl.make_tensor_descriptor(x, [rows, columns], [stride, 1], [B, B])
    tl.store(out + tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :], tiles.load([0, 0]))


@pytest.mark.parametrize(("first", "stride", "field"), [(0, 30, "strides"), (1, 32, "base"), (0, 32, None)])
def test_a_tensor_descriptor_that_no_gpu_takes_is_refused(first: int, stride: int, field: str | None):
    x, out = np.arange(8 + 16 * 32, dtype=np.float16), np.zeros((16, 16), np.float16)
    x = x[-x.ctypes.data % 16 // 2 + first :]
    launch: Any = lambda: pp.kernel(through_descriptor)[1,](x, out, 15, stride, stride, 16)  # noqa: E731
    if field is None:
        launch()
        assert out[0].tolist() == x[:16].tolist()
    else:
        with failing(LaunchError, kernel="through_descriptor", field=field, limit=16):
            launch()


def test_a_gpu_without_tma_takes_any_tensor_descriptor():
    x, out = np.arange(512, dtype=np.float16), np.zeros((16, 16), np.float16)
    with pp.Device("virtual:a100"):
        pp.kernel(through_descriptor)[1,](x, out, 15, 30, 30, 16)
    assert out[1].tolist() == x[30:46].tolist()


# ---- numbers -------------------------------------------------------------------------------------------------------


def saturated(value: float, sign: bool, source: str, bits: int) -> int:
    """PTX's `cvt.rzi`, one number at a time; 8-bit results are the lower half of 16-bit ones."""
    wide = max(bits, 16)
    low, high = (-(1 << (wide - 1)), (1 << (wide - 1)) - 1) if sign else (0, (1 << wide) - 1)
    if math.isnan(value):
        whole = 1 << (wide - 1) if wide == 64 or source == "f64" else 0
    elif math.isinf(value):
        whole = high if value > 0 else low
    else:
        whole = min(max(int(value), low), high)
    return whole & ((1 << bits) - 1)


powers = [s * (2.0**n + d) for n in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, 0, 1) for s in (1, -1)]
edges = st.sampled_from([*powers, 0.0, -0.0, 0.99, -5.7, 1e30, -1e30, np.inf, -np.inf, np.nan, 255.5, 300.0, -129.0])


@given(st.lists(st.one_of(edges, st.floats(width=32)), min_size=1, max_size=8), st.booleans(),
       st.sampled_from(["f32", "f64"]), st.sampled_from([8, 16, 32, 64]))  # fmt: skip
def test_conversions_to_integers_saturate(values: list[float], sign: bool, source: str, bits: int):
    x = np.array(values, ELEMENTS[source].compute)
    convert = elementwise.convert("arith.fptosi" if sign else "arith.fptoui", ELEMENTS[source], ELEMENTS[f"i{bits}"])
    with np.errstate(all="ignore"):
        found = convert(x)
    assert found.dtype == ELEMENTS[f"i{bits}"].compute
    assert [int(v) & ((1 << bits) - 1) for v in found] == [saturated(float(v), sign, source, bits) for v in x]


@triton.jit
def to_bytes(x, out):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.load(x + i).to(tl.uint8))


def test_a_negative_number_is_zero_as_an_unsigned_byte():
    out = np.zeros(4, np.uint8)
    pp.kernel(to_bytes)[1,](np.array([-5.7, 5.7, np.nan, 255.0], np.float32), out)
    assert out.tolist() == [0, 5, 0, 255]


@triton.jit
def cast(x, out, T: tl.constexpr):
    i = tl.arange(0, 2)
    tl.store(out + i, tl.load(x + i).to(T).to(tl.float64))


TIE = 2**24 + 2**16  # between two bfloat16; one more is above the tie, which float32 cannot hold


@pytest.mark.parametrize(("dtype", "to", "value", "nearest"), [
    *((t, tl.bfloat16, TIE + 1, 2**24 + 2**17) for t in (np.int32, np.uint32, np.int64, np.uint64)),
    (np.int64, tl.bfloat16, -TIE - 1, -(2**24) - 2**17), (np.int32, tl.bfloat16, TIE, 2**24),
    (np.float64, tl.bfloat16, 1 + 2**-8 + 2**-40, 1 + 2**-7), (np.float64, tl.bfloat16, 1e39, np.inf),
    (np.float64, tl.float16, 1 + 2**-11 + 2**-40, 1 + 2**-10), (np.int64, tl.float16, 70000, np.inf),
])  # fmt: skip
def test_conversions_to_half_precision_round_once(dtype: Any, to: Any, value: float, nearest: float):
    """PTX: `cvt.rn.bf16.s64` and the like."""
    out = np.zeros(2)
    pp.kernel(cast)[1,](np.array([value, value], dtype), out, to)
    assert out.tolist() == [nearest, nearest]


@triton.jit
def divide(x, by, quotient, remainder):
    i = tl.arange(0, 4)
    tl.store(quotient + i, tl.load(x + i) // tl.load(by + i))
    tl.store(remainder + i, tl.load(x + i) % tl.load(by + i))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint32, np.uint64])
def test_an_integer_divided_by_zero_has_all_bits_set(dtype: Any):
    """PTX leaves it open; the hardware gives all ones, and the dividend as the remainder."""
    ones = np.zeros(1, dtype) - np.ones(1, dtype)
    x, quotient, remainder = np.array([5, 0, 7, 9], dtype), np.zeros(4, dtype), np.zeros(4, dtype)
    pp.kernel(divide)[1,](x, np.array([0, 0, 2, 1], dtype), quotient, remainder)
    assert quotient.tolist() == [ones[0], ones[0], 3, 9]
    assert remainder.tolist() == [5, 0, 1, 0]


@triton.jit
def roots(x, out):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.rsqrt(tl.load(x + i)))
    tl.store(out + 4 + i, tl.sqrt(tl.load(x + i)))
    tl.store(out + 8 + i, tl.sqrt_rn(tl.load(x + i)))


def test_approximate_roots_take_denormals_as_zero():
    """PTX: `rsqrt.approx.ftz.f32` and `sqrt.approx.ftz.f32`, but `sqrt.rn.f32`."""
    x, out = np.array([1e-40, -1e-40, 4, 0], np.float32), np.zeros(12, np.float32)
    pp.kernel(roots)[1,](x, out)
    assert out[:8].tolist() == [np.inf, -np.inf, 0.5, np.inf, 0, 0, 2, 0]
    assert out[8] == np.sqrt(x[0]) > 0


@triton.jit
def fused(a, b, c, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.fma(tl.load(a + i), tl.load(b + i), tl.load(c + i)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_fma_rounds_once(dtype: Any):
    one, tiny = dtype(1), np.finfo(dtype).eps
    a = np.array([one + tiny, one - tiny, 3, 0.1] * 4, dtype)
    b = np.array([one + tiny, one + tiny, 7, 10] * 4, dtype)
    c = np.array([-one - 2 * tiny, -one, 0.5, -1] * 4, dtype)
    out = np.zeros(16, dtype)
    pp.kernel(fused)[1,](a, b, c, out, 16)
    exact = [float(x).as_integer_ratio() for x in (a[0], b[0], c[0])]
    first = exact[0][0] * exact[1][0] / (exact[0][1] * exact[1][1])
    assert out[0] == dtype(tiny) ** 2  # the product's last bit, which two roundings lose
    assert out[1] == -(dtype(tiny) ** 2)
    assert first > 0
    assert out[2] == 21.5


@given(st.lists(st.floats(width=16, min_value=-100, max_value=100), min_size=3, max_size=3))
def test_narrow_fma_is_the_nearest_half(values: list[float]):
    a, b, c = (np.float16(v) for v in values)
    exact = float(a) * float(b) + float(c)  # 22 bits of product, c of 11 within 2**13: exact in float64
    found = np.float16(elementwise.narrow_fma(*(np.array([v], np.float32) for v in values))[0])
    assert found == np.float16(exact)


def test_error_functions_keep_their_precision():
    small = np.array([1e-30, 1e-8, -3e-5, 0.0], np.float32)
    assert elementwise.erf(small) == pytest.approx(small * 2 / math.sqrt(math.pi), rel=1e-6)
    erfc, erfinv = ours.lookup("__nv_erfcf"), ours.lookup("__nv_erfinvf")
    assert erfc is not None
    assert erfinv is not None
    assert float(erfc(np.float32(5))) == pytest.approx(math.erfc(5), rel=1e-6)
    y = np.array([1, -1, 0, 1e-6, 0.5, -0.999, 1 - 2.0**-24, 2], np.float32)
    with np.errstate(all="ignore"):
        found = erfinv(y)
    assert found[:3].tolist() == [np.inf, -np.inf, 0]
    assert np.isnan(found[-1])
    assert [math.erf(float(v)) for v in found[3:-1]] == pytest.approx(y[3:-1].tolist(), rel=1e-6)


# ---- what hooks see --------------------------------------------------------------------------------------------------


@triton.jit
def double(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * 2)


def test_a_grid_function_sees_the_arguments_as_they_were_given():
    class Mine(np.ndarray):
        pass

    x, seen = np.ones(8, np.float32).view(Mine), {}
    pp.kernel(double)[lambda meta: seen.update(meta) or (1,)](x, np.zeros(8, np.float32), N=8)
    assert seen["x"] is x
    assert seen["N"] == 8


def test_compiling_with_report_none_gives_the_plain_kernel():
    kernel = pp.kernel(double)
    plain = kernel.compile("*fp32", "*fp32", 8, target="sm_90", report=None)
    assert plain.ptx == plain.original_ptx
    assert kernel.compile("*fp32", "*fp32", 8, target="sm_90").ptx != plain.ptx


@triton.jit
def poll_and_store(flag, out, steps, N: tl.constexpr):
    pid = tl.program_id(0)
    if pid == tl.num_programs(0) - 1:
        tl.store(flag, 1)
    else:
        seen = tl.atomic_add(flag, 0)
        rounds = 0
        while seen == 0:
            rounds += 1
            tl.store(steps + pid, rounds)
            seen = tl.atomic_add(flag, 0)
    tl.store(out + pid, pid + 1)


def test_a_loop_that_polls_and_stores_ends_when_the_other_block_says_so():
    out = np.zeros(4, np.int32)
    pp.kernel(poll_and_store)[4,](np.zeros(1, np.int32), out, np.zeros(4, np.int32), 1)
    assert out.tolist() == [1, 2, 3, 4]


@triton.jit
def poll_past_l1(flag, out, HOW: tl.constexpr):
    if tl.program_id(0) == 1:
        seen, rounds = tl.load(flag), 0
        while seen == 0:
            tl.store(out, rounds)
            rounds += 1
            seen = tl.load(flag, cache_modifier=HOW)
    else:
        tl.store(flag, 1)
    tl.store(out + 1 + tl.program_id(0), 7)


@pytest.mark.parametrize("how", [".cv", ".cg"])
def test_a_load_past_l1_sees_what_other_blocks_store(how: str):
    out = np.zeros(3, np.int32)
    pp.kernel(poll_past_l1)[2,](np.zeros(1, np.int32), out, how)
    assert out.tolist() == [0, 7, 7]


@triton.jit
def all_arrive(count, blocks):
    tl.atomic_add(count, 1)
    while tl.atomic_add(count, 0) < blocks:
        pass


def test_a_barrier_over_the_grid_needs_all_blocks_on_the_gpu_at_once():
    kernel, count = pp.kernel(all_arrive), np.zeros(1, np.int32)
    held = 2 * 132  # blocks of 1,024 threads
    kernel[held,](count, held, num_warps=32)
    assert count == held
    with failing(LaunchError, kernel="all_arrive", field="grid", given=held + 1, limit=held):
        kernel[held + 1,](np.zeros(1, np.int32), held + 1, num_warps=32)


def test_a_barrier_of_no_more_blocks_than_sms_needs_no_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(VirtualLauncher, "compiled", property(lambda launcher: pytest.fail("compiled")))
    count = np.zeros(1, np.int32)
    pp.kernel(all_arrive)[132,](count, 132)
    assert count == 132


@triton.jit
def never(flag, out):
    seen = tl.atomic_add(flag, 0)
    while seen == 0:
        tl.store(out, 7)
        seen = tl.atomic_add(flag, 0)


def test_a_loop_that_nobody_ends_is_an_error_and_not_a_hang():
    with failing(LaunchError, kernel="never", field="wait"):
        pp.kernel(never)[2,](np.zeros(1, np.int32), np.zeros(1, np.int32))


@triton.jit
def gelu(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, libdevice.erfc(v) + tl.erf(v))


def test_erf_and_erfc_add_up():
    out = np.zeros(8, np.float32)
    pp.kernel(gelu)[1,](np.linspace(-4, 4, 8).astype(np.float32), out, 8)
    assert out == pytest.approx(1, abs=1e-6)
