"""CUDA C kernels, by the feature they use: shared memory, templates, calls, atomics, ranges; bounds and parameters."""

from __future__ import annotations

import numpy as np

from .case import Array, CudaCall, CudaCase, drawn, normal, poisoned, scaled
from .cuda_exits import covering, mapped

BLOCK_SUM = r"""
extern "C" __global__ void block_sum(const float* x, float* out, int n) {
    __shared__ float tile[256];
    int t = threadIdx.x, i = blockIdx.x * 256 + t;
    if (i < n) tile[t] = x[i] > 0.0f ? x[i] : 0.5f * x[i];
    else tile[t] = 0.0f;
    __syncthreads();
    for (int half = 128; half > 0; half >>= 1) {
        if (t < half) tile[t] += tile[t + half];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = tile[0];
}
"""

DYNAMIC_SHARED = r"""
extern __shared__ float buffer[];
extern "C" __global__ void reverse_tiles(const float* x, float* out, int n) {
    int t = threadIdx.x, base = blockIdx.x * blockDim.x, live = min((int)blockDim.x, n - base);
    if (t < live) buffer[t] = x[base + t];
    __syncthreads();
    if (t < live) out[base + t] = buffer[live - 1 - t];
}
"""

TEMPLATE = r"""
template <typename T, int TIMES>
__global__ void repeat(const T* x, T* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    T v = x[i];
    for (int k = 0; k < TIMES; ++k) v = v * v - v;
    out[i] = v;
}
"""

TWO_ENTRIES = r"""
__constant__ float weights[3] = {0.25f, 0.5f, 0.25f};
extern "C" __global__ void smooth(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = weights[0] * x[max(i - 1, 0)] + weights[1] * x[i] + weights[2] * x[min(i + 1, n - 1)];
}
extern "C" __global__ void shift(const float* x, float* out, int n, int by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[(i + by) % n] = x[i];
}
"""

NOINLINE = r"""
__device__ __noinline__ int gcd(int a, int b) {
    while (b) { int r = a % b; a = b; b = r; }
    return a;
}
__device__ __noinline__ int ackermannish(int depth, int v) {
    if (depth == 0) return v + 1;
    return ackermannish(depth - 1, v * 2) + gcd(v, 12);
}
extern "C" __global__ void calls(const int* x, const int* y, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = gcd(x[i], y[i]) * 1000 + ackermannish(x[i] % 4, y[i] % 10 + 1);
}
"""

GRID_STRIDE = r"""
extern "C" __global__ void grid_stride(const double* x, double* out, long long n) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
        out[i] = sqrt(x[i]) + 1.0;
}
"""

TRANSPOSE = r"""
extern "C" __global__ void transpose(const float* x, float* out, int rows, int columns) {
    __shared__ float tile[16][17];
    int c = blockIdx.x * 16 + threadIdx.x, r = blockIdx.y * 16 + threadIdx.y;
    if (r < rows && c < columns) tile[threadIdx.y][threadIdx.x] = x[r * columns + c];
    __syncthreads();
    c = blockIdx.y * 16 + threadIdx.x;
    r = blockIdx.x * 16 + threadIdx.y;
    if (r < columns && c < rows) out[r * rows + c] = tile[threadIdx.x][threadIdx.y];
}
"""

GRID_3D = r"""
extern "C" __global__ void grid_3d(int* out) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = block * 1000 + thread + gridDim.z;
}
"""

HISTOGRAM = r"""
extern "C" __global__ void histogram(const unsigned char* x, unsigned* counts, int n) {
    __shared__ unsigned local[64];
    if (threadIdx.x < 64) local[threadIdx.x] = 0;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&local[x[i] & 63], 1u);
    __syncthreads();
    if (threadIdx.x < 64 && local[threadIdx.x]) atomicAdd(&counts[threadIdx.x], local[threadIdx.x]);
}
"""

FLOAT_ATOMIC = r"""
extern "C" __global__ void float_atomic(const float* x, float* total, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    atomicAdd(total, x[i]);
}
"""

WARP_SUM = r"""
extern "C" __global__ void warp_sum(const float* x, float* out, int rows, int columns) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float total = 0.0f;
    for (int c = lane; c < columns; c += 32) total += x[row * columns + c];
    for (int step = 16; step > 0; step >>= 1) total += __shfl_xor_sync(0xffffffffu, total, step);
    if (lane == 0) out[row] = total;
}
"""

# The compiler copies a function that is always inlined into the kernel, with its ranges.
DEVICE_RANGES = r"""
__device__ __forceinline__ float neighbours(const float* tile, int t, int size) {
    pp_warp_range_begin("neighbours");
    float sum = tile[(t + size - 1) % size] + tile[(t + 1) % size];
    pp_warp_range_end("neighbours");
    return sum;
}
extern "C" __global__ void device_ranges(const float* x, float* out, int n) {
    __shared__ float tile[128];
    int t = threadIdx.x, i = blockIdx.x * 128 + t;
    pp_range_begin("load");
    tile[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    pp_range_end("load");
    for (int k = 0; k < 3; ++k) {
        float sum = neighbours(tile, t, 128);
        __syncthreads();
        tile[t] = 0.5f * sum;
        __syncthreads();
    }
    if (i < n) out[i] = tile[t];
}
"""


