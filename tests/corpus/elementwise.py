"""One output element per input element: floats and casts."""

from __future__ import annotations

import math
from functools import partial

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .case import Array, Case, elementwise, normal


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def mul_add_relu(x, y, z, out, alpha, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    value = alpha * tl.load(x + i, mask=mask) * tl.load(y + i, mask=mask) + tl.load(z + i, mask=mask)
    tl.store(out + i, tl.maximum(value, 0.0), mask=mask)


@triton.jit
def gelu(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i, 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476)), mask=i < n)


@triton.jit
def gelu_tanh(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    inner = 0.7978845608028654 * (v + 0.044715 * v * v * v)
    tl.store(out + i, 0.5 * v * (1.0 + libdevice.tanh(inner)), mask=i < n)


@triton.jit
def silu(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n).to(tl.float32)
    tl.store(out + i, (v * tl.sigmoid(v)).to(out.dtype.element_ty), mask=i < n)


@triton.jit
def mathematics(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    v = tl.load(x + i, mask=mask, other=1.0)
    positive = tl.abs(v) + 0.5
    tl.store(out + i, tl.exp(v) + tl.exp2(-v), mask=mask)
    tl.store(out + n + i, tl.log(positive) - tl.log2(positive), mask=mask)
    tl.store(out + 2 * n + i, tl.sin(v) * tl.cos(v), mask=mask)
    tl.store(out + 3 * n + i, tl.sqrt(positive) + tl.rsqrt(positive), mask=mask)
    tl.store(out + 4 * n + i, tl.floor(v) - tl.ceil(4.0 * v), mask=mask)
    tl.store(out + 5 * n + i, tl.fma(v, positive, 3.0) / tl.clamp(v, 0.25, 0.75), mask=mask)
    tl.store(out + 6 * n + i, tl.where(v > 0.5, -v, tl.minimum(v, -0.125)), mask=mask)


@triton.jit
def casts(x, as_half, as_brain, as_int, as_byte, back, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    v = tl.load(x + i, mask=mask, other=0.0)
    tl.store(as_half + i, v.to(tl.float16), mask=mask)
    tl.store(as_brain + i, v.to(tl.bfloat16), mask=mask)
    whole = v.to(tl.int32)
    tl.store(as_int + i, whole.to(tl.int64) * 3, mask=mask)
    tl.store(as_byte + i, whole.to(tl.int8), mask=mask)
    tl.store(back + i, whole.to(tl.int16).to(tl.float64) + (v > 0).to(tl.float64), mask=mask)


@triton.jit
def fp8_casts(x, e4m3, e5m2, back, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    v = tl.load(x + i, mask=mask, other=0.0)
    narrow = v.to(tl.float8e4nv)
    tl.store(e4m3 + i, narrow, mask=mask)
    tl.store(e5m2 + i, v.to(tl.float8e5), mask=mask)
    tl.store(back + i, narrow.to(tl.float32), mask=mask)


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _gelu_tanh(x: Array) -> dict[str, Array]:
    v = x.astype(np.float64)
    return {"out": 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))}


def _mathematics(x: Array) -> dict[str, Array]:
    v = x.astype(np.float64)
    positive = np.abs(v) + 0.5
    rows = [
        np.exp(v) + np.exp2(-v),
        np.log(positive) - np.log2(positive),
        np.sin(v) * np.cos(v),
        np.sqrt(positive) + 1 / np.sqrt(positive),
        np.floor(v) - np.ceil(4 * v),
        (v * positive + 3) / np.clip(v, 0.25, 0.75),
        np.where(v > 0.5, -v, np.minimum(v, -0.125)),
    ]
    return {"out": np.stack(rows)}


def _casts(x: Array) -> dict[str, Array]:
    whole = np.trunc(x).astype(np.int32)
    return {
        "as_half": x.astype(np.float16),
        "as_brain": x.astype(BF16),
        "as_int": whole.astype(np.int64) * 3,
        "as_byte": whole.astype(np.int8),
        "back": whole.astype(np.float64) + (x > 0),
    }


def _fp8_casts(x: Array) -> dict[str, Array]:
    narrow = x.astype(E4M3)
    return {"e4m3": narrow, "e5m2": x.astype(E5M2), "back": narrow.astype(np.float32)}


BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
X, OUT = {"x": normal}, {"out": np.float32}
CASES = (
    Case("add", add, elementwise(5003, 1024, {"x": normal, "y": normal}, OUT,
         lambda x, y: {"out": x.astype(np.float64) + y}, 1e-5)),
    Case("mul_add_relu", mul_add_relu, elementwise(3001, 256, {"x": normal, "y": normal, "z": normal}, OUT,
         lambda x, y, z: {"out": np.maximum(1.75 * x.astype(np.float64) * y + z, 0)}, 1e-5, constants={"alpha": 1.75})),
    Case("gelu", gelu, elementwise(2999, 512, X, OUT,
         lambda x: {"out": 0.5 * x.astype(np.float64) * (1 + _erf(x * np.sqrt(0.5)))}, 1e-5)),
    Case("gelu_tanh", gelu_tanh, elementwise(2999, 512, X, OUT, _gelu_tanh, 1e-5)),
    Case("silu_bf16", silu, elementwise(4001, 1024, {"x": partial(normal, dtype=BF16)}, {"out": BF16},
         lambda x: {"out": x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))}, 1e-2)),
    Case("mathematics", mathematics, elementwise(1301, 512, X, OUT, _mathematics, 1e-5, rows=(7,))),
    Case("casts", casts, elementwise(1999, 256, {"x": lambda rng, n: normal(rng, n) * np.float32(20)},
         {"as_half": np.float16, "as_brain": BF16, "as_int": np.int64, "as_byte": np.int8, "back": np.float64},
         _casts)),
    Case("fp8_casts", fp8_casts, elementwise(1999, 256, X, {"e4m3": E4M3, "e5m2": E5M2, "back": np.float32},
         _fp8_casts), min_sm=90),
)  # fmt: skip
