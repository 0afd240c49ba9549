"""One output element per input element: floats, casts, integers, bits, random numbers."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .case import Array, Call, Case, normal, poisoned, scaled


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


@triton.jit
def integers(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    a = tl.load(x + i, mask=mask, other=1)
    b = tl.load(y + i, mask=mask, other=1)
    tl.store(out + i, a * b + 12345, mask=mask)
    tl.store(out + n + i, a // b, mask=mask)
    tl.store(out + 2 * n + i, a % b, mask=mask)
    tl.store(out + 3 * n + i, tl.minimum(a, b) - tl.maximum(a, -b), mask=mask)
    tl.store(out + 4 * n + i, (a.to(tl.int64) * b >> 16).to(tl.int32), mask=mask)
    tl.store(out + 5 * n + i, tl.abs(a >> 1), mask=mask)


@triton.jit
def unsigned(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    a = tl.load(x + i, mask=mask, other=1)
    b = tl.load(y + i, mask=mask, other=1)
    tl.store(out + i, a // b, mask=mask)
    tl.store(out + n + i, a % b, mask=mask)
    tl.store(out + 2 * n + i, (a > b).to(tl.uint32), mask=mask)
    tl.store(out + 3 * n + i, tl.umulhi(a, b), mask=mask)
    tl.store(out + 4 * n + i, tl.maximum(a, b) - tl.minimum(a, b), mask=mask)
    tl.store(out + 5 * n + i, (a.to(tl.float32) * 0.5).to(tl.uint32), mask=mask)
    tl.store(out + 6 * n + i, (a.to(tl.uint64) * b >> 7).to(tl.uint32), mask=mask)


@triton.jit
def bits(x, y, out, floats, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    a = tl.load(x + i, mask=mask, other=0)
    b = tl.load(y + i, mask=mask, other=0)
    shift = b & 31
    rotated = (a.to(tl.uint32, bitcast=True) << 7) | (a.to(tl.uint32, bitcast=True) >> 25)
    tl.store(out + i, (a & b) ^ (a | ~b), mask=mask)
    tl.store(out + n + i, (a << shift) ^ (a >> shift), mask=mask)
    tl.store(out + 2 * n + i, rotated.to(tl.int32, bitcast=True), mask=mask)
    tl.store(out + 3 * n + i, libdevice.popc(a), mask=mask)
    sign_free = tl.load(floats + i, mask=mask, other=1.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(out + 4 * n + i, sign_free, mask=mask)
    tl.store(floats + i, sign_free.to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def dropout(x, out, n, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    keep = tl.rand(seed, i) > p
    tl.store(out + i, tl.where(keep, v / (1 - p), 0.0), mask=i < n)


@triton.jit
def inline_asm(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0)
    reversed_bits = tl.inline_asm_elementwise("brev.b32 $0, $1;", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out + i, reversed_bits, mask=i < n)


def philox(seed: int, offset: Array) -> Array:
    """First word of Philox-4x32-10 at counter (offset, 0, 0, 0): what `tl.randint` gives."""
    c0, c1, c2, c3 = offset.astype(np.uint64), *(np.zeros(offset.shape, np.uint64) for _ in range(3))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ np.uint64(k0), b & low, (a >> half) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0.astype(np.uint32)


def uniform(word: Array) -> Array:
    """A float32 in [0, 1) from 32 random bits, as `tl.rand` makes it."""
    signed = word.view(np.int32)
    return np.where(signed < 0, ~signed, signed).astype(np.float32) * np.float32(4.6566127342e-10)


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _blocks(n: int, block: int) -> tuple[int]:
    return (-(-n // block),)


def make_add(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(5003, scale)
    x, y = normal(rng, n), normal(rng, n)
    return Call(
        {"x": x, "y": y, "out": poisoned(n, np.float32), "n": n}, {"BLOCK": 1024}, _blocks(n, 1024), ("out",),
        lambda: {"out": x.astype(np.float64) + y}, 1e-5,
    )  # fmt: skip


def make_mul_add_relu(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(3001, scale)
    x, y, z = (normal(rng, n) for _ in range(3))
    return Call(
        {"x": x, "y": y, "z": z, "out": poisoned(n, np.float32), "alpha": 1.75, "n": n},
        {"BLOCK": 256}, _blocks(n, 256), ("out",),
        lambda: {"out": np.maximum(1.75 * x.astype(np.float64) * y + z, 0)}, 1e-5,
    )  # fmt: skip


def make_gelu(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(2999, scale)
    x = normal(rng, n)
    return Call(
        {"x": x, "out": poisoned(n, np.float32), "n": n}, {"BLOCK": 512}, _blocks(n, 512), ("out",),
        lambda: {"out": 0.5 * x.astype(np.float64) * (1 + _erf(x * np.sqrt(0.5)))}, 1e-5,
    )  # fmt: skip


def make_gelu_tanh(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(2999, scale)
    x = normal(rng, n)

    def reference() -> dict[str, Array]:
        v = x.astype(np.float64)
        return {"out": 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))}

    return Call(
        {"x": x, "out": poisoned(n, np.float32), "n": n}, {"BLOCK": 512}, _blocks(n, 512), ("out",), reference, 1e-5
    )


def make_silu(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(4001, scale)
    x = normal(rng, n, ml_dtypes.bfloat16)
    return Call(
        {"x": x, "out": poisoned(n, ml_dtypes.bfloat16), "n": n}, {"BLOCK": 1024}, _blocks(n, 1024), ("out",),
        lambda: {"out": x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))}, 1e-2,
    )  # fmt: skip


def make_mathematics(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(1301, scale)
    x = normal(rng, n)

    def reference() -> dict[str, Array]:
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

    return Call(
        {"x": x, "out": poisoned((7, n), np.float32), "n": n}, {"BLOCK": 512}, _blocks(n, 512), ("out",),
        reference, 1e-5,
    )  # fmt: skip


def make_casts(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(1999, scale)
    x = normal(rng, n) * np.float32(20)
    outputs = {
        "as_half": np.float16, "as_brain": ml_dtypes.bfloat16, "as_int": np.int64, "as_byte": np.int8,
        "back": np.float64,
    }  # fmt: skip

    def reference() -> dict[str, Array]:
        whole = np.trunc(x).astype(np.int32)
        return {
            "as_half": x.astype(np.float16),
            "as_brain": x.astype(ml_dtypes.bfloat16),
            "as_int": whole.astype(np.int64) * 3,
            "as_byte": whole.astype(np.int8),
            "back": whole.astype(np.float64) + (x > 0),
        }

    args = {"x": x, **{name: poisoned(n, dtype) for name, dtype in outputs.items()}, "n": n}
    return Call(args, {"BLOCK": 256}, _blocks(n, 256), tuple(outputs), reference, 0.0)


def make_fp8_casts(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(1999, scale)
    x = normal(rng, n)
    outputs = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "back": np.float32}

    def reference() -> dict[str, Array]:
        narrow = x.astype(ml_dtypes.float8_e4m3fn)
        return {"e4m3": narrow, "e5m2": x.astype(ml_dtypes.float8_e5m2), "back": narrow.astype(np.float32)}

    args = {"x": x, **{name: poisoned(n, dtype) for name, dtype in outputs.items()}, "n": n}
    return Call(args, {"BLOCK": 256}, _blocks(n, 256), tuple(outputs), reference, 0.0)


def make_integers(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(777, scale)
    x, y = (rng.integers(-(2**31) + 1, 2**31, n, np.int32) for _ in range(2))
    y[::2] >>= 20
    y[(y == 0) | (y == -1)] = 7

    def reference() -> dict[str, Array]:
        a, b = x.astype(np.int64), y.astype(np.int64)
        quotient = np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
        rows = [
            a * b + 12345,
            quotient,
            a - quotient * b,
            np.minimum(a, b) - np.maximum(a, -b),
            a * b >> 16,
            np.abs(a >> 1),
        ]
        return {"out": np.stack(rows).astype(np.int32)}

    return Call(
        {"x": x, "y": y, "out": poisoned((6, n), np.int32), "n": n}, {"BLOCK": 256}, _blocks(n, 256), ("out",),
        reference, 0.0,
    )  # fmt: skip


def make_unsigned(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(777, scale)
    x, y = (rng.integers(1, 2**32, n, np.uint32) for _ in range(2))
    y[::2] = (y[::2] >> 20) | 1

    def reference() -> dict[str, Array]:
        a, b = x.astype(np.uint64), y.astype(np.uint64)
        halved = (x.astype(np.float32) * np.float32(0.5)).astype(np.uint64)
        rows = [a // b, a % b, a > b, a * b >> 32, np.maximum(a, b) - np.minimum(a, b), halved, a * b >> 7]
        return {"out": np.stack([row.astype(np.uint32) for row in rows])}

    return Call(
        {"x": x, "y": y, "out": poisoned((7, n), np.uint32), "n": n}, {"BLOCK": 256}, _blocks(n, 256), ("out",),
        reference, 0.0,
    )  # fmt: skip


def make_bits(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(777, scale)
    x, y = (rng.integers(-(2**31), 2**31, n, np.int32) for _ in range(2))
    floats = normal(rng, n)
    initial = floats.copy()

    def reference() -> dict[str, Array]:
        shift, u = y & 31, x.view(np.uint32)
        rows = [
            (x & y) ^ (x | ~y),
            (x << shift) ^ (x >> shift),
            ((u << np.uint32(7)) | (u >> np.uint32(25))).view(np.int32),
            np.bitwise_count(u).astype(np.int32),
            np.abs(initial).view(np.int32),
        ]
        return {"out": np.stack(rows), "floats": np.abs(initial)}

    return Call(
        {"x": x, "y": y, "out": poisoned((5, n), np.int32), "floats": floats, "n": n},
        {"BLOCK": 256}, _blocks(n, 256), ("out", "floats"), reference, 0.0,
    )  # fmt: skip


def make_dropout(rng: np.random.Generator, scale: float) -> Call:
    n, p = scaled(3001, scale), 0.25
    x, seed = normal(rng, n), int(rng.integers(1, 2**31))

    def reference() -> dict[str, Array]:
        keep = uniform(philox(seed, np.arange(n))) > np.float32(p)
        return {"out": np.where(keep, x.astype(np.float64) / (1 - p), 0)}

    return Call(
        {"x": x, "out": poisoned(n, np.float32), "n": n, "p": p, "seed": seed},
        {"BLOCK": 512}, _blocks(n, 512), ("out",), reference, 1e-5,
    )  # fmt: skip


def make_inline_asm(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(999, scale)
    x = rng.integers(1, 2**31, n, np.int32)

    def reference() -> dict[str, Array]:
        bits = np.unpackbits(x.view(np.uint8).reshape(n, 4), axis=1, bitorder="little")
        return {"out": np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.int32).ravel()}

    return Call(
        {"x": x, "out": poisoned(n, np.int32), "n": n}, {"BLOCK": 256}, _blocks(n, 256), ("out",), reference, 0.0
    )


CASES = (
    Case("add", add, make_add),
    Case("mul_add_relu", mul_add_relu, make_mul_add_relu),
    Case("gelu", gelu, make_gelu),
    Case("gelu_tanh", gelu_tanh, make_gelu_tanh),
    Case("silu_bf16", silu, make_silu),
    Case("mathematics", mathematics, make_mathematics),
    Case("casts", casts, make_casts),
    Case("fp8_casts", fp8_casts, make_fp8_casts, min_sm=90),
    Case("integers", integers, make_integers),
    Case("unsigned", unsigned, make_unsigned),
    Case("bits", bits, make_bits),
    Case("dropout", dropout, make_dropout),
    Case("inline_asm", inline_asm, make_inline_asm, evaluable=False),
)
