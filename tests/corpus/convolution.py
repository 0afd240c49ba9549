"""Images: convolutions as implicit products, depthwise, and pooling."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from .case import Array, Call, Case, blocks, normal, poisoned, scaled


@triton.jit
def conv3x3(
    x, weight, bias, out, N, C, H, W, F, OH, OW,
    STRIDE: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # Rows of the product are output pixels, columns are filters, the inner dimension is (channel, 3, 3).
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    f = tl.program_id(1) * BN + tl.arange(0, BN)
    ow, oh, image = m % OW, (m // OW) % OH, m // (OW * OH)
    M, K = N * OH * OW, C * 9
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        ih = oh[:, None] * STRIDE + ((k % 9) // 3)[None, :] - PAD
        iw = ow[:, None] * STRIDE + (k % 3)[None, :] - PAD
        inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (m < M)[:, None] & (k < K)[None, :]
        pixels = tl.load(x + ((image[:, None] * C + (k // 9)[None, :]) * H + ih) * W + iw, mask=inside, other=0.0)
        filters = tl.load(weight + f[None, :] * K + k[:, None], mask=(k < K)[:, None] & (f < F)[None, :], other=0.0)
        acc = tl.dot(pixels, filters, acc, input_precision="ieee")
    acc = tl.maximum(acc + tl.load(bias + f, mask=f < F, other=0.0)[None, :], 0.0)
    where = out + ((image[:, None] * F + f[None, :]) * OH + oh[:, None]) * OW + ow[:, None]
    tl.store(where, acc, mask=(m < M)[:, None] & (f < F)[None, :])


@triton.jit
def conv1x1(x, weight, out, C, F, PIXELS, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    image = tl.program_id(2)
    f = tl.program_id(0) * BM + tl.arange(0, BM)
    p = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, C, BK):
        c = start + tl.arange(0, BK)
        filters = tl.load(weight + f[:, None] * C + c[None, :], mask=(f < F)[:, None] & (c < C)[None, :], other=0.0)
        where = x + (image * C + c[:, None]) * PIXELS + p[None, :]
        acc = tl.dot(filters, tl.load(where, mask=(c < C)[:, None] & (p < PIXELS)[None, :], other=0.0), acc)
    where = out + (image * F + f[:, None]) * PIXELS + p[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=(f < F)[:, None] & (p < PIXELS)[None, :])


@triton.jit
def depthwise3x3(x, weight, out, C, H, W, BLOCK: tl.constexpr):
    plane = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, w = i // W, i % W
    acc = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(9):
        ih, iw = h + tap // 3 - 1, w + tap % 3 - 1
        inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (i < H * W)
        gain = tl.load(weight + (plane % C) * 9 + tap)
        acc += gain * tl.load(x + plane * H * W + ih * W + iw, mask=inside, other=0.0)
    tl.store(out + plane * H * W + i, acc, mask=i < H * W)


@triton.jit
def max_pool2x2(x, out, H, W, OH, OW, BLOCK: tl.constexpr):
    plane = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    corner = x + plane * H * W + (i // OW) * 2 * W + (i % OW) * 2
    mask = i < OH * OW
    top = tl.maximum(tl.load(corner, mask=mask), tl.load(corner + 1, mask=mask))
    bottom = tl.maximum(tl.load(corner + W, mask=mask), tl.load(corner + W + 1, mask=mask))
    tl.store(out + plane * OH * OW + i, tl.maximum(top, bottom), mask=mask)


def _windows(x: Array, stride: int) -> Array:
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    return np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::stride, ::stride]


def make_conv3x3(rng: np.random.Generator, scale: float) -> Call:
    n, c, h, w, f, stride = scaled(2, scale), 5, 17, 14, 20, 2
    oh, ow = (h + 1) // 2, (w + 1) // 2
    x, weight, bias = normal(rng, (n, c, h, w)), normal(rng, (f, c, 3, 3)) / np.float32(7), normal(rng, f)

    def reference() -> dict[str, Array]:
        product = np.einsum("nchwij,fcij->nfhw", _windows(x, stride), weight, optimize=True)
        return {"out": np.maximum(product + bias[:, None, None], 0)}

    args = {
        "x": x, "weight": weight, "bias": bias, "out": poisoned((n, f, oh, ow), np.float32), "N": n, "C": c, "H": h,
        "W": w, "F": f, "OH": oh, "OW": ow,
    }  # fmt: skip
    constexprs = {"STRIDE": stride, "PAD": 1, "BM": 32, "BN": 16, "BK": 16}
    return Call(args, constexprs, (*blocks(n * oh * ow, 32), *blocks(f, 16)), ("out",), reference, 1e-5)


def make_conv1x1(rng: np.random.Generator, scale: float) -> Call:
    n, c, f, side = scaled(3, scale), 40, 24, 9
    x, weight = normal(rng, (n, c, side, side), np.float16), (normal(rng, (f, c)) / np.float32(6)).astype(np.float16)
    args = {
        "x": x, "weight": weight, "out": poisoned((n, f, side, side), np.float16), "C": c, "F": f,
        "PIXELS": side * side,
    }  # fmt: skip
    return Call(
        args, {"BM": 16, "BN": 32, "BK": 16}, (*blocks(f, 16), *blocks(side * side, 32), n), ("out",),
        lambda: {"out": np.einsum("fc,nchw->nfhw", weight.astype(np.float64), x.astype(np.float64))}, 1e-2,
    )  # fmt: skip


def make_depthwise3x3(rng: np.random.Generator, scale: float) -> Call:
    n, c, h, w = scaled(2, scale), 7, 13, 19
    x, weight = normal(rng, (n, c, h, w)), normal(rng, (c, 3, 3))
    args = {"x": x, "weight": weight, "out": poisoned(x.shape, np.float32), "C": c, "H": h, "W": w}
    return Call(
        args, {"BLOCK": 128}, (*blocks(h * w, 128), n * c), ("out",),
        lambda: {"out": np.einsum("nchwij,cij->nchw", _windows(x, 1), weight, optimize=True)}, 1e-5,
    )  # fmt: skip


def make_max_pool2x2(rng: np.random.Generator, scale: float) -> Call:
    n, c, h, w = scaled(3, scale), 5, 15, 22
    oh, ow = h // 2, w // 2
    x = normal(rng, (n, c, h, w), np.float16)
    args = {"x": x, "out": poisoned((n, c, oh, ow), np.float16), "H": h, "W": w, "OH": oh, "OW": ow}
    return Call(
        args, {"BLOCK": 64}, (*blocks(oh * ow, 64), n * c), ("out",),
        lambda: {"out": x[:, :, : 2 * oh].reshape(n, c, oh, 2, ow, 2).max(axis=(3, 5))}, 0.0,
    )  # fmt: skip


CASES = (
    Case("conv3x3", conv3x3, make_conv3x3),
    Case("conv1x1", conv1x1, make_conv1x1),
    Case("depthwise3x3", depthwise3x3, make_depthwise3x3),
    Case("max_pool2x2", max_pool2x2, make_max_pool2x2),
)
