"""What single instructions do at their edges, each with the rule of the PTX ISA that it rests on: on both devices.

A rule is the name of an instruction, with the sentence of its description that decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.language.extra import libdevice

import paellapy as pp

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
LEAST, MOST = -(2**31), 2**31 - 1
INF, NAN = float("inf"), float("nan")
TINY = float(np.float32(1e-40))  # denormal
BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


@pytest.fixture(params=["virtual:h200", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[pp.Device]:
    with pp.Device(request.param) as opened:
        yield opened


@triton.jit
def binary(x, y, out, OP: tl.constexpr):
    i = tl.arange(0, 4)
    a, b = tl.load(x + i), tl.load(y + i)
    if OP == "+":
        c = a + b
    elif OP == "-":
        c = a - b
    elif OP == "*":
        c = a * b
    elif OP == "/":
        c = a / b
    elif OP == "//":
        c = a // b
    elif OP == "%":
        c = a % b
    elif OP == "<<":
        c = a << b
    elif OP == ">>":
        c = a >> b
    elif OP == "<":
        c = a < b
    elif OP == "!=":
        c = a != b
    elif OP == "max":
        c = tl.maximum(a, b)
    elif OP == "max, NaN":
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "min":
        c = tl.minimum(a, b)
    elif OP == "umulhi":
        c = tl.umulhi(a, b)
    elif OP == "fma":
        c = tl.fma(a, a, b)
    else:
        c = tl.div_rn(a, b)
    tl.store(out + i, c)


# operation, rule, type, operands, wanted
BINARY: list[tuple[str, str, Any, list[Any], list[Any], list[Any]]] = [
    ("+", "add.s32: no saturation unless .sat", np.int32, [MOST, LEAST, 5, -5], [1, -1, 6, 7], [LEAST, MOST, 11, 2]),
    ("+", "add.s16 of bytes: the lower 8 bits are stored", np.int8, [127, -128, 100, 1], [1, -1, 100, 1],
     [-128, 127, -56, 2]),
    ("-", "sub.u16 of bytes: the lower 8 bits are stored", np.uint8, [0, 1, 200, 3], [1, 2, 100, 4],
     [255, 255, 100, 255]),
    ("*", "mul.lo.s32: the lower half of the product", np.int32, [65536, MOST, 3, LEAST], [65536, 2, 4, -1],
     [0, -2, 12, LEAST]),
    ("*", "mul.lo.s64: the lower half of the product", np.int64, [2**32, 2**62, 3, -1], [2**32, 2, 4, -1],
     [0, -(2**63), 12, 1]),
    ("umulhi", "mul.hi.u32: the upper half of the product", np.uint32, [2**32 - 1, 2**31, 3, 0], [2**32 - 1, 2, 4, 7],
     [2**32 - 2, 1, 0, 0]),
    ("//", "div.s32: truncates towards 0", np.int32, [-7, 7, -7, 7], [2, -2, -2, 2], [-3, -3, 3, 3]),
    ("//", "div.u32: operands are unsigned", np.uint32, [2**32 - 1, 2**31, 7, 0], [2, 2**31, 2, 5],
     [2**31 - 1, 1, 3, 0]),
    ("%", "rem.s32: the sign of the dividend", np.int32, [-7, 7, -7, 7], [2, -2, -2, 2], [-1, 1, -1, 1]),
    ("%", "rem.u32: operands are unsigned", np.uint32, [2**32 - 1, 2**31, 7, 0], [10, 3, 2, 5], [5, 2, 1, 0]),
    ("<<", "shl.b32: clamps amounts above 32", np.int32, [1, 1, -1, 1], [32, 33, 64, 31], [0, 0, 0, LEAST]),
    ("<<", "shl.b32: the amount is unsigned", np.int32, [1, 7, 1, 1], [-1, -31, 0, 1], [0, 0, 1, 2]),
    ("<<", "shl.b64: clamps amounts above 64", np.int64, [1, 1, 1, 3], [64, 63, 100, 1], [0, -(2**63), 0, 6]),
    (">>", "shr.s32: amounts above 32 are clamped; fills with the sign", np.int32, [-8, 8, -1, LEAST],
     [32, 33, 100, 31], [-1, 0, -1, -1]),
    (">>", "shr.u32: amounts above 32 are clamped; fills with 0", np.uint32, [2**32 - 1, 8, 7, 2**31],
     [32, 33, 100, 31], [0, 0, 0, 1]),
    (">>", "shr.s64: amounts above 64 are clamped; fills with the sign", np.int64, [-1, 5, -8, 8], [64, 70, 1, 1],
     [-1, 0, -4, 4]),
    ("<", "setp.lt.s32: operands are signed", np.int32, [-1, 1, LEAST, 0], [1, -1, MOST, 0], [1, 0, 1, 0]),
    ("<", "setp.lo.u32: operands are unsigned", np.uint32, [2**32 - 1, 1, 0, 0], [1, 2**32 - 1, 2**31, 0],
     [0, 1, 1, 0]),
    ("min", "min.s32: operands are signed", np.int32, [-1, 1, LEAST, 0], [1, -1, MOST, 0], [-1, -1, LEAST, 0]),
    ("max", "max.u32: operands are unsigned", np.uint32, [2**32 - 1, 1, 0, 0], [1, 2**31, 5, 0],
     [2**32 - 1, 2**31, 5, 0]),
    ("/", "div.full.f32: follows IEEE 754 for 0 and infinity", np.float32, [1, -1, 0, INF], [0, 0, 0, 2],
     [INF, -INF, NAN, INF]),
    ("div_rn", "div.rn.f32: rounds to nearest even", np.float32, [1, 2, TINY, -1], [3, 3, 2, 10],
     [1 / 3, 2 / 3, TINY / 2, -0.1]),
    ("%", "no instruction: libdevice's fmodf, the sign of the dividend", np.float32, [5.5, -5.5, 5.5, INF],
     [2, 2, -2, 2], [1.5, -1.5, 1.5, NAN]),
    ("+", "add.f32: denormals are supported without .ftz", np.float32, [TINY, TINY, INF, -0.0], [TINY, 0, -INF, -0.0],
     [2 * TINY, TINY, NAN, -0.0]),
    ("*", "mul.f32: denormals are supported without .ftz", np.float32, [TINY, 3e38, -1, INF], [0.5, 10, 0, 0],
     [TINY / 2, INF, -0.0, NAN]),
    ("fma", "fma.rn.f32: infinite precision before one rounding", np.float32, [1 + 2**-12, 3, INF, 0],
     [-1 - 2**-11, 0.5, 1, -0.0], [2**-24, 9.5, INF, 0]),
    ("max", "max.f32: the other input if one is NaN", np.float32, [NAN, 1, NAN, -INF], [1, NAN, NAN, 2],
     [1, 1, NAN, 2]),
    ("max, NaN", "max.NaN.f32: NaN if either input is NaN", np.float32, [NAN, 1, 1, -INF], [1, NAN, 2, 2],
     [NAN, NAN, 2, 2]),
    ("min", "min.f32: -0.0 is less than +0.0", np.float32, [0.0, -0.0, NAN, 3], [-0.0, 0.0, 2, NAN],
     [-0.0, -0.0, 2, 3]),
    ("max", "max.f32: +0.0 is greater than -0.0", np.float32, [0.0, -0.0, 1, 3], [-0.0, 0.0, 2, -3], [0.0, 0.0, 2, 3]),
    ("<", "setp.lt.f32: false if an operand is NaN", np.float32, [NAN, 1, -0.0, -INF], [1, NAN, 0.0, INF],
     [0, 0, 0, 1]),
    ("!=", "setp.neu.f32: true if an operand is NaN", np.float32, [NAN, 1, -0.0, 1], [NAN, NAN, 0.0, 1], [1, 1, 0, 0]),
    ("*", "fma.rn.f16 or mul.f16: denormals are supported", np.float16, [6e-8, 65504, 1 + 2**-10, 0.1], [1, 2, 1, 0.1],
     [6e-8, INF, 1 + 2**-10, np.float16(0.1) ** 2]),
    ("+", "add.rn.bf16, or fp32 rounded to it: nearest even", BF16, [1, 1, 256, 3e38], [2**-8, 3 * 2**-8, 1, 3e38],
     [1, 1 + 2**-6, 256, INF]),
]  # fmt: skip


@triton.jit
def unary(x, out, OP: tl.constexpr):
    i = tl.arange(0, 4)
    a = tl.load(x + i)
    if OP == "sqrt":
        c = tl.sqrt(a)
    elif OP == "sqrt_rn":
        c = tl.sqrt_rn(a)
    elif OP == "rsqrt":
        c = tl.rsqrt(a)
    elif OP == "exp2":
        c = tl.exp2(a)
    elif OP == "log2":
        c = tl.log2(a)
    elif OP == "floor":
        c = tl.floor(a)
    elif OP == "ceil":
        c = tl.ceil(a)
    elif OP == "rint":
        c = libdevice.rint(a)
    elif OP == "abs":
        c = tl.abs(a)
    else:  # Triton up to 3.6 compiles -a to 0 - a
        c = tl.inline_asm_elementwise("neg.f32 $0, $1;", "=f,f", [a], tl.float32, True, 1)
    tl.store(out + i, c)


UNARY: list[tuple[str, str, list[float], list[float]]] = [
    ("sqrt", "sqrt.approx.ftz.f32: denormals are 0", [TINY, 4, -1, INF], [0, 2, NAN, INF]),
    ("sqrt_rn", "sqrt.rn.f32: denormals are supported", [TINY, 4, -0.0, INF],
     [float(np.sqrt(np.float32(TINY))), 2, -0.0, INF]),
    ("rsqrt", "rsqrt.approx.ftz.f32: denormals are 0", [TINY, 4, -1, INF], [INF, 0.5, NAN, 0]),
    ("rsqrt", "rsqrt.approx.f32: the sign of a zero is kept", [0.0, -0.0, 16, 0.25], [INF, -INF, 0.25, 2]),
    ("exp2", "ex2.approx.f32: 0 of -infinity, 1 of 0", [-INF, 0, 3, INF], [0, 1, 8, INF]),
    ("log2", "lg2.approx.f32: -infinity of 0, NaN below", [0, 1, -1, INF], [-INF, 0, NAN, INF]),
    ("floor", "cvt.rmi.f32.f32: towards -infinity", [-2.5, 2.5, -0.0, 8388607.5], [-3, 2, -0.0, 8388607]),
    ("ceil", "cvt.rpi.f32.f32: towards +infinity", [-0.5, 2.5, 0.0, INF], [-0.0, 3, 0.0, INF]),
    ("rint", "cvt.rni.f32.f32: ties to even", [0.5, 1.5, 2.5, -0.5], [0, 2, 2, -0.0]),
    ("abs", "abs.f32: clears the sign", [-0.0, -INF, -TINY, 3], [0.0, INF, TINY, 3]),
    ("neg", "neg.f32: flips the sign", [0.0, -0.0, INF, TINY], [-0.0, 0.0, -INF, -TINY]),
]  # fmt: skip


@triton.jit
def converted(x, out, T: tl.constexpr, HOW: tl.constexpr):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.load(x + i).to(T, fp_downcast_rounding=HOW).to(out.dtype.element_ty))


F, D = np.float32, np.float64
CONVERSIONS: list[tuple[str, Any, Any, Any, list[Any], list[Any]]] = [
    ("cvt.rzi.s32.f32: clamps; NaN is 0", F, tl.int32, np.int32, [1e10, -1e10, NAN, -1.9], [MOST, LEAST, 0, -1]),
    ("cvt.rzi.s64.f32: clamps", F, tl.int64, np.int64, [1e30, -1e30, 2.9, -2.9], [2**63 - 1, -(2**63), 2, -2]),
    ("cvt.rzi.u32.f32: clamps at 0", F, tl.uint32, np.uint32, [-1, -5.7, 5e9, NAN], [0, 0, 2**32 - 1, 0]),
    ("cvt.rzi.s32.f64: clamps", D, tl.int32, np.int32, [1e10, -1e10, INF, 7.9], [MOST, LEAST, MOST, 7]),
    ("cvt.rn.f32.s32: nearest even", np.int32, tl.float32, F, [2**24 + 1, 2**24 + 3, MOST, -1],
     [2**24, 2**24 + 4, 2**31, -1]),
    ("cvt.rn.f32.u32: operands are unsigned", np.uint32, tl.float32, F, [2**32 - 1, 2**31, 1, 0], [2**32, 2**31, 1, 0]),
    ("cvt.rn.f32.s64: one rounding", np.int64, tl.float32, F, [2**24 + 1, 2**53 + 1, -(2**24 + 3), 2**40 + 2**16 + 1],
     [2**24, 2**53, -(2**24 + 4), 2**40 + 2**17]),
    ("cvt.rn.f16.f32: nearest even, infinity above 65520", F, tl.float16, F, [65520, 65519, 1 + 2**-11, 1 + 3 * 2**-11],
     [INF, 65504, 1, 1 + 2**-9]),
    ("cvt.rn.bf16.f32: nearest even", F, tl.bfloat16, F, [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, NAN],
     [1, 1 + 2**-6, INF, NAN]),
    ("cvt.rn.f16.f64: one rounding", D, tl.float16, D, [1 + 2**-11 + 2**-40, 1 + 2**-11, 7e4, -0.0],
     [1 + 2**-10, 1, INF, -0.0]),
    ("cvt.rn.bf16.s32: one rounding", np.int32, tl.bfloat16, F, [2**24 + 2**16 + 1, 2**24 + 2**16, 3, -1],
     [2**24 + 2**17, 2**24, 3, -1]),
    ("cvt.f32.f16: exact", np.float16, tl.float32, F, [6e-8, 65504, -0.0, INF], [2**-24, 65504, -0.0, INF]),
    ("cvt.f64.f32: exact", F, tl.float64, D, [TINY, 3e38, 0.1, NAN], [TINY, float(F(3e38)), float(F(0.1)), NAN]),
    ("cvt.rn.f32.f64: nearest even", D, tl.float32, F, [1 + 2**-24, 1 + 3 * 2**-24, 1e39, -1e-46],
     [1, 1 + 2**-22, INF, -0.0]),
    ("cvt.u32.u64: the lower half", np.int64, tl.int32, np.int32, [2**32 + 5, -1, 2**31, 2**33], [5, -1, LEAST, 0]),
    ("cvt.s32.s8: extends the sign", np.int8, tl.int32, np.int32, [-1, -128, 127, 0], [-1, -128, 127, 0]),
    ("cvt.u32.u8: extends with 0", np.uint8, tl.int32, np.int32, [255, 128, 127, 0], [255, 128, 127, 0]),
    ("cvt.rn.satfinite.e4m3x2.f32: 448 at most", F, tl.float8e4nv, F, [500, 1e9, INF, -INF], [448, 448, 448, -448]),
    ("cvt.rn.satfinite.e4m3x2.f32: nearest even", F, tl.float8e4nv, F, [2**-10, 17, 19, NAN], [0, 16, 20, NAN]),
    ("cvt.rn.satfinite.e5m2x2.f32: 57344 at most", F, tl.float8e5, F, [1e6, 61440, -1e6, 9], [57344, 57344, -57344, 8]),
    ("cvt.rz.f16.f32: towards 0", F, tl.float16, F, [65519.9, 1e9, 1.0009, -1.0009], [65504, 65504, 1, -1]),
]  # fmt: skip


@triton.jit
def updated(x, y, out, OP: tl.constexpr):
    i = tl.arange(0, 4)
    v = tl.load(y + i)
    if OP == "add":
        old = tl.atomic_add(x + i, v)
    elif OP == "max":
        old = tl.atomic_max(x + i, v)
    elif OP == "min":
        old = tl.atomic_min(x + i, v)
    elif OP == "xor":
        old = tl.atomic_xor(x + i, v)
    elif OP == "xchg":
        old = tl.atomic_xchg(x + i, v)
    else:
        old = tl.atomic_cas(x + i, i, v)
    tl.store(out + i, old)


ATOMICS: list[tuple[str, str, Any, list[int], list[int], list[int]]] = [
    ("add", "atom.add.s32: wraps", np.int32, [MOST, 1, -1, LEAST], [1, 2, 3, -1], [LEAST, 3, 2, MOST]),
    ("max", "atom.max.s32: signed", np.int32, [-1, 5, LEAST, 0], [1, -5, 0, 0], [1, 5, 0, 0]),
    ("max", "atom.max.u32: unsigned", np.uint32, [2**32 - 1, 5, 0, 0], [1, 2**31, 7, 0], [2**32 - 1, 2**31, 7, 0]),
    ("min", "atom.min.s32: signed", np.int32, [-1, 5, MOST, 0], [1, -5, 0, 0], [-1, -5, 0, 0]),
    ("xor", "atom.xor.b32", np.int32, [5, -1, 0, 7], [3, -1, 9, 0], [6, 0, 9, 7]),
    ("xchg", "atom.exch.b32", np.int32, [5, -1, 0, 7], [3, -1, 9, 0], [3, -1, 9, 0]),
    ("cas", "atom.cas.b32: stores where the old value is the one compared", np.int32, [0, 7, 2, 3], [9, 9, 9, 9],
     [9, 7, 9, 9]),
]  # fmt: skip


def same(found: Any, wanted: Any) -> None:
    """Equal numbers, with the signs of zeros; any NaN is like any other."""
    found, wanted = (np.asarray(each).astype(np.float64) if np.asarray(each).dtype.kind in "fV" else np.asarray(each)
                     for each in (found, wanted))  # fmt: skip
    np.testing.assert_array_equal(found, wanted)
    if found.dtype.kind == "f":
        zero = found == 0
        np.testing.assert_array_equal(np.signbit(found[zero]), np.signbit(wanted[zero]))


def ids(probes: Any) -> Any:
    return [next(each for each in probe if isinstance(each, str) and len(each) > 8) for probe in probes]


@pytest.mark.parametrize(("op", "rule", "dtype", "x", "y", "wanted"), BINARY, ids=ids(BINARY))
def test_binary(device: pp.Device, op: str, rule: str, dtype: Any, x: Any, y: Any, wanted: Any) -> None:
    out = pp.array(np.zeros(4, np.int32 if op in ("<", "!=") else dtype))
    pp.kernel(binary)[1,](pp.array(np.array(x, dtype)), pp.array(np.array(y, dtype)), out, op)
    same(out.numpy(), np.array(wanted, out.dtype))


@pytest.mark.parametrize(("op", "rule", "x", "wanted"), UNARY, ids=ids(UNARY))
def test_unary(device: pp.Device, op: str, rule: str, x: Any, wanted: Any) -> None:
    out = pp.array(np.zeros(4, F))
    pp.kernel(unary)[1,](pp.array(np.array(x, F)), out, op)
    same(out.numpy(), np.array(wanted, F))


@pytest.mark.parametrize(("rule", "dtype", "to", "kept", "x", "wanted"), CONVERSIONS, ids=ids(CONVERSIONS))
def test_conversion(device: pp.Device, rule: str, dtype: Any, to: Any, kept: Any, x: Any, wanted: Any) -> None:
    out, how = pp.array(np.zeros(4, kept)), "rtz" if "towards 0" in rule else None
    pp.kernel(converted)[1,](pp.array(np.array(x, dtype)), out, to, how)
    same(out.numpy(), np.array(wanted, kept))


@pytest.mark.parametrize(("op", "rule", "dtype", "x", "y", "wanted"), ATOMICS, ids=ids(ATOMICS))
def test_atomic(device: pp.Device, op: str, rule: str, dtype: Any, x: Any, y: Any, wanted: Any) -> None:
    place, old = pp.array(np.array(x, dtype)), pp.array(np.zeros(4, dtype))
    pp.kernel(updated)[1,](place, pp.array(np.array(y, dtype)), old, op)
    same(place.numpy(), np.array(wanted, dtype))
    same(old.numpy(), np.array(x, dtype))
