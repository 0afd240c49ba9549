"""The demo models' kernels. Images are (batch, height, width, channels); all values are float32; any batch size works.

Products use `ieee` precision, so that a real and the virtual GPU give the same numbers up to the order of additions.
Extents of a layer are compile-time constants; the batch is not, and never specialises a kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paellapy.instrument.kernels.decorator import kernel


@kernel
@triton.jit(do_not_specialize=["M"])
def linear(
    x, weight, bias, residual, out, M, K: tl.constexpr, N: tl.constexpr,
    ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out (M, N) = activation(x (M, K) @ weight (K, N) + bias) + residual; residual may be None."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        rows = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        columns = tl.load(weight + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(rows, columns, acc, input_precision="ieee")
    acc += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    if ACTIVATION == "relu":
        acc = tl.maximum(acc, 0.0)
    if ACTIVATION == "gelu":  # the tanh form: 0.5 x (1 + tanh(u)) = x sigmoid(2u)
        acc = acc * tl.sigmoid(1.5957691216057308 * (acc + 0.044715 * acc * acc * acc))
    where = m[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if residual is not None:
        acc += tl.load(residual + where, mask=inside, other=0.0)
    tl.store(out + where, acc, mask=inside)


@kernel
@triton.jit(do_not_specialize=["M"])
def classify(
    x, weight, bias, out, M, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """out (M, N) = softmax(x (M, K) @ weight (K, N) + bias); all N classes in one block."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        rows = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        columns = tl.load(weight + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(rows, columns, acc, input_precision="ieee")
    acc += tl.load(bias + n, mask=n < N, other=-float("inf"))[None, :]
    powers = tl.exp(acc - tl.max(acc, axis=1)[:, None])
    where = out + m[:, None] * N + n[None, :]
    tl.store(where, powers / tl.sum(powers, axis=1)[:, None], mask=(m < M)[:, None] & (n < N)[None, :])


