"""Matrix products: precisions, tile orders, pointer styles, batches, split-K."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

from .case import Array, Call, Case, normal, options, poisoned, scaled


@triton.jit
def gemm(
    a, b, c, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    m = (pid // columns) * BM + tl.arange(0, BM)
    n = (pid % columns) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_tile = a + m[:, None] * stride_am + k[None, :] * stride_ak
    b_tile = b + k[:, None] * stride_bk + n[None, :] * stride_bn
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a_tile, mask=(m < M)[:, None] & (k + start < K)[None, :], other=0.0)
        right = tl.load(b_tile, mask=(k + start < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        a_tile += BK * stride_ak
        b_tile += BK * stride_bk
    where = c + m[:, None] * stride_cm + n[None, :] * stride_cn
    tl.store(where, acc.to(c.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def gemm_bias_relu(
    a, b, bias, c, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    # Tiles go down GROUP rows before the next column, so that neighbours share what is in L2.
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BM)
    per_group = GROUP * tl.cdiv(N, BN)
    first = (pid // per_group) * GROUP
    height = min(tiles_m - first, GROUP)
    m = (first + (pid % per_group) % height) * BM + tl.arange(0, BM)
    n = ((pid % per_group) // height) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for block in range(tl.cdiv(K, BK)):
        k = block * BK + tl.arange(0, BK)
        left = tl.load(a + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(b + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        acc += tl.dot(left, right)
    acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if RELU:
        acc = tl.maximum(acc, 0.0)
    tl.store(c + m[:, None] * N + n[None, :], acc.to(c.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def gemm_block_pointers(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    a_block = tl.make_block_ptr(a, (M, K), (K, 1), (m, 0), (BM, BK), (1, 0))
    b_block = tl.make_block_ptr(b, (K, N), (N, 1), (0, n), (BK, BN), (1, 0))
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        left = tl.load(a_block, boundary_check=(0, 1), padding_option="zero")
        right = tl.load(b_block, boundary_check=(0, 1), padding_option="zero")
        acc = tl.dot(left, right, acc)
        a_block = tl.advance(a_block, (0, BK))
        b_block = tl.advance(b_block, (BK, 0))
    c_block = tl.make_block_ptr(c, (M, N), (N, 1), (m, n), (BM, BN), (1, 0))
    tl.store(c_block, acc.to(c.dtype.element_ty), boundary_check=(0, 1))


@triton.jit
def gemm_descriptors(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    a_desc = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    b_desc = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    c_desc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_desc.load([m, k]), b_desc.load([k, n]), acc)
    c_desc.store([m, n], acc.to(c.dtype.element_ty))


@triton.jit
def batched_gemm(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    batch = tl.program_id(2).to(tl.int64)
    a += batch * M * K
    b += batch * N * K
    c += batch * M * N
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(b + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        acc += tl.dot(left, tl.trans(right), input_precision="ieee")
    tl.store(c + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def split_k_gemm(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(tl.program_id(2) * BK, K, SPLIT * BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(b + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(left, right, acc)
    tl.atomic_add(c + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :], sem="relaxed")


@triton.jit
def gemm_warp_specialized(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    a_desc = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    b_desc = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    c_desc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=True):
        acc = tl.dot(a_desc.load([m, k]), b_desc.load([n, k]).T, acc)
    c_desc.store([m, n], acc.to(c.dtype.element_ty))


def _operands(rng: np.random.Generator, m: int, n: int, k: int, dtype: Any) -> tuple[Array, Array]:
    return normal(rng, (m, k), dtype), (normal(rng, (k, n)) / np.float32(np.sqrt(k))).astype(dtype)


def _product(a: Array, b: Array) -> Array:
    return a.astype(np.float64) @ b.astype(np.float64)


def _tiles(m: int, n: int, bm: int, bn: int) -> tuple[int, int]:
    return -(-m // bm), -(-n // bn)


def make_gemm(
    rng: np.random.Generator, scale: float, *, dtype: Any, precision: str = "ieee", tolerance: float, out: Any = None,
    tile: tuple[int, int, int] = (32, 32, 32), **compiler: int,
) -> Call:  # fmt: skip
    side = scale**0.5
    m, n, k = scaled(125, side), scaled(94, side), 77
    a, b = _operands(rng, m, n, k, dtype)
    args = {
        "a": a, "b": b, "c": poisoned((m, n), out or dtype), "M": m, "N": n, "K": k, "stride_am": k, "stride_ak": 1,
        "stride_bk": n, "stride_bn": 1, "stride_cm": n, "stride_cn": 1,
    }  # fmt: skip
    bm, bn, bk = tile
    constexprs = {"BM": bm, "BN": bn, "BK": bk, "PRECISION": precision}
    grid = (int(np.prod(_tiles(m, n, bm, bn))),)
    return Call(args, constexprs, grid, ("c",), lambda: {"c": _product(a, b)}, tolerance, options(**compiler))


def make_gemm_bias_relu(rng: np.random.Generator, scale: float) -> Call:
    side = scale**0.5
    m, n, k = scaled(200, side), scaled(150, side), 96
    a, b = _operands(rng, m, n, k, np.float16)
    bias = normal(rng, n, np.float16)
    args = {"a": a, "b": b, "bias": bias, "c": poisoned((m, n), np.float16), "M": m, "N": n, "K": k}
    constexprs = {"BM": 32, "BN": 32, "BK": 32, "GROUP": 4, "RELU": True}
    grid = (int(np.prod(_tiles(m, n, 32, 32))),)
    return Call(args, constexprs, grid, ("c",), lambda: {"c": np.maximum(_product(a, b) + bias, 0)}, 1e-2)


def make_tiled(
    rng: np.random.Generator, scale: float, *, dtype: Any = np.float16, tile: tuple[int, int, int] = (32, 32, 32),
    transposed: bool = False, **compiler: int,
) -> Call:  # fmt: skip
    """A product on a 2-D grid of tiles. Tensor descriptors need row strides divisible by 16 bytes, so N and K give
    such.
    """
    side = scale**0.5
    m, n, k = scaled(101, side), 16 * scaled(5, side), 72
    a, b = _operands(rng, m, n, k, dtype)
    right = np.ascontiguousarray(b.T) if transposed else b
    args = {"a": a, "b": right, "c": poisoned((m, n), dtype), "M": m, "N": n, "K": k}
    constexprs = dict(zip(("BM", "BN", "BK"), tile, strict=True))
    grid = _tiles(m, n, tile[0], tile[1])
    return Call(args, constexprs, grid, ("c",), lambda: {"c": _product(a, b)}, 1e-2, options(**compiler))


def make_batched_gemm(rng: np.random.Generator, scale: float) -> Call:
    batch, m, n, k = scaled(5, scale), 45, 38, 50
    a, b = normal(rng, (batch, m, k)), normal(rng, (batch, n, k))
    args = {"a": a, "b": b, "c": poisoned((batch, m, n), np.float32), "M": m, "N": n, "K": k}
    return Call(
        args, {"BM": 16, "BN": 16, "BK": 16}, (*_tiles(m, n, 16, 16), batch), ("c",),
        lambda: {"c": _product(a, b.transpose(0, 2, 1))}, 1e-5,
    )  # fmt: skip


def make_split_k_gemm(rng: np.random.Generator, scale: float) -> Call:
    side = scale**0.5
    m, n, k, split = scaled(45, side), scaled(60, side), 300, 3
    a, b = _operands(rng, m, n, k, np.float16)
    c = normal(rng, (m, n))
    initial = c.copy()
    args = {"a": a, "b": b, "c": c, "M": m, "N": n, "K": k}
    constexprs = {"BM": 32, "BN": 32, "BK": 32, "SPLIT": split}
    grid = (*_tiles(m, n, 32, 32), split)
    return Call(args, constexprs, grid, ("c",), lambda: {"c": _product(a, b) + initial}, 1e-5)


E4M3 = ml_dtypes.float8_e4m3fn
CASES = (
    Case("gemm_fp32", gemm, partial(make_gemm, dtype=np.float32, tolerance=1e-5)),
    Case("gemm_tf32", gemm, partial(make_gemm, dtype=np.float32, precision="tf32", tolerance=2e-3)),
    Case("gemm_tf32x3", gemm, partial(make_gemm, dtype=np.float32, precision="tf32x3", tolerance=1e-5)),
    Case("gemm_fp16", gemm, partial(make_gemm, dtype=np.float16, precision="tf32", tolerance=1e-2, tile=(64, 64, 32))),
    Case("gemm_bf16", gemm, partial(make_gemm, dtype=ml_dtypes.bfloat16, precision="tf32", tolerance=1e-2)),
    Case("gemm_fp8", gemm, partial(make_gemm, dtype=E4M3, out=np.float16, precision="tf32", tolerance=5e-2), min_sm=90),
    Case(
        "gemm_two_ctas", gemm,
        partial(make_gemm, dtype=np.float16, precision="tf32", tolerance=1e-2, tile=(128, 64, 32), num_ctas=2),
        min_sm=90,
    ),
    Case("gemm_bias_relu", gemm_bias_relu, make_gemm_bias_relu),
    # Later Tritons have no block pointers: tensor descriptors took their place.
    *([Case("gemm_block_pointers", gemm_block_pointers, make_tiled)] if hasattr(tl, "advance") else []),
    Case("gemm_descriptors", gemm_descriptors, make_tiled, scratch=True),
    Case("batched_gemm", batched_gemm, make_batched_gemm),
    Case("split_k_gemm", split_k_gemm, make_split_k_gemm, deterministic=False),
    Case(
        "gemm_warp_specialized", gemm_warp_specialized,
        partial(make_tiled, tile=(128, 64, 64), transposed=True, num_stages=3), min_sm=90, scratch=True,
    ),
)  # fmt: skip
