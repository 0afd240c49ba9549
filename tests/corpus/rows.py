"""Over rows: softmax, norms, sums, arg-reductions, moments; running sums, scans of affine maps, sorting."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from .case import Array, Call, Case, normal, poisoned, scaled


@triton.jit
def softmax(x, out, stride_x, stride_out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + row * stride_x + c, mask=c < columns, other=-float("inf"))
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row * stride_out + c, e / tl.sum(e, axis=0), mask=c < columns)


@triton.jit
def online_softmax(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x += row * columns
    out += row * columns
    top = -float("inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        v = tl.load(x + c, mask=c < columns, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(v, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(v - new_top), axis=0)
        top = new_top
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        v = tl.load(x + c, mask=c < columns)
        tl.store(out + c, tl.exp(v - top) / total, mask=c < columns)


@triton.jit
def layer_norm(x, weight, bias, out, mean, rstd, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x += row * columns
    out += row * columns
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        total += tl.load(x + c, mask=c < columns, other=0.0).to(tl.float32)
    mu = tl.sum(total, axis=0) / columns
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        v = tl.load(x + c, mask=c < columns, other=0.0).to(tl.float32)
        v = tl.where(c < columns, v - mu, 0.0)
        squares += v * v
    inverse = 1 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
    tl.store(mean + row, mu)
    tl.store(rstd + row, inverse)
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        mask = c < columns
        v = (tl.load(x + c, mask=mask).to(tl.float32) - mu) * inverse
        v = v * tl.load(weight + c, mask=mask) + tl.load(bias + c, mask=mask)
        tl.store(out + c, v.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm(x, weight, out, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < columns
    v = tl.load(x + row * columns + c, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, axis=0) / columns + eps)
    v = v * scale * tl.load(weight + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * columns + c, v.to(out.dtype.element_ty), mask=mask)


@triton.jit
def row_sum_max(x, total, top, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    where = x + r[:, None] * columns + c[None, :]
    tl.store(total + r, tl.sum(tl.load(where, mask=mask, other=0.0), axis=1), mask=r < rows)
    tl.store(top + r, tl.max(tl.load(where, mask=mask, other=-float("inf")), axis=1), mask=r < rows)


@triton.jit
def arg_extremes(x, highest, lowest, top, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + c, mask=c < columns, other=-float("inf"))
    value, index = tl.max(v, axis=0, return_indices=True)
    tl.store(highest + row, index)
    tl.store(top + row, value)
    tl.store(lowest + row, tl.argmin(tl.where(c < columns, v, float("inf")), axis=0))


@triton.jit
def _merge_moments(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    n = n_a + n_b
    delta = mean_b - mean_a
    share = tl.where(n == 0, 0.0, n_b / tl.maximum(n, 1.0))
    return mean_a + delta * share, m2_a + m2_b + delta * delta * n_a * share, n


@triton.jit
def welford(x, mean, variance, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + c, mask=c < columns, other=0.0)
    ones = (c < columns).to(tl.float32)
    mu, m2, n = tl.reduce((v, tl.zeros_like(v), ones), 0, _merge_moments)
    tl.store(mean + row, mu)
    tl.store(variance + row, m2 / n)


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


def _softmax(x: Array) -> Array:
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def make_softmax(rng: np.random.Generator, scale: float) -> Call:
    rows, columns, padded = scaled(61, scale), 381, 400
    x, out = normal(rng, (rows, padded)), poisoned((rows, columns), np.float32)
    args = {"x": x, "out": out, "stride_x": padded, "stride_out": columns, "columns": columns}
    return Call(args, {"BLOCK": 512}, (rows,), ("out",), lambda: {"out": _softmax(x[:, :columns])}, 1e-5)


def make_online_softmax(rng: np.random.Generator, scale: float) -> Call:
    rows, columns = scaled(29, scale), 1001
    x = normal(rng, (rows, columns)) * np.float32(3)
    args = {"x": x, "out": poisoned(x.shape, np.float32), "columns": columns}
    return Call(args, {"BLOCK": 256}, (rows,), ("out",), lambda: {"out": _softmax(x)}, 1e-5)


def make_layer_norm(rng: np.random.Generator, scale: float) -> Call:
    rows, columns, eps = scaled(37, scale), 700, 1e-5
    x, weight, bias = normal(rng, (rows, columns)) + np.float32(0.5), normal(rng, columns), normal(rng, columns)

    def reference() -> dict[str, Array]:
        v = x.astype(np.float64)
        mean, rstd = v.mean(axis=1), 1 / np.sqrt(v.var(axis=1) + eps)
        return {"out": (v - mean[:, None]) * rstd[:, None] * weight + bias, "mean": mean, "rstd": rstd}

    args = {
        "x": x, "weight": weight, "bias": bias, "out": poisoned(x.shape, np.float32),
        "mean": poisoned(rows, np.float32), "rstd": poisoned(rows, np.float32), "columns": columns, "eps": eps,
    }  # fmt: skip
    return Call(args, {"BLOCK": 256}, (rows,), ("out", "mean", "rstd"), reference, 1e-5)


def make_rms_norm(rng: np.random.Generator, scale: float) -> Call:
    rows, columns, eps = scaled(41, scale), 500, 1e-6
    x, weight = normal(rng, (rows, columns), np.float16), normal(rng, columns, np.float16)

    def reference() -> dict[str, Array]:
        v = x.astype(np.float64)
        return {"out": v / np.sqrt((v * v).mean(axis=1, keepdims=True) + eps) * weight.astype(np.float64)}

    args = {"x": x, "weight": weight, "out": poisoned(x.shape, np.float16), "columns": columns, "eps": eps}
    return Call(args, {"BLOCK": 512}, (rows,), ("out",), reference, 1e-2)


def make_row_sum_max(rng: np.random.Generator, scale: float) -> Call:
    rows, columns = scaled(83, scale), 250
    x = normal(rng, (rows, columns)) + np.float32(1)
    args = {
        "x": x, "total": poisoned(rows, np.float32), "top": poisoned(rows, np.float32), "rows": rows,
        "columns": columns,
    }  # fmt: skip
    return Call(
        args, {"ROWS": 8, "BLOCK": 256}, (-(-rows // 8),), ("total", "top"),
        lambda: {"total": x.sum(axis=1, dtype=np.float64), "top": x.max(axis=1)}, 1e-5,
    )  # fmt: skip


def make_arg_extremes(rng: np.random.Generator, scale: float) -> Call:
    rows, columns = scaled(67, scale), 300
    x = normal(rng, (rows, columns))
    x[3 % rows, [5, 200]] = 9.0  # a tie: the first one wins
    args = {
        "x": x, "highest": poisoned(rows, np.int32), "lowest": poisoned(rows, np.int32),
        "top": poisoned(rows, np.float32), "columns": columns,
    }  # fmt: skip
    return Call(
        args, {"BLOCK": 512}, (rows,), ("highest", "lowest", "top"),
        lambda: {
            "highest": x.argmax(axis=1).astype(np.int32),
            "lowest": x.argmin(axis=1).astype(np.int32),
            "top": x.max(axis=1),
        },
        0.0,
    )  # fmt: skip


def make_welford(rng: np.random.Generator, scale: float) -> Call:
    rows, columns = scaled(51, scale), 333
    x = normal(rng, (rows, columns)) + np.float32(2)
    args = {"x": x, "mean": poisoned(rows, np.float32), "variance": poisoned(rows, np.float32), "columns": columns}
    return Call(
        args, {"BLOCK": 512}, (rows,), ("mean", "variance"),
        lambda: {"mean": x.mean(axis=1, dtype=np.float64), "variance": x.astype(np.float64).var(axis=1)}, 1e-5,
    )  # fmt: skip


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
    Case("softmax", softmax, make_softmax),
    Case("online_softmax", online_softmax, make_online_softmax),
    Case("layer_norm", layer_norm, make_layer_norm),
    Case("rms_norm_fp16", rms_norm, make_rms_norm),
    Case("row_sum_max", row_sum_max, make_row_sum_max),
    Case("arg_extremes", arg_extremes, make_arg_extremes),
    Case("welford", welford, make_welford),
    Case("cumulative", cumulative, make_cumulative),
    Case("linear_recurrence", linear_recurrence, make_linear_recurrence),
    Case("sort_rows", sort_rows, make_sort_rows),
)
