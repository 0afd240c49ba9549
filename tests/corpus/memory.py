"""Where data goes: gathers, strides, and tiles that change shape."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

from .case import Array, Call, Case, normal, poisoned, scaled


@triton.jit
def embedding(ids, table, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    source = tl.load(ids + row)
    tl.store(out + row * width + c, tl.load(table + source * width + c, mask=c < width), mask=c < width)


@triton.jit
def gather_rows(x, index, out, columns, picks, BLOCK: tl.constexpr, PICKS: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    p = tl.arange(0, PICKS)
    v = tl.load(x + row * columns + c, mask=c < columns, other=0.0)
    where = tl.load(index + row * picks + p, mask=p < picks, other=0)
    tl.store(out + row * picks + p, tl.gather(v, where, 0), mask=p < picks)


@triton.jit
def transposed_copy(
    x, out, rows, columns, stride_xr, stride_xc, stride_or, stride_oc, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    tile = tl.load(x + r[:, None] * stride_xr + c[None, :] * stride_xc, mask=mask)
    tl.store(out + r[:, None] * stride_or + c[None, :] * stride_oc, tile, mask=mask)


@triton.jit
def shapes(x, y, out, rotated, rows, COLUMNS: tl.constexpr):
    # Rotary embedding on interleaved pairs, then the same tile through join, trans, permute and reshape.
    row = tl.program_id(0)
    pair = tl.arange(0, COLUMNS // 2)
    even, odd = tl.split(tl.reshape(tl.load(x + row * COLUMNS + tl.arange(0, COLUMNS)), (COLUMNS // 2, 2)))
    angle = tl.load(y + row * (COLUMNS // 2) + pair)
    turned = tl.interleave(even * tl.cos(angle) - odd * tl.sin(angle), even * tl.sin(angle) + odd * tl.cos(angle))
    tl.store(rotated + row * COLUMNS + tl.arange(0, COLUMNS), turned)
    planes = tl.trans(tl.join(even, odd))
    cube = tl.permute(tl.reshape(planes, (2, 4, COLUMNS // 8)), (2, 0, 1))
    flat = tl.reshape(cube, (COLUMNS,)) + tl.ravel(tl.expand_dims(turned, 0))
    tl.store(out + row * COLUMNS + tl.arange(0, COLUMNS), flat)


@triton.jit
def broadcasts(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    base = tl.program_id(0) * rows * columns
    v = tl.load(x + base + r[:, None] * columns + c[None, :], mask=mask, other=0.0).to(tl.float32)
    row_means = tl.sum(v, axis=1, keep_dims=True) / columns
    column_means = tl.broadcast_to(tl.expand_dims(tl.sum(v, axis=0) / rows, 0), (ROWS, COLUMNS))
    centred = v - row_means - column_means + tl.sum(v) / (rows * columns)
    tl.store(out + base + r[:, None] * columns + c[None, :], centred.to(tl.bfloat16), mask=mask)


def make_embedding(rng: np.random.Generator, scale: float) -> Call:
    tokens, vocabulary, width = scaled(77, scale), 500, 100
    ids, table = rng.integers(0, vocabulary, tokens, np.int64), normal(rng, (vocabulary, width))
    args = {"ids": ids, "table": table, "out": poisoned((tokens, width), np.float32), "width": width}
    return Call(args, {"BLOCK": 128}, (tokens,), ("out",), lambda: {"out": table[ids]}, 0.0)


def make_gather_rows(rng: np.random.Generator, scale: float) -> Call:
    rows, columns, picks = scaled(21, scale), 100, 50
    x, index = normal(rng, (rows, columns)), rng.integers(0, columns, (rows, picks), np.int32)
    args = {"x": x, "index": index, "out": poisoned(index.shape, np.float32), "columns": columns, "picks": picks}
    return Call(
        args, {"BLOCK": 128, "PICKS": 64}, (rows,), ("out",),
        lambda: {"out": np.take_along_axis(x, index, axis=1)}, 0.0,
    )  # fmt: skip


def make_transposed_copy(rng: np.random.Generator, scale: float) -> Call:
    rows, columns, padded = scaled(75, scale), 90, 96
    x = normal(rng, (rows, padded), np.float16)  # the last six columns are padding
    args = {
        "x": x, "out": poisoned((columns, rows), np.float16), "rows": rows, "columns": columns, "stride_xr": padded,
        "stride_xc": 1, "stride_or": 1, "stride_oc": rows,
    }  # fmt: skip
    return Call(
        args, {"ROWS": 32, "COLUMNS": 32}, (-(-rows // 32), -(-columns // 32)), ("out",),
        lambda: {"out": x[:, :columns].T}, 0.0,
    )  # fmt: skip


def make_shapes(rng: np.random.Generator, scale: float) -> Call:
    rows, columns = scaled(27, scale), 64
    x, y = normal(rng, (rows, columns)), rng.uniform(0.1, 3, (rows, columns // 2)).astype(np.float32)

    def reference() -> dict[str, Array]:
        pairs, angle = x.astype(np.float64).reshape(rows, -1, 2), y.astype(np.float64)
        turned = ((pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)).view(np.float64).reshape(rows, columns)
        planes = pairs.transpose(0, 2, 1).reshape(rows, 2, 4, columns // 8)
        return {"rotated": turned, "out": planes.transpose(0, 3, 1, 2).reshape(rows, columns) + turned}

    args = {
        "x": x, "y": y, "out": poisoned(x.shape, np.float32), "rotated": poisoned(x.shape, np.float32), "rows": rows,
    }  # fmt: skip
    return Call(args, {"COLUMNS": columns}, (rows,), ("out", "rotated"), reference, 1e-5)


def make_broadcasts(rng: np.random.Generator, scale: float) -> Call:
    batch, rows, columns = scaled(9, scale), 13, 50
    x = (normal(rng, (batch, rows, columns)) + 1).astype(ml_dtypes.bfloat16)

    def reference() -> dict[str, Array]:
        v = x.astype(np.float64)
        over = [v.mean(axis=axis, keepdims=True) for axis in (1, 2, (1, 2))]
        return {"out": v - over[0] - over[1] + over[2]}

    args = {"x": x, "out": poisoned(x.shape, ml_dtypes.bfloat16), "rows": rows, "columns": columns}
    return Call(args, {"ROWS": 16, "COLUMNS": 64}, (batch,), ("out",), reference, 1e-2)


CASES = (
    Case("embedding", embedding, make_embedding),
    Case("gather_rows", gather_rows, make_gather_rows),
    Case("transposed_copy", transposed_copy, make_transposed_copy),
    Case("shapes", shapes, make_shapes),
    Case("broadcasts", broadcasts, make_broadcasts),
)
