"""Attention: the fused forward pass, causal or not, and one decoding step over a paged cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import triton
import triton.language as tl

from .case import Array, Call, Case, blocks, normal, poisoned, scaled


@triton.jit
def attention(
    q, k, v, out, head_stride, T, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m = block * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    rows = head * head_stride + m[:, None] * D + d[None, :]
    query = tl.load(q + rows, mask=(m < T)[:, None], other=0.0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    end = T
    if CAUSAL:
        end = tl.minimum(T, (block + 1) * BM)
    for start in range(0, end, BN):
        n = start + tl.arange(0, BN)
        keys = tl.load(k + head * head_stride + n[None, :] * D + d[:, None], mask=(n < T)[None, :], other=0.0)
        scores = tl.dot(query, keys, input_precision=PRECISION) * (scale * 1.4426950408889634)
        seen = (n < T)[None, :]
        if CAUSAL:
            seen = seen & (m[:, None] >= n[None, :])
        scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=1)
        values = tl.load(v + head * head_stride + n[:, None] * D + d[None, :], mask=(n < T)[:, None], other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
        top = new_top
    tl.store(out + rows, (acc / total[:, None]).to(out.dtype.element_ty), mask=(m < T)[:, None])


@triton.jit
def paged_decode(q, cache_k, cache_v, pages, lengths, out, scale, max_pages, D: tl.constexpr, PAGE: tl.constexpr):
    # One query a block; its trip count and its addresses both come from memory.
    sequence = tl.program_id(0)
    length = tl.load(lengths + sequence)
    d = tl.arange(0, D)
    slot = tl.arange(0, PAGE)
    query = tl.load(q + sequence * D + d).to(tl.float32)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for first in range(0, length, PAGE):
        page = tl.load(pages + sequence * max_pages + first // PAGE).to(tl.int64)
        where = page * PAGE * D + slot[:, None] * D + d[None, :]
        keys = tl.load(cache_k + where).to(tl.float32)
        scores = tl.sum(keys * query[None, :], axis=1) * scale
        scores = tl.where(first + slot < length, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=0))
        weights = tl.exp(scores - new_top)
        decay = tl.exp(top - new_top)
        total = total * decay + tl.sum(weights, axis=0)
        values = tl.load(cache_v + where).to(tl.float32)
        acc = acc * decay + tl.sum(weights[:, None] * values, axis=0)
        top = new_top
    tl.store(out + sequence * D + d, (acc / total).to(out.dtype.element_ty))


def _attend(q: Array, k: Array, v: Array, scale: float, seen: Array | None = None) -> Array:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ np.swapaxes(k, -1, -2) * scale
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def make_attention(rng: np.random.Generator, scale: float, *, dtype: Any, causal: bool, tolerance: float) -> Call:
    heads, length, width = scaled(3, scale), 75, 32
    q, k, v = (normal(rng, (heads, length, width), dtype) for _ in range(3))
    factor = width**-0.5
    args = {
        "q": q, "k": k, "v": v, "out": poisoned(q.shape, dtype), "head_stride": length * width, "T": length,
        "scale": factor,
    }  # fmt: skip
    precision = "ieee" if dtype is np.float32 else "tf32"
    constexprs = {"D": width, "BM": 32, "BN": 32, "CAUSAL": causal, "PRECISION": precision}
    seen = np.tril(np.ones((length, length), bool)) if causal else None
    return Call(
        args, constexprs, (*blocks(length, 32), heads), ("out",),
        lambda: {"out": _attend(q, k, v, factor, seen)}, tolerance,
    )  # fmt: skip


def make_paged_decode(rng: np.random.Generator, scale: float) -> Call:
    sequences, width, page, max_pages = scaled(9, scale), 64, 16, 6
    lengths = rng.integers(1, page * max_pages + 1, sequences, np.int32)
    pages = rng.permutation(sequences * max_pages).astype(np.int32).reshape(sequences, max_pages)
    q = normal(rng, (sequences, width), np.float16)
    cache_k, cache_v = (normal(rng, (sequences * max_pages, page, width), np.float16) for _ in range(2))
    factor = width**-0.5

    def reference() -> dict[str, Array]:
        k, v = (cache[pages].reshape(sequences, -1, width) for cache in (cache_k, cache_v))
        seen = (np.arange(page * max_pages) < lengths[:, None])[:, None, :]
        return {"out": _attend(q[:, None, :], k, v, factor, seen)[:, 0]}

    args = {
        "q": q, "cache_k": cache_k, "cache_v": cache_v, "pages": pages, "lengths": lengths,
        "out": poisoned(q.shape, np.float16), "scale": factor, "max_pages": max_pages,
    }  # fmt: skip
    return Call(args, {"D": width, "PAGE": page}, (sequences,), ("out",), reference, 1e-2)


CASES = (
    *(
        Case(
            f"attention_{name}{'_causal' if causal else ''}", attention,
            partial(make_attention, dtype=dtype, causal=causal, tolerance=tolerance),
        )
        for name, dtype, tolerance in (("fp32", np.float32, 1e-5), ("fp16", np.float16, 1e-2))
        for causal in (False, True)
    ),
    Case("paged_decode", paged_decode, make_paged_decode),
)  # fmt: skip
