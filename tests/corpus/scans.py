"""Rows into rows: running sums, scans of affine maps, sorting."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from .case import Array, Call, Case, normal, poisoned, scaled


@triton.jit
def cumulative(x, sums, reverse, products, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < columns
    v = tl.load(x + row * columns + c, mask=mask, other=0.0)
    tl.store(sums + row * columns + c, tl.cumsum(v, axis=0), mask=mask)
    tl.store(reverse + row * columns + c, tl.cumsum(v, axis=0, reverse=True), mask=mask)
    tl.store(products + row * columns + c, tl.cumprod(1.0 + 0.1 * v, axis=0), mask=mask)


@triton.jit
def _compose(a_left, b_left, a_right, b_right):
    return a_left * a_right, b_left * a_right + b_right


@triton.jit
def linear_recurrence(a, b, out, steps, channels, STEPS: tl.constexpr, CHANNELS: tl.constexpr):
    # h[t] = a[t] * h[t-1] + b[t] as a scan of affine maps, the heart of state-space models.
    t = tl.arange(0, STEPS)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (t < steps)[:, None] & (c < channels)[None, :]
    where = t[:, None] * channels + c[None, :]
    gain = tl.load(a + where, mask=mask, other=1.0)
    drive = tl.load(b + where, mask=mask, other=0.0)
    _, h = tl.associative_scan((gain, drive), 0, _compose)
    tl.store(out + where, h, mask=mask)


@triton.jit
def sort_rows(x, ascending, descending, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < columns
    v = tl.load(x + row * columns + c, mask=mask, other=float("inf"))
    tl.store(ascending + row * columns + c, tl.sort(v), mask=mask)
    v = tl.where(mask, v, -float("inf"))
    tl.store(descending + row * columns + c, tl.sort(v, descending=True), mask=mask)


def make_cumulative(rng: np.random.Generator, scale: float) -> Call:
    rows, columns = scaled(33, scale), 200
    x = normal(rng, (rows, columns))
    names = ("sums", "reverse", "products")

    def reference() -> dict[str, Array]:
        v = x.astype(np.float64)
        return {
            "sums": v.cumsum(axis=1),
            "reverse": v[:, ::-1].cumsum(axis=1)[:, ::-1],
            "products": (1 + 0.1 * v).cumprod(axis=1),
        }

    args = {"x": x, **{name: poisoned(x.shape, np.float32) for name in names}, "columns": columns}
    return Call(args, {"BLOCK": 256}, (rows,), names, reference, 1e-5)


def make_linear_recurrence(rng: np.random.Generator, scale: float) -> Call:
    steps, channels = 60, scaled(45, scale)
    a, b = rng.uniform(0.5, 0.99, (steps, channels)).astype(np.float32), normal(rng, (steps, channels))

    def reference() -> dict[str, Array]:
        h, rows = np.zeros(channels), []
        for gain, drive in zip(a.astype(np.float64), b.astype(np.float64), strict=True):
            h = gain * h + drive
            rows.append(h)
        return {"out": np.stack(rows)}

    args = {"a": a, "b": b, "out": poisoned(a.shape, np.float32), "steps": steps, "channels": channels}
    return Call(args, {"STEPS": 64, "CHANNELS": 16}, (-(-channels // 16),), ("out",), reference, 1e-5)


def make_sort_rows(rng: np.random.Generator, scale: float) -> Call:
    rows, columns = scaled(19, scale), 100
    x = normal(rng, (rows, columns))
    args = {
        "x": x, "ascending": poisoned(x.shape, np.float32), "descending": poisoned(x.shape, np.float32),
        "columns": columns,
    }  # fmt: skip
    return Call(
        args, {"BLOCK": 128}, (rows,), ("ascending", "descending"),
        lambda: {"ascending": np.sort(x, axis=1), "descending": np.sort(x, axis=1)[:, ::-1]}, 0.0,
    )  # fmt: skip


CASES = (
    Case("cumulative", cumulative, make_cumulative),
    Case("linear_recurrence", linear_recurrence, make_linear_recurrence),
    Case("sort_rows", sort_rows, make_sort_rows),
)