LAUNCH_BOUNDS = r"""
extern "C" __global__ void __launch_bounds__(64, 4) bounded(const float* __restrict__ a, const float* __restrict__ v,
                                                            float* __restrict__ out, int rows, int columns) {
    int row = blockIdx.x * 64 + threadIdx.x;
    if (row >= rows) return;
    float total = 0.0f;
    #pragma unroll 4
    for (int c = 0; c < columns; ++c) total = fmaf(a[row * columns + c], v[c], total);
    out[row] = total;
}
"""

NO_PARAMETERS = r"""
extern "C" __device__ int marks[96];
extern "C" __global__ void no_parameters() {
    marks[blockIdx.x * 32 + threadIdx.x] = blockIdx.x * 100 + threadIdx.x;
}
"""

MIXED_PARAMETERS = r"""
struct Affine { float gain; int shift; float lift[3]; };
extern "C" __global__ void mixed(signed char sign, double offset, short step, Affine map, const float* x, float* out,
                                 unsigned long long n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = sign * (map.gain * x[i] + map.lift[(i + map.shift) % 3]) + (float)offset * step;
}
"""

CLUSTER = r"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) clusters(int* out) {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    out[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x * 10 + rank;
}
"""

AFFINE = np.dtype([("gain", "<f4"), ("shift", "<i4"), ("lift", "<f4", (3,))])


def make_block_sum(rng: np.random.Generator, scale: float) -> CudaCall:
    n = scaled(3001, scale)
    grid, block = covering(n, 256)
    x = normal(rng, n)

    def reference() -> dict[int, Array]:
        leaky = np.where(x > 0, x, 0.5 * x.astype(np.float64))
        return {1: np.add.reduceat(leaky, np.arange(0, n, 256))}

    return CudaCall([x, poisoned(grid[0], np.float32), np.int32(n)], grid, block, (1,), reference, 1e-5)


def _reversed_tiles(x: Array) -> Array:
    return np.concatenate([x[start : start + 128][::-1] for start in range(0, len(x), 128)])


def _repeated(x: Array) -> Array:
    for _ in range(3):
        x = x * x - x
    return x


def _smoothed(x: Array) -> Array:
    v = np.pad(x.astype(np.float64), 1, mode="edge")
    return 0.25 * v[:-2] + 0.5 * v[1:-1] + 0.25 * v[2:]


def make_noinline(rng: np.random.Generator, scale: float) -> CudaCall:
    n = scaled(1001, scale)
    x, y = rng.integers(1, 500, n, np.int32), rng.integers(1, 500, n, np.int32)

    def reference() -> dict[int, Array]:
        depth, v, total = x % 4, y % 10 + 1, np.zeros(n, np.int32)
        for level in range(3):
            total += np.where(level < depth, np.gcd(v, 12), 0).astype(np.int32)
            v = np.where(level < depth, v * 2, v)
        return {2: np.gcd(x, y) * 1000 + total + v + 1}

    return CudaCall([x, y, poisoned(n, np.int32), np.int32(n)], *covering(n, 128), (2,), reference, 0.0)


def make_grid_stride(rng: np.random.Generator, scale: float) -> CudaCall:
    n = scaled(5001, scale)
    x = rng.uniform(0.5, 9, n)
    args = [x, poisoned(n, np.float64), np.int64(n)]
    return CudaCall(args, (5, 1, 1), (160, 1, 1), (1,), lambda: {1: np.sqrt(x) + 1}, 1e-12)


def make_transpose(rng: np.random.Generator, scale: float) -> CudaCall:
    rows, columns = scaled(75, scale), 60
    x = normal(rng, (rows, columns))
    grid = (-(-columns // 16), -(-rows // 16), 1)
    args = [x, poisoned((columns, rows), np.float32), np.int32(rows), np.int32(columns)]
    return CudaCall(args, grid, (16, 16, 1), (1,), lambda: {1: x.T}, 0.0)


def make_grid_3d(rng: np.random.Generator, scale: float) -> CudaCall:
    grid, block = (scaled(5, scale), 3, 2), (4, 3, 5)
    blocks, threads = int(np.prod(grid)), int(np.prod(block))
    wanted = np.arange(blocks, dtype=np.int32)[:, None] * 1000 + np.arange(threads, dtype=np.int32) + grid[2]
    return CudaCall([poisoned((blocks, threads), np.int32)], grid, block, (0,), lambda: {0: wanted}, 0.0)


def make_histogram(rng: np.random.Generator, scale: float) -> CudaCall:
    n = scaled(3001, scale)
    x, counts = rng.integers(0, 256, n, np.uint8), rng.integers(1, 9, 64, np.uint32)
    initial = counts.copy()
    return CudaCall(
        [x, counts, np.int32(n)], *covering(n, 256), (1,),
        lambda: {1: initial + np.bincount(x & 63, minlength=64).astype(np.uint32)}, 0.0,
    )  # fmt: skip


def make_float_atomic(rng: np.random.Generator, scale: float) -> CudaCall:
    n = scaled(3001, scale)
    x = normal(rng, n) + np.float32(1)
    return CudaCall(
        [x, np.float32([2]), np.int32(n)], *covering(n, 256), (1,),
        lambda: {1: np.array([2 + x.sum(dtype=np.float64)])}, 1e-5,
    )  # fmt: skip


def make_warp_sum(rng: np.random.Generator, scale: float) -> CudaCall:
    rows, columns = scaled(93, scale), 101
    x = normal(rng, (rows, columns)) + np.float32(1)
    args = [x, poisoned(rows, np.float32), np.int32(rows), np.int32(columns)]
    return CudaCall(args, *covering(rows * 32, 128), (1,), lambda: {1: x.sum(axis=1, dtype=np.float64)}, 1e-5)


def _device_ranges(x: Array) -> Array:
    tiles = np.pad(x.astype(np.float64), (0, -len(x) % 128)).reshape(-1, 128)
    for _ in range(3):
        tiles = 0.5 * (np.roll(tiles, 1, axis=1) + np.roll(tiles, -1, axis=1))
    return tiles.ravel()[: len(x)]


def make_launch_bounds(rng: np.random.Generator, scale: float) -> CudaCall:
    rows, columns = scaled(301, scale), 50
    a, v = normal(rng, (rows, columns)), normal(rng, columns)
    args = [a, v, poisoned(rows, np.float32), np.int32(rows), np.int32(columns)]
    return CudaCall(args, *covering(rows, 64), (2,), lambda: {2: a.astype(np.float64) @ v}, 1e-5)


def make_no_parameters(rng: np.random.Generator, scale: float) -> CudaCall:
    marks = (np.arange(3, dtype=np.int32)[:, None] * 100 + np.arange(32, dtype=np.int32)).ravel()
    return CudaCall([], (3, 1, 1), (32, 1, 1), (), dict, 0.0, globals={"marks": marks})


def make_mixed_parameters(rng: np.random.Generator, scale: float) -> CudaCall:
    n = scaled(1001, scale)
    x, affine = normal(rng, n), np.array((1.5, 4, (0.25, -2.0, 3.0)), AFFINE)[()]

    def reference() -> dict[int, Array]:
        lift = affine["lift"].astype(np.float64)[(np.arange(n) + 4) % 3]
        return {5: -3 * (1.5 * x.astype(np.float64) + lift) + 0.75 * 7}

    args = [np.int8(-3), np.float64(0.75), np.int16(7), affine, x, poisoned(n, np.float32), np.uint64(n)]
    return CudaCall(args, *covering(n, 128), (5,), reference, 1e-5)


def make_cluster(rng: np.random.Generator, scale: float) -> CudaCall:
    blocks = 2 * scaled(6, scale)
    number = np.arange(blocks, dtype=np.int32)
    wanted = np.repeat(number * 10 + number % 2, 64)
    return CudaCall([poisoned(64 * blocks, np.int32)], (blocks, 1, 1), (64, 1, 1), (0,), lambda: {0: wanted}, 0.0)


CASES = (
    CudaCase("block_sum", BLOCK_SUM, "block_sum", make_block_sum),
    CudaCase("dynamic_shared", DYNAMIC_SHARED, "reverse_tiles",
             mapped(1501, 128, normal, _reversed_tiles, shared_bytes=128 * 4)),
    CudaCase("template", TEMPLATE, "repeat", mapped(1501, 128, drawn(2, 50, np.uint32), _repeated),
             name_expression="repeat<unsigned, 3>"),
    CudaCase("two_entries_first", TWO_ENTRIES, "smooth", mapped(2001, 192, normal, _smoothed, 1e-5)),
    CudaCase("two_entries_second", TWO_ENTRIES, "shift",
             mapped(2001, 192, normal, lambda x: np.roll(x, 77), 0.0, np.int32(77))),
    CudaCase("noinline", NOINLINE, "calls", make_noinline),
    CudaCase("grid_stride", GRID_STRIDE, "grid_stride", make_grid_stride),
    CudaCase("transpose", TRANSPOSE, "transpose", make_transpose),
    CudaCase("grid_3d", GRID_3D, "grid_3d", make_grid_3d),
    CudaCase("histogram", HISTOGRAM, "histogram", make_histogram),
    CudaCase("float_atomic", FLOAT_ATOMIC, "float_atomic", make_float_atomic, deterministic=False),
    CudaCase("warp_sum", WARP_SUM, "warp_sum", make_warp_sum),
    CudaCase("device_ranges", DEVICE_RANGES, "device_ranges", mapped(1501, 128, normal, _device_ranges, 1e-5)),
    CudaCase("launch_bounds", LAUNCH_BOUNDS, "bounded", make_launch_bounds),
    CudaCase("no_parameters", NO_PARAMETERS, "no_parameters", make_no_parameters),
    CudaCase("mixed_parameters", MIXED_PARAMETERS, "mixed", make_mixed_parameters),
    CudaCase("cluster", CLUSTER, "clusters", make_cluster, min_sm=90, sliceable=False),
)  # fmt: skip
