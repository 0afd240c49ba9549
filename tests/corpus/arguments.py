"""Arguments that are not arrays or numbers, and helpers that are called."""

from __future__ import annotations

from functools import partial

import numpy as np
import triton
import triton.language as tl

from .case import Array, Call, Case, normal, poisoned, scaled


@triton.jit
def _square_plus(v, w):
    return v * v + w


@triton.jit
def _half_square_plus(v, w):
    return _square_plus(v, w) * 0.5


@triton.jit(noinline=True)  # takes scalars only; stays a function of its own down to PTX
def _sign_of(pointer, index):
    v = tl.load(pointer + index)
    if v < 0.0:
        return -1.0
    return 1.0


@triton.jit
def helpers(x, y, out, signs, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    w = tl.load(y + i, mask=i < n, other=0.0)
    tl.store(out + i, _half_square_plus(v, w) + _square_plus(w, v), mask=i < n)
    tl.store(signs + pid, _sign_of(x, pid))


@triton.jit
def optional_bias(x, bias, out, rows, columns, negate, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < columns
    v = tl.load(x + row * columns + c, mask=mask)
    if bias is not None:
        v += tl.load(bias + c, mask=mask)
    if negate:
        v = -v
    tl.store(out + row * columns + c, v, mask=mask)


@triton.jit
def tuple_argument(inputs, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(len(inputs)):
        total += (k + 1) * tl.load(inputs[k] + i, mask=i < n, other=0.0)
    tl.store(out + i, total, mask=i < n)


def make_helpers(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(1703, scale)
    blocks = -(-n // 256)
    x, y = normal(rng, n), normal(rng, n)

    def reference() -> dict[str, Array]:
        v, w = x.astype(np.float64), y.astype(np.float64)
        return {"out": (v * v + w) * 0.5 + w * w + v, "signs": np.sign(v[:blocks])}

    args = {"x": x, "y": y, "out": poisoned(n, np.float32), "signs": poisoned(blocks, np.float32), "n": n}
    return Call(args, {"BLOCK": 256}, (blocks,), ("out", "signs"), reference, 1e-5)


def make_optional_bias(rng: np.random.Generator, scale: float, given: bool) -> Call:
    rows, columns = scaled(23, scale), 100
    x = normal(rng, (rows, columns))
    bias = normal(rng, columns) if given else None
    sizes = {"rows": rows, "columns": columns, "negate": given}
    args = {"x": x, "bias": bias, "out": poisoned(x.shape, np.float32), **sizes}
    reference = lambda: {"out": -(x.astype(np.float64) + bias) if given else x}  # noqa: E731
    return Call(args, {"BLOCK": 128}, (rows,), ("out",), reference, 1e-5)


def make_tuple_argument(rng: np.random.Generator, scale: float) -> Call:
    n = scaled(1201, scale)
    inputs = tuple(normal(rng, n) for _ in range(3))
    args = {"inputs": inputs, "out": poisoned(n, np.float32), "n": n}
    return Call(
        args, {"BLOCK": 256}, (-(-n // 256),), ("out",),
        lambda: {"out": sum((k + 1) * x.astype(np.float64) for k, x in enumerate(inputs))}, 1e-5,
    )  # fmt: skip


CASES = (
    Case("helpers", helpers, make_helpers),
    Case("optional_bias_given", optional_bias, partial(make_optional_bias, given=True)),
    Case("optional_bias_none", optional_bias, partial(make_optional_bias, given=False)),
    Case("tuple_argument", tuple_argument, make_tuple_argument),
)
