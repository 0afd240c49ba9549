"""Branches and loops: early returns, data-dependent ends, grids walked by fewer blocks."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from .case import Array, Call, Case, normal, options, poisoned, scaled


@triton.jit
def early_return(x, out, blocks, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid >= blocks:
        return
    i = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 3, mask=i < n)


@triton.jit
def two_returns(x, out, n):
    pid = tl.program_id(0)
    if pid >= n:
        return
    v = tl.load(x + pid)
    if v < 0:
        tl.store(out + pid, -1)
        return
    tl.store(out + pid, v * v)


@triton.jit
def collatz(x, steps, next_value, n):
    pid = tl.program_id(0)
    if pid < n:
        v = tl.load(x + pid)
        if v % 2 == 0:
            tl.store(next_value + pid, v // 2)
        else:
            tl.store(next_value + pid, 3 * v + 1)
        count = 0
        while v > 1:
            v = tl.where(v % 2 == 0, v // 2, 3 * v + 1)
            count += 1
        tl.store(steps + pid, count)


@triton.jit
def bisect(x, table, out, n, size, BLOCK: tl.constexpr):
    # A loop whose carried values are whole tiles, ended by a reduction over them.
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + size
    while tl.max(high - low, axis=0) > 0:
        open_ = low < high
        middle = (low + high) // 2
        right = tl.load(table + middle, mask=open_, other=0.0) < v
        low = tl.where(open_ & right, middle + 1, low)
        high = tl.where(open_ & ~right, middle, high)
    tl.store(out + i, low, mask=i < n)


@triton.jit
def nested_loops(x, out, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # Triangular: the inner bound depends on the outer index; the unrolled loop becomes straight-line code.
    pid = tl.program_id(0)
    total = 0.0
    for row in range(pid, rows, tl.num_programs(0)):
        for start in range(0, row + 1, BLOCK):
            c = start + tl.arange(0, BLOCK)
            total += tl.sum(tl.load(x + row * columns + c, mask=c <= row, other=0.0), axis=0)
    for power in tl.static_range(ROWS):
        tl.store(out + pid * ROWS + power, total * (power + 1))


@triton.jit
def persistent(x, out, n, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.exp(tl.load(x + i, mask=i < n)), mask=i < n)


@triton.jit
def checked_gather(x, index, out, n, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    where = tl.load(index + i, mask=i < n, other=0)
    tl.device_assert((where >= 0) & (where < size), "index out of range")
    tl.store(out + i, tl.load(x + where, mask=i < n), mask=i < n)


@triton.jit
def grid_2d(x, y, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    outer = tl.load(x + r, mask=r < rows)[:, None] * tl.load(y + c, mask=c < columns)[None, :]
    tl.store(out + r[:, None] * columns + c[None, :], outer, mask=mask)


@triton.jit
def grid_shape(out):
    a, b, c = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width, height, depth = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    linear = (c * height + b) * width + a
    tl.store(out + linear, linear * 1000 + width * 100 + height * 10 + depth)


def make_early_return(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(1501, scale)
    blocks = -(-n // 128)
    x = rng.integers(1, 1000, n, np.int32)
    args = {"x": x, "out": poisoned(n, np.int32), "blocks": blocks, "n": n}
    return Call(args, {"BLOCK": 128}, (blocks + 5,), ("out",), lambda: {"out": x * 3}, 0.0)


def make_two_returns(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(93, scale)
    x = rng.integers(1, 100, n, np.int32) * rng.choice(np.int32([-1, 1]), n)
    args = {"x": x, "out": poisoned(n, np.int32), "n": n}
    return Call(args, {}, (n + 3,), ("out",), lambda: {"out": np.where(x < 0, np.int32(-1), x * x)}, 0.0)


def make_collatz(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(61, scale)
    x = rng.integers(1, 100, n, np.int32)

    def steps(v: int) -> int:
        count = 0
        while v > 1:
            v, count = (v // 2 if v % 2 == 0 else 3 * v + 1), count + 1
        return count

    args = {"x": x, "steps": poisoned(n, np.int32), "next_value": poisoned(n, np.int32), "n": n}
    return Call(
        args, {}, (n + 3,), ("steps", "next_value"),
        lambda: {
            "steps": np.int32([steps(int(v)) for v in x]),
            "next_value": np.where(x % 2 == 0, x // 2, 3 * x + 1),
        },
        0.0,
    )  # fmt: skip


def make_bisect(rng: np.random.Generator, scale: float) -> Call:
    n, size = scaled(901, scale), 300
    x, table = normal(rng, n), np.sort(normal(rng, size))
    args = {"x": x, "table": table, "out": poisoned(n, np.int32), "n": n, "size": size}
    return Call(
        args, {"BLOCK": 128}, (-(-n // 128),), ("out",),
        lambda: {"out": np.searchsorted(table, x, side="left").astype(np.int32)}, 0.0,
    )  # fmt: skip


def make_nested_loops(rng: np.random.Generator, scale: float) -> Call:
    rows, blocks = scaled(71, scale**0.5), 9
    x = normal(rng, (rows, rows)) + np.float32(1)

    def reference() -> dict[str, Array]:
        sums = np.tril(x.astype(np.float64)).sum(axis=1)
        totals = np.array([sums[block::blocks].sum() for block in range(blocks)])
        return {"out": totals[:, None] * np.arange(1, 4)}

    args = {"x": x, "out": poisoned((blocks, 3), np.float32), "rows": rows, "columns": rows}
    return Call(args, {"ROWS": 3, "BLOCK": 32}, (blocks,), ("out",), reference, 1e-5)


def make_persistent(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(5501, scale)
    x = normal(rng, n)
    args = {"x": x, "out": poisoned(n, np.float32), "n": n}
    return Call(args, {"BLOCK": 256}, (7,), ("out",), lambda: {"out": np.exp(x.astype(np.float64))}, 1e-5)


def make_checked_gather(rng: np.random.Generator, scale: float) -> Call:
    n, size = scaled(801, scale), 97
    x, index = normal(rng, size), rng.integers(0, size, n, np.int32)
    args = {"x": x, "index": index, "out": poisoned(n, np.float32), "n": n, "size": size}
    return Call(
        args, {"BLOCK": 256}, (-(-n // 256),), ("out",), lambda: {"out": x[index]}, 0.0, options(debug=True)
    )  # fmt: skip


def make_grid_2d(rng: np.random.Generator, scale: float) -> Call:
    rows, columns = scaled(45, scale), 130
    x, y = normal(rng, rows), normal(rng, columns)
    args = {"x": x, "y": y, "out": poisoned((rows, columns), np.float32), "rows": rows, "columns": columns}
    return Call(
        args, {"ROWS": 16, "COLUMNS": 64}, (-(-rows // 16), -(-columns // 64)), ("out",),
        lambda: {"out": np.outer(x.astype(np.float64), y)}, 1e-5,
    )  # fmt: skip


def make_grid_shape(rng: np.random.Generator, scale: float) -> Call:
    width, height, depth = scaled(7, scale), 5, 3
    linear = np.arange(width * height * depth, dtype=np.int32)
    return Call(
        {"out": poisoned(linear.shape, np.int32)}, {}, (width, height, depth), ("out",),
        lambda: {"out": linear * 1000 + width * 100 + height * 10 + depth}, 0.0,
    )  # fmt: skip


CASES = (
    Case("early_return", early_return, make_early_return),
    Case("two_returns", two_returns, make_two_returns),
    Case("collatz", collatz, make_collatz),
    Case("bisect", bisect, make_bisect),
    Case("nested_loops", nested_loops, make_nested_loops),
    Case("persistent", persistent, make_persistent),
    Case("checked_gather", checked_gather, make_checked_gather),
    Case("grid_2d", grid_2d, make_grid_2d),
    Case("grid_shape", grid_shape, make_grid_shape),
)
