"""CUDA C kernels by how their threads end: guards, several returns, returns in loops and before barriers, `exit`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .case import Array, CudaCall, CudaCase, Draw, drawn, normal, poisoned, scaled

Grid = tuple[int, int, int]


def covering(n: int, block: int) -> tuple[Grid, Grid]:
    """Grid and block of one dimension that cover `n` elements."""
    return (-(-n // block), 1, 1), (block, 1, 1)


def mapped(
    size: int, block: int, draw: Draw, wanted: Callable[[Array], Array], tolerance: float = 0.0, *more: np.generic,
    shared_bytes: int = 0,
) -> Callable[[np.random.Generator, float], CudaCall]:  # fmt: skip
    """Launches of a kernel (x, out, n, more…) with an element a thread."""

    def make(rng: np.random.Generator, scale: float) -> CudaCall:
        n = scaled(size, scale)
        x = draw(rng, n)
        args = [x, poisoned(len(x), x.dtype), np.int32(len(x)), *more]
        return CudaCall(args, *covering(len(x), block), (1,), lambda: {1: wanted(x)}, tolerance, shared_bytes)

    return make


SAXPY = r"""
extern "C" __global__ void saxpy(float a, const float* x, const float* y, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = a * x[i] + y[i];
}
"""

SEVERAL_RETURNS = r"""
extern "C" __global__ void several_returns(const int* x, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int v = x[i];
    if (v < 0) { out[i] = -1; return; }
    if (v % 3 == 0) { out[i] = v / 3; return; }
    unsigned turned = v;
    for (int k = 0; k < v % 17; ++k) turned = turned * 5u + k;
    out[i] = turned;
}
"""

# Threads of one warp leave after different numbers of turns, so the block ends long after its first thread.
RETURN_IN_LOOP = r"""
extern "C" __global__ void return_in_loop(const int* x, const int* wanted, int* out, int n, int m) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    for (int k = 0; k < m; ++k) {
        if (x[k] == wanted[i]) { out[i] = k; return; }
    }
    out[i] = -1;
}
"""

# In the last block some warps are gone and one is torn when the others meet at the barrier.
BARRIER_AFTER_RETURN = r"""
extern "C" __global__ void barrier_after_return(const float* x, float* out, int n) {
    __shared__ float tile[128];
    int t = threadIdx.x, i = blockIdx.x * 128 + t;
    if (i >= n) return;
    int live = min(128, n - (int)blockIdx.x * 128);
    tile[t] = x[i];
    __syncthreads();
    float left = tile[(t + live - 1) % live], right = tile[(t + 1) % live];
    __syncthreads();
    tile[t] = left + right;
    __syncthreads();
    out[i] = tile[live - 1 - t];
}
"""

SWITCH = r"""
extern "C" __global__ void switched(const int* x, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int v = x[i];
    switch (v & 7) {
        case 0: v = v * 3; break;
        case 1: v = v ^ 0x55; break;
        case 2: out[i] = 2; return;
        case 3: v = v << 2; break;
        case 4: v = v - 11; break;
        case 5: v = v | 0x1000; break;
        case 6: for (int k = 0; k < 5; ++k) v = v * 7 + k; break;
        default: v = -v;
    }
    out[i] = v;
}
"""

EXIT_IN_ENTRY = r"""
extern "C" __global__ void exit_in_entry(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) asm volatile("exit;");
    out[i] = x[i] * 2.0f;
}
"""

# NVRTC folds all returns into one at the end; a predicated `ret` in the middle has to be written by hand.
PREDICATED_RETURN = r"""
extern "C" __global__ void predicated_return(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    asm volatile("{ .reg .pred done; setp.ge.s32 done, %0, %1; @done ret; }" :: "r"(i), "r"(n));
    out[i] = x[i] * 2.0f;
}
"""

EXIT_IN_FUNCTION = r"""
__device__ __noinline__ float checked(const float* x, int i, int n) {
    if (i >= n) asm volatile("exit;");
    return x[i] * 2.0f;
}
extern "C" __global__ void exit_in_function(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = checked(x, i, n);
}
"""

PRINT_AND_ASSERT = r"""
extern "C" __global__ void print_and_assert(const int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    assert(x[i] > 0 && "positive { } ; // input");
    if (i == 0) printf("first of %d: %d; ret; /* not a comment */\n", n, x[i]);
}
"""


def make_saxpy(rng: np.random.Generator, scale: float) -> CudaCall:
    n, a = scaled(3001, scale), np.float32(1.25)
    x, y = normal(rng, n), normal(rng, n)
    return CudaCall(
        [a, x, y, poisoned(n, np.float32), np.int32(n)], *covering(n, 128), (3,),
        lambda: {3: 1.25 * x.astype(np.float64) + y}, 1e-5,
    )  # fmt: skip


def _several_returns(x: Array) -> Array:
    turned = x.copy()
    for k in range(16):
        turned = np.where(k < x % 17, turned * np.int32(5) + np.int32(k), turned)
    return np.where(x < 0, np.int32(-1), np.where(x % 3 == 0, x // 3, turned))


def make_return_in_loop(rng: np.random.Generator, scale: float) -> CudaCall:
    n, m = scaled(1001, scale), 150
    x = rng.permutation(200)[:m].astype(np.int32)
    wanted = rng.integers(0, 200, n, np.int32)

    def reference() -> dict[int, Array]:
        found = x[None, :] == wanted[:, None]
        return {2: np.where(found.any(axis=1), found.argmax(axis=1), -1).astype(np.int32)}

    args = [x, wanted, poisoned(n, np.int32), np.int32(n), np.int32(m)]
    return CudaCall(args, *covering(n, 96), (2,), reference, 0.0)


def _barrier_after_return(x: Array) -> Array:
    tiles = [x[start : start + 128].astype(np.float64) for start in range(0, len(x), 128)]
    return np.concatenate([(np.roll(tile, 1) + np.roll(tile, -1))[::-1] for tile in tiles])


def _switched(x: Array) -> Array:
    looped = x.copy()
    for k in range(5):
        looped = looped * np.int32(7) + np.int32(k)
    arms = [x * 3, x ^ 0x55, np.full_like(x, 2), x << 2, x - 11, x | 0x1000, looped, -x]
    return np.choose(x & 7, arms)


def make_print_and_assert(rng: np.random.Generator, scale: float) -> CudaCall:
    n = scaled(301, scale)
    return CudaCall([rng.integers(1, 9, n, np.int32), np.int32(n)], *covering(n, 128), (), dict, 0.0)


TORN = mapped(6, 128, lambda rng, n: normal(rng, 128 * n + 45), _barrier_after_return, 1e-5)
DOUBLED = mapped(1501, 128, normal, lambda x: 2 * x.astype(np.float64), 1e-5)
CASES = (
    CudaCase("saxpy", SAXPY, "saxpy", make_saxpy),
    CudaCase("saxpy_line_info", SAXPY, "saxpy", make_saxpy, options=("--generate-line-info",)),
    CudaCase("saxpy_debug", SAXPY, "saxpy", make_saxpy, options=("--device-debug",)),
    CudaCase(
        "several_returns", SEVERAL_RETURNS, "several_returns", mapped(2001, 256, drawn(-500, 1000), _several_returns)
    ),
    CudaCase("return_in_loop", RETURN_IN_LOOP, "return_in_loop", make_return_in_loop),
    CudaCase("barrier_after_return", BARRIER_AFTER_RETURN, "barrier_after_return", TORN),
    CudaCase("switch", SWITCH, "switched", mapped(1501, 128, drawn(1, 10000), _switched)),
    CudaCase("exit_in_entry", EXIT_IN_ENTRY, "exit_in_entry", DOUBLED),
    CudaCase("predicated_return", PREDICATED_RETURN, "predicated_return", DOUBLED),
    CudaCase(
        "exit_in_function", EXIT_IN_FUNCTION, "exit_in_function", DOUBLED, instrumentable=False,
        reason="exit inside a device function cannot be redirected to the entry's end",
    ),
    CudaCase("print_and_assert", PRINT_AND_ASSERT, "print_and_assert", make_print_and_assert, launchable=False),
)  # fmt: skip