@kernel
@triton.jit(do_not_specialize=["B"])
def conv3x3(
    x, weight, bias, out, B, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """relu(3x3 convolution + bias), zero padded: x (B, H, W, C), weight (3, 3, C, F), out (B, H, W, F)."""
    # An implicit product: rows are output pixels, columns are filters, the inner dimension is (3, 3, C).
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    f = tl.program_id(1) * BN + tl.arange(0, BN)
    M = B * H * W
    row, column = (m // W) % H, m % W
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, 9 * C, BK):
        k = start + tl.arange(0, BK)
        taps = tl.load(weight + k[:, None] * F + f[None, :], mask=(k < 9 * C)[:, None] & (f < F)[None, :], other=0.0)
        if C % BK == 0:  # the tile is a single tap, so its position is computed per row, not per element
            down, right = start // (3 * C) - 1, (start // C) % 3 - 1
            h, w = row + down, column + right
            inside = ((h >= 0) & (h < H) & (w >= 0) & (w < W) & (m < M))[:, None]
            where = (m + down * W + right)[:, None] * C + (start % C + tl.arange(0, BK))[None, :]
        else:
            down, right = k // (3 * C) - 1, (k // C) % 3 - 1
            h, w = row[:, None] + down[None, :], column[:, None] + right[None, :]
            inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (m < M)[:, None] & (k < 9 * C)[None, :]
            where = (m[:, None] + (down * W + right)[None, :]) * C + (k % C)[None, :]
        acc = tl.dot(tl.load(x + where, mask=inside, other=0.0), taps, acc, input_precision="ieee")
    acc = tl.maximum(acc + tl.load(bias + f, mask=f < F, other=0.0)[None, :], 0.0)
    tl.store(out + m[:, None] * F + f[None, :], acc, mask=(m < M)[:, None] & (f < F)[None, :])


@kernel
@triton.jit(do_not_specialize=["B"])
def max_pool2x2(x, out, B, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Halves height and width: x (B, H, W, C), out (B, H/2, W/2, C)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < B * (H // 2) * (W // 2) * C
    c, column, row = i % C, (i // C) % (W // 2), i // (C * (W // 2))  # rows continue from image to image
    corner = x + (row * 2 * W + column * 2) * C + c
    top = tl.maximum(tl.load(corner, mask=inside), tl.load(corner + C, mask=inside))
    bottom = tl.maximum(tl.load(corner + W * C, mask=inside), tl.load(corner + W * C + C, mask=inside))
    tl.store(out + i, tl.maximum(top, bottom), mask=inside)


@kernel
@triton.jit(do_not_specialize=["B"])
def upsample2x(x, out, B, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """Doubles height and width of single-channel images, bilinear: x (B, H, W), out (B, 2H, 2W)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < B * 4 * H * W
    column, row, image = i % (2 * W), (i // (2 * W)) % (2 * H), i // (4 * H * W)
    # An output pixel lies a quarter of the way from its source pixel to that pixel's neighbour on its side.
    h, w = row // 2, column // 2
    beside_h = tl.minimum(tl.maximum(h + (row % 2) * 2 - 1, 0), H - 1)
    beside_w = tl.minimum(tl.maximum(w + (column % 2) * 2 - 1, 0), W - 1)
    x += image * H * W
    near = 0.75 * tl.load(x + h * W + w, mask=inside) + 0.25 * tl.load(x + h * W + beside_w, mask=inside)
    far = tl.load(x + beside_h * W + w, mask=inside) * 0.75 + tl.load(x + beside_h * W + beside_w, mask=inside) * 0.25
    tl.store(out + i, 0.75 * near + 0.25 * far, mask=inside)


@kernel
@triton.jit
def mean_pool(x, out, T: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr):
    """The mean over tokens or pixels: x (B, T, N), out (B, N). Grid: images, columns."""
    image = tl.program_id(0)
    t = tl.arange(0, BT)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    where = x + (image * T + t[:, None]) * N + n[None, :]
    values = tl.load(where, mask=(t < T)[:, None] & (n < N)[None, :], other=0.0)
    tl.store(out + image * N + n, tl.sum(values, axis=0) / T, mask=n < N)


@kernel
@triton.jit
def patch_embed(
    x, weight, bias, position, out, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """P x P patches as tokens: x (B, H, W), weight (P, P, N), position (T, N), out (B, T, N). Grid: images, columns."""
    T: tl.constexpr = (H // P) * (W // P)
    image = tl.program_id(0)
    t, k = tl.arange(0, BT), tl.arange(0, BK)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    corner = (image * H + t // (W // P) * P) * W + t % (W // P) * P
    pixel = corner[:, None] + (k // P * W + k % P)[None, :]
    patches = tl.load(x + pixel, mask=(t < T)[:, None] & (k < P * P)[None, :], other=0.0)
    columns = tl.load(weight + k[:, None] * N + n[None, :], mask=(k < P * P)[:, None] & (n < N)[None, :], other=0.0)
    inside = (t < T)[:, None] & (n < N)[None, :]
    acc = tl.dot(patches, columns, input_precision="ieee") + tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    acc += tl.load(position + t[:, None] * N + n[None, :], mask=inside, other=0.0)
    tl.store(out + (image * T + t[:, None]) * N + n[None, :], acc, mask=inside)


@kernel
@triton.jit(do_not_specialize=["M"])
def layer_norm(x, gain, bias, out, M, eps, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Rows of x (M, N) to mean 0 and variance 1, then gain and bias; a whole row in one block."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    inside = (m < M)[:, None] & (n < N)[None, :]
    v = tl.load(x + m[:, None] * N + n[None, :], mask=inside, other=0.0)
    centred = tl.where((n < N)[None, :], v - (tl.sum(v, axis=1) / N)[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=1) / N + eps)
    g, b = tl.load(gain + n, mask=n < N, other=0.0), tl.load(bias + n, mask=n < N, other=0.0)
    tl.store(out + m[:, None] * N + n[None, :], centred * scale[:, None] * g[None, :] + b[None, :], mask=inside)


@kernel
@triton.jit
def attention(qkv, out, scale, T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BT: tl.constexpr):
    """Attention of every token to every token: qkv (B, T, 3, HEADS, D), out (B, T, HEADS, D). Grid: heads, images."""
    head, image = tl.program_id(0), tl.program_id(1)
    t, d = tl.arange(0, BT), tl.arange(0, D)
    seen = t < T
    base = qkv + image * T * 3 * HEADS * D + head * D
    where = t[:, None] * (3 * HEADS * D) + d[None, :]
    query = tl.load(base + where, mask=seen[:, None], other=0.0)
    key = tl.load(base + HEADS * D + t[None, :] * (3 * HEADS * D) + d[:, None], mask=seen[None, :], other=0.0)
    value = tl.load(base + 2 * HEADS * D + where, mask=seen[:, None], other=0.0)
    scores = tl.dot(query, key, input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, -float("inf"))
    powers = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    mixed = tl.dot(powers, value, input_precision="ieee") / tl.sum(powers, axis=1)[:, None]
    rows = out + image * T * HEADS * D + head * D + t[:, None] * (HEADS * D) + d[None, :]
    tl.store(rows, mixed, mask=seen[:, None])
