"""Blocks that meet in memory: atomics of every kind, work queues, locks, barriers across the grid."""

from __future__ import annotations

from functools import partial

import numpy as np
import triton
import triton.language as tl

from .case import Array, Call, Case, normal, poisoned, scaled


@triton.jit
def histogram_atomics(x, counts, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(x + i, mask=i < n, other=0), 1, mask=i < n)


@triton.jit
def histogram_tiles(x, counts, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.histogram(tl.load(x + i, mask=i < n, other=0), BINS, mask=i < n)
    tl.atomic_add(counts + tl.arange(0, BINS), tile)


@triton.jit
def atomic_kinds(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0)
    tl.atomic_max(out + i % 4, v, mask=i < n)
    tl.atomic_min(out + 4 + i % 4, v, mask=i < n)
    tl.atomic_and(out + 8 + i % 4, v, mask=i < n)
    tl.atomic_or(out + 12 + i % 4, v, mask=i < n)
    tl.atomic_xor(out + 16 + i % 4, v, mask=i < n)


@triton.jit
def float_atomics(x, total, top, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.atomic_add(total, tl.sum(v, axis=0))
    tl.atomic_max(top + i % 8, v, mask=i < n)


@triton.jit
def work_queue(x, out, counter, n, BLOCK: tl.constexpr):
    # Blocks draw tiles from a counter, so the result of the atomic decides what a block does.
    tile = tl.atomic_add(counter, 1)
    while tile < tl.cdiv(n, BLOCK):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) * 2.0 + 1.0, mask=i < n)
        tile = tl.atomic_add(counter, 1)


