"""CUDA C kernels, by their needs at launch: bounds, clusters, and parameters of every kind, or none."""

from __future__ import annotations

import numpy as np

from .case import Array, CudaCall, CudaCase, normal, poisoned, scaled
from .cuda_exits import covering

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
    CudaCase("launch_bounds", LAUNCH_BOUNDS, "bounded", make_launch_bounds),
    CudaCase("no_parameters", NO_PARAMETERS, "no_parameters", make_no_parameters),
    CudaCase("mixed_parameters", MIXED_PARAMETERS, "mixed", make_mixed_parameters),
    CudaCase("cluster", CLUSTER, "clusters", make_cluster, min_sm=90, sliceable=False),
)
