"""The kernels that benchmarks time, at the sizes given in the documentation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton
import triton.language as tl

import paellapy as pp


@triton.jit
def add(x, y, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@pp.kernel
@triton.jit
def copy(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def softmax(out, x, columns, B: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, B)
    v = tl.load(x + row * columns + c, mask=c < columns, other=-float("inf"))
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row * columns + c, e / tl.sum(e, axis=0), mask=c < columns)


@triton.jit
def layer_norm(x, out, weight, bias, columns, eps, B: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, B)
    inside = c < columns
    v = tl.load(x + row * columns + c, mask=inside, other=0.0)
    centred = tl.where(inside, v - tl.sum(v, axis=0) / columns, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    w, b = tl.load(weight + c, mask=inside), tl.load(bias + c, mask=inside)
    tl.store(out + row * columns + c, centred * scale * w + b, mask=inside)


@triton.jit
def gemm(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, G: tl.constexpr):
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (G * columns)
    height = min(rows - group * G, G)
    pm = group * G + (pid % (G * columns)) % height
    pn = (pid % (G * columns)) // height
    rm, rn, rk = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN), tl.arange(0, BK)
    ap, bp = a + rm[:, None] * K + rk[None, :], b + rk[:, None] * N + rn[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(ap), tl.load(bp), acc)
        ap += BK
        bp += BK * N
    tl.store(c + rm[:, None] * N + rn[None, :], acc.to(tl.float16))


@triton.jit
def attention(q, k, v, out, T, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    head = tl.program_id(1) * T * D
    rm, rd, rn = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN)
    query = tl.load(q + head + rm[:, None] * D + rd[None, :])
    highest = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for s in range(0, T, BN):
        keys = tl.load(k + head + (s + rn)[None, :] * D + rd[:, None])
        scores = tl.dot(query, keys) * (scale * 1.44269504)
        new = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(highest - new)
        total = total * shrink + tl.sum(p, 1)
        values = tl.load(v + head + (s + rn)[:, None] * D + rd[None, :])
        acc = tl.dot(p.to(tl.float16), values, acc * shrink[:, None])
        highest = new
    tl.store(out + head + rm[:, None] * D + rd[None, :], (acc / total[:, None]).to(tl.float16))


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel with its arguments on a device; `launches` go into one timed graph."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    launches: int = 50


def works(device: Any) -> list[Work]:
    """The kernels the cost of reporting is quoted for."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = np.float32) -> Any:
        return device.array(rng.standard_normal(shape, dtype=np.float32).astype(dtype))

    def addition(name: str, blocks: int, launches: int) -> Work:
        n = blocks * 1024
        args = (normal(n), normal(n), device.empty(n), n)
        return Work(name, add, (blocks,), args, {"B": 1024, "num_warps": 4}, launches)

    rows, columns, size, heads, length = 8192, 1000, 2048, 64, 1024
    half = [normal(heads, length, 64, dtype=np.float16) for _ in range(3)]
    return [
        addition("add, 16384 blocks", 16384, 20),
        addition("add, 1024 blocks", 1024, 200),
        Work("softmax 8192×1000", softmax, (rows,), (device.empty((rows, columns)), normal(rows, columns), columns),
             {"B": 1024, "num_warps": 4}),
        Work("layer norm 8192×1000", layer_norm, (rows,), (normal(rows, columns), device.empty((rows, columns)),
             normal(columns), normal(columns), columns, 1e-5), {"B": 1024, "num_warps": 4}),
        Work("GEMM fp16 2048³", gemm, (256,), (normal(size, size, dtype=np.float16),
             normal(size, size, dtype=np.float16), device.empty((size, size), np.float16), size, size, size),
             {"BM": 128, "BN": 128, "BK": 64, "G": 8, "num_warps": 8, "num_stages": 3}),
        Work("attention fp16, 64 heads × 1024", attention, (length // 128, heads),
             (*half, device.empty((heads, length, 64), np.float16), length, 0.125),
             {"D": 64, "BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3}, 20),
    ]  # fmt: skip