@triton.jit
def last_block_sums(x, partial, total, counter, n, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    pid = tl.program_id(0)
    blocks = tl.num_programs(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(partial + pid, tl.sum(tl.load(x + i, mask=i < n, other=0.0), axis=0))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == blocks - 1:
        b = tl.arange(0, BLOCKS)
        tl.store(total, tl.sum(tl.load(partial + b, mask=b < blocks, other=0.0, volatile=True), axis=0))


@triton.jit
def spin_lock(x, lock, total, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x + i, mask=i < n, other=0.0), axis=0)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total, volatile=True) + part)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def grid_barrier(x, partial, out, counter, n, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    # Every block waits for every other: it never ends unless all of them are on the GPU at once.
    pid = tl.program_id(0)
    blocks = tl.num_programs(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(partial + pid, tl.sum(v, axis=0))
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel")
    while tl.atomic_add(counter, 0, sem="acq_rel") < blocks:
        pass
    b = tl.arange(0, BLOCKS)
    total = tl.sum(tl.load(partial + b, mask=b < blocks, other=0.0, volatile=True), axis=0)
    tl.store(out + i, v / total, mask=i < n)


def make_histogram(rng: np.random.Generator, scale: float, **constexprs: int) -> Call:
    n, bins = scaled(3001, scale), 32
    x, counts = rng.integers(0, bins, n, np.int32), rng.integers(1, 9, bins, np.int32)
    initial = counts.copy()
    return Call(
        {"x": x, "counts": counts, "n": n}, {"BLOCK": 256, **constexprs}, (-(-n // 256),), ("counts",),
        lambda: {"counts": initial + np.bincount(x, minlength=bins).astype(np.int32)}, 0.0,
    )  # fmt: skip


def make_atomic_kinds(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(1001, scale)
    x, out = rng.integers(-(2**31), 2**31, n, np.int32), rng.integers(-(2**31), 2**31, (5, 4), np.int32)
    initial = out.copy()
    kinds = (np.maximum, np.minimum, np.bitwise_and, np.bitwise_or, np.bitwise_xor)

    def reference() -> dict[str, Array]:
        out = initial.copy()
        for kind, row in zip(kinds, out, strict=True):
            row[:] = [kind.reduce(x[c::4], initial=row[c]) for c in range(4)]
        return {"out": out}

    return Call({"x": x, "out": out, "n": n}, {"BLOCK": 128}, (-(-n // 128),), ("out",), reference, 0.0)


def make_float_atomics(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(4001, scale)
    x = normal(rng, n) + np.float32(1)
    return Call(
        {"x": x, "total": np.float32([3]), "top": np.full(8, -1e30, np.float32), "n": n},
        {"BLOCK": 256}, (-(-n // 256),), ("total", "top"),
        lambda: {"total": np.array([3 + x.sum(dtype=np.float64)]), "top": np.array([x[c::8].max() for c in range(8)])},
        1e-5,
    )  # fmt: skip


def make_work_queue(rng: np.random.Generator, scale: float) -> Call:
    n, blocks = scaled(4001, scale), 6
    x, tiles = normal(rng, n), -(-n // 256)
    args = {"x": x, "out": poisoned(n, np.float32), "counter": np.zeros(1, np.int32), "n": n}
    return Call(
        args, {"BLOCK": 256}, (blocks,), ("out", "counter"),
        lambda: {"out": x.astype(np.float64) * 2 + 1, "counter": np.int32([tiles + blocks])}, 1e-5,
    )  # fmt: skip


def make_last_block_sums(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(4001, scale)
    blocks = -(-n // 256)
    x = normal(rng, n) + np.float32(1)
    args = {
        "x": x, "partial": poisoned(blocks, np.float32), "total": poisoned(1, np.float32),
        "counter": np.zeros(1, np.int32), "n": n,
    }  # fmt: skip

    def reference() -> dict[str, Array]:
        partial = np.add.reduceat(x.astype(np.float64), np.arange(0, n, 256))
        return {"partial": partial, "total": partial.sum(keepdims=True), "counter": np.int32([blocks])}

    constexprs = {"BLOCK": 256, "BLOCKS": 1 << (blocks - 1).bit_length()}
    return Call(args, constexprs, (blocks,), ("partial", "total", "counter"), reference, 1e-5)


def make_spin_lock(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(2001, scale)
    x = normal(rng, n) + np.float32(1)
    args = {"x": x, "lock": np.zeros(1, np.int32), "total": np.zeros(1, np.float32), "n": n}
    return Call(
        args, {"BLOCK": 256}, (-(-n // 256),), ("lock", "total"),
        lambda: {"lock": np.zeros(1, np.int32), "total": x.sum(dtype=np.float64, keepdims=True)}, 1e-5,
    )  # fmt: skip


def make_grid_barrier(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(4001, min(scale, 8.0))  # at most 126 blocks, so that they fit on any GPU at once
    blocks = -(-n // 256)
    x = rng.uniform(0.5, 1.5, n).astype(np.float32)
    args = {
        "x": x, "partial": poisoned(blocks, np.float32), "out": poisoned(n, np.float32),
        "counter": np.zeros(1, np.int32), "n": n,
    }  # fmt: skip

    def reference() -> dict[str, Array]:
        partial = np.add.reduceat(x.astype(np.float64), np.arange(0, n, 256))
        return {"partial": partial, "out": x / partial.sum(), "counter": np.int32([blocks])}

    constexprs = {"BLOCK": 256, "BLOCKS": 1 << (blocks - 1).bit_length()}
    return Call(args, constexprs, (blocks,), ("partial", "out", "counter"), reference, 1e-5)


CASES = (
    Case("histogram_atomics", histogram_atomics, make_histogram),
    Case("histogram_tiles", histogram_tiles, partial(make_histogram, BINS=32)),
    Case("atomic_kinds", atomic_kinds, make_atomic_kinds),
    Case("float_atomics", float_atomics, make_float_atomics, deterministic=False),
    Case("work_queue", work_queue, make_work_queue),
    Case("last_block_sums", last_block_sums, make_last_block_sums),
    Case("spin_lock", spin_lock, make_spin_lock, deterministic=False),
    Case("grid_barrier", grid_barrier, make_grid_barrier, sliceable=False),
)
