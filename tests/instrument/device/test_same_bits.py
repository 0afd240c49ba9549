"""The virtual GPU's numbers are a real one's: the same kernels on both, with special values, compared bit by bit.

Where there is no GPU, another virtual one stands in for it, so that the kernels themselves are tested.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.language.extra import libdevice

import paellapy as pp

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
OTHERS = ["virtual:h100", pytest.param("cuda", marks=pytest.mark.gpu)]
N = 64
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.25, -5.7, 127.5, 255.5, 300.0, -129.0, 32767.6, -32769.0,
          65504.0, 65519.9, 65520.0, 7e4, 2147483648.0, -2147483904.0, 4294967296.0, 9.3e18, -9.3e18, 1.9e19, 3e38,
          -3e38, 1e-3, -1e-3, 1e-8, 6e-8, 1e-30, 448.0, 460.0, 465.0, 57344.0, 61440.0, 1 + 2**-11, 1 + 2**-8,
          1 + 3 * 2**-11, 0.1, -0.1, float("nan"), float("inf"), float("-inf"), 16777217.0, 8388607.5]  # fmt: skip
INTS = [0, 1, -1, 2, -2, 3, 7, -7, 31, 32, 33, 255, 256, -128, -129, 127, 32767, -32768, 65535, 2**24 + 1, -(2**24) - 1,
        2**31 - 1, -(2**31), 0x12345678, -0x12345678, 0x0F0F0F0F, 1000003]  # fmt: skip


def floats(dtype: Any = np.float32) -> Any:
    return np.resize(np.array(FLOATS, np.float32), N).astype(dtype)


def ints(dtype: Any = np.int32) -> Any:
    return np.resize(np.array(INTS, np.int32), N).astype(dtype)


def on(name: str, kernel: Any, inputs: list[Any], outputs: list[Any], **constants: Any) -> list[Any]:
    with pp.Device(name):
        given = [pp.array(a) for a in inputs]
        made = [pp.array(a) for a in outputs]
        pp.kernel(kernel)[1,](*given, *made, **constants)
        return [np.asarray(a.numpy() if hasattr(a, "numpy") else a) for a in made]


def compare(name: str, kernel: Any, inputs: list[Any], outputs: list[Any], **constants: Any) -> None:
    ours, theirs = (on(each, kernel, inputs, outputs, **constants) for each in ("virtual:h200", name))
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        same = a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}")
        if a.dtype.kind != "i":
            same |= np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
        wrong = np.nonzero(~same)[0][:5]
        assert not wrong.size, (k, wrong, [i.flat[wrong % N] for i in inputs], a[wrong], b[wrong])


# ---- conversions -----------------------------------------------------------------------------------------------------


@triton.jit
def to_integers(x, a, b, c, d, e, f, g, h, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(a + i, v.to(tl.int8))
    tl.store(b + i, v.to(tl.uint8))
    tl.store(c + i, v.to(tl.int16))
    tl.store(d + i, v.to(tl.uint16))
    tl.store(e + i, v.to(tl.int32))
    tl.store(f + i, v.to(tl.uint32))
    tl.store(g + i, v.to(tl.int64))
    tl.store(h + i, v.to(tl.uint64))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_floats_become_the_same_integers(name: str, dtype: Any) -> None:
    kinds = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
    compare(name, to_integers, [floats(dtype)], [np.zeros(N, k) for k in kinds], N=N)


@triton.jit
def to_floats(x, y, a, b, c, d, e, f, g, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(a + i, v.to(tl.float16))
    tl.store(b + i, v.to(tl.bfloat16))
    tl.store(c + i, v.to(tl.float64))
    tl.store(d + i, v.to(tl.float8e5))
    tl.store(e + i, v.to(tl.float16, fp_downcast_rounding="rtz"))
    w = tl.load(y + i)
    tl.store(f + i, w.to(tl.float32))
    tl.store(g + i, w.to(tl.uint32, bitcast=True).to(tl.float32))


@pytest.mark.parametrize("name", OTHERS)
def test_numbers_become_the_same_floats(name: str) -> None:
    kinds = [np.float16, ml_dtypes.bfloat16, np.float64, ml_dtypes.float8_e5m2, np.float16, np.float32, np.float32]
    compare(name, to_floats, [floats(), ints()], [np.zeros(N, k) for k in kinds], N=N)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


@triton.jit
def arithmetic(x, y, a, b, N: tl.constexpr):
    i = tl.arange(0, N)
    u, v = tl.load(x + i), tl.load(x + N - 1 - i)
    tl.store(a + i, tl.fma(u, v, u))
    tl.store(a + N + i, tl.div_rn(u, v))
    tl.store(a + 2 * N + i, tl.sqrt_rn(u))
    tl.store(a + 3 * N + i, tl.maximum(u, v))
    tl.store(a + 4 * N + i, tl.maximum(u, v, propagate_nan=tl.PropagateNan.ALL))
    tl.store(a + 5 * N + i, tl.floor(u))
    tl.store(a + 6 * N + i, tl.clamp(u, -2.0, 3.0))
    tl.store(a + 7 * N + i, libdevice.rint(u))
    p, q = tl.load(y + i), tl.load(y + N - 1 - i)
    q = tl.where((q == 0) | (q == -1), 3, q)
    tl.store(b + i, p // q)
    tl.store(b + N + i, p % q)
    tl.store(b + 2 * N + i, p >> (q & 31))
    tl.store(b + 3 * N + i, tl.umulhi(p, q))
    tl.store(b + 4 * N + i, p * q)
    tl.store(b + 5 * N + i, tl.cdiv(p, q))
    tl.store(b + 6 * N + i, libdevice.clz(p))
    tl.store(b + 7 * N + i, libdevice.mulhi(p, q))


@pytest.mark.parametrize("name", OTHERS)
def test_arithmetic_has_the_same_results(name: str) -> None:
    compare(name, arithmetic, [floats(), ints()], [np.zeros(8 * N, np.float32), np.zeros(8 * N, np.int32)], N=N)


@triton.jit
def functions(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, tl.erf(v))
    tl.store(out + N + i, libdevice.erfc(v))
    tl.store(out + 2 * N + i, libdevice.erfinv(v))
    tl.store(out + 3 * N + i, tl.exp(v))
    tl.store(out + 4 * N + i, tl.log(v))
    tl.store(out + 5 * N + i, libdevice.tanh(v))
    tl.store(out + 6 * N + i, tl.rsqrt(v))
    tl.store(out + 7 * N + i, libdevice.pow(v, 3.0))


@pytest.mark.parametrize("name", OTHERS)
def test_functions_agree_within_their_precision(name: str) -> None:
    given = np.clip(floats(), -50, 50)
    ours, theirs = (on(each, functions, [given], [np.zeros(8 * N, np.float32)], N=N)[0]
                    for each in ("virtual:h200", name))  # fmt: skip
    np.testing.assert_allclose(ours, theirs, rtol=3e-6, atol=1e-37)


# ---- PTX by hand -----------------------------------------------------------------------------------------------------

# Of words $1 and $2.
PIECES = (
    "div.s32 $0, $1, 7;", "rem.s32 $0, $1, -7;", "div.u32 $0, $1, 7;", "mad.lo.s32 $0, $1, $2, $1;",
    "mul.hi.s32 $0, $1, $2;", "mul.hi.u32 $0, $1, $2;", "min.s32 $0, $1, $2;", "max.u32 $0, $1, $2;",
    "{ .reg .b64 w; mul.wide.s32 w, $1, $2; shr.s64 w, w, 13; cvt.u32.u64 $0, w; }",
    "{ .reg .b64 w; mul.wide.u32 w, $1, 3; mad.wide.s32 w, $1, $2, w; shr.u64 w, w, 9; cvt.u32.u64 $0, w; }",
    "shl.b32 $0, $1, $2;", "shr.u32 $0, $1, $2;", "shr.s32 $0, $1, $2;", "shf.l.wrap.b32 $0, $1, $2, 5;",
    "shf.r.clamp.b32 $0, $1, $2, 40;", "prmt.b32 $0, $1, $2, 0x5B0E;", "lop3.b32 $0, $1, $2, 0xF0F0, 0x96;",
    "bfe.s32 $0, $1, 5, 9;", "bfe.u32 $0, $1, 28, 9;", "bfi.b32 $0, $1, $2, 7, 11;", "popc.b32 $0, $1;",
    "clz.b32 $0, $1;", "brev.b32 $0, $1;", "abs.s32 $0, $1;", "neg.s32 $0, $1;", "not.b32 $0, $1;",
    "{ .reg .pred p, q; setp.lt.s32 p, $1, $2; setp.hi.u32 q, $1, $2; xor.pred p, p, q; selp.b32 $0, $1, 77, p; }",
    "cvt.s32.s8 $0, $1;", "cvt.u32.u8 $0, $1;", "cvt.s8.s32 $0, $1;", "cvt.sat.s8.s32 $0, $1;",
    "cvt.sat.u16.s32 $0, $1;", "cvt.rz.f32.s32 $0, $1;", "cvt.rp.f32.u32 $0, $1;",
)  # fmt: skip
FLOAT_PIECES = (
    "cvt.rni.f32.f32 $0, $1;", "cvt.rzi.f32.f32 $0, $1;", "cvt.rmi.f32.f32 $0, $1;", "cvt.rpi.f32.f32 $0, $1;",
    "cvt.rni.s32.f32 $0, $1;", "cvt.rmi.u32.f32 $0, $1;", "cvt.rzi.s8.f32 $0, $1;", "cvt.rzi.u16.f32 $0, $1;",
    "cvt.rna.tf32.f32 $0, $1;", "cvt.sat.f32.f32 $0, $1;", "cvt.rn.f16x2.f32 $0, $1, $2;",
    "cvt.rz.f16x2.f32 $0, $1, $2;", "cvt.rn.relu.bf16x2.f32 $0, $1, $2;", "add.rz.f32 $0, $1, $2;",
    "add.sat.f32 $0, $1, $2;", "mul.rp.f32 $0, $1, $2;", "fma.rm.f32 $0, $1, $2, $1;", "div.rn.f32 $0, $1, $2;",
    "sqrt.rz.f32 $0, $1;", "min.f32 $0, $1, $2;", "max.NaN.f32 $0, $1, $2;", "copysign.f32 $0, $1, $2;",
    "abs.f32 $0, $1;", "neg.f32 $0, $1;",
    "{ .reg .b16 h; cvt.rn.satfinite.e5m2x2.f32 h, $1, $2; cvt.rn.f16x2.e5m2x2 $0, h; }",
    "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $1, $2; cvt.rn.f16x2.e4m3x2 $0, h; }",
    "{ .reg .b32 w; cvt.rn.f16x2.f32 w, $1, $2; fma.rn.f16x2 $0, w, w, w; }",
    "{ .reg .pred p; setp.ne.f32 p, $1, $2; selp.b32 $0, 1, 0, p; }",
    "{ .reg .pred p; setp.neu.f32 p, $1, $2; selp.b32 $0, 1, 0, p; }",
    "{ .reg .pred p; setp.leu.f32 p, $1, $2; selp.b32 $0, 1, 0, p; }",
    "{ .reg .pred p; setp.nan.f32 p, $1, $2; selp.b32 $0, 1, 0, p; }",
)  # fmt: skip


@triton.jit
def piece_by_piece(x, y, out, TEXTS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    u, v = tl.load(x + i), tl.load(y + i)
    for k in tl.static_range(len(TEXTS)):
        tl.store(out + k * N + i, tl.inline_asm_elementwise(TEXTS[k], "=r,r,r", [u, v], tl.int32, True, 1))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("pieces", [PIECES, FLOAT_PIECES], ids=["words", "floats"])
def test_ptx_by_hand_has_the_same_results(name: str, pieces: tuple[str, ...]) -> None:
    x, y = (ints(), ints()[::-1].copy()) if pieces is PIECES else (floats().view(np.int32),) * 2
    y = np.roll(y, 7)
    wrong = []
    for k in range(0, len(pieces), 8):
        some = pieces[k : k + 8]
        ours, theirs = (on(each, piece_by_piece, [x, y], [np.zeros(len(some) * N, np.int32)], TEXTS=some, N=N)[0]
                        for each in ("virtual:h200", name))  # fmt: skip
        for text, a, b in zip(some, ours.reshape(-1, N), theirs.reshape(-1, N), strict=True):
            same = _equal(a, b, text)
            at = np.nonzero(~same)[0][:4]
            wrong += [(text, x[at], y[at], a[at], b[at])] if at.size else []
    assert not wrong


def _equal(a: Any, b: Any, text: str) -> Any:
    """Whether words are equal; the bits of a NaN are not specified."""
    if "x2" in text:
        halves = a.view(np.int16).reshape(-1, 2), b.view(np.int16).reshape(-1, 2)
        first = 0x7F80 if "bf16x2" in text else 0x7C00
        nan = [(each & 0x7FFF) > first for each in halves]
        return ((halves[0] == halves[1]) | (nan[0] & nan[1])).all(axis=1)
    if ".f32 $0" in text:
        return (a == b) | (np.isnan(a.view(np.float32)) & np.isnan(b.view(np.float32)))
    return a == b
