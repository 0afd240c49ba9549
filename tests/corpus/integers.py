"""Integers and bits: signed and unsigned arithmetic, counter-based random numbers, PTX of one's own."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .case import Array, Call, Case, blocks, drawn, elementwise, normal, poisoned, scaled


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
    """First word of Philox-4x32-10 at counter (offset, 0, 0, 0), as `tl.randint` returns it."""
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


def _divisors(rng: np.random.Generator, n: int) -> Array:
    y = rng.integers(-(2**31) + 1, 2**31, n, np.int32)
    y[::2] >>= 20
    y[(y == 0) | (y == -1)] = 7
    return y


def _integers(x: Array, y: Array) -> dict[str, Array]:
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


def _unsigned_divisors(rng: np.random.Generator, n: int) -> Array:
    y = rng.integers(1, 2**32, n, np.uint32)
    y[::2] = (y[::2] >> 20) | 1
    return y


def _unsigned(x: Array, y: Array) -> dict[str, Array]:
    a, b = x.astype(np.uint64), y.astype(np.uint64)
    halved = (x.astype(np.float32) * np.float32(0.5)).astype(np.uint64)
    rows = [a // b, a % b, a > b, a * b >> 32, np.maximum(a, b) - np.minimum(a, b), halved, a * b >> 7]
    return {"out": np.stack([row.astype(np.uint32) for row in rows])}


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
        {"BLOCK": 256}, blocks(n, 256), ("out", "floats"), reference, 0.0,
    )  # fmt: skip


def make_dropout(rng: np.random.Generator, scale: float) -> Call:
    n, p = scaled(3001, scale), 0.25
    x, seed = normal(rng, n), int(rng.integers(1, 2**31))

    def reference() -> dict[str, Array]:
        keep = uniform(philox(seed, np.arange(n))) > np.float32(p)
        return {"out": np.where(keep, x.astype(np.float64) / (1 - p), 0)}

    return Call(
        {"x": x, "out": poisoned(n, np.float32), "n": n, "p": p, "seed": seed},
        {"BLOCK": 512}, blocks(n, 512), ("out",), reference, 1e-5,
    )  # fmt: skip


def _reversed_bits(x: Array) -> dict[str, Array]:
    bits = np.unpackbits(x.view(np.uint8).reshape(len(x), 4), axis=1, bitorder="little")
    return {"out": np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.int32).ravel()}


CASES = (
    Case("integers", integers, elementwise(777, 256, {"x": drawn(-(2**31) + 1, 2**31), "y": _divisors},
         {"out": np.int32}, _integers, rows=(6,))),
    Case("unsigned", unsigned, elementwise(777, 256, {"x": drawn(1, 2**32, np.uint32), "y": _unsigned_divisors},
         {"out": np.uint32}, _unsigned, rows=(7,))),
    Case("bits", bits, make_bits),
    Case("dropout", dropout, make_dropout),
    Case("inline_asm", inline_asm, elementwise(999, 256, {"x": drawn(1, 2**31)}, {"out": np.int32}, _reversed_bits),
         evaluable=False),
)  # fmt: skip
